"""Every module that does work is imported by name in a unit test, so that a failure names a place."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "quintnet_compiler": ROOT / "quintnet_compiler",
    "quintnet_compiler.passes": ROOT / "passes",
    "quintnet_compiler.cost_models": ROOT / "cost_models",
}
# Tested through others only. The list shrinks: a module that gets a test leaves it, and none may be added.
MISSING = frozenset(
    {
        "quintnet_compiler.api.plan",
        "quintnet_compiler.checkpoint.pretrained",
        "quintnet_compiler.checkpoint.pretrained_save",
        "quintnet_compiler.checkpoint.storage",
        "quintnet_compiler.cost_models.calibrated",
        "quintnet_compiler.driver.shared_parameters",
        "quintnet_compiler.equivalence.localize",
        "quintnet_compiler.equivalence.module_check",
        "quintnet_compiler.equivalence.module_sides",
        "quintnet_compiler.equivalence.module_trace",
        "quintnet_compiler.equivalence.unsplit_step",
        "quintnet_compiler.huggingface.attention",
        "quintnet_compiler.planner.build",
        "quintnet_compiler.planner.planning",
        "quintnet_compiler.runtime.backends.backend",
        "quintnet_compiler.runtime.execute.cuda_graphs.graph_segment",
        "quintnet_compiler.runtime.execute.cuda_graphs.graphed_engine",
        "quintnet_compiler.runtime.state.state",
        "quintnet_compiler.runtime.transport.collectives",
        "quintnet_compiler.runtime.transport.transport",
        "quintnet_compiler.simulation.program",
        "quintnet_compiler.training.run",
        "quintnet_compiler.training.trainer",
    }
)


@cache
def _modules() -> set[str]:
    """Modules with a function or a class; a package itself, and names for ``python -m``, are none."""
    found = set()
    for package, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            linked = package == "quintnet_compiler" and parts[0] in ("passes", "cost_models")
            if file.stem.startswith("__") or linked:
                continue
            if any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.parse(file.read_text()).body):
                found.add(".".join((package, *parts)))
    return found


@cache
def _imported() -> set[str]:
    found = set[str]()
    for file in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
            elif isinstance(node, ast.Import):
                found |= {one.name for one in node.names}
    return found


def test_every_module_is_imported_by_name_in_a_unit_test() -> None:
    assert sorted(_modules() - _imported() - MISSING) == []


def test_the_list_of_missing_tests_gets_shorter() -> None:
    assert sorted(MISSING - (_modules() - _imported())) == []


def test_unit_tests_start_no_process() -> None:
    """``make smoke`` is fast, and runs where processes cannot talk to each other."""
    starts = {"subprocess", "multiprocessing", "torch.multiprocessing"}
    for file in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not starts.intersection(names), f"{file.name}:{node.lineno}"
