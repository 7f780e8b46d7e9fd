"""ZeRO gathers 8-bit numbers: half the bytes, and the same bits as numbers that are cast after a wide gather."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.core.annotations import is_getitem, num_bytes, origin, value
from quintnet_compiler.features.fp8.eight_bits import RECIPES
from quintnet_compiler.ops.collectives import all_gather, gather_together
from quintnet_compiler.passes.sharding import shard_parameters

from .test_eight_bit_experts import Mixture
from .test_eight_bits import WIDTH, Block, sizes_of

pytestmark = pytest.mark.usefixtures("shared_captures")

ROWS, LENGTH = 8, 4


def net(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(nn.Linear, width), Block(nn.Linear, width), nn.Linear(width, 16))


def batch(seed: int = 1, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, LENGTH, width, generator=dice), torch.randn(ROWS, LENGTH, 16, generator=dice)


def wide() -> AbstractContextManager[Any]:
    """Programs that gather 16 bits and cast what arrives."""
    return mock.patch.object(shard_parameters, "slice_cast_strategies", lambda *_: {})


def compiled(mesh: dict[str, int], width: int = WIDTH, **plan: Any) -> quintnet.CompiledProgram:
    decisions = {"precision": "fp8", "zero": 3, **plan}
    return quintnet.compile(net(width), quintnet.Mesh(**mesh), batch(width=width), loss_fn=F.mse_loss, plan=decisions)


def trained(program: quintnet.CompiledProgram, width: int = WIDTH) -> list[Tensor]:
    """Losses of two steps, the gradients of the first, and the parameters after it."""
    optimizer = torch.optim.AdamW(program.parameters(), lr=0.1)
    found = [program.step(batch(width=width))]
    found += [p.grad.clone() for _, p in program.named_parameters()]  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()
    return [*found, program.step(batch(2, width)), *(p.detach().clone() for _, p in program.named_parameters())]


LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {"microbatches": 2}),
    ({"dp": 4}, {"recompute": "full"}),
    ({"dp": 2, "tp": 2}, {}),
    ({"dp": 2, "cp": 2}, {"zero_axes": ("dp", "cp")}),
    ({"dp": 2, "pp": 2}, {"microbatches": 2}),
    ({"dp": 2}, {"reshard_after_forward": False}),
    ({"dp": 2}, {"zero": 1, "microbatches": 2}),
    ({"dp": 2, "tp": 2}, {"zero": 1}),
    ({"dp": 2, "pp": 2}, {"zero": 1, "microbatches": 2, "schedule": "zb-h1"}),
    ({"dp": 4}, {"zero": 2, "microbatches": 2}),
    ({"dp": 2, "cp": 2}, {"zero": 2, "zero_axes": ("dp", "cp")}),
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize(("mesh", "plan"), LAYOUTS, ids=str)
def test_the_bits_are_those_of_a_wide_gather(mesh: dict[str, int], plan: dict[str, Any], recipe: str) -> None:
    width = sizes_of(recipe)[0]
    made = trained(compiled(mesh, width, fp8_recipe=recipe, **plan), width)
    with wide():
        expected = trained(compiled(mesh, width, fp8_recipe=recipe, **plan), width)
    assert len(made) == len(expected) and all(map(torch.equal, made, expected))


def _gathered(program: quintnet.CompiledProgram) -> dict[torch.dtype, int]:
    """Bytes of the matrices that a microbatch gathers, by dtype."""
    found: dict[torch.dtype, int] = defaultdict(int)
    for node in program._primary().program.source.graph.nodes:
        if node.op != "call_function" or origin(node)[0].target not in (all_gather, gather_together):
            continue
        for one in [value(node)] if node.target is all_gather or is_getitem(node) else ():
            if one.dim() > 1 and min(one.shape[-2:]) > 1 and one.dtype is not torch.float32:  # no scales
                found[one.dtype] += num_bytes(one)
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_half_the_bytes_are_gathered(recipe: str) -> None:
    """Forward and backward: of rows and of columns, or twice the same numbers."""
    numbers = 2 * 3 * WIDTH * 2 * WIDTH  # of the blocks' weights
    head = 16 * WIDTH * 2 * 2
    with wide():
        assert _gathered(compiled({"dp": 2}, fp8_recipe=recipe, overlap=False)) == {
            torch.bfloat16: numbers * 2 * 2 + head
        }
    found = _gathered(compiled({"dp": 2}, fp8_recipe=recipe, overlap=False))
    assert found == {torch.float8_e4m3fn: numbers * 2, torch.bfloat16: head}


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(("recipe", "copies"), [("rowwise", 2), ("tensorwise", 1)])
def test_a_step_gathers_8_bits_once(recipe: str, copies: int, zero: int) -> None:
    """One copy for each direction, or one for both; and of the head, biases and norms 16 bits."""
    (stage,) = compiled({"dp": 2}, fp8_recipe=recipe, zero=zero, overlap=False, microbatches=2).ranks[0].stages
    assert stage.once is not None
    assert not any("gather(scaled_cast" in piece.code for piece in (stage.forward, stage.backward))
    sent = [line.partition("]")[0] for line in stage.once.code.splitlines() if "comm.gather_states(" in line]
    eight, wide = ([line.count(name) for line in sent if f"[{name}" in line] for name in ("scaled_cast", "_to_copy"))
    assert eight == [6 * copies] and wide == [4 + 4 + 2]


def test_a_matrix_is_gathered_where_it_is_read() -> None:
    """In the forward that of rows, in the backward that of columns."""
    (stage,) = compiled({"dp": 2}, fp8_recipe="rowwise", overlap=False).ranks[0].stages
    for piece, count in ((stage.forward, 6), (stage.backward, 6)):
        calls = [line for line in piece.code.splitlines() if "gather" in line and "[scaled_cast" in line]
        assert sum(line.count("scaled_cast") for line in calls if " = None" not in line.split(";")[0]) >= count
    assert stage.once is not None and stage.once.code.count("comm.gather_states(") == 1  # all scales of columns


def test_a_parameter_that_another_operator_reads_is_gathered_wide() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x) + self.first.weight.mean())

    program = quintnet.compile(
        Twice(), quintnet.Mesh(dp=2), batch(), loss_fn=F.mse_loss, plan={"precision": "fp8", "zero": 3}
    )
    assert "all_gather(scaled_cast" not in program.ranks[0].forward.code and program.verify(batch()).ok


def test_experts_are_gathered_in_8_bits() -> None:
    given = torch.randn(16, WIDTH), torch.randint(0, 8, (16,))
    plan = {"precision": "fp8", "fp8_recipe": "rowwise", "zero": 3}
    program = quintnet.compile(Mixture(), quintnet.Mesh(dp=2), given, plan=plan)
    made = program.step(given), *(p.grad for p in program.parameters())
    dtypes = set(_gathered(program))
    with wide():
        program = quintnet.compile(Mixture(), quintnet.Mesh(dp=2), given, plan=plan)
        expected = program.step(given), *(p.grad for p in program.parameters())
    assert torch.float8_e4m3fn in dtypes and all(map(torch.equal, made, expected))  # type: ignore[arg-type]


class AfterExperts(nn.Module):
    """A linear layer on rows that ranks hold in slices: they cast its weight in slices of what they gathered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.weight = nn.Linear(32, 4), nn.Parameter(torch.randn(4, 64, 32) / 4)
        self.down, self.head = nn.Linear(64, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        probabilities, ids = self.gate(x).softmax(-1).max(-1)
        x = F.gelu(quintnet.expert_linear(x, ids, self.weight)) * probabilities[:, None]
        return F.cross_entropy(self.head(self.down(x)), y)


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero", [1, 2])
def test_slices_of_what_is_gathered_once_are_cast_once(zero: int) -> None:
    given = torch.randn(16, 32), torch.randint(0, 8, (16,))

    def step(zero: int) -> tuple[quintnet.CompiledProgram, list[Tensor]]:
        plan = {"precision": "fp8", "fp8_recipe": "mxfp8", "zero": zero}
        program = quintnet.compile(AfterExperts(), quintnet.Mesh(ep=2, dp=2), given, plan=plan)
        loss = program.step(given).detach()
        return program, [loss, *(p.grad.clone() for _, p in program.named_parameters())]  # type: ignore[union-attr]

    (program, made), (_, expected) = step(zero), step(0)
    for mine, other in zip(made, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)
    text = program.ranks[0].forward.code
    assert text.count("quintnet.scaled_cast.default(") == 2, text  # of rows of both layers, and of no weight


def _process(dp: int) -> list[Tensor]:
    torch.set_num_threads(1)
    program = compiled({"dp": dp}, fp8_recipe="rowwise", microbatches=2)
    loss = program.step(batch())
    return [loss, *(p.grad.full_tensor() for p in program.parameters())]  # type: ignore[union-attr]


@pytest.mark.slow
def test_processes_gather_8_bits() -> None:
    expected = _process(2)
    for found in quintnet.launch(_process, 2, (2,), timeout=120):
        assert all(map(torch.equal, found, expected))
