"""Names, plans and folders that somebody made to do harm: nothing is executed, nothing is written outside."""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import CompileError, Mesh, Plan
from quintnet_compiler.core.errors import Where
from quintnet_compiler.core.names import is_safe, one_line
from quintnet_compiler.ir.codegen_allowlist import check_source
from quintnet_compiler.ir.printer import code_text, program_text
from quintnet_compiler.passes.codegen.python_ops import SPELLING

from .models import CASES, build

torch.set_num_threads(1)
MARKER = "executed"
HARM = f"open('{MARKER}', 'w')"  # PyTorch refuses dots in names


class Outside:
    """A folder that nothing may change, next to the working directory of a test."""

    def __init__(self, top: Path) -> None:
        self.top, self.work, self.folder = top, top / "work", top / "outside"
        self.work.mkdir()
        (self.folder / "inner").mkdir(parents=True)
        (self.folder / "file.txt").write_bytes(b"precious")
        self.before = self._listing()

    def _listing(self) -> dict[str, bytes]:
        files = {str(f): f.read_bytes() if f.is_file() else b"folder" for f in self.folder.rglob("*")}
        return files | {str(f): b"" for f in self.top.iterdir()}

    def check(self) -> None:
        assert self._listing() == self.before
        assert not list(self.top.rglob(MARKER))


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    """Runs a test in an empty folder, then looks for the marker and for changes around it."""
    found = Outside(tmp_path)
    monkeypatch.chdir(found.work)
    yield found
    found.check()


# -- names

PAYLOADS = {
    # as a key of a batch this one runs inside torch.export (2.13), where nothing stops it before
    "text of a guard": f'" + str(open("{MARKER}", "w")) + "',
    "double quote": f'a"); {HARM}; ("',
    "double quote in getattr": f'a", {HARM}) or getattr(self, "a',
    "single quote": f"a'); {HARM}; ('",
    "triple quote": f'a"""\n{HARM}\n"""',
    "newline": f"a\n{HARM}",
    "newline and indent": f"a\n    {HARM}\n    #",
    "carriage return": f"a\r{HARM}",
    "vertical tab": f"a\x0b{HARM}",
    "form feed": f"a\x0c{HARM}",
    "next line": f"a\x85{HARM}",
    "line separator": f"a\u2028{HARM}",
    "paragraph separator": f"a\u2029{HARM}",
    "no-break space": "a\u00a0b",
    "backslash": "a\\",
    "backslash and quote": f'a\\"); {HARM}; ("',
    "escaped newline": "a\\n",
    "braces": f"{{{HARM}}}",
    "percent": "a%s%n",
    "comment": f"a # {HARM}",
    "semicolon": f"a; {HARM}",
    "backtick": "`touch executed`",
    "shell": "$(touch executed)",
    "glob": "*",
    "bracket glob": "[a-z]",
    "NUL": "a\0b",
    "escape sequence": "a\x1b[2J",
    "right-to-left override": "a\u202eb",
    "zero-width space": "a\u200bb",
    "byte order mark": "\ufeffa",
    "lone surrogate": "a\udc80",
    "ligature that Python reads as fi": "\ufb01",
    "full-width letters": "ａｄｄ",
    "Cyrillic a in a Latin word": "n\u0430me",
    "path, as Windows has it": "\\\\x\\y",
    "very long": "a" * 10_000,
    "Python keyword": "class",
}
HARMLESS = (
    "conv-1",
    "a b",
    "/etc/passwd",
    "user->item",
    "<a___to___b>",
    "k=3",
    "x@y",
    "en:de",
    "f(x, y)",
    "c++",
    "名前",
)


class Keyed(nn.Module):
    """A layer below a key of a ModuleDict."""

    def __init__(self, key: str = "safe", *, parameter: str = "", buffer: str = "", attribute: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleDict({key: nn.Linear(4, 4)})
        self.key, self.others = key, [name for name in (parameter, buffer, attribute) if name]
        if parameter:
            self.register_parameter(parameter, nn.Parameter(torch.ones(4)))
        if buffer:
            self.register_buffer(buffer, torch.ones(4))
        if attribute:
            setattr(self, attribute, torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[self.key](x)
        for name in self.others:
            x = x * getattr(self, name)
        return x


class AnyKey(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *args: Any, **batch: Any) -> Tensor:
        values = [x for x in [*args, *batch.values()] for x in (x.values() if isinstance(x, dict) else [x])]
        return self.layer(sum(values)).sum()


class KeyedLoss(nn.Module):
    def __init__(self, key: str) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({key: nn.Parameter(torch.ones(()))})

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x, labels) * next(iter(self.scales.values()))


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4), torch.tensor([0, 1, 2, 3])


