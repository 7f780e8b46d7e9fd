"""``quintnet passes``: the list, and one pass on a model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer

from quintnet_compiler.cli.passes import passes
from quintnet_compiler.driver.pipeline import PIPELINE

from .test_cli_parts import TARGET


def _document(*args: Any, **options: Any) -> Any:
    return json.loads(passes(*args, **options).document)


def test_the_list_is_the_pipeline() -> None:
    text = passes().text.splitlines()
    assert [line.split()[1] for line in text] == [spec.name for spec in PIPELINE]
    assert _document()["passes"][0] == {
        "name": "Normalize", "makes": "Program", "decides": PIPELINE[0].decides,
    }  # fmt: skip


def test_the_passes_that_ran_and_what_they_changed() -> None:
    rows = {row["name"]: row for row in _document(TARGET, mesh="tp=2")["passes"]}
    order = [spec.name for spec in PIPELINE if spec.name in rows]
    assert list(rows) == order and "CoalesceCollectives" not in rows  # nothing is gathered without ZeRO 3
    assert rows["LowerPrecision"]["added"] == rows["LowerPrecision"]["removed"] == 0
    assert rows["InsertCommunication"]["added"] > 0


@pytest.mark.slow
def test_the_program_before_and_after_one_pass() -> None:
    found = _document(TARGET, mesh="tp=2", only="insertcommunication")
    assert "all_reduce" not in found["before"] and "quintnet.convert" in found["after"]
    assert found["diff"].startswith("--- before InsertCommunication\n+++ after InsertCommunication\n")
    assert passes(TARGET, mesh="tp=2", only="InsertCommunication", diff=True).text == found["diff"]
    assert passes(TARGET, mesh="tp=2", only="LowerPrecision", diff=True).text == "LowerPrecision changes nothing"
    until = _document(TARGET, mesh="tp=2", until="ChooseSharding")
    assert until["text"].startswith("axes: tp=2 (model)\n")
    first = _document(TARGET, mesh="tp=2", only="Normalize")
    assert first["before"].startswith("graph():") and "aten.linear" in first["after"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"until": "Normalize"}, "needs a TARGET"),
        ({"target": TARGET, "until": "Normalize", "only": "Overlap"}, "give one of them"),
        ({"target": TARGET, "diff": True}, "needs --only PASS"),
        ({"target": TARGET, "until": "Normalise"}, "did you mean Normalize?"),
        ({"target": TARGET, "mesh": "tp=2", "until": "CoalesceCollectives"}, "CoalesceCollectives did not run"),
    ],
)
def test_what_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        passes(**given)
    assert told in str(refused.value)
