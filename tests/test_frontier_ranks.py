"""Ranks that hold other values than the others are named before they train; ranks that agree are left alone."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.runtime.state.digests import BLOCK, digests

AXES = ({"dp": 2}, {"tp": 2}, {"pp": 2})
ROOT = Path(__file__).parents[1]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) * self.scale)


def _batch(seed: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=dice), torch.randint(4, (rows,), generator=dice)


def _model(seed: int = 0) -> Scaled:
    torch.manual_seed(seed)
    return Scaled()


def _program(axes: dict[str, int], model: nn.Module) -> Any:
    return quintnet.compile(model, quintnet.Mesh(**axes), _batch(0), loss_fn=F.cross_entropy)


def _seeds(axes: dict[str, int], rank: int) -> None:
    _program(axes, _model(seed=rank)).step(_batch(0))


def _a_buffer(axes: dict[str, int], rank: int) -> None:
    model = _model()
    model.scale[3] += rank  # type: ignore[operator]
    _program(axes, model).step(_batch(0))


def _a_sign(axes: dict[str, int], rank: int) -> None:
    model = _model()
    with torch.no_grad():
        model.b.weight[1] *= 1 - 2 * rank
    _program(axes, model).step(_batch(0))


def _the_first_batch(axes: dict[str, int], rank: int) -> None:
    _program(axes, _model()).step(_batch(rank))


def _rows_of_another_order(axes: dict[str, int], rank: int) -> None:
    x, y = _batch(0)
    _program(axes, _model()).step((x.roll(rank, 0), y.roll(rank, 0)))


def _a_later_batch(axes: dict[str, int], rank: int) -> None:
    program = _program(axes, _model())
    for step in range(9):
        program.step(_batch(step + 100 * rank * (step >= 2)))


def _evaluation(axes: dict[str, int], rank: int) -> None:
    program = _program(axes, _model())
    program.step(_batch(0))
    program.evaluate(_batch(rank))


def _changed_after_compiling(axes: dict[str, int], rank: int) -> None:
    program = _program(axes, _model())
    with torch.no_grad():
        for parameter in program.parameters():
            parameter.mul_(1 + rank)
    program.step(_batch(0))


def _whatever_is_loaded_later(axes: dict[str, int], rank: int) -> None:
    """Ranks begin with other values, and get equal ones."""
    program = _program(axes, _model(seed=rank))
    program.initialize({"*": quintnet.Normal(0.1)})
    with pytest.raises(quintnet.RunError, match=r"(?s)QN404.*buffer scale"):
        program.step(_batch(0))
    model = _model(seed=rank)
    model.scale = torch.ones(8)
    program = _program(axes, model)
    program.initialize({"*": quintnet.Normal(0.1)})
    program.step(_batch(0))


def _all_is_equal(axes: dict[str, int], rank: int) -> None:
    program = _program(axes, _model())
    for step in range(6):
        program.step(_batch(step))
    program.evaluate(_batch(1))
    program(_batch(2)[0])


def _own_rows(axes: dict[str, int], rank: int) -> None:
    program = _program(axes, _model())
    for step in range(6):
        program.step(_batch(step + 100 * rank * ("dp" in axes), 8 // axes.get("dp", 1)), batch_is_local=True)


def _own_rows_where_they_are_shared(axes: dict[str, int], rank: int) -> None:
    program = _program(axes, _model())
    program.step(_batch(rank, 8 // axes.get("dp", 1)), batch_is_local=True)


ALL = "parameters a.weight, a.bias, b.weight, b.bias"
ODD = "rank 1 has other values than rank 0: "
BATCH = rf"{ODD}batch\[0\], batch\[1\]\n"
# what happens on a layout, and what every rank says; "" if nothing: ranks hold other parts, or get equal ones later
CASES: tuple[tuple[Callable[[dict[str, int], int], None], dict[str, int], str], ...] = (
    *((_seeds, axes, f"before the first step:\n  {ODD}{ALL}\n") for axes in AXES),
    *((_the_first_batch, axes, BATCH) for axes in AXES),
    (_a_buffer, {"pp": 2}, f"{ODD}buffer scale\n"),
    (_a_sign, {"tp": 2}, f"{ODD}parameter b.weight\n"),
    (_rows_of_another_order, {"dp": 2}, BATCH),
    (_a_later_batch, {"tp": 2}, f"step 3:\n  {BATCH}"),
    (_evaluation, {"dp": 2}, BATCH),
    (_changed_after_compiling, {"dp": 2}, f"{ODD}{ALL}\n"),
    (_changed_after_compiling, {"tp": 2}, f"{ODD}parameter b.bias\n"),
    (_changed_after_compiling, {"pp": 2}, ""),
    (_whatever_is_loaded_later, {"dp": 2}, ""),
    (_all_is_equal, {"tp": 2}, ""),
    (_own_rows, {"dp": 2}, ""),
    (_own_rows_where_they_are_shared, {"tp": 2}, BATCH),
)


FOUR = {"dp": 2, "tp": 2}
EACH = r"4 different ones, of rank 0 \| rank 1 \| rank 2 \| rank 3: "
# the same on four ranks
MORE: tuple[tuple[Callable[[dict[str, int], int], None], dict[str, int], str], ...] = (
    (_seeds, FOUR, f"before the first step:\n  {EACH}{ALL}\n"),
    (_a_buffer, FOUR, f"{EACH}buffer scale\n"),
    (_the_first_batch, FOUR, rf"{EACH}batch\[0\], batch\[1\]\n"),
    (_a_later_batch, FOUR, rf"step 3:\n  {EACH}batch\[0\], batch\[1\]\n"),
    (_all_is_equal, FOUR, ""),
)


def _all_cases() -> list[str]:
    torch.set_num_threads(1)
    found = []
    for case, axes, _ in CASES if torch.distributed.get_world_size() == 2 else MORE:
        try:
            case(axes, torch.distributed.get_rank())
            found.append("")
        except quintnet.RunError as error:
            found.append(str(error))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_with_other_values_are_named(size: int) -> None:
    ranks = quintnet.launch(_all_cases, size, timeout=240, collective_timeout=60)
    assert all(texts == ranks[0] for texts in ranks)
    for (case, axes, text), found in zip(CASES if size == 2 else MORE, ranks[0], strict=True):
        if text:
            assert found.startswith("QN404") and re.search(text, found) and "fix: " in found, (case, axes, found)
        else:
            assert not found, (case, axes, found)


def test_digests_see_bits_places_shapes_and_dtypes() -> None:
    torch.manual_seed(0)
    x = torch.randn(3 * BLOCK + 5)
    (whole,) = digests([x])
    for i, j in ((0, 1), (7, BLOCK + 7), (BLOCK, 3 * BLOCK + 4)):
        swapped, flipped = x.clone(), x.clone()
        swapped[[i, j]] = swapped[[j, i]]
        flipped[[i, j]] *= -1
        assert whole not in digests([swapped, flipped])
    others = [x[:-1], x.view(1, -1), x.view(torch.int32), x.double(), torch.zeros(2), torch.zeros(3), torch.zeros(3, 1)]
    assert len({whole, *digests(others)}) == 1 + len(others)
    views = [x[1:], x[1:].clone(), x[5:].view(-1, 96).T, x[5:].view(-1, 96).T.contiguous()]
    first, second, third, fourth = digests(views)
    assert first == second and third == fourth
    nan = torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16)
    assert digests([nan]) == digests([nan.clone()])
    assert digests([x], 1000) != digests([x.roll(1)], 1000)


ON_TWO = """
import re, sys
from pathlib import Path
script = re.search(r"```python\\n(.*?)```", Path("README.md").read_text(), re.S)[1]
try:
    exec(script)  # is for eight ranks
