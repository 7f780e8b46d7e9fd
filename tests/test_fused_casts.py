"""Casts to 8 bits as compilers for GPUs get them: kernels that nothing interrupts; those of parameters, too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.utils import get_code

import quintnet
from quintnet_compiler.compat.torch import make_fx
from quintnet_compiler.compat.torch_inductor import decompositions, kernels
from quintnet_compiler.features.fp8.eight_bits import RECIPES
from quintnet_compiler.features.fp8.ops.scaled_products import block_max, block_scale, scaled_cast, scaled_matmul
from quintnet_compiler.ops.catalog import spec_of
from quintnet_compiler.runtime.execute import engines, executor
from quintnet_compiler.runtime.execute.segments import Segment, split

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPERATORS = block_max, block_scale, scaled_cast, scaled_matmul
CONSISTS_OF: dict[Any, Any] = {op: own.function for op in OPERATORS if (own := spec_of(op).consists_of)}


def _traced(x: Tensor, block: list[int]) -> fx.GraphModule:
    """A norm and a cast of its result, as the engine traces them for a GPU."""

    def norm_and_cast(x: Tensor) -> tuple[Tensor, ...]:
        y = x * (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt().to(x.dtype)
        scale = block_scale(block_max(y, block), E4M3, False)
        return scaled_cast(y, scale, E4M3), scale

    with torch.no_grad():
        table = {**decompositions(), **CONSISTS_OF}
        traced: fx.GraphModule = make_fx(norm_and_cast, decomposition_table=table, tracing_mode="fake")(x)
    return traced


@pytest.mark.slow
@pytest.mark.parametrize("block", [[0, 0], [1, 0]], ids=["tensorwise", "rowwise"])
def test_no_operator_runs_between_the_kernels_of_a_cast(block: list[int]) -> None:
    traced = _traced(torch.randn(64, 128, dtype=torch.bfloat16), block)
    assert not [node for node in traced.graph.nodes if getattr(node.target, "_schema", None) and _writes(node.target)]
    fakes = [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"]
    with config.patch(force_disable_caches=True):
        code = get_code(lambda: kernels(traced, fakes))[0]  # as Python: what C++ it holds is not compiled
    calls = code[code.index("def call") :]
    assert "_fused_" in calls and "torch.ops." not in calls and "extern_kernels." not in calls, calls


def _writes(operator: Any) -> bool:
    return bool(operator._schema.is_mutable)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_kernels_compute_is_the_operator_to_the_bit(dtype: torch.dtype, of: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    edges = [0.0, -0.0, math.nan, math.inf, -math.inf, most, -most, 2 * most, -2 * most, most * (1 + 2**-7), 1e-9, 1.0]
    x = torch.cat([torch.tensor(edges, dtype=of), (torch.randn(500) * most).to(of)]).view(2, -1)
    for scale in (torch.ones(1, 1), torch.tensor([[0.7], [3.1]])):
        mine, theirs = CONSISTS_OF[scaled_cast](x, scale, dtype), scaled_cast(x, scale, dtype)
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("block", [[0, 0], [1, 0], [1, 32]], ids=str)
def test_a_compiler_for_gpus_sees_what_casts_to_8_bits_consist_of(block: list[int]) -> None:
    """So that a scale and a cast become a part of the kernel that makes the value; on CPUs they are calls."""

    def cast(x: Tensor) -> tuple[Tensor, ...]:
        scale = block_scale(block_max(x, block), E4M3, block[0] == 1)
        x8 = scaled_cast(x, scale, E4M3)
        return x8, scale, scaled_matmul(x8, x8, scale, scale, "mk,nk->mn", torch.bfloat16)

    given = (torch.randn(48, 64, dtype=torch.bfloat16),)
    traced = make_fx(cast, decomposition_table=CONSISTS_OF)(*given)
    assert not any(getattr(n.target, "namespace", "") == "quintnet" for n in traced.graph.nodes)
    for found, expected in zip(traced(*given), cast(*given), strict=True):
        assert torch.equal(found.float(), expected.float())


class Layers(nn.Module):
    """Two blocks of linears of three sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in [(64, 128), (128, 64), (64, 64)] * 2)
        self.last = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.silu(layer(x))
        return self.last(x)  # type: ignore[no-any-return]


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 32, 64), torch.randn(8, 32, 8)


