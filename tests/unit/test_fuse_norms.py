"""passes.lowering.fuse_norms, checks.rewrites.norms: which operators are one norm, and the proof of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quintnet_compiler.checks.rewrites.norms import check_norms
from quintnet_compiler.core.absent_gpu import CPU, CUDA
from quintnet_compiler.core.annotations import Leaf
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.sharding import R
from quintnet_compiler.driver import pipeline
from quintnet_compiler.ir.builder import GraphBuilder, aten
from quintnet_compiler.ir.program import LocalProgram
from quintnet_compiler.passes.lowering import fuse_norms
from quintnet_compiler.passes.lowering.fuse_norms import FuseNorms

from .graphs import builder
from .unsplit import check_step

ROWS, SIZE, EPS = (2, 4), 16, 1e-5
HALF, FULL = torch.bfloat16, torch.float32
Make = Callable[[GraphBuilder, fx.Node, fx.Node], tuple[fx.Node, ...]]


def _program(make: Make, dtype: torch.dtype = HALF, weight: torch.dtype = HALF, device: Any = CUDA) -> LocalProgram:
    to = builder()
    with to.mode:
        given = torch.empty(*ROWS, SIZE, dtype=dtype, device=device), torch.empty(SIZE, dtype=weight, device=device)
    x = to.placeholder("x", given[0], Leaf("input", "x", batched=True))
    w = to.placeholder("w", given[1], Leaf("parameter", "w", True), needs_grad=True)
    made = make(to, x, w)
    to.output(made)
    known = [node for node in to.graph.nodes if node.op != "output"]
    staged: Any = None
    return LocalProgram(
        staged, to.graph, to.mode, dict.fromkeys(known, 0), dict.fromkeys(known, (R,)), frozenset(), {}, {}
    )


def _cast(to: GraphBuilder, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return to.call(aten._to_copy.default, x, dtype=dtype)


def _factor(to: GraphBuilder, x: fx.Node, dim: int = 2, size: int = SIZE) -> fx.Node:
    """1 / the root of the mean square."""
    square = to.call(aten.pow.Tensor_Scalar, x, 2)
    mean = to.call(aten.div.Scalar, to.call(aten.sum.dim_IntList, square, [dim], True), size)
    return to.call(aten.rsqrt.default, to.call(aten.add.Scalar, mean, EPS))


def _normed(to: GraphBuilder, x: fx.Node) -> fx.Node:
    return to.call(aten.mul.Tensor, x, _factor(to, x))


def _llama(to: GraphBuilder, x: fx.Node, w: fx.Node) -> tuple[fx.Node, ...]:
    return (to.call(aten.mul.Tensor, w, _cast(to, _normed(to, _cast(to, x, FULL)), HALF)),)


def _wide(to: GraphBuilder, x: fx.Node, w: fx.Node) -> tuple[fx.Node, ...]:
    return (to.call(aten.mul.Tensor, _normed(to, x), w),)


def _gemma(to: GraphBuilder, x: fx.Node, w: fx.Node) -> tuple[fx.Node, ...]:
    scale = to.call(aten.add.Scalar, w, 1.0)
    return (_cast(to, to.call(aten.mul.Tensor, _normed(to, _cast(to, x, FULL)), scale), HALF),)


def _plain(to: GraphBuilder, x: fx.Node, w: fx.Node) -> tuple[fx.Node, ...]:
    return _cast(to, _normed(to, _cast(to, x, FULL)), HALF), w


def _behind_another(to: GraphBuilder, x: fx.Node, w: fx.Node) -> tuple[fx.Node, ...]:
    return _wide(to, _wide(to, x, w)[0], w)


# dtypes of x and w; what is left beside the norms
FUSED: dict[str, tuple[Make, torch.dtype, torch.dtype, list[str]]] = {
    "in 16 bits": (_llama, HALF, HALF, []),
    "in 32 bits": (_wide, FULL, FULL, []),
    "in 64 bits": (_wide, torch.float64, torch.float64, []),
    "a factor of more bits": (_gemma, HALF, FULL, ["_to_copy", "_to_copy", "add"]),
    "no factor": (_plain, HALF, FULL, []),
    "a factor of other bits": (
        lambda to, x, w: (to.call(aten.mul.Tensor, w, _plain(to, x, w)[0]),), HALF, FULL, ["mul"]
    ),
    "two": (_behind_another, FULL, FULL, []),
}  # fmt: skip


def _names(program: LocalProgram) -> list[str]:
    found = [n.target.overloadpacket.__name__ for n in program.graph.nodes if n.op == "call_function"]  # type: ignore[union-attr]
    return [name for name in found if name != "rms_norm"]


@pytest.mark.parametrize("name", FUSED)
def test_what_is_a_norm(name: str) -> None:
    make, x, w, left = FUSED[name]
    before = _program(make, x, w)
    after = FuseNorms()(before)
    assert sorted(_names(after)) == left
    norms = after.graph.find_nodes(op="call_function", target=aten.rms_norm.default)
    assert len(norms) == (2 if name == "two" else 1)
    assert all(n.args[1] == [SIZE] and n.args[3] == EPS and after.stage[n] == 0 for n in norms)
    assert [n.meta["val"].dtype for n in norms] == [FULL if left[:1] == ["_to_copy"] else x] * len(norms)
    check_norms(before, after)


def _factor_returned(to: GraphBuilder, x: fx.Node, w: fx.Node) -> tuple[fx.Node, ...]:
    factor = _factor(to, x)
    return to.call(aten.mul.Tensor, x, factor), factor, w


KEPT: dict[str, Make] = {
    "another dim": lambda to, x, w: (to.call(aten.mul.Tensor, x, _factor(to, x, 1, ROWS[1])), w),
    "a part of the sum": lambda to, x, w: (to.call(aten.mul.Tensor, x, _factor(to, x, 2, 2 * SIZE)), w),
    "the factor of another value": lambda to, x, w: (
        to.call(aten.mul.Tensor, to.call(aten.relu.default, x), _factor(to, x)),
        w,
    ),
    "the factor is read": _factor_returned,
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_none(name: str) -> None:
    before = _program(KEPT[name], FULL, FULL)
    assert FuseNorms()(before) is before


def test_what_others_read_stays() -> None:
    before = _program(_wide, FULL, FULL)
    (square,) = before.graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar)
    output = before.graph.output_node()
    output.args = ((*output.args[0], square),)  # type: ignore[misc]
    assert FuseNorms()(before) is before


def test_only_gpus_have_the_kernel() -> None:
    before = _program(_wide, FULL, FULL, CPU)
    assert FuseNorms()(before) is before


def test_steps_of_two_stages_are_none() -> None:
    before = _program(_wide, FULL, FULL)
    last = [node for node in before.graph.nodes if node.op == "call_function"][-2]
    assert FuseNorms()(replace(before, stage={**before.stage, last: 1})) is not before  # less is one operator
    (rsqrt,) = before.graph.find_nodes(op="call_function", target=aten.rsqrt.default)
    moved = replace(before, stage={**before.stage, rsqrt: 1})
    assert FuseNorms()(moved) is moved


def _changed(after: LocalProgram, position: int, given: Any) -> LocalProgram:
    (norm,) = after.graph.find_nodes(op="call_function", target=aten.rms_norm.default)
    norm.update_arg(position, given)
    return after


def test_a_wrong_norm_is_found() -> None:
    before = _program(_llama)
    for position, wrong in ((3, 1e-6), (3, 0.0), (2, None), (1, [4, SIZE])):
        with pytest.raises(CompileError, match="QN209"):
            check_norms(before, _changed(FuseNorms()(before), position, wrong))
    other = _program(_plain)
    fused = FuseNorms()(other)
    for stray in ({"stage": {}}, {"sharding": {}}, {"once": frozenset(fused.graph.nodes)}):
        with pytest.raises(CompileError, match="norm check"):
            check_norms(other, replace(fused, **stray))
    with pytest.raises(CompileError, match=r"does not have the dtype|other sizes or dtypes"):
        check_norms(_program(_gemma, HALF, FULL), FuseNorms()(_program(_llama)))


class Norm(nn.Module):
    """As models of transformers write it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype is torch.float64 else x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Norm(8), nn.Linear(8, 16), Norm(16), nn.Linear(16, 8, bias=False), Norm(8)).double()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("axes", "norms"), [({"dp": 2}, 3), ({"tp": 2}, 1), ({"pp": 2, "tp": 2}, 1)], ids=str)
def test_it_trains_as_the_model_does(axes: dict[str, int], norms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU is taken for a GPU. A norm that tensor parallelism splits by features is none; how many it splits
    follows from prices."""
    monkeypatch.setattr(pipeline, "CUDA", CPU)
    monkeypatch.setattr(fuse_norms, "CUDA", CPU)
    batch = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    program = check_step(_model(), axes, batch)
    source = program._primary().program.source.local.graph
    left = [
        source.find_nodes(op="call_function", target=target) for target in (aten.rms_norm.default, aten.rsqrt.default)
    ]
    assert [len(nodes) for nodes in left] == [norms, 3 - norms]
