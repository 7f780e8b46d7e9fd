"""What CI runs, in one part or in several, and the wheel that it tries."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("given", "targets"),
    [
        ((), ["setup", "-j2 --output-sync lint first-gpu", "test PART=1/1"]),
        (("1/3",), ["setup", "test PART=1/3"]),
        (("3/3",), ["setup", "-j2 --output-sync lint first-gpu", "test PART=3/3"]),
    ],
)
def test_one_part_of_ci_has_what_no_part_of_the_tests_has(
    given: tuple[str, ...], targets: list[str], tmp_path: Path
) -> None:
    (make := tmp_path / "make").write_text('#!/bin/sh\necho "$@"\n')
    make.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run([ROOT / ".ci/run", *given], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == targets


def _tool(name: str) -> ModuleType:
    """Load a script of ``tools/``, which no package has."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _workflow(name: str) -> dict[str, dict[str, list[str]]]:
    """Return the matrix of each job that has one."""
    jobs = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())["jobs"]
    return {job: options["strategy"]["matrix"] for job, options in jobs.items()}


def test_ci_tries_every_python_and_the_ends_of_what_is_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    pythons = [text.rpartition(" ")[2] for text in project["classifiers"] if text.startswith(prefix)]
    assert project["requires-python"] == f">={pythons[0]}" and len(pythons) == 3
    assert _workflow("ci")["wheel"]["python"] == pythons
    assert _workflow("versions")["versions"] == {"python": pythons, "libraries": list(_tool("matrix").VERSIONS)}


def test_a_wheel_with_a_file_too_few_or_too_many_is_told() -> None:
    try_wheel = _tool("try_wheel")
    files = try_wheel.expected_files()
    assert {"quintnet_compiler/passes/__init__.py", "quintnet_compiler/cost_models/cluster.py"} < files
    assert {"quintnet/py.typed", "quintnet_compiler/__init__.pyi"} < files
    assert try_wheel.problems([*files, "quintnet_compiler-0.1.0.dist-info/METADATA"]) == []
    assert try_wheel.problems([*(files - {"quintnet/py.typed"}), "passes/__init__.py"]) == [
        "missing: quintnet/py.typed",
        "not in the checkout: passes/__init__.py",
    ]
