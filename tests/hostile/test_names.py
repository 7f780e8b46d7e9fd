"""Names of modules, tensors and batches that somebody made to do harm."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quintnet
from quintnet import Mesh, Plan
from quintnet_compiler.core.errors import Where
from quintnet_compiler.core.names import is_safe, one_line
from quintnet_compiler.ir.printer import code_text, program_text

from . import HARM, MARKER, AnyKey, Keyed, KeyedLoss, Outside, check_dump, compile_keyed, keyed_batch, refused

torch.set_num_threads(1)

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


@pytest.mark.parametrize("payload", PAYLOADS)
def test_module_names_are_refused(payload: str, outside: Outside) -> None:
    message = refused("QN701", lambda: compile_keyed(Keyed(PAYLOADS[payload])))
    assert "layers." in message and "rename it" in message


@pytest.mark.parametrize("payload", PAYLOADS)
def test_names_of_tensors_are_refused(payload: str, outside: Outside) -> None:
    text = PAYLOADS[payload]
    for given in ({"parameter": text}, {"buffer": text}, {"attribute": text}):
        assert f"the {'tensor ' * ('attribute' in given)}{next(iter(given))} " in refused(
            "QN701",
            lambda given=given: compile_keyed(Keyed(**given)),  # type: ignore[misc]
        )


@pytest.mark.parametrize("payload", [name for name in PAYLOADS if name != "Python keyword"])
def test_keys_of_batches_are_refused(payload: str, outside: Outside) -> None:
    key = PAYLOADS[payload]
    refused("QN701", lambda: compile_keyed(AnyKey(), {key: torch.randn(4, 4)}))
    refused("QN701", lambda: compile_keyed(AnyKey(), (torch.randn(4, 4), {key: torch.randn(4, 4)})))


def test_names_that_are_hidden_or_late_are_refused(outside: Outside) -> None:
    shared = Keyed()
    shared.layers[PAYLOADS["double quote"]] = shared.layers["safe"]  # named_modules gives the first name only
    refused("QN701", lambda: compile_keyed(shared))
    refused("QN701", lambda: compile_keyed(Keyed(), keyed_batch(), loss_fn=KeyedLoss(PAYLOADS["double quote"])))
    program = quintnet.compile(Keyed(PAYLOADS["newline"]), Mesh(dp=2), loss_fn=F.cross_entropy)
    refused("QN701", lambda: program.step(keyed_batch()))
    for name in ("", ".", "a.b", "../../x"):
        direct = Keyed()
        direct._modules[name] = nn.ReLU()
        refused("QN701", lambda: compile_keyed(direct))  # noqa: B023
    deep: nn.Module = nn.Linear(4, 4)
    for _ in range(20):
        deep = nn.ModuleDict({"x" * 150: deep})
    refused("QN701", lambda: compile_keyed(deep))


def test_a_hostile_class_name_stays_text(outside: Outside) -> None:
    program = compile_keyed(type(f'A"\n{HARM}', (Keyed,), {})())
    assert program.step(keyed_batch()) > 0
    check_dump(program.dump("out"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("key", HARMLESS)
def test_harmless_names_work(key: str, outside: Outside) -> None:
    assert is_safe(key)
    model = Keyed(key, parameter=f"p {key}", buffer=f"b {key}", attribute=f"a {key}")
    batch = keyed_batch()
    expected = F.cross_entropy(model(batch[0]), batch[1])
    program = compile_keyed(model, batch, loss_fn=F.cross_entropy)
    torch.testing.assert_close(program.step(batch), expected)
    assert {n for n, _ in program.named_parameters()} == {n for n, _ in model.named_parameters()}
    check_dump(program.dump("out"))
    assert Plan.from_json(Path("out/plan.json").read_bytes()) == program.plan


def test_text_stays_within_its_line() -> None:
    for text in PAYLOADS.values():
        assert one_line(text).isprintable()
    assert one_line("naïve – 名前") == "naïve – 名前"


def test_places_and_sites_stay_within_comments() -> None:
    import dataclasses

    from quintnet_compiler.core.annotations import annotate, facts

    program = compile_keyed(Keyed(), plan={"sequence_parallel": False})
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
