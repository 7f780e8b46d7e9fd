"""Pictures of who holds what, and what notebooks show."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.core.sharding import parse_type
from quintnet_compiler.core.slices import take_all

BATCH = torch.randn(8, 16), torch.randn(8, 8)


@pytest.fixture(scope="module")
def program() -> quintnet.CompiledProgram:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    plan = {"parameters": {"0.weight": {"tp": "S(0)"}, "2.weight": {"tp": "S(1)"}}}
    mesh = Mesh(pp=2, dp=2, tp=2)
    return quintnet.compile(model, mesh, BATCH, loss_fn=F.mse_loss, microbatches=2, plan=plan)


def test_a_parameter_is_shown_with_its_ranks(program: quintnet.CompiledProgram) -> None:
    found = quintnet.visualize(program, "0.weight")
    assert str(found).splitlines() == [
        "0.weight [32, 16]: dp: R, tp: S(0)",
        "  [0:16, :]   ranks 0, 2",
        "  [16:32, :]  ranks 1, 3",
    ]
    assert "[:, 0:16]   ranks 4, 6" in str(program.visualize("2.weight"))  # the second stage's ranks
    assert json.loads(found.to_json())["parts"][1]["ranks"] == [1, 3]
    drawn = ElementTree.fromstring(found.svg())
    texts = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "ranks 0, 2" in texts and "dim 0: 32" in texts


@pytest.mark.parametrize(
    ("types", "shape"),
    [
        ({"dp": "S(0)", "tp": "S(0)"}, (8, 3)), ({"tp": "S(1,3)"}, (4, 12)), ({"dp": "S(1)", "tp": "S(0)"}, (4, 4)),
        ({"dp": "P"}, (4,)), ({}, ()), ({"dp": "S(2)", "cp": "S(0)", "tp": "S(1)"}, (2, 4, 6)),
    ],
)  # fmt: skip
def test_parts_are_those_that_ranks_hold(types: dict[str, str], shape: tuple[int, ...]) -> None:
    mesh = Mesh(tp=2, dp=2, cp=2)
    found = quintnet.visualize(mesh, types, shape)
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    order = ("dp", "cp", "tp")
    for part in found.parts:
        index = [torch.cat([torch.arange(a, b) for a, b in ranges]) for ranges in part.ranges]
        shown = whole[torch.meshgrid(*index, indexing="ij")] if shape else whole
        for rank in part.ranks:
            place = mesh.coordinate(rank)
            kinds = tuple(parse_type(types.get(axis, "I")) for axis in order)
            held = take_all(whole, kinds, [2, 2, 2], [place[axis] for axis in order])
            assert torch.equal(held, shown)
    assert sorted(rank for part in found.parts for rank in part.ranks) == list(range(8))
    ElementTree.fromstring(found.svg())
    assert ("terms of a sum" in str(found)) == ("P" in types.values())


def test_what_cannot_be_shown_is_refused(program: quintnet.CompiledProgram) -> None:
    mesh = Mesh(pp=2, tp=2)
    with pytest.raises(quintnet.CompileError, match=r"QN204(?s:.*)did you mean 0.weight"):
        quintnet.visualize(program, "0.wait")
    with pytest.raises(quintnet.CompileError, match=r"QN201(?s:.*)'pp'"):
        quintnet.visualize(mesh, {"pp": "S(0)"}, (4,))
    with pytest.raises(quintnet.CompileError, match=r"QN203(?s:.*)tp=2"):
        quintnet.visualize(mesh, {"tp": "S(0)"}, (3,))
    with pytest.raises(quintnet.CompileError, match=r"QN203(?s:.*)dim 1"):
        quintnet.visualize(mesh, {"tp": "S(1)"}, (4,))
    with pytest.raises(quintnet.CompileError, match=r"QN207(?s:.*)'split'"):
        quintnet.visualize(mesh, {"tp": "split"}, (4,))
    with pytest.raises(quintnet.CompileError, match=r"QN204(?s:.*)visualize\(mesh"):
        quintnet.visualize(mesh, "0.weight")


class _Tags(HTMLParser):
    """Everything that is opened is closed, and nothing runs."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "iframe")
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _shown(x: object) -> str:
    return _Tags(x._repr_html_()).text  # type: ignore[attr-defined]


def test_notebooks_show_tables(program: quintnet.CompiledProgram) -> None:
    assert "rank 5" in _shown(Mesh(pp=2, dp=2, tp=2)) and "tp=1" in _shown(Mesh(pp=2, dp=2, tp=2))
    assert "1024 ranks" in _shown(Mesh(dp=512, tp=2)) and "rank" in _shown(Mesh())
    hostile = quintnet.Plan(parameters={"<script>": {"tp": "I"}}, zero=1)
    assert "<script>" in _shown(hostile) and "zero" in _shown(hostile)
    assert "2 microbatches" in _shown(program) and "0.weight" in _shown(program.visualize("0.weight"))
    lazy = quintnet.compile(nn.Linear(2, 2), Mesh(dp=2))
    assert "not compiled yet" in _shown(lazy)
    assert "bubble" in _shown(program.simulate())
    cluster = quintnet.Cluster("h100", nodes=1, gpus_per_node=2)
    report = quintnet.plan(nn.Linear(16, 8), cluster, BATCH, loss_fn=F.mse_loss)
    assert str(report.found.ranked[0].layout) in _shown(report)
