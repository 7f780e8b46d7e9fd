"""What the documents claim about the code, compared with the code. (That their Python runs: test_docs.py.)"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quintnet
from quintnet_compiler.cli.app import VERBS
from quintnet_compiler.cli.plan import plan as plan_command
from quintnet_compiler.driver.pipeline import PIPELINE
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ir.plan_options import PlanOptions
from quintnet_compiler.ir.printer import program_text
from quintnet_compiler.planner.search import SearchEffort
from quintnet_compiler.schedules.kinds import SCHEDULES

from .language import compiled, flat
from .models import WIDTH, Mixture

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = [ROOT / "quintnet_compiler", ROOT / "passes", ROOT / "cost_models"]
FOLDERS = ["", "quintnet_compiler", "cost_models", "tests"]  # that a path on a page may start from
ELSEWHERE = {"ranks/rank000.py", "merge_checkpoints.py", "mappings.py"}  # of a dump, of others


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def _script(name: str) -> Any:
    """Import a script of the folder of pages."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / f"docs/{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[f"docs_{name}"] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def _section(page: str, heading: str) -> str:
    """What stands under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", page, re.S | re.M)
    assert found is not None, f"no heading {heading!r}"
    return found[1]


def _first_column(text: str) -> list[str]:
    """The code at the start of each row of a table."""
    return re.findall(r"^\| `([^`]+)`", text, re.M)


def _modules(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.py") if "__pycache__" not in path.parts]


class Written(nn.Module):
    """A norm and halves that change places, written out as in models of transformers, and a buffer that needs all
    rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("signs", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.signs += torch.sign(x.detach().sum(0))
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + torch.cat((-x[..., 8:], x[..., :8]), dim=-1)


@cache
def _everything() -> quintnet.CompiledProgram:
    """A program for which every pass runs, and every check but those of tokens and of early gradients."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(Written(), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)]
    batch = torch.randn(256, 16), torch.randint(0, 64, (256,))
    return quintnet.compile(
        nn.Sequential(*blocks, nn.Linear(16, 64)), quintnet.Mesh(pp=2, dp=2, tp=2), batch, loss_fn=F.cross_entropy,
        microbatches=2, zero=3, loss_chunks=2, precision="fp8", fp8_skip=("0.*",), recompute="selective",
        async_tp=True, check="off", device="cuda", offload=("activations", "parameters"),
    )  # fmt: skip


def _mixture() -> quintnet.CompiledProgram:
    """A program whose tokens stay on their experts' ranks."""
    torch.manual_seed(0)
    batch = torch.randn(8, WIDTH), torch.randint(0, 8, (8,))
    return quintnet.compile(Mixture(), quintnet.Mesh(ep=2), batch, check="off")


@pytest.mark.slow
def test_the_table_of_passes_is_the_pipeline_that_runs() -> None:
    ran = [name for name in _everything().compile_seconds if not name.startswith("check_")]
    assert ran == [one.name for one in PIPELINE]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.*) \|$", _section(_page("architecture.md"), "Passes"), re.M)
    assert rows[0][:2] == ("capture", "Captured")
    assert rows[1:] == [(one.name, one.result, one.decides) for one in PIPELINE]


def test_the_table_of_checks_has_the_checks_that_run() -> None:
    section = _section(_page("verification.md"), "Before it runs: checks on every compile")
    files = re.findall(r"\| `([^`]+\.py)` \|$", section, re.M)
    listed = {re.findall(r"^def (check_\w+)\(", (ROOT / file).read_text(), re.M)[0] for file in files}
    some = _everything(), _mixture(), compiled(flat, {"dp": 2}, loss_chunks=2)
    ran = {name for program in some for name in program.compile_seconds if name.startswith("check_")}
    ran -= {"check_experts", "check_names"}  # of the plan: whether the model has what it names
    assert listed == ran and len(files) == len(ran)
    assert f"{len(files)} checks" in section


def test_nodes_of_a_mixture_are_as_the_page_on_experts_prints_them() -> None:
    batch = torch.randn(4, WIDTH, dtype=torch.float64), torch.randint(0, 8, (4,))
    program = quintnet.compile(Mixture(bias=False).double(), quintnet.Mesh(ep=2), batch, check="off")
    (text,) = [program_text(made) for name, made in program.passes() if name == "FuseTokenDispatch"]
    lines = re.findall(r"^%.* = quintnet\.(?:dispatch|combine|group|ungroup).*$", _page("experts.md"), re.M)
    assert len(lines) == 7 and all(f"{line}  @ stage 0\n" in text for line in lines)
    assert '"dispatch_1"' in program.simulate().chrome_trace()


def test_the_table_of_packages_has_their_levels_and_docstrings() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    levels = next(contract["layers"] for contract in contracts if contract["name"] == "layers")
    names = {name: str(level) for level, text in enumerate(levels, 1) for name in re.findall(r"\w+", text)}
    found = re.findall(r"^\| (\d+) \| `(\w+)` \| (.*) \|$", _page("architecture.md"), re.M)
    assert {name: level for level, name, _ in found} == names
    for _, name, line in found:
        text = (ROOT / "quintnet_compiler" / name / "__init__.py").read_text()
        first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        assert line == first.replace("``", "`")


def test_who_imports_torch_distributed() -> None:
    found = set()
    for folder in PACKAGES:
        for path in _modules(folder):
            if "torch.distributed" in " ".join(_imports(path)):
                found.add(path.relative_to(ROOT / "quintnet_compiler").parts[0])
    claim = re.search(r"Only ((?:`\w+`(?:, | and )?)+) import `torch\.distributed`", _page("architecture.md"))
    assert claim is not None and set(re.findall(r"`(\w+)`", claim[1])) == found


def _imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", page.read_text())) - ELSEWHERE
    assert [path for path in sorted(named) if not any((ROOT / folder / path).is_file() for folder in FOLDERS)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_headings_that_a_page_links_to_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        text = (page.parent / target if target else page).read_text()
        headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
        slugs = [re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", one).strip().lower()) for one in headings]
        assert anchor in slugs, f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_that_a_page_uses_exist(page: Path) -> None:
    text = "\n".join(line for line in page.read_text().splitlines() if "%" not in line)  # those are operators
    public = set(re.findall(r"(?<![\w./-])quintnet\.(\w+)", text))
    assert [name for name in sorted(public) if not hasattr(quintnet, name)] == []
    for dotted in set(re.findall(r"`(quintnet_compiler(?:\.\w+)+)`", text)):
        assert _resolves(dotted), dotted


def _resolves(dotted: str) -> bool:
    """Whether a module, or a name in one, exists."""
    module, *names = dotted.split(".")
    found: Any = importlib.import_module(module)
    for name in names:
        module = f"{module}.{name}"
        if hasattr(found, name):
            found = getattr(found, name)
        elif name in getattr(found, "__annotations__", {}):  # a field without a default
            return True
        elif inspect.ismodule(found) and importlib.util.find_spec(module) is not None:
            found = importlib.import_module(module)
        else:
            return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_methods_that_a_page_calls_exist(page: Path) -> None:
    called = set(re.findall(r"\bprogram\.(\w+)", page.read_text())) - {"py"}  # a file
    assert [name for name in sorted(called) if not hasattr(quintnet.CompiledProgram, name)] == []


def test_the_reference_is_what_signatures_and_docstrings_say() -> None:
    """`python docs/make_api.py` writes it; it raises for a public name that is on no page."""
    written = {f"api/{path.name}" for path in (ROOT / "docs/api").iterdir()} | {"api.md"}
    pages = _script("make_api").pages()
    assert pages.keys() == written
    assert [name for name, text in pages.items() if _page(name) != text] == []


def test_every_public_name_has_a_docstring() -> None:
    """Every name of the package, and every public method and property of its classes."""
    named = [(name, getattr(quintnet, name)) for name in quintnet.__all__ if name != "SCHEDULES"]
    for name, thing in list(named):
        for base in inspect.getmro(thing) if inspect.isclass(thing) else ():
            if base.__module__.startswith("quintnet_compiler"):
                parts = ((part, x) for part, x in vars(base).items() if not part.startswith("_"))
                named += [(f"{name}.{part}", x) for part, x in parts if callable(x) or isinstance(x, property)]
    assert [name for name, thing in named if not inspect.getdoc(thing)] == []


def test_schedules_are_those_that_there_are() -> None:
    listed = _first_column(_page("pipelines.md"))
    assert listed == [*SCHEDULES, "synthesized"]
    text = quintnet.Plan.__doc__
    assert text is not None and [name for name in listed if f'"{name}"' not in text] == []


def test_the_command_line_page_has_every_verb() -> None:
    assert _first_column(_page("cli.md")) == list(VERBS)


def test_every_option_is_described() -> None:
    plan, function = quintnet.Plan.__doc__, quintnet.compile.__doc__
    assert plan is not None and function is not None
    assert [name for name in Plan.model_fields if f"\n        {name}: " not in plan] == []
    parameters = inspect.signature(quintnet.compile).parameters
    own = parameters.keys() - PlanOptions.__annotations__.keys()
    assert [name for name in own if f"\n        {name}: " not in function] == []
    assert PlanOptions.__annotations__.keys() == Plan.model_fields.keys() - {"version", "mesh"} < parameters.keys()


def test_numbers_on_pages_are_those_of_the_code() -> None:
    seconds = inspect.signature(plan_command).parameters["seconds"].default
    assert seconds == SearchEffort.seconds and f"({seconds:g} s by default)" in _page("limitations.md")
    measured = _page("models.md").partition("## Adapters")[0]  # of transformers; some have rows in two tables
    names = set(re.findall(r"^\| ([^|]+) \|.*\de-\d\d", measured, re.M))
    readme = (ROOT / "README.md").read_text()
    assert f"{len(names)} architectures" in readme and f"[{len(SCHEDULES) + 1} schedules]" in readme


def test_names_in_docstrings_exist() -> None:
    """Those with a role, as in :mod:`.test_docs`: relative to their package, or to their module."""
    missing = []
    for folder in PACKAGES:
        for path in _modules(folder):
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = parts if parts[0] == "quintnet_compiler" else ("quintnet_compiler", *parts)
            for name in re.findall(r":(?:mod|class|func|meth|attr):`~?([\w.]+)`", path.read_text()):
                dots = len(name) - len(name.lstrip("."))
                if dots or name.startswith("quintnet"):
                    start = ".".join(module[:-dots]) + "." if dots else ""
                    there = _resolves(start + name.lstrip(".")) or (dots == 1 and _resolves(".".join(module) + name))
                    missing += [] if there else [f"{path.name}: {name}"]
    assert missing == []


def test_what_the_comparison_says_of_this_system_has_a_test_or_page() -> None:
    """Files and links that a page names exist by other tests; here, that each claim has one."""
    rows = [line.split("|")[1:-1] for line in _page("comparison.md").splitlines() if re.search("[●◐○]", line)]
    rows = [[cell.strip() for cell in row] for row in rows if len(row) > 3]
    assert len(rows) > 30 and {len(row) for row in rows} == {12}
    assert [row[0] for row in rows if row[1][0] in "●◐" and not re.search(r"\]\(|`tests/", row[-1])] == []
    assert [row[0] for row in rows if row[1] == "○" or not all(re.match("[●◐○?*]", cell) for cell in row[1:-1])] == []


def test_what_the_walks_pass_through_exists() -> None:
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", _page("walks.md"), re.M)
    assert len(rows) == 24
    names: dict[str, set[str]] = {}
    for file in {file for file, _ in rows}:
        names[file] = set()
        for node in ast.parse((ROOT / file).read_text()).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                parts = node.body if isinstance(node, ast.ClassDef) else []
                names[file] |= {node.name, *(f"{node.name}.{x.name}" for x in parts if isinstance(x, ast.FunctionDef))}
    assert [(file, name) for file, name in rows if name not in names[file]] == []
