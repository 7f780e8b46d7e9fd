"""The page of a dump: it needs nothing else, says what is there, and shows hostile names as text."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.core.annotations import annotate, facts
from quintnet_compiler.core.errors import Where
from quintnet_compiler.dump.compare import compare_plans
from quintnet_compiler.dump.folder import dump_files
from quintnet_compiler.dump.model_graph import operators, units
from quintnet_compiler.dump.page import Extras

from .models import CASES, GPT

SECTIONS = {"plan", "graph", "communication", "code", "passes", "timeline", "files"}
HARM = '</summary><script>alert(1)</script><img src="http://evil.example/x" onerror=alert(1)>'


class Stack(nn.Module):
    """Equal blocks that cost little to compile."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


BATCH = torch.randn(4, 8), torch.randn(4, 8)


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what the page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[tuple[str, str]] = []
        self.scripts = 0
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br", "input", "img"):
            self.open.append(tag)
        found = {name: value or "" for name, value in attrs}
        assert not [name for name in found if name.startswith("on")]
        self.ids += [found["id"]] if "id" in found else []
        self.links += [(tag, found[name]) for name in ("href", "src", "xlink:href", "data", "action") if name in found]
        self.scripts += tag == "script"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.seen.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.seen).split())


@pytest.fixture(scope="module")
def program() -> quintnet.CompiledProgram:
    torch.manual_seed(0)
    plan = {"stages": ["blocks.3"]}
    return quintnet.compile(GPT(depth=6), Mesh(pp=2, dp=2, tp=2), CASES["gpt"].batch(8), microbatches=2, plan=plan)


@pytest.fixture(scope="module")
def folder(program: quintnet.CompiledProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program.dump(tmp_path_factory.mktemp("dump"))


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "index.html").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_page_stands_alone(page: Page, folder: Path) -> None:
    assert set(page.ids) >= SECTIONS | {"stage-0", "stage-1"} and len(page.ids) == len(set(page.ids))
    for tag, target in page.links:
        if target.startswith("#"):
            assert target[1:] in page.ids
        elif tag == "link":
            assert target == "data:,"
        else:
            assert tag == "a" and (folder / target).is_file()
    text = (folder / "index.html").read_text(encoding="utf-8")
    assert set(re.findall(r"\w+://[^\s\"'<]*", text)) == {"http://www.w3.org/2000/svg"}  # the name of a language
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest", text)
    assert "default-src 'none'" in text and page.scripts == 1


@pytest.mark.slow
def test_the_page_says_what_is_there(page: Page, program: quintnet.CompiledProgram) -> None:
    text = page.text
    assert "from stage 0, for each microbatch: 1.00 KiB, and 1.00 KiB of gradients back" in text
    assert "blocks.3 ×3" in text and "the same for blocks.4 to blocks.5" in text
    assert "tp P → tp S(0) reduce_scatter of linear_1, 2.00 KiB; gradient: all_gather" in text
    assert "blocks.0.up.weight [128, 32], on a rank [64, 32] dp R tp S(0)" in text
    assert re.search(r"models.py:\d+: return x \+ self.down\(F.gelu\(self.up\(self.ln2\(x\)\)\)\)", text)
    assert "comm.reduce_scatter(linear_1, 'tp', 0, 1, 2)" in text and "ranks 0, 1, 2, 3" in text
    assert "10 Overlap" in text and "changes nothing" in text and "+%nll_terms" in text
    assert "no predicted timeline" not in text and "rank 4 (pp1 dp0 tp0) ×4" in text