def _compile(model: nn.Module, batch: Any = None, **options: Any) -> quintnet.CompiledProgram:
    if batch is None:
        batch, options = _batch(), {"loss_fn": F.cross_entropy, **options}
    return quintnet.compile(model, Mesh(dp=2), batch, **options)


def _refused(code: str, act: Callable[[], object]) -> str:
    with pytest.raises(CompileError) as caught:
        act()
    message = str(caught.value)
    assert caught.value.code == code, message
    assert len(message) < 5000 and all(line.isprintable() for line in message.split("\n"))
    return message


@pytest.mark.parametrize("payload", PAYLOADS)
def test_module_names_are_refused(payload: str, outside: Outside) -> None:
    message = _refused("QN701", lambda: _compile(Keyed(PAYLOADS[payload])))
    assert "layers." in message and "rename it" in message


@pytest.mark.parametrize("payload", PAYLOADS)
def test_names_of_tensors_are_refused(payload: str, outside: Outside) -> None:
    text = PAYLOADS[payload]
    for given in ({"parameter": text}, {"buffer": text}, {"attribute": text}):
        assert f"the {'tensor ' * ('attribute' in given)}{next(iter(given))} " in _refused(
            "QN701",
            lambda given=given: _compile(Keyed(**given)),  # type: ignore[misc]
        )


@pytest.mark.parametrize("payload", [name for name in PAYLOADS if name != "Python keyword"])
def test_keys_of_batches_are_refused(payload: str, outside: Outside) -> None:
    key = PAYLOADS[payload]
    _refused("QN701", lambda: _compile(AnyKey(), {key: torch.randn(4, 4)}))
    _refused("QN701", lambda: _compile(AnyKey(), (torch.randn(4, 4), {key: torch.randn(4, 4)})))


def test_names_that_are_hidden_or_late_are_refused(outside: Outside) -> None:
    shared = Keyed()
    shared.layers[PAYLOADS["double quote"]] = shared.layers["safe"]  # named_modules gives the first name only
    _refused("QN701", lambda: _compile(shared))
    _refused("QN701", lambda: _compile(Keyed(), _batch(), loss_fn=KeyedLoss(PAYLOADS["double quote"])))
    program = quintnet.compile(Keyed(PAYLOADS["newline"]), Mesh(dp=2), loss_fn=F.cross_entropy)
    _refused("QN701", lambda: program.step(_batch()))
    for name in ("", ".", "a.b", "../../x"):
        direct = Keyed()
        direct._modules[name] = nn.ReLU()
        _refused("QN701", lambda: _compile(direct))  # noqa: B023
    deep: nn.Module = nn.Linear(4, 4)
    for _ in range(20):
        deep = nn.ModuleDict({"x" * 150: deep})
    _refused("QN701", lambda: _compile(deep))


def test_a_hostile_class_name_stays_text(outside: Outside) -> None:
    program = _compile(type(f'A"\n{HARM}', (Keyed,), {})())
    assert program.step(_batch()) > 0
    _check_dump(program.dump("out"))


