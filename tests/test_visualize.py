"""Pictures of who holds what, and what notebooks show."""

from __future__ import annotations

import json
import re
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
    """Everything that is opened is closed, nothing runs, and nothing is loaded."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        assert not self.open
        assert "url(" not in html and "@import" not in html

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "iframe", "link", "object", "embed", "base", "meta", "form")
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("src", "href", "action"), (tag, name, value)
        if tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def _shown(x: object) -> str:
    return _Tags(x._repr_html_()).text  # type: ignore[attr-defined]


def test_notebooks_show_tables(program: quintnet.CompiledProgram) -> None:
    assert "rank 5" in _shown(Mesh(pp=2, dp=2, tp=2)) and "tp=1" in _shown(Mesh(pp=2, dp=2, tp=2))
    assert "1024 ranks" in _shown(Mesh(dp=512, tp=2)) and "rank" in _shown(Mesh())
    hostile = quintnet.Plan(parameters={"<script>": {"tp": "I"}}, zero=1)
    assert "<script>" in _shown(hostile) and "zero" in _shown(hostile)
    assert "0.weight" in _shown(program.visualize("0.weight"))
    assert "bubble" in _shown(program.simulate())
    cluster = quintnet.Cluster("h100", nodes=1, gpus_per_node=2)
    report = quintnet.plan(nn.Linear(16, 8), cluster, BATCH, loss_fn=F.mse_loss)
    assert str(report.found.ranked[0].layout) in _shown(report)


def test_a_notebook_shows_a_program(program: quintnet.CompiledProgram) -> None:
    shown = _shown(program)
    for text in ("A program for Mesh(pp=2, dp=2, tp=2)", "8ranks", "2microbatches", "1f1b"):
        assert text in re.sub(r"\s+", "", shown) or text in shown, text
    # parameters with their types, operators with theirs, a predicted step with its memory
    for text in ("0.weight", "[32, 16]", "[16, 16]", "tp S(0)", "gelu", "stage 1", "bubble", "kept between actions"):
        assert text in shown, text
    assert f"{program.simulate().peak.bytes / 2**10:.2f} KiB" in shown
    style = program._repr_html_().partition("<style>")[2].partition("</style>")[0]
    assert style.startswith(".quintnet {") and style.count("{") == style.count("}")  # it ends with the program


def test_a_notebook_shows_what_is_not_compiled_yet() -> None:
    class Untraceable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.later = nn.Linear(4, 4), nn.LazyLinear(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("it was traced")

    shown = _shown(quintnet.compile(Untraceable(), Mesh(dp=2), zero=2))
    assert "not compiled yet" in shown and "known after the first batch" in shown
    assert "first" in shown and "20" in shown and "LazyLinear" in shown and "zero" in shown
    assert "1,000,000" in _shown(quintnet.compile(nn.Linear(1000, 1000, bias=False, device="meta"), Mesh(dp=2)))


@pytest.mark.slow
def test_a_notebook_of_a_deep_model_is_as_small_as_that_of_a_shallow_one() -> None:
    """Equal blocks are shown once; of unlike ones, as many as there is room for."""

    def pages(blocks: int, width: int = 16) -> str:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(blocks)))
        mesh, batch = Mesh(tp=2), (torch.randn(4, width), torch.randn(4, width))
        program = quintnet.compile(model, mesh, batch, loss_fn=F.mse_loss, check="off")
        return str(program._repr_html_())

    shallow, deep = pages(3), pages(12)
    assert "{0..11}.0.weight" in _Tags(deep).text and "×11" in _Tags(deep).text
    without = [len(re.sub("<svg.*?</svg>", "", page, flags=re.S)) for page in (shallow, deep)]
    assert without[1] < 1.2 * without[0] and len(deep) < 10**5

    class Unlike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for n in range(420):
                x = torch.tanh(x * self.scale) if n % 3 else x + n
            return x

    batch = torch.randn(4, 4), torch.randn(4, 4)
    program = quintnet.compile(Unlike(), Mesh(dp=2), batch, loss_fn=F.mse_loss, check="off")
    shown = program._repr_html_()
    assert re.search(r"and \d+ operators more", _Tags(shown).text) and len(shown) < 10**6


def test_a_timeline_of_many_microbatches_is_bounded() -> None:
    batch = torch.randn(300, 4), torch.randn(300, 4)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    program = quintnet.compile(model, Mesh(pp=4), batch, loss_fn=F.mse_loss, microbatches=300, check="off")
    timeline = program.simulate()
    assert sum(len(row.events) for row in timeline.rows) > 3000
    shown = timeline._repr_html_()
    assert len(shown) < 10**6 and re.search(r"and \d more ranks", _Tags(shown).text)


def test_any_tensor_of_a_program_is_shown(program: quintnet.CompiledProgram) -> None:
    made = quintnet.visualize(program, "gelu")  # dp splits rows, tp the columns, and stage 0 is on ranks 0 to 3
    assert str(made).splitlines()[:5] == [
        "gelu [8, 32]: dp: S(0), tp: S(1)",
        "  [0:4, 0:16]   rank 0",
        "  [0:4, 16:32]  rank 1",
        "  [4:8, 0:16]   rank 2",
        "  [4:8, 16:32]  rank 3",
    ]
    assert program.visualize("1").parts == made.parts  # the module that makes it
    partial = program.visualize("linear_1")
    assert partial.types["tp"] == "P" and {r for part in partial.parts for r in part.ranks} == {4, 5, 6, 7}
    assert program.visualize("linear_1.grad").types["tp"] == "I"  # the transpose of a sum
    assert program.visualize("batch_0").shape == (8, 16)
    gradient = program.visualize("0.weight.grad")
    assert gradient.parts == program.visualize("0.weight").parts and "dp: P" in gradient.note
    for name, why in (("batch_0.grad", "no gradient"), ("gelus", "did you mean gelu"), ("relu.grad", "nothing")):
        with pytest.raises(quintnet.CompileError, match=rf"QN204(?s:.*){why}"):
            program.visualize(name)


def test_gradients_and_optimizer_states_are_shown() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    mesh, batch = Mesh(dp=2), (torch.randn(8, 8), torch.randn(8, 4))
    program = quintnet.compile(model, mesh, batch, loss_fn=F.mse_loss, zero=1)
    optimizer = torch.optim.AdamW(program.parameters())
    with pytest.raises(quintnet.CompileError, match=r"QN204(?s:.*)before its first step"):
        program.visualize("weight.exp_avg", optimizer=optimizer)
    program.step(batch)
    optimizer.step()
    held = program.visualize("weight")
    assert len(held.parts) == 2
    weight = dict(program.named_parameters())["weight"]
    assert program.visualize(weight) == held and weight.grad is not None
    assert quintnet.visualize(program, weight.grad).name == "weight.grad"
    state = quintnet.visualize(program, "weight.exp_avg", optimizer=optimizer)
    assert state.parts == held.parts and "process" in state.note
    assert quintnet.visualize(program, "weight.step", optimizer=optimizer).parts[0].ranks == (0, 1)
    whole = program.optimizer(torch.optim.AdamW)
    program.step(batch)
    whole.step()
    assert len(quintnet.visualize(program, "weight.exp_avg", optimizer=whole).parts) == 1
    with pytest.raises(quintnet.CompileError, match=r"QN204(?s:.*)such as weight\.exp_avg"):
        program.visualize("wait.exp_avg", optimizer=optimizer)
    with pytest.raises(quintnet.CompileError, match=r"QN204(?s:.*)has step, exp_avg"):
        program.visualize("weight.momentum", optimizer=optimizer)
    for wrong in (torch.zeros(2), weight.detach()):
        with pytest.raises(quintnet.CompileError, match=r"QN204(?s:.*)nor a DTensor"):
            program.visualize(wrong)
    plain = torch.zeros(4, 8)
    assert quintnet.visualize(mesh, {"dp": "S(0)"}, plain) == quintnet.visualize(mesh, {"dp": "S(0)"}, (4, 8))


def test_a_size_that_does_not_divide_is_shown_without_padding() -> None:
    batch = torch.randn(6, 3), torch.randn(6, 5)
    program = quintnet.compile(nn.Linear(3, 5), Mesh(dp=2), batch, loss_fn=F.mse_loss, zero=3)
    shown = [str(program.visualize(name)).splitlines()[1:] for name in ("weight", "bias")]
    assert shown == [["  [0:3, :]  rank 0", "  [3:5, :]  rank 1"], ["  [0:3]  rank 0", "  [3:5]  rank 1"]]


def test_rows_of_microbatches_that_an_inner_axis_splits_are_shown_in_runs() -> None:
    """Microbatches are runs of rows, of each of which ranks along tp have a half."""
    from quintnet_compiler.core.sharding import S
    from quintnet_compiler.reports.tensor_picture import picture

    found = picture("x", (8,), Mesh(tp=2), {"mb": S(0), "tp": S(0)}, range(2), times={"mb": 2})
    assert [part.ranges for part in found.parts] == [(((0, 2), (4, 6)),), (((2, 4), (6, 8)),)]
    assert found.types == {"tp": "S(0)"}


@pytest.mark.slow
def test_dtensors_of_processes_are_shown_as_the_program_has_them() -> None:
    for pictures in quintnet.launch(_pictures, 4):
        for whole, seen in pictures:
            assert json.loads(whole)["parts"] == json.loads(seen)["parts"] and len(json.loads(seen)["parts"]) > 1


def _pictures() -> list[tuple[str, str]]:
    """Of each parameter, its gradient and state: what the program says, and what the DTensor itself says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    program = quintnet.compile(model, Mesh(dp=2, tp=2), BATCH, loss_fn=F.mse_loss, zero=3)
    optimizer = torch.optim.AdamW(program.parameters())
    program.step(BATCH)
    optimizer.step()
    found = []
    for name, p in program.named_parameters():
        told = program.visualize(name).to_json()
        for x in (p, p.grad, optimizer.state[p]["exp_avg"]):
            found.append((told, quintnet.visualize(x).to_json()))
        found.append((told, program.visualize(f"{name}.exp_avg", optimizer=optimizer).to_json()))
        assert program.visualize(p.detach()).parts  # another object of the same layout
    return found
