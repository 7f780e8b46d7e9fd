"""What CONTRIBUTING, CHANGELOG and SECURITY say is so: their links, make targets, files and versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from quintnet_compiler.checkpoint import manifest
from quintnet_compiler.core.errors import REPORT
from quintnet_compiler.cost_models.calibration import Calibration
from quintnet_compiler.ir.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", ".github/pull_request_template.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_and_files_exist(page: Path) -> None:
    text, targets = page.read_text(), re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"\bmake ([a-z-]+)[`\s]", text)) <= {*targets, "a"}  # "to make a change"
    for path in re.findall(r"`((?:quintnet_compiler|cost_models|passes|tests|\.github)/[\w/.]*)`", text):
        assert (ROOT / path).exists(), path


def test_versions_of_files_are_those_in_the_changelog() -> None:
    rows = r"^\| (plan|checkpoint manifest|calibration|dump manifest)\b[^|]*\| (\d+) \|"
    table = dict(re.findall(rows, (ROOT / "CHANGELOG.md").read_text(), re.M))
    assert int(table["plan"]) == Plan().version
    assert int(table["calibration"]) == Calibration.model_fields["version"].default
    assert int(table["checkpoint manifest"]) == manifest.VERSION
    assert f'"version": {table["dump manifest"]}' in (ROOT / "quintnet_compiler/dump/folder.py").read_text()


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_a_mistake_of_the_compiler_is_reported_with_the_form_that_asks_for_what_is_needed() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    assert form["name"] == "Bug" and "template: bug" in REPORT
    asked = {one["id"]: one["validations"]["required"] for one in form["body"] if "validations" in one}
    assert asked == {"what": True, "model": True, "doctor": True} and "quintnet doctor" in REPORT


def test_ci_runs_what_contributors_run() -> None:
    job, _ = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()  # and the wheel
    assert job["steps"][-1] == {"run": ".ci/run ${{ matrix.part }}"}
    assert job["steps"][1]["with"]["python-version"] == "3.11"
    parts = job["strategy"]["matrix"]["part"]
    assert parts == [f"{number + 1}/{len(parts)}" for number in range(len(parts))]