def _check_dump(folder: Path) -> None:
    """Every line of generated code is code, and every other line a comment."""
    for file in (folder / "ranks").iterdir():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        assert {type(node) for node in tree.body} == {ast.FunctionDef}
        assert file.read_text(encoding="utf-8").count("\n") == len(file.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("key", HARMLESS)
def test_harmless_names_work(key: str, outside: Outside) -> None:
    assert is_safe(key)
    model = Keyed(key, parameter=f"p {key}", buffer=f"b {key}", attribute=f"a {key}")
    batch = _batch()
    expected = F.cross_entropy(model(batch[0]), batch[1])
    program = _compile(model, batch, loss_fn=F.cross_entropy)
    torch.testing.assert_close(program.step(batch), expected)
    assert {n for n, _ in program.named_parameters()} == {n for n, _ in model.named_parameters()}
    _check_dump(program.dump("out"))
    assert Plan.from_json(Path("out/plan.json").read_bytes()) == program.plan


def test_text_stays_within_its_line() -> None:
    for text in PAYLOADS.values():
        assert one_line(text).isprintable()
    assert one_line("naïve – 名前") == "naïve – 名前"


def test_places_and_sites_stay_within_comments() -> None:
    import dataclasses

    from quintnet_compiler.core.annotations import annotate, facts

    program = _compile(Keyed(), plan={"sequence_parallel": False})
    primary = program._primary()
    hostile = [f"x = 1{end}{HARM}" for end in ("\n", "\r", "\x0b", "\x0c", "\x85", "\u2028", "\u2029", "\0")]
    whole = dataclasses.replace(primary.program, sites=tuple(hostile))
    text = code_text(whole, whole.rank(0))
    assert {type(node) for node in ast.parse(text).body} == {ast.FunctionDef} and text.count("\n") == len(
        text.splitlines()
    )
    differentiated = next(after for name, after in primary.passes() if name == "Differentiate")
    before = len(program_text(differentiated).splitlines())
    for node in differentiated.graph.nodes:
        if node.op == "call_function":
            annotate(node, dataclasses.replace(facts(node), where=Where("m", hostile[0])))
    lines = program_text(differentiated).splitlines()
    assert len(lines) <= before + len(hostile) and not any(line.startswith("open") for line in lines)


# -- plans

GOOD = '{"parameters": {"layers.safe.weight": {"tp": "I"}}}'
PLAN_FILES: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"parameters: {}",
    "Python": HARM.encode(),
    "a pickle": pickle.dumps({"microbatches": 1}),
    "a pickle that acts": b"cpathlib\nPath\n(S'executed'\ntR.",
    "a list": b"[]",
    "a number": b"1",
    "unknown key": b'{"__class__": "x"}',
    "nested unknown key": b'{"parameters": {"*": {"tp": {"__reduce__": 1}}}}',
    "unknown version": b'{"version": 3}',
    "a text for a number": b'{"microbatches": "2"}',
    "a truth for a number": b'{"microbatches": true}',
    "a fraction for a number": b'{"microbatches": 1.5}',
    "no microbatches": b'{"microbatches": 0}',
    "NaN": b'{"microbatches": NaN}',
    "infinity": b'{"mesh": {"dp": Infinity}}',
    "a number of many digits": b'{"microbatches": ' + b"9" * 10_000 + b"}",
    "a number for a text": b'{"schedule": 1}',
    "a text for a truth": b'{"sequence_parallel": "no"}',
    "a text for stages": b'{"stages": "a"}',
    "null": b'{"stages": null}',
    "a key given twice": b'{"microbatches": 1, "microbatches": 2}',
    "a nested key given twice": b'{"parameters": {"*": {"tp": "I", "tp": "R"}}}',
    "deep nesting": b'{"parameters": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "huge": b" " * (16 * 2**20) + b"{}",
    "UTF-16": GOOD.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + GOOD.encode(),
    "Latin-1": '{"stages": ["é"]}'.encode("latin-1"),
    "NUL": b'{"stages": ["a\\u0000b"]}',
    "newline in a stage": json.dumps({"stages": [f"a\n{HARM}"]}).encode(),
    "line separator in a pattern": json.dumps({"parameters": {f"a\u2028{HARM}": {"tp": "I"}}}).encode(),
    "escape sequence in a schedule": b'{"schedule": "\\u001b[2J"}',
    "lone surrogate": b'{"stages": ["\\ud800"]}',
    "long pattern": json.dumps({"parameters": {"a" * 5000: {"tp": "I"}}}).encode(),
    "code for a type": json.dumps({"parameters": {"*": {"tp": HARM}}}).encode(),
    "large dim": b'{"parameters": {"*": {"tp": "S(1e9)"}}}',
}


@pytest.mark.parametrize("name", PLAN_FILES)
def test_plan_files_are_refused(name: str, outside: Outside) -> None:
    Path("plan.json").write_bytes(PLAN_FILES[name])
    _refused("QN207", lambda: _compile(Keyed(), plan="plan.json"))


