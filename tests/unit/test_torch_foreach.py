"""Functions of lists are those of their elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quintnet_compiler.compat import torch_foreach

CALLS: dict[str, tuple[Any, ...]] = {
    "_foreach_add": (2.0,),
    "_foreach_mul": ([2.0, 3.0],),
    "_foreach_lerp": ([torch.ones(3), torch.ones(2)], 0.25),
    "_foreach_addcmul": ([torch.ones(3), torch.ones(2)], [torch.ones(3), torch.ones(2)], 0.5),
    "_foreach_sqrt": (),
    "_foreach_norm": (),
    "_foreach_pow": (2,),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_torch_computes_it(name: str) -> None:
    lists, others = [torch.rand(3), torch.rand(2)], CALLS[name]
    theirs = getattr(torch, name)
    torch.testing.assert_close(torch_foreach.FOREACH[theirs](lists, *others), list(theirs(lists, *others)))
    in_place = getattr(torch, f"{name}_", None)
    if in_place is not None:
        changed = [x.clone() for x in lists]
        torch_foreach.FOREACH[in_place](changed, *others)
        torch.testing.assert_close(changed, list(theirs(lists, *others)))


def test_options_have_names() -> None:
    lists, others = [torch.rand(3)], [torch.rand(3)]
    made = torch_foreach.FOREACH[torch._foreach_add](lists, others, alpha=2)
    torch.testing.assert_close(made, list(torch._foreach_add(lists, others, alpha=2)))
