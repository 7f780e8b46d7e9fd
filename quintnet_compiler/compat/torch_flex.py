"""Private names of torch: ``torch.nn.attention.flex_attention``, which calls functions that say which scores count."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor

__all__ = ["flex_attention_by"]

_FLEX = "torch.nn.attention.flex_attention"


@contextlib.contextmanager
def flex_attention_by(run: Callable[..., Tensor | tuple[Any, ...]], replace: Any) -> Iterator[None]:
    """Inside, what ``flex_attention`` computes is ``run(q, k, v, score_mod, mask_mod, scale, more, theirs)``, on CPUs
    also where a gradient is needed, which torch refuses.

    q [B, H, S, D], k [B, G, T, D], v [B, G, T, E]; None for a function that changes nothing; ``more``: whether logs or
    maxima are asked for; ``theirs``: what torch would do. ``replace(ours, theirs)`` is what the process calls
    meanwhile. Instead: a function of our own in its place, which a model that imported it before would not call.
    """
    module: Any = sys.modules.get(_FLEX)
    if module is None:  # no model uses it
        yield
        return
    theirs, options, asked = module.flex_attention_hop, module._apply_kernel_options, [False]

    def chosen_options(
        query: Any, key: Any, value: Any, return_lse: bool, kernel_options: Any, return_aux: Any = None
    ) -> Any:
        asked[0] = bool(return_lse or return_aux is not None)
        return options(query, key, value, return_lse, kernel_options, return_aux)

    def ours(q: Any, k: Any, v: Any, score_mod: Any, block_mask: Any, scale: float, *rest: Any) -> tuple[Any, ...]:
        mask = None if block_mask[-1] in (None, module.noop_mask) else block_mask[-1]
        changes = None if score_mod is module._identity else score_mod
        torchs = lambda: theirs(q, k, v, score_mod, block_mask, scale, *rest)  # noqa: E731
        output = run(q, k, v, changes, mask, scale, asked[0], torchs)
        return output if isinstance(output, tuple) else (output, q.new_empty(0), q.new_empty(0))

    changed = {
        "flex_attention_hop": replace(ours, theirs),
        "_apply_kernel_options": replace(chosen_options, options),
        "_validate_device": replace(lambda *args: None, module._validate_device),
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,  # torch.compile does not run while a module is traced
    }
    with mock.patch.multiple(module, **changed):
        yield