HOSTILE_PLANS: dict[str, tuple[str, Any]] = {
    "path for a stage": ("QN206", {"stages": ["../../x"]}),
    "code for a stage": ("QN206", {"stages": [HARM]}),
    "path for a schedule": ("QN208", {"schedule": "../../x"}),
    "path for a parameter": ("QN204", {"parameters": {"/etc/passwd": {"tp": "I"}}}),
    "slow glob": ("QN204", {"parameters": {"*a" * 1000 + "b": {"tp": "I"}}}),
    "broken glob": ("QN204", {"parameters": {"[[z-a]!(?:x)\\": {"tp": "I"}}}),
    "regular expression": ("QN204", {"parameters": {"(a+)+$": {"tp": "I"}}}),
    "code for an axis": ("QN201", {"parameters": {"*": {HARM: "I"}}}),
    "code for an axis of the mesh": ("QN201", {"mesh": {HARM: 2}}),
    "self for an axis of the mesh": ("QN201", {"mesh": {"self": 2}}),
    "an object": ("QN207", {"schedule": object()}),
    "NaN": ("QN207", {"microbatches": float("nan")}),
    "bytes": ("QN207", b"{}"),
    "a path with NUL": ("QN207", "plan\0.json"),
    "a path that is too long": ("QN207", "a" * 5000),
    "a folder": ("QN207", "."),
    "a device": ("QN207", "/dev/zero"),
}


@pytest.mark.parametrize("name", HOSTILE_PLANS)
def test_plans_are_refused(name: str, outside: Outside) -> None:
    code, plan = HOSTILE_PLANS[name]
    mesh = Mesh(pp=2) if "stage" in name else Mesh(tp=2)
    _refused(code, lambda: quintnet.compile(Keyed(), mesh, _batch(), loss_fn=F.cross_entropy, plan=plan))


def test_a_plan_that_holds_itself_and_a_pipe_are_refused(outside: Outside) -> None:
    plan: dict[str, Any] = {}
    plan["parameters"] = plan
    _refused("QN207", lambda: _compile(Keyed(), plan=plan))
    os.mkfifo("pipe")  # reading it would never end
    _refused("QN207", lambda: _compile(Keyed(), plan="pipe"))


def test_saving_a_plan_replaces_a_link_and_keeps_what_it_pointed_to(outside: Outside) -> None:
    Path("plan.json").symlink_to(outside.folder / "file.txt")
    Plan().save("plan.json")
    assert not Path("plan.json").is_symlink() and Plan.from_json(Path("plan.json").read_bytes()) == Plan()
    assert os.listdir() == ["plan.json"]
    _refused("QN701", lambda: Plan().save("plan.json/x"))
    Path("folder").mkdir()
    _refused("QN701", lambda: Plan().save("folder"))
    assert sorted(os.listdir()) == ["folder", "plan.json"]


def test_nothing_unpickles_or_evaluates() -> None:
    """No source of the compiler calls what turns data into code, but for answers of processes that it started."""
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    root = Path(quintnet.__file__).parent.parent
    for folder in ("quintnet", "quintnet_compiler", "passes", "cost_models"):
        for file in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                    found = {name.partition(".")[0] for name in names} & banned
                    assert not found or file.name in ("launch.py", "attempt.py"), file
                if isinstance(node, ast.Call):
                    assert ast.unparse(node.func) not in (
                        "eval",
                        "exec",
                        "compile",
                        "torch.load",
                        "__import__",
                        "yaml.load",
                    ), file


# -- dump folders


@pytest.fixture(scope="module")
def program() -> quintnet.CompiledProgram:
    return _compile(Keyed())


FILES = ("plan.json", "schedule.txt", "passes/01_Normalize.txt", "ranks/rank000.py")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("target", ["file.txt", "new.txt", "inner"])
def test_a_planted_link_to_a_file_is_replaced(
    name: str, target: str, program: quintnet.CompiledProgram, outside: Outside
) -> None:
    link = Path("out") / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside.folder / target)
    program.dump("out")
    assert link.is_file() and not link.is_symlink()
    _check_dump(Path("out"))


@pytest.mark.parametrize("name", ["passes", "ranks"])
@pytest.mark.parametrize("kind", ["link", "broken link", "link inside", "file", "pipe"])
def test_something_else_in_place_of_a_sub_folder_is_refused(
    name: str, kind: str, program: quintnet.CompiledProgram, outside: Outside
) -> None:
    Path("out").mkdir()
    place = Path("out") / name
    if kind == "file":
        place.write_text("x")
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to({"link": outside.folder, "broken link": outside.folder / "new", "link inside": "."}[kind])
    assert name in _refused("QN701", lambda: program.dump("out"))


def test_something_else_in_place_of_the_folder_is_refused(program: quintnet.CompiledProgram, outside: Outside) -> None:
    Path("file").write_text("x")
    Path("broken").symlink_to(outside.folder / "new")
    for folder in ("file", "file/out", "broken", "a\0b"):
        _refused("QN701", lambda folder=folder: program.dump(folder))  # type: ignore[misc]
    for name in FILES:
        (Path("full") / name).mkdir(parents=True)
    _refused("QN701", lambda: program.dump("full"))
    assert not [file for file in Path("full").rglob("*") if file.is_file()]