@pytest.fixture
def eager_parameters() -> Iterator[Any]:
    """Casts of parameters run as generated Python while it is entered."""
    return mock.patch.object(executor, "engine_of_parameters", lambda engine: engines.eager)


def _program(recipe: str, axes: dict[str, int], **plan: Any) -> quintnet.CompiledProgram:
    return quintnet.compile(
        Layers(), quintnet.Mesh(**axes), _batch(), loss_fn=F.mse_loss, precision="fp8", fp8_recipe=recipe,
        backend="inductor", check="off", **plan,
    )  # fmt: skip


def _step(recipe: str, axes: dict[str, int], **plan: Any) -> list[Tensor]:
    program = _program(recipe, axes, **plan)
    loss = program.step(_batch())
    return [loss, *(p.grad.full_tensor() for p in program.parameters() if p.grad is not None)]  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "axes", "plan"),
    [
        ("tensorwise", {"dp": 1}, {}),
        pytest.param("rowwise", {"tp": 2}, {"microbatches": 2}, marks=pytest.mark.slow),
        ("tensorwise", {"dp": 2}, {"zero": 3}),
        ("mxfp8", {"dp": 2}, {"zero": 1}),
    ],
)
def test_compiled_casts_of_parameters_change_no_bit(
    recipe: str, axes: dict[str, int], plan: dict[str, Any], eager_parameters: Any
) -> None:
    assert recipe in RECIPES
    found = _step(recipe, axes, **plan)
    with eager_parameters:
        expected = _step(recipe, axes, **plan)
    assert len(found) == len(expected) == 1 + 2 * 7
    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
def test_each_parameters_casts_are_a_segment_and_equal_ones_are_compiled_once() -> None:
    (stage,) = _program("tensorwise", {"dp": 1}).ranks[0].stages
    engine = engines.Inductor()
    engine.of_parameters(stage.once.module, "once")
    casting = [part for part in _segments(stage.once.module) if any(map(engines._casts, part.nodes))]
    assert len(casting) == 7 and all(len(part.inputs) == 1 for part in casting)
    assert len(engine.kernels) == 4  # a kernel for each size


def _segments(module: Any) -> list[Segment]:
    return [part for part in split(module.graph, apart=True) if isinstance(part, Segment)]


def test_without_casts_what_runs_once_is_generated_python() -> None:
    program = quintnet.compile(
        Layers(), quintnet.Mesh(dp=1), _batch(), loss_fn=F.mse_loss, precision="bf16", backend="inductor", check="off"
    )
    (stage,) = program.ranks[0].stages
    assert engines.Inductor().of_parameters(stage.once.module, "once") == stage.once.module.forward
    assert engines.engine_of_parameters(engines.eager) is engines.eager


def test_parts_that_no_value_connects_are_segments_of_their_own() -> None:
    graph = fx.Graph()
    comm, a, b, c = (graph.placeholder(name) for name in ("comm", "a", "b", "c"))
    twice, thrice = graph.call_function(torch.mul, (a, 2)), graph.call_function(torch.mul, (b, 3))
    other = graph.call_function(torch.exp, (c,))
    both = graph.call_function(torch.add, (twice, thrice))
    summed = graph.call_method("all_reduce", (comm, both, "dp", 0))
    last = graph.call_function(torch.sub, (summed, other))
    graph.output((last,))
    parts = split(graph, apart=True)
    assert [part.nodes if isinstance(part, Segment) else part for part in parts] == [
        (twice, thrice, both),
        (other,),
        summed,
        (last,),
    ]
