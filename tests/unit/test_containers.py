"""ir.containers and ir.result_form: what torch.export does not take is taken apart, and made again."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from quintnet_compiler.compat.torch import pytree
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.ir.batch_form import BatchForm, FlatBatch
from quintnet_compiler.ir.containers import Held, as_lists, held, rebuilt
from quintnet_compiler.ir.result_form import ResultForm
from quintnet_compiler.runtime.launch.rank_status import described


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = None


class Pair(NamedTuple):
    x: Any
    y: Any


X = torch.zeros(4, 2)


def test_objects_are_made_again_of_their_parts() -> None:
    batch = ({"a": [Point(X, (1, Point(2.0)))], "b": Pair(collections.UserDict(k=X), None)}, X)
    parts = held(batch)
    assert isinstance(parts[0]["a"][0], Held) and held(parts) is parts and parts[1] is X
    assert len(pytree.tree_leaves(parts)) == 7
    assert "Point(x=" in repr(parts[0]["a"][0])
    again = rebuilt(pytree.tree_map_only(Tensor, lambda x: x + 1, parts))
    assert type(again[0]["a"][0]) is Point and again[0]["a"][0].y == (1, Point(2.0))
    assert type(again[0]["b"].x) is collections.UserDict and torch.equal(again[0]["b"].x["k"], X + 1)
    assert as_lists(parts)[0]["a"] == [[X, (1, [2.0, None])]]


def test_what_torch_export_takes_stays_as_it_is() -> None:
    batch = ([X, {"k": X}], Pair(X, 1.0), collections.OrderedDict(k=None), collections.deque([X]))
    assert held(batch) is batch and rebuilt(batch) is batch


def test_a_result_is_put_together_again() -> None:
    form, tensors = ResultForm.of_result({"x": X, "more": [Point(X + 1, "text"), None, 3]})
    assert len(tensors) == 2
    made = form.result([x * 2 for x in tensors], {}, {})
    assert torch.equal(made["x"], X * 2) and made["more"][1:] == [None, 3] and made["more"][0].y == "text"
    for result in ({"x": 1}, (X, object())):
        with pytest.raises(CompileError, match="QN101"):
            ResultForm.of_result(result)


def test_objects_of_two_classes_differ_in_form() -> None:
    first = BatchForm.of_batch(FlatBatch.flatten((Point(X),)).batch, 4)
    assert first.varying_sizes(FlatBatch.flatten((Point(X[:2]),))) == {"rows": 2}
    assert (
        first.varying_sizes(FlatBatch.flatten((Pair(X, None),))) is None
        and first.varying_sizes(FlatBatch.flatten((Point(X, 1),))) is None
    )


def test_what_ranks_must_have_in_common_of_an_object() -> None:
    assert described((Point(X, 1),)) == ({"x": (torch.float32, (4, 2)), "y": "int"},)