def test_new_folders_are_private_and_no_temporary_file_stays(
    program: quintnet.CompiledProgram, outside: Outside
) -> None:
    program.dump("a/../b/c")
    assert sorted(os.listdir()) == ["a", "b"] and not os.listdir("a")
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in (Path("b"), Path("b/c"), Path("b/c/ranks")))
    assert {"manifest.json", "passes", "plan.json", "ranks", "ranks.json", "schedule.txt"} <= {*os.listdir("b/c")}
    assert not [file for file in Path("b").rglob("*") if file.name.endswith(".tmp")]
    before = {file: file.read_bytes() for file in Path("b").rglob("*") if file.is_file()}
    program.dump("b/c")
    assert {file: file.read_bytes() for file in Path("b").rglob("*") if file.is_file()} == before


# -- generated code


def _function(*body: str, last: str = "return (x,)") -> str:
    lines = ["comm, x, = args", "args.clear()", *body, last]
    return "def forward(self, args):\n" + "".join(f"    {line}\n" for line in lines)


ALLOWED = (
    "y = torch.t(x);  x = None",
    "y = torch.ops.aten.t.default(x)",
    "y = torch.ops.aten.__and__.Tensor(x, x)",
    "y = torch.ops.quintnet.all_reduce.default(x, 'tp', 2)",
    "y = torch._C._nn.linear(x, x, None)",
    "y = x[0];  comm = x = None",
    "y = comm.all_gather(x, 'tp', 1, 1, 0)",
    "y = comm.accumulate(x, 'p_layers_weight');  y = None",
    "y = torch.ops.aten.full.default([2, -1], -inf, dtype = torch.float32, device = device(type='cuda'))",
    "y = torch.ops.aten.gelu.default(x, approximate = 'tanh')",
    "y = torch.mul(x, 1e-05)",
    "y = torch.mul(x, (1+2j))",
)
REFUSED = (
    "import os",
    "from os import system",
    "exec('x')",
    "eval('x')",
    HARM,
    f"y = {HARM}",
    "y = open('executed', 'w')",
    "y = x",
    "y = 'text'",
    "y = x.__class__",
    "y = x.__class__.__base__.__subclasses__()",
    "y = torch.t.__globals__",
    "y = torch.load('x')",
    "y = torch.save(x, 'x')",
    "y = torch.hub.load('x', 'y')",
    "y = torch.os.system('x')",
    "y = torch.from_file('executed', True, 4)",
    "y = torch.ops.aten.from_file.default('executed', True, 4)",
    "y = torch.ops.load_library('x')",
    "y = torch.ops.load_library.__call__('x')",
    "y = torch.ops.import_module.__func__.__call__('x')",
    "y = torch.ops.aten.t.__call__(x)",
    "y = torch.ops.aten.t(x)",
    "y = torch.ops.aten.no_such_operator.default(x)",
    "y = torch._C._nn.no_such_function(x)",
    "y = getattr(x, 'y')",
    "y = self.layer(x)",
    "y = x.cpu()",
    "y = comm.world(x)",
    "y = comm.__init__(x)",
    "y = comm.accumulate(x, 'a\\nb')",
    "y = comm.accumulate(x, f'{x}')",
    "y = comm.accumulate",
    "y = lambda: x",
    "y = [x for x in (1,)]",
    "y = (x for x in (1,))",
    "y = {'a': x}",
    "y = {x}",
    "y = f'{x}'",
    "y = torch.t(f'{x}')",
    "y = torch.t('x\\ny')",
    "y = torch.t(b'x')",
    "y = torch.t(...)",
    "y = torch.t(*x)",
    "y = torch.t(**x)",
    "y = torch.t(lambda: x)",
    "y = torch.t(torch.t(x))",
    "y = torch.t(torch.serialization)",
    "y = torch.t(x.T)",
    "y = torch.t(z)",
    "y = torch.t(args)",
    "y = torch.t(self)",
    "y = torch.t(device)",
    "y = torch.t(device(type=x))",
    "y = torch.ops.aten.ones.default([2], device = device(type='cuda', index=0))",  # ranks have devices of their own
    "y = torch.t(device('cpu'))",
    "y = torch.t(y := x)",
    "y = torch.t(2 ** 99999999)",
    "y = torch.t(-x)",
    "y = x[x]",
    "y = x[x:1]",
    "y = x[:, 0:1, 2]",
    "y = comm[0:1]",
    "y = x[0][0]",
    "y = x if x else x",
    "y = x or x",
    "y = yield x",
    "yield x",
    "y: int = None",
    "y += 1",
    "z = None",
    "y = z = torch.t(x)",
    "x[0] = torch.t(x)",
    "x.data = None",
    "torch = torch.t(x)",
    "comm = torch.t(x)",
    "args = torch.t(x)",
    "inf = torch.t(x)",
    "a, b = torch.t(x)",
    "torch.t(x)",
    "args.clear()",
    "del x",
    "pass",
    "global x",
    "assert x",
    "raise x",
    "return (x,)",
    "if x: y = None",
    "for y in x: y = None",
    "while x: x = None",
    "with x: x = None",
    "try:\n        x = None\n    finally:\n        x = None",
    "def f(): pass",
    "class A: pass",
)
WHOLE = (
    "",
    "x = 1",
    HARM,
    "def forward(self, args): pass",
    f"def forward(self, args={HARM}):\n  comm, = args\n  args.clear()\n  return ()",
    f"def forward(self, args) -> {HARM}:\n  comm, = args\n  args.clear()\n  return ()",
    f"def forward(self, args: {HARM}):\n  comm, = args\n  args.clear()\n  return ()",
    f"@{HARM}\ndef forward(self, args):\n  comm, = args\n  args.clear()\n  return ()",
    "async def forward(self, args):\n  comm, = args\n  args.clear()\n  return ()",
    "def forward(self, *args):\n  comm, = args\n  args.clear()\n  return ()",
    "def other(self, args):\n  comm, = args\n  args.clear()\n  return ()",
    f"{_function()}\n{HARM}",
    f"{_function()}\n{_function()}",
    _function(last="return x"),
    _function(last="return (x.data,)"),
    _function(last="return (y,)"),
    _function(last=f"return ({HARM},)"),
    _function().replace("comm, x,", "x, comm,"),
    _function().replace("comm, x,", "comm, torch, x,"),
    _function().replace("comm, x,", "comm, *x,"),
    _function().replace("= args", "= self"),
    _function().replace("    args.clear()\n", ""),
    _function().replace("args.clear()", "args.append(x)"),
    "def forward(self, args):\n\0",
    "def forward(self, args:",
    "(" * 10_000,
)


