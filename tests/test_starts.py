"""What a start imports: budgets of modules, tables that are complete when they are asked, ranks that import nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quintnet_compiler.cli.app import VERBS, loaded
from quintnet_compiler.cli.calibrate import LONGEST_SIDE
from quintnet_compiler.reports.calibrate import CalibrationEffort
from quintnet_compiler.training.run_page import PAGE

ROOT = Path(__file__).parent.parent
MAX_MODULES, MAX_OF_OTHERS = 80, 120  # of quintnet.compile, beyond torch's: ours, and those of other libraries
MAX_MODULES_OF_COMPILE = 510  # ours, of the first compile and step of a small model
HEAVY = (
    "sympy", "scipy", "networkx", "jinja2", "rich", "yaml", "torch._dynamo", "torch._inductor", "torch.export._trace",
    "torch.distributed.tensor", "torch.distributed.checkpoint",
)  # fmt: skip
# of QuintNet, what a step of a small model does without
UNUSED = (
    "planner", "simulation", "dump", "reports", "training", "textbook", "cli", "runtime.backends.processes",
    "runtime.launch.attempt", "runtime.execute.cuda_graphs", "checkpoint.training_state", "driver.program_cache",
    "features.text_generation.generation", "features.whole_step_graph.captured_step", "api.plan", "weights.initialize",
)  # fmt: skip
STEP = """
import torch, torch.nn.functional as F
import quintnet
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
batch = torch.randn(4, 8), torch.randint(0, 4, (4,))
quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy).step(batch)
"""
TABLES = """
from quintnet_compiler.core.precision import COMPUTE_DTYPES
from quintnet_compiler.features import FEATURES
from quintnet_compiler.ops.catalog import spec_of
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.driver.pipeline import PIPELINE

def tables():
    return [sorted(map(str, RULES)), sorted(COMPUTE_DTYPES), [feature.name for feature in FEATURES],
            [spec.name for spec in PIPELINE], [str(spec_of(target)) for target in sorted(RULES, key=str)]]
"""


def _run(code: str) -> Any:
    """Run ``code`` in a process of its own, and return what it prints last, as JSON."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def _modules_of(code: str) -> list[str]:
    """Return the names of all modules that ``code`` imports, beyond those of torch."""
    count = "print(json.dumps([name for name in sys.modules if name not in at_start]))"
    names: list[str] = _run(f"import json, sys, torch\nat_start = set(sys.modules)\n{code}\n{count}")
    return names


def _ours(names: list[str]) -> list[str]:
    return [name for name in names if name.partition(".")[0] in ("quintnet", "quintnet_compiler")]


def test_quintnet_compile_imports_what_it_is_made_of() -> None:
    names = _modules_of("import quintnet; quintnet.compile")
    ours = _ours(names)
    assert len(ours) <= MAX_MODULES and len(names) - len(ours) <= MAX_OF_OTHERS, sorted(ours)
    assert [name for name in names if name.startswith(HEAVY)] == []


def test_a_small_model_imports_what_compiles_it() -> None:
    names = _modules_of(STEP)
    unused = tuple(f"quintnet_compiler.{name}" for name in UNUSED)
    assert len(_ours(names)) <= MAX_MODULES_OF_COMPILE
    assert [
        name for name in names if name.startswith((*unused, "torch.distributed.checkpoint", "jinja2", "rich"))
    ] == []


@pytest.mark.slow
def test_tables_are_complete_when_a_model_was_compiled() -> None:
    """Importing every module adds no rule, precision, feature, pass or fact of an operator."""
    every = """
import importlib, json, pkgutil, quintnet_compiler
lazily = tables()
for module in pkgutil.walk_packages(quintnet_compiler.__path__, "quintnet_compiler."):
    if not module.name.startswith("quintnet_compiler.loops") and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(json.dumps([lazily == tables(), len(lazily[0]), len(lazily[1])]))
"""
    same, rules, precisions = _run(STEP + TABLES + every)
    assert same and rules > 400 and precisions >= 3


def test_wrong_arguments_are_answered_without_torch() -> None:
    code = f"""
import json, sys
from quintnet_compiler.cli.app import app
codes = []
for verb in {list(VERBS)}:
    try: app([verb, "--nonsense"])
    except SystemExit as error: codes.append(error.code)
print(json.dumps([codes, [name for name in ("torch", "numpy", "sympy", "yaml") if name in sys.modules]]))
"""
    assert _run(code) == [[2] * len(VERBS), []]


def test_what_the_command_line_says_without_asking() -> None:
    assert CalibrationEffort().sides[-1] == LONGEST_SIDE
    assert any(PAGE in (option.help or "") for option in loaded("watch").params)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_fork_server_has_imported_what_ranks_need_and_started_nothing() -> None:
    code = """
import importlib, json, os, sys, threading
from quintnet_compiler.runtime.launch.attempt import PRELOADED
for name in PRELOADED: importlib.import_module(name)
import torch
threads = [threading.active_count(), len(os.listdir("/proc/self/task"))]  # Python's, and all
at_start = set(sys.modules)
step = compile(STEP, "step", "exec")
exec(step)
ours = [name for name in sys.modules if name.startswith("quintnet_compiler") and name not in at_start]
print(json.dumps([threads, torch.cuda.is_initialized(), ours]))
""".replace("STEP", repr(STEP))
    assert _run(code) == [[1, 1], False, []]
