"""Only what the allow list has is executed as generated code."""

from __future__ import annotations

import subprocess

import pytest
import torch

import quintnet
from quintnet import Mesh
from quintnet_compiler.ir.codegen_allowlist import check_source
from quintnet_compiler.passes.codegen.python_ops import SPELLING

from ..models import CASES, build
from . import HARM, MARKER, Outside, refused


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
    refused("QN701", lambda: check_source(_function(line)))


@pytest.mark.parametrize("source", WHOLE)
def test_the_allow_list_refuses_a_function(source: str, outside: Outside) -> None:
    refused("QN701", lambda: check_source(source))


def test_the_allow_list_names_the_line() -> None:
    assert "'import os' (line 4)" in refused("QN701", lambda: check_source(_function("import os")))


def test_the_allow_list_has_every_spelling() -> None:
    for function in SPELLING.values():
        graph = torch.fx.Graph()
        graph.call_function(function, ())
        path = next(line for line in graph.python_code("self").src.splitlines() if "= torch" in line)
        check_source(_function(path.strip().partition(";")[0], last="return ()"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "gpt", "vit", "encoder", "cnn"])
def test_generated_code_passes_the_allow_list(name: str) -> None:
    case = CASES[name]
    program = quintnet.compile(build(name), Mesh(pp=2, dp=2, tp=2), case.batch(8), loss_fn=case.loss_fn, microbatches=2)
    for stage in program._primary().program.stages:
        for piece in (stage.once, stage.forward, stage.backward):
            check_source(piece.code)


def test_a_program_with_other_code_is_refused(program: quintnet.CompiledProgram, outside: Outside) -> None:
    import dataclasses

    from quintnet_compiler.ir.invariants import verify_invariants

    whole = program._primary().program
    graph = torch.fx.Graph()
    graph.output((graph.call_function(subprocess.run, (["touch", MARKER],)),))
    piece = dataclasses.replace(whole.stages[0].forward, module=torch.fx.GraphModule({}, graph))
    stage = dataclasses.replace(whole.stages[0], forward=piece)
    refused("QN701", lambda: verify_invariants(dataclasses.replace(whole, stages=(stage,))))