@pytest.mark.parametrize("line", ALLOWED)
def test_the_allow_list_has(line: str) -> None:
    check_source(_function(line, last="return ()"))


@pytest.mark.parametrize("line", REFUSED)
def test_the_allow_list_refuses_a_line(line: str, outside: Outside) -> None:
    _refused("QN701", lambda: check_source(_function(line)))


@pytest.mark.parametrize("source", WHOLE)
def test_the_allow_list_refuses_a_function(source: str, outside: Outside) -> None:
    _refused("QN701", lambda: check_source(source))


def test_the_allow_list_names_the_line() -> None:
    assert "'import os' (line 4)" in _refused("QN701", lambda: check_source(_function("import os")))


def test_the_allow_list_has_every_spelling() -> None:
    for function in SPELLING.values():
        graph = torch.fx.Graph()
        graph.call_function(function, ())
        path = next(line for line in graph.python_code("self").src.splitlines() if "= torch" in line)
        check_source(_function(path.strip().partition(";")[0], last="return ()"))


@pytest.mark.parametrize("name", ["mlp", "gpt", "vit", "encoder", "cnn"])
def test_generated_code_passes_the_allow_list(name: str) -> None:
    case = CASES[name]
    program = quintnet.compile(build(name), Mesh(pp=2, dp=2, tp=2), case.batch(8), loss_fn=case.loss_fn, microbatches=2)
    for stage in program._primary().program.stages:
        for piece in (stage.once, stage.forward, stage.backward):
            check_source(piece.code)


def test_a_program_with_other_code_is_refused(program: quintnet.CompiledProgram, outside: Outside) -> None:
    import dataclasses

    from quintnet_compiler.ir.invariants import verify

    whole = program._primary().program
    graph = torch.fx.Graph()
    graph.output((graph.call_function(subprocess.run, (["touch", MARKER],)),))
    piece = dataclasses.replace(whole.stages[0].forward, module=torch.fx.GraphModule({}, graph))
    stage = dataclasses.replace(whole.stages[0], forward=piece)
    _refused("QN701", lambda: verify(dataclasses.replace(whole, stages=(stage,))))
