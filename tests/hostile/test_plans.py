"""Plan files and plans that somebody made to do harm."""

from __future__ import annotations

import ast
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

import quintnet
from quintnet import Mesh, Plan

from . import HARM, Keyed, Outside, compile_keyed, keyed_batch, refused

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
    refused("QN207", lambda: compile_keyed(Keyed(), plan="plan.json"))


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
    refused(code, lambda: quintnet.compile(Keyed(), mesh, keyed_batch(), loss_fn=F.cross_entropy, plan=plan))


def test_a_plan_that_holds_itself_and_a_pipe_are_refused(outside: Outside) -> None:
    plan: dict[str, Any] = {}
    plan["parameters"] = plan
    refused("QN207", lambda: compile_keyed(Keyed(), plan=plan))
    os.mkfifo("pipe")  # reading it would never end
    refused("QN207", lambda: compile_keyed(Keyed(), plan="pipe"))


def test_saving_a_plan_replaces_a_link_and_keeps_what_it_pointed_to(outside: Outside) -> None:
    Path("plan.json").symlink_to(outside.folder / "file.txt")
    Plan().save("plan.json")
    assert not Path("plan.json").is_symlink() and Plan.from_json(Path("plan.json").read_bytes()) == Plan()
    assert os.listdir() == ["plan.json"]
    refused("QN701", lambda: Plan().save("plan.json/x"))
    Path("folder").mkdir()
    refused("QN701", lambda: Plan().save("folder"))
    assert sorted(os.listdir()) == ["folder", "plan.json"]


@pytest.mark.slow
def test_nothing_unpickles_or_evaluates() -> None:
    """No source of the compiler calls what turns data into code, but for answers of processes that it started. Other
    tools' checkpoints are read as data (``records.py``: tests/unit/test_formats.py), their values by torch's restricted
    unpickler. The one source that runs is a generated function's, after the allowlist has passed it
    (tests/hostile/test_generated_code.py)."""
    allowed = {"quintnet_compiler/runtime/launch/sending.py", "quintnet_compiler/core/pickle_records.py"}
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    root = Path(quintnet.__file__).parent.parent
    for folder in ("quintnet", "quintnet_compiler", "passes", "cost_models"):
        for file in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                    found = {name.partition(".")[0] for name in names} & banned
                    assert not found or file.relative_to(root).as_posix() in allowed, file
                checked = "exec(compile(check_source(", "compile(check_source("
                if isinstance(node, ast.Call) and not (
                    ast.unparse(node).endswith(", weights_only=True)") or ast.unparse(node).startswith(checked)
                ):
                    assert ast.unparse(node.func) not in (
                        "eval",
                        "exec",
                        "compile",
                        "torch.load",
                        "__import__",
                        "yaml.load",
                    ), file
