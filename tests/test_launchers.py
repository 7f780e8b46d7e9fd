"""Runs that other programs start: each sets variables of its own, and the same script finds its world."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import quintnet
from quintnet_compiler.runtime.launch.launchers import LAUNCHERS, first_host, started

ROOT = Path(__file__).parent.parent
SCRIPT = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist, torch.nn.functional as F
import quintnet

def train(folder):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    batch = torch.randn(8, 6), torch.randn(8, 3)
    program = quintnet.compile(torch.nn.Linear(6, 3), quintnet.Mesh(dp=size), batch, loss_fn=F.mse_loss)
    loss = float(program.step(batch))
    time.sleep(1.5 * rank)  # the first one, which has the store, is ready before the others
    Path(folder, f"rank{rank}").write_text(f"{loss:.6f} of {size}")
    return loss

if __name__ == "__main__":
    found = quintnet.launch(train, 2, (sys.argv[1],), collective_timeout=60)
    assert sum(x is not None for x in found) == 1
"""

Of = Callable[[int], dict[str, str]]
# What each launcher tells its process number ``rank`` of two on one node.
TOLD: Mapping[str, Of] = {
    "srun": lambda rank: {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
    },
    "mpirun": lambda rank: {
        "PMIX_NAMESPACE": f"prterun-{os.getpid()}@1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        # its helpers were started by srun, one on each node
        "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "1",
    },
    "a Kubernetes PyTorchJob": lambda rank: {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(40000 + os.getpid() % 9000), "WORLD_SIZE": "2",
        "RANK": str(rank),
    },
}  # fmt: skip
NAMES = {name for one in LAUNCHERS for name in (one.size, one.rank, one.local_rank, one.local_size)}


def _clean() -> dict[str, str]:
    known = {k: v for k, v in os.environ.items() if k not in NAMES and not k.startswith(("SLURM_", "MASTER_"))}
    return {**known, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", *(pytest.param(x, marks=pytest.mark.slow) for x in [*TOLD][1:])])
def test_a_script_with_launch_finds_the_world_of_its_launcher(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    ranks = [
        subprocess.Popen(command, env={**_clean(), **TOLD[launcher](rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    losses = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert losses[0] == losses[1] and losses[0].endswith(" of 2")


# Scripts of examples/launchers, as docs/launchers.md starts them; what each needs beside the package.
STARTS = {
    "torchrun": (["-m", "torch.distributed.run", "--nproc-per-node", "2", "start.py", "2"], "torch"),
    "accelerate": (
        ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "start.py", "2"],
        "accelerate",
    ),
    "Ray Train": (["ray_train.py", "2"], "ray"),
    "Lightning Fabric": (["lightning_fabric.py", "2"], "lightning"),
    "Lightning's Trainer": (["lightning_trainer.py", "2"], "lightning"),
}
EXAMPLES = ROOT / "examples" / "launchers"


def _plain_loss() -> float:
    """What the scripts train, in plain PyTorch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    x = torch.randn(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
    return loss.item()


def _said(made: str) -> list[float]:
    """Ray puts the worker's name before each line."""
    return [float(number) for number in re.findall(r"^(?:.*RayTrainWorker.* )?loss (\d\.\d+)$", made, re.M)]


@pytest.mark.slow
@pytest.mark.parametrize("who", STARTS)
def test_the_example_of_each_launcher(who: str) -> None:
    """Rank 0 alone says the loss, which is that of plain PyTorch."""
    command, needs = STARTS[who]
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    known = {**_clean(), "RAY_USAGE_STATS_ENABLED": "0"}
    made = subprocess.run(
        [sys.executable, *command], cwd=EXAMPLES, env=known, capture_output=True, text=True, timeout=400
    )
    assert made.returncode == 0, made.stderr
    assert _said(made.stdout) == pytest.approx([_plain_loss()], abs=2e-6), made.stdout


@pytest.mark.slow
def test_the_example_under_mpirun() -> None:
    if (mpirun := shutil.which("mpirun")) is None:
        pytest.skip("mpirun is not installed")
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    command = [mpirun, *root, "--oversubscribe", "-np", "2", sys.executable, "start.py", "2"]
    made = subprocess.run(command, cwd=EXAMPLES, env=_clean(), capture_output=True, text=True, timeout=400)
    assert _said(made.stdout) == pytest.approx([_plain_loss()], abs=2e-6), made.stderr


@pytest.mark.parametrize("launcher", [pytest.param(x, marks=pytest.mark.slow) for x in TOLD])
def test_the_example_with_the_variables_of_a_launcher(launcher: str) -> None:
    ranks = []
    for rank in range(2):
        known = {**_clean(), **TOLD[launcher](rank)}
        command = [sys.executable, "start.py", "2"]
        ranks.append(subprocess.Popen(command, cwd=EXAMPLES, env=known, stdout=subprocess.PIPE, text=True))
    said = [_said(rank.communicate(timeout=400)[0]) for rank in ranks]
    assert said == [pytest.approx([_plain_loss()], abs=2e-6), []]


def test_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in TOLD["srun"](0).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(quintnet.RunError, match=r"asked for 3 ranks, and srun started 2 \(SLURM_STEP_NUM_TASKS=2\)"):
        quintnet.launch(print, 3)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node7", "node7"), ("node[07-09,12],other", "node07"), ("a1,b[2-3]", "a1"), ("gpu[3]-ib,x", "gpu3-ib")],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_where_processes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    ports = set()
    for job in ("1", "2"):
        for name, value in {**TOLD["srun"](1), "SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "n[4-5]"}.items():
            monkeypatch.setenv(name, value)
        found = started()
        assert found is not None and (found.launcher.name, found.local_rank) == ("srun", 1)
        where = found.meeting()
        assert where is not None and where.host == "n4" and 15000 <= where.port < 30000
        ports.add(where.port)
    assert len(ports) == 2
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.setenv("MASTER_PORT", "29500")
    found = started()
    assert found is not None
    where = found.meeting()
    assert where is not None and (where.host, where.port) == ("elsewhere", 29500)
