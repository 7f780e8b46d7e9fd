"""Programs from the cache are those that the compiler makes: the same code, the same steps bit by bit, the same
reports."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintnet
from quintnet_compiler.driver.program_cache import ProgramCache
from quintnet_compiler.driver.stored_program import program_data

from .models import CASES, build

torch.set_num_threads(1)


@dataclass(frozen=True)
class Layout:
    """A model, a mesh, and options of its plan."""

    name: str
    axes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{a}{n}" for a, n in self.axes.items()), *map(str, self.options)])


LAYOUTS = [
    Layout("gpt", {"pp": 2, "tp": 2}, {"microbatches": 2}),
    Layout("mixture", {"ep": 2, "dp": 2}),
    Layout("mlp", {"dp": 3}, {"zero": 3}),  # no size divides
    Layout("gpt", {"cp": 2, "tp": 2}, {"context": "ring"}),
    Layout("gpt", {"cp": 2}, {"context": "ulysses", "microbatches": 2}),
    Layout("gpt", {"tp": 3}),
    Layout("gpt", {"dp": 2, "pp": 2}, {"microbatches": 4, "schedule": "zb-h1", "zero": 1}),
    Layout("gpt", {"pp": 2, "tp": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 2}),
    Layout("gpt", {"dp": 2, "tp": 2}, {"recompute": "selective", "zero": 2}),
    Layout("gpt", {"tp": 2}, {"async_tp": True, "overlap": True}),
    Layout("hf_llama_double", {"tp": 2, "dp": 2}, {"zero": 3, "microbatches": 2}),
    Layout("hf_gpt2", {"pp": 2, "dp": 2}, {"microbatches": 2}),
    Layout("encoder", {"tp": 2}),
    Layout("cnn", {"dp": 2, "tp": 2}),
    Layout("vit", {"tp": 2, "pp": 2}, {"microbatches": 2}),
    Layout("mixture", {"ep": 4}, {"microbatches": 2}),
    Layout("mixture", {"dp": 2, "tp": 2}, {"experts": ["dp"]}),
]
FLOAT32 = Layout("gpt", {"dp": 2, "tp": 2}, {"precision": "bf16", "microbatches": 2})


def _compiled(layout: Layout, cache: Path | None, dtype: torch.dtype = torch.float64) -> quintnet.CompiledProgram:
    case = CASES[layout.name]
    model, mesh = build(layout.name, dtype), quintnet.Mesh(**layout.axes)
    return quintnet.compile(
        model, mesh, case.batch(8), loss_fn=case.loss_fn, cache=cache, check="off", **layout.options
    )


def _read(program: quintnet.CompiledProgram) -> bool:
    """Whether the program came from the cache."""
    return program.compile_seconds.keys() == {ProgramCache.__name__}


def _steps(program: quintnet.CompiledProgram, layout: Layout) -> list[Tensor]:
    """Loss, gradients and parameters of two steps, an evaluation, and a step of another batch size."""
    batch, found = CASES[layout.name].batch, list[Tensor]()
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    for _ in range(2):
        found.append(program.step(batch(8)).clone())
        found += [p.grad.clone() for _, p in program.named_parameters() if p.grad is not None]
        optimizer.step()
    found.append(program.evaluate(batch(8)))
    found.append(program.step(batch(16)).clone())
    return [*found, *(p.detach().clone() for _, p in program.named_parameters())]


def _code(program: quintnet.CompiledProgram) -> list[Any]:
    pieces = [(s.index, n, p.code) for rank in program.ranks for s in rank.stages for n, p in s.pieces.items()]
    return [pieces, [rank.actions for rank in program.ranks], program.plan.to_json(), program.unsplit]


def _same(layout: Layout, folder: Path, dtype: torch.dtype = torch.float64) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", quintnet.CacheWarning)
        first = _compiled(layout, folder, dtype)
        expected = _steps(first, layout)
        second = _compiled(layout, folder, dtype)
    assert not _read(first) and _read(second)
    plain = _compiled(layout, None, dtype)
    one, two = plain._primary().program, second._primary().program
    assert two.digest == one.digest and _code(second) == _code(plain)
    for one_by_one in zip(expected, _steps(plain, layout), _steps(second, layout), strict=True):
        assert all(torch.equal(x, one_by_one[0]) for x in one_by_one)
    assert "source" not in vars(two)  # nothing was compiled for all that
    assert program_data(two) == program_data(one)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_same_steps(layout: Layout, tmp_path: Path) -> None:
    _same(layout, tmp_path / "cache")


@pytest.mark.slow
def test_the_same_steps_in_mixed_precision(tmp_path: Path) -> None:
    _same(FLOAT32, tmp_path / "cache", torch.float32)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.slow
def test_reports_are_the_same(tmp_path: Path) -> None:
    layout = Layout("mlp", {"tp": 2, "pp": 2}, {"microbatches": 2})
    plain, _ = _compiled(layout, None), _compiled(layout, tmp_path / "cache")
    second = _compiled(layout, tmp_path / "cache")
    assert _read(second)
    name = next(name for name, _ in plain.named_parameters() if name.endswith("weight"))
    assert second.explain(name).to_json() == plain.explain(name).to_json()
    assert second.prove(name) == plain.prove(name)
    assert second.simulate().to_json() == plain.simulate().to_json()
    assert second.model_flops == plain.model_flops
    assert _files(second.dump(tmp_path / "second")) == _files(plain.dump(tmp_path / "plain"))
    assert second.verify().ok


class Divides(nn.Module):
    """NaN where an input is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x) / x.sum()).mean()


def test_a_bad_value_is_found_in_a_program_from_the_cache(tmp_path: Path) -> None:
    for _ in range(2):
        program = quintnet.compile(Divides(), quintnet.Mesh(dp=2), (torch.ones(4, 8),), cache=tmp_path / "cache")
        with pytest.raises(quintnet.RunError, match=r"QN501[\s\S]*self.first\(x\) / x.sum\(\)"):
            program.step((torch.zeros(4, 8),))
    assert _read(program)


def _in_a_process(folder: str) -> tuple[bool, str, float, int]:
    layout = Layout("gpt", {"tp": 2}, {"microbatches": 2})
    program = _compiled(layout, Path(folder), torch.float32)
    loss = float(program.step(CASES["gpt"].batch(8)))
    inode = next(os.stat(path).st_ino for path in Path(folder).glob("*.program"))
    return _read(program), program._primary().program.digest, loss, inode


@pytest.mark.slow
def test_one_rank_compiles_for_all(tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    started = [quintnet.launch(_in_a_process, 2, (folder,), timeout=120) for _ in range(2)]
    assert [[rank[0] for rank in ranks] for ranks in started] == [[False, True], [True, True]]
    assert len({rank[1:] for ranks in started for rank in ranks}) == 1  # one program, one loss, one file


def _without_a_disk_of_its_own(folder: str) -> tuple[bool, float]:
    """Only rank 0 can read what it writes."""
    own = Path(folder) / str(torch.distributed.get_rank() if torch.distributed.is_initialized() else os.environ["RANK"])
    layout = Layout("mlp", {"dp": 2})
    program = _compiled(layout, own, torch.float64)
    return _read(program), float(program.step(CASES["mlp"].batch(8)))


@pytest.mark.slow
def test_ranks_receive_where_no_disk_is_shared(tmp_path: Path) -> None:
    (first, loss), (second, other) = quintnet.launch(_without_a_disk_of_its_own, 2, (str(tmp_path),), timeout=120)
    assert (first, second) == (False, True) and loss == other
