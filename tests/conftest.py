"""Options and markers of the tests."""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from quintnet_compiler.api import plan
from quintnet_compiler.driver import variants
from quintnet_compiler.ir.program import Captured

from .samples import is_in_part, spread
from .shared_captures import SharedCaptures

with torch.device("meta"):
    # torch remembers its functions that make tensors at the first such call. If that were inside of transformers, which
    # has another torch.linspace there meanwhile, torch's own would ignore devices in all tests that follow.
    torch.empty(0)

# pytest listens to each logger that does not propagate. What torch would write for this one, of each trace and each
# graph, is made only if somebody listens.
logging.getLogger("torch.__trace").propagate = True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="such as 2/3: the second of three parts of all files")
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/*/*.txt instead of comparing")


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_samples(items)
    part: str = config.getoption("part")
    others = [item for item in items if not is_in_part(item.path.name, part)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if is_in_part(item.path.name, part)]
    # autograd makes a queue for each device when it first runs: the emulated device must be there before. The short
    # ones are first, as a worker that has nothing left takes tests from the end of another's.
    first = {"test_gradient_memory.py": 0, "test_accelerator.py": 1}
    items.sort(key=lambda item: first.get(item.path.name, len(first)))


def _mark_samples(items: list[pytest.Item]) -> None:
    """Mark as slow all but ``n`` cases of a test with ``@pytest.mark.sample(n)``, the same ones in each run."""
    tests = defaultdict[object, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            tests[item.path, item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        (count,) = cases[0].iter_markers("sample")
        mixed = sorted(cases, key=lambda item: hashlib.sha256(item.name.encode()).digest())
        chosen = set(spread([_values(item) for item in mixed], count.args[0]))
        for place, item in enumerate(mixed):
            if place not in chosen:
                item.add_marker(pytest.mark.slow)


def _values(item: pytest.Item) -> tuple[str, ...]:
    """Return the values of a case's parameters, as text."""
    return tuple(f"{name}={value!r}" for name, value in sorted(item.callspec.params.items()))  # type: ignore[attr-defined]


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield where checkpoints are saved: a folder's path, or the URL of a store in memory, which is empty."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield str(tmp_path / "run") if request.param == "disk" else f"memory://{tmp_path.name}/run"
    MemoryFileSystem.store.clear()


@pytest.fixture(scope="session")
def captures_of_process() -> SharedCaptures:
    """Return the captures that tests of this process share."""
    return SharedCaptures()


@pytest.fixture
def shared_captures(captures_of_process: SharedCaptures, monkeypatch: pytest.MonkeyPatch) -> SharedCaptures:
    """Let modules that are alike share one trace, see :mod:`.shared_captures`."""
    for user in (variants, plan):
        monkeypatch.setattr(user, "capture", captures_of_process)
    compare = variants.Programs._compare

    def compare_once(programs: variants.Programs, kind: str, captured: Captured, batch: Any, *, first: bool) -> None:
        captures_of_process.compare_once(programs, kind, captured, batch, first=first, compare=compare)

    monkeypatch.setattr(variants.Programs, "_compare", compare_once)
    return captures_of_process