def test_the_manifest_has_every_file(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    there = {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()} - {"manifest.json"}
    assert set(manifest["files"]) == there
    assert torch.__version__.startswith(manifest["versions"]["torch"])  # PyPI's package does not name its CUDA
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    ranks = json.loads((folder / "ranks.json").read_text())["files"]
    assert len(ranks) == 8 and set(ranks.values()) == {"ranks/rank000.py", "ranks/rank004.py"}


def test_pictures_and_documents_are_well_formed(folder: Path) -> None:
    for name in ("graph/model.svg", "timeline/predicted.svg"):
        assert ElementTree.parse(folder / name).getroot().tag.endswith("svg")
    assert json.loads((folder / "timeline/predicted.trace.json").read_text())["traceEvents"]
    dot = (folder / "graph/model.dot").read_text()
    assert dot.count("{") == dot.count("}") and "b0 -> b1" in dot and 'label="stage 1"' in dot


def test_every_exchange_is_in_the_schedule(folder: Path, program: quintnet.CompiledProgram) -> None:
    found = json.loads((folder / "comm/schedule.json").read_text())
    for rank, stage in ((0, 0), (4, 1)):
        code = program.ranks[rank].forward.code
        [function] = [f for f in found["functions"] if f["stage"] == stage and f["function"] == "forward"]
        names = [one["node"] for one in function["exchanges"]]
        calls = r"^    (\w+) = comm\.(?:start_)?(?:all_|reduce_|gather_|scatter_)"
        assert names == re.findall(calls, code, re.M) and names
    assert {one["axes"] == ["dp"] for one in found["gradients"]} == {True, False}
    whole = sum(one["bytes"] for one in found["gradients"] if one["pipeline_place"] == 0)
    held = sum(p.full_tensor().numel() * 4 for name, p in program.named_parameters() if "blocks.0" in name)
    assert 0 < held < 3 * whole  # tensor-parallel ranks sum their halves
    assert found["transfers"][0]["forward_bytes"] == 2 * 8 * 32 * 4 // 2  # [rows, length, width] over tp=2


@pytest.mark.slow
def test_measured_steps_and_other_plans_stand_beside(program: quintnet.CompiledProgram, tmp_path: Path) -> None:
    cluster = quintnet.Cluster("h100", nodes=1, gpus_per_node=2)
    report = quintnet.plan(Stack(2), cluster, BATCH, loss_fn=F.mse_loss, top_k=2)
    measured = replace(program.simulate(), title="what a clock said")
    program.dump(tmp_path, measured=measured, report=report)
    found = Page((tmp_path / "index.html").read_text(encoding="utf-8")).text
    assert "what a clock said" in found and "Other plans" in found and str(report.found.ranked[1].layout) in found
    assert (tmp_path / "timeline/measured.svg").is_file()


def test_hostile_names_and_source_lines_stay_text(tmp_path: Path) -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"a<b>-(1)": nn.Linear(8, 8)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers["a<b>-(1)"](x).tanh()

    program = quintnet.compile(Keyed(), Mesh(tp=2), BATCH, loss_fn=F.mse_loss)
    primary = program._primary()
    for after in (primary.program.source.local.staged.sharded.program, primary.program.source):
        for node in after.graph.nodes:
            if node.op == "call_function":
                annotate(node, replace(facts(node), where=Where(HARM, f"x.py:1: {HARM}\x01")))
    extras = Extras(replace(program.simulate(), title=HARM))
    files = dump_files(primary.program, primary.plan, primary.passes(), extras)
    page = Page(files["index.html"])
    assert page.scripts == 1 and HARM in page.text and "layers.a<b>-(1).weight" in page.text
    assert "<img" not in files["index.html"] and "\x01" not in files["index.html"]
    for name in ("graph/model.svg", "timeline/predicted.svg"):
        assert HARM in "".join(ElementTree.fromstring(files[name]).itertext()) or "..." in files[name]


def test_a_model_of_many_blocks_makes_a_small_page() -> None:
    def page_of(depth: int) -> str:
        primary = quintnet.compile(Stack(depth), Mesh(tp=2), BATCH, loss_fn=F.mse_loss)._primary()
        return dump_files(primary.program, primary.plan, primary.passes(), Extras())["index.html"]

    small, large = page_of(6), page_of(24)
    assert len(large) < 1.2 * len(small)
    assert "<b>layers.1</b> ×23" in large


def test_a_stage_may_begin_within_a_block() -> None:
    plan = {"stages": ["blocks.1.ln2"]}
    program = quintnet.compile(GPT(depth=3), Mesh(pp=2), CASES["gpt"].batch(4), plan=plan)._primary().program
    found = units(program, operators(program))
    assert [unit.title for unit in found] == ["", "blocks.0", "blocks.1", "blocks.1", "blocks.2", ""]
    assert found[3].items[0].module == "blocks.1.ln2"
    for unit in found:
        assert len({one.stage for one in unit.items} - {None}) == 1


def test_programs_for_inference_and_one_rank_are_dumped(tmp_path: Path) -> None:
    alone = quintnet.compile(Stack(1), Mesh(dp=1), BATCH, loss_fn=F.mse_loss).dump(tmp_path / "one")
    outputs = quintnet.compile(Stack(2), Mesh(tp=2), BATCH[:1], training=False).dump(tmp_path / "two")
    for made in (alone, outputs):
        assert set(Page((made / "index.html").read_text(encoding="utf-8")).ids) >= SECTIONS


def test_plans_differ_by_decision_and_parameter() -> None:
    one = quintnet.Plan(zero=1, parameters={"a": {"tp": "I"}})
    two = quintnet.Plan(parameters={"a": {"tp": "S(0)"}, "b": {"tp": "I"}})
    found = compare_plans(one, two)
    assert found.plan == {"zero": (1, 0)} and found.parameters["a"] == ({"tp": "I"}, {"tp": "S(0)"})
    assert found.parameters["b"] == (None, {"tp": "I"}) and "b: not said -> tp: I" in str(found)
    assert str(compare_plans(one, one)) == "no difference"
