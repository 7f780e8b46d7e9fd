"""Parameters whose sizes do not divide over data ranks, stored in slices all the same (ZeRO): exact, in the memory and
traffic of the closed forms, and saved bit by bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.core.sharding import Shard
from quintnet_compiler.simulation.rehearsal import rehearse

from .beside_plain import sent_in_a_step, train_beside
from .models import GPT, Mixture
from .test_checkpoint import _require_equal

torch.set_num_threads(1)
WIDTH, RANKS = 15, 4
CHUNK = -(-WIDTH // RANKS)  # rows of a rank
MATRIX = RANKS * CHUNK * WIDTH * 8  # bytes of a matrix of float64, with the padding of all ranks


def _gpt() -> nn.Module:
    """No size is even but that of the heads: rows, columns, positions, tokens."""
    torch.manual_seed(0)
    return GPT(vocab=33, width=25, heads=5, depth=2, length=11).double()


def _tokens(rows: int = 6) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 33, (rows, 8), generator=torch.Generator().manual_seed(0))
    return ids, ids.roll(-1, 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 2}, {"zero": 1}),
        ({"dp": 4}, {"zero": 3}),
        ({"dp": 2}, {"zero": 2, "microbatches": 2}),
        ({"dp": 2, "pp": 2}, {"zero": 1, "microbatches": 2, "recompute": "full"}),
        ({"dp": 2, "tp": 2}, {"zero": 1}),
        ({"dp": 2, "tp": 2}, {"zero": 3, "overlap": False}),
        ({"dp": 2, "cp": 3}, {"zero": 1, "zero_axes": ("dp", "cp")}),
        ({"dp": 2, "pp": 2}, {"zero": 3, "microbatches": 2, "recompute": "full"}),
        ({"dp": 3, "ep": 2}, {"zero": 2, "zero_axes": ("ep",)}),  # hybrid
        ({"dp": 6}, {"zero": 3, "reshard_after_forward": False}),
    ],
    ids=str,
)
def test_slices_of_odd_sizes_are_exact(axes: dict[str, int], options: dict[str, Any]) -> None:
    program = quintnet.compile(_gpt(), Mesh(**axes), _tokens(), **options)
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)
    kinds = program._primary().program.state["wte.weight"].sharding
    stored = sum(isinstance(kind, Shard) for kind in kinds)
    assert stored >= 1
    if set(axes) == {"dp"}:
        assert program.unsplit == ()


def test_experts_and_slices_of_odd_sizes() -> None:
    batch = torch.randn(12, 16, dtype=torch.float64), torch.randint(0, 8, (12,))
    program = quintnet.compile(Mixture().double(), Mesh(dp=2, ep=3), batch, zero=1)
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


@pytest.mark.slow
def test_in_bf16_what_travels_is_the_copy() -> None:
    program = quintnet.compile(_gpt().float(), Mesh(dp=2), _tokens(), zero=1, precision="bf16")
    assert program.verify(steps=1).ok


class Odd(nn.Module):
    """Products alone, whose backward reads every parameter (but the first: nobody asks for its input's gradient)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return (x * x).mean()


def _odd(zero: int, **options: Any) -> quintnet.CompiledProgram:
    torch.manual_seed(0)
    return quintnet.compile(
        Odd().double(), Mesh(dp=RANKS), (torch.randn(16, WIDTH, dtype=torch.float64),), zero=zero, **options
    )


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bytes_on_the_wire(zero: int, microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of sizes that divide, of which each rank has a whole chunk."""
    program = _odd(zero, microbatches=microbatches)
    sent = sent_in_a_step(program, (torch.randn(16, WIDTH, dtype=torch.float64),), monkeypatch)
    m, whole = microbatches, 4 * MATRIX
    gathered = {1: whole, 2: whole, 3: m * (2 * whole - MATRIX)}[zero]
    assert sent == {"gather": gathered, "scatter": whole if zero == 1 else m * whole}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_predicted_memory_is_that_of_the_closed_forms(zero: int) -> None:
    found, whole = rehearse(_odd(zero, microbatches=2)._primary().program)[0], 4 * MATRIX
    assert found.parameters == (whole // RANKS if zero == 3 else whole)
    assert found.gradients == (whole // RANKS if zero >= 2 else whole)


# -- processes


def _bytes(tensors: list[Tensor]) -> int:
    return sum(x.to_local().nbytes for x in tensors if hasattr(x, "to_local"))


def _trained(axes: dict[str, int], options: dict[str, Any], folder: str, start: str) -> tuple[int, int]:
    """Two clipped steps of AdamW as plain PyTorch does them, saved. Returns the bytes of a rank's parameters, and of
    its moments."""
    torch.set_num_threads(1)
    model, batch = _gpt(), _tokens()
    plain = copy.deepcopy(model)
    program = quintnet.compile(model, Mesh(**axes), batch, **options)
    ours = train_beside(program, plain, batch, 2)
    program.save(folder, step=1, optimizer=ours)
    again = quintnet.compile(_gpt(), Mesh(**axes), batch, **options)
    if start:  # what another layout wrote, written again
        optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
        again.load(start, optimizer=optimizer)
        again.save(f"{folder}-again", step=1, optimizer=optimizer)
    moments = [x for state in ours.state.values() for x in state.values() if x.dim()]
    return _bytes(list(program.parameters())), _bytes(moments)


def _held(ranks: int, rank: int) -> int:
    """The bytes that ``rank`` has of all parameters: of the dim with the least padding what torch.chunk gives."""
    total = 0
    for p in _gpt().parameters():
        dim = min(range(p.dim()), key=lambda d: -(-p.shape[d] // ranks) * ranks / p.shape[d])
        chunks = torch.chunk(p, ranks, dim)
        total += chunks[rank].nbytes if rank < len(chunks) else 0
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "zero"), [(2, 1), *(pytest.param(n, z, marks=pytest.mark.slow) for n, z in ((3, 1), (2, 2), (4, 3)))]
)
def test_processes_train_and_save_slices_of_odd_sizes(ranks: int, zero: int, tmp_path: Path) -> None:
    """Another layout reads and writes the same bits; every rank's memory is that of its own slices."""
    _trained({"dp": 1}, {}, str(tmp_path / "whole"), "")
    whole, own = tmp_path / "whole", tmp_path / "own"
    found = quintnet.launch(_trained, ranks, ({"dp": ranks}, {"zero": zero}, str(own), str(whole)), timeout=240)
    name = "step-00000001"
    _require_equal(whole / name, Path(f"{own}-again") / name)
    for rank, (parameters, moments) in enumerate(found):
        assert moments == 2 * _held(ranks, rank)
        assert parameters == _held(ranks, rank)
    program = quintnet.compile(_gpt(), Mesh(dp=2, tp=2), _tokens(), zero=3)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    program.load(own, optimizer=optimizer)
    program.save(tmp_path / "third", step=1, optimizer=optimizer)
    _require_equal(own / name, tmp_path / "third" / name)