except quintnet.RunError as error:
    assert error.code == "QN301" and "the world has 2" in str(error), error
    print("refused", flush=True)
exec(script.replace("pp=2, dp=2, tp=2", "dp=2") + "\\nassert torch.distributed.get_world_size() == 2")
where = torch.distributed.get_rank()
Path(sys.argv[1], f"rank{where}").write_text(f"{float(loss):.6f} {float(program.step(batch)):.6f}")
"""


def _on_one() -> str:
    script = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert script is not None
    known: dict[str, Any] = {}
    exec(script[1].replace("pp=2, dp=2, tp=2", "dp=2"), known)
    return f"{float(known['loss']):.6f} {float(known['program'].step(known['batch'])):.6f}"


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **more}


def test_the_script_of_the_readme_distributes_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import quintnet\n" + ON_TWO)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "script.py")]
    found = subprocess.run(
        [sys.executable, *command, str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, env=_environment(), timeout=200,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("refused") == 2, found.stdout
    ranks = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert ranks == [_on_one()] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "rank"), [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")]
)
def test_other_launchers(tmp_path: Path, size: str, rank: str) -> None:
    (tmp_path / "script.py").write_text("import quintnet\n" + ON_TWO)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py"), str(tmp_path)],
            cwd=ROOT, env=_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **{size: "2", rank: str(one)}),
        )
        for one in range(2)
    ]  # fmt: skip
    assert [one.wait(200) for one in running] == [0, 0]
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank1").read_text()


@pytest.mark.parametrize("size", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_process_of_several_never_plays_all_ranks(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(size, "2")
    with pytest.raises(quintnet.RunError, match=r"QN301.*\n.*no process group and no .*MASTER_ADDR"):
        quintnet.compile(Scaled(), quintnet.Mesh(dp=2), _batch(0), loss_fn=F.cross_entropy)
    with pytest.raises(quintnet.RunError, match=r"QN301.*\n.*needs 4 ranks, and the world has 2"):
        quintnet.compile(Scaled(), quintnet.Mesh(dp=4), _batch(0), loss_fn=F.cross_entropy)
