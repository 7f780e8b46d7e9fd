"""The statements that generated code may consist of. Anything else is refused before it runs, whoever wrote it."""

from __future__ import annotations

import ast
import copy
import re
from dataclasses import dataclass, field
from functools import cache

import torch

from ..compat.torch import OpOverload, schema
from ..core.errors import REPORT, CompileError
from ..core.names import one_line
from ..ops.catalog import spec_of_method

# What passes/codegen/python_ops.py calls; everything else goes by its full name, torch.ops.namespace.operator.overload.
_SPELLED = frozenset(
    f"torch.{name}"
    for name in re.findall(
        r"\S+",
        "add sub mul div neg rsqrt pow tanh sigmoid relu exp mm bmm addmm matmul _C._nn.linear _C._nn.silu t transpose "
        "permute reshape split_with_sizes select cat sum mean native_layer_norm embedding where masked_fill log sqrt "
        "cos sin eq ne ge gt le lt logical_and logical_or logical_not _C._nn.gelu detach unsqueeze squeeze amax any",
    )
)
_FLOATS = frozenset({"inf", "nan"})  # as fx spells them
_FIXED = _FLOATS | {"self", "args", "torch", "device"}  # names that code may not bind
_OPTION = re.compile(r"[\w.,() >-]{0,100}")  # text arguments of operators: "tanh", "none", "bij,bjk->bik"


def check_source(source: str) -> ast.Module:
    """Accept one function of the form that GenerateRanks writes, and nothing else. Returns what it was read as.

    It unpacks and empties a list, assigns what PyTorch's operators and ``comm`` return to names, and returns a tuple
    of names. It imports nothing, reads no other name, and uses no attribute of a value.

    Raises:
        CompileError: QN701 with the line that is something else.

    >>> tree = check_source(
    ...     "def forward(self, args):\\n  comm, x, = args\\n  args.clear()\\n  y = torch.t(x)\\n  return (y,)"
    ... )
    """
    try:
        parsed = ast.parse(source)
        _Function(source).check(parsed)
        return parsed
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, CompileError):
            raise
        raise CompileError("QN701", f"generated code is not Python: {one_line(str(error))}", fix=REPORT) from None


@dataclass
class _Function:
    """A function that is checked, and the names bound so far."""

    source: str
    bound: set[str] = field(default_factory=set)

    def check(self, module: ast.Module) -> None:
        function = module.body[0] if len(module.body) == 1 else module
        if not isinstance(function, ast.FunctionDef):
            self._refuse(module.body[-1] if module.body else module)
            return
        plain = ast.parse("def forward(self, args): pass").body
        plain[0].body, head = [], copy.copy(function)  # type: ignore[attr-defined]
        head.body = []
        self._require(ast.dump(plain[0]) == ast.dump(head) and len(function.body) >= 3, function)
        unpack, clear, *body, last = function.body
        self._unpack(unpack)
        self._require(isinstance(clear, ast.Expr) and ast.unparse(clear) == "args.clear()", clear)
        for statement in body:
            self._assign(statement)
        self._require(isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple), last)
        assert isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple)
        for name in last.value.elts:
            self._require(isinstance(name, ast.Name) and name.id in self.bound, name)

    def _refuse(self, node: ast.AST) -> None:
        line = getattr(node, "lineno", 1)
        text = one_line((ast.get_source_segment(self.source, node) or type(node).__name__)[:200])
        raise CompileError("QN701", f"generated code may not contain {text!a} (line {line})", fix=REPORT)

    def _require(self, holds: bool, node: ast.AST) -> None:
        if not holds:
            self._refuse(node)

    def _unpack(self, node: ast.stmt) -> None:
        """Accept ``comm, x, y, = args``."""
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Tuple)):
            return self._refuse(node)
        self._require(isinstance(node.value, ast.Name) and node.value.id == "args", node)
        for position, target in enumerate(node.targets[0].elts):
            self._require(isinstance(target, ast.Name) and (target.id == "comm") == (position == 0), node)
            self._bind(target)

    def _bind(self, target: ast.expr) -> None:
        self._require(isinstance(target, ast.Name) and target.id not in _FIXED, target)
        assert isinstance(target, ast.Name)
        self.bound.add(target.id)

    def _assign(self, node: ast.stmt) -> None:
        """Accept ``x = y = None``, ``x = y[0]``, ``x = y[:, 2:5]`` or ``x = operator(...)``."""
        if not isinstance(node, ast.Assign):
            return self._refuse(node)
        value = node.value
        if isinstance(value, ast.Constant) and value.value is None:
            for target in node.targets:
                self._require(isinstance(target, ast.Name) and target.id in self.bound, target)
            return None
        if isinstance(value, ast.Subscript):
            index = value.slice
            self._require(isinstance(value.value, ast.Name) and value.value.id in self.bound - {"comm"}, value)
            cuts = index.elts if isinstance(index, ast.Tuple) else [index]
            self._require(_is_integer(index) or (bool(cuts) and all(map(_is_slice, cuts))), value)
        elif isinstance(value, ast.Call):
            self._call(value)
        else:
            self._refuse(value)
        target = node.targets[0]
        self._require(len(node.targets) == 1 and isinstance(target, ast.Name) and target.id != "comm", node)
        self._bind(target)
        return None

    def _call(self, node: ast.Call) -> None:
        path = _dotted(node.func)
        to_comm = _is_rank_method(path) and "comm" in self.bound
        self._require(to_comm or path in _SPELLED or _is_operator(path), node.func)
        for arg in node.args:
            if to_comm and isinstance(arg, ast.Constant) and isinstance(arg.value, str):  # an axis, a parameter's value
                self._require(arg.value.isidentifier(), arg)
            else:
                self._value(arg)
        for option in node.keywords:
            self._require(option.arg is not None, node)
            self._value(option.value)

    def _value(self, node: ast.expr) -> None:
        if isinstance(node, ast.Name):
            self._require(node.id in self.bound or node.id in _FLOATS, node)
        elif isinstance(node, (ast.List, ast.Tuple)):
            for element in node.elts:
                self._value(element)
        elif isinstance(node, ast.Attribute):
            self._require(_is_torch_constant(_dotted(node)), node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self._require(_OPTION.fullmatch(node.value) is not None, node)
        elif isinstance(node, ast.Call):
            self._device(node)
        else:
            self._require((isinstance(node, ast.Constant) and node.value is None) or _is_number(node), node)

    def _device(self, node: ast.Call) -> None:
        """Accept ``device(type='cuda')``: a kind without an index, as all ranks run the same code."""
        self._require(isinstance(node.func, ast.Name) and node.func.id == "device" and not node.args, node)
        for option in node.keywords:
            named = isinstance(option.value, ast.Constant) and type(option.value.value) is str
            self._require(option.arg == "type" and named, node)
            self._value(option.value)


def _dotted(node: ast.expr) -> str:
    """Return ``torch.ops.aten.t.default`` of the expression that reads it; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def _is_rank_method(path: str) -> bool:
    """Return whether it is ``comm.name`` of an operator that the runtime carries out."""
    comm, _, name = path.partition(".")
    spec = spec_of_method(name)
    return comm == "comm" and (spec.on_rank or spec.accumulates is not None)


@cache
def _is_operator(path: str) -> bool:
    parts = path.split(".")
    if len(parts) != 5 or parts[:2] != ["torch", "ops"]:
        return False
    operator: object = torch.ops
    for name in parts[2:]:
        operator = getattr(operator, name, None)
    # aten::from_file would open the file that it is given
    return isinstance(operator, OpOverload) and all(a.name != "filename" for a in schema(operator).arguments)


@cache
def _is_torch_constant(path: str) -> bool:
    module, _, name = path.partition(".")
    return module == "torch" and isinstance(vars(torch).get(name), (torch.dtype, torch.layout, torch.memory_format))


def _is_integer(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _is_slice(node: ast.expr) -> bool:
    """Return whether a node is ``:``, ``2:``, ``2:5`` or ``0:8:2``, as in ``x[:, 2:5]``."""
    return isinstance(node, ast.Slice) and all(n is None or _is_integer(n) for n in (node.lower, node.upper, node.step))


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and _is_number(node.operand)
    if isinstance(node, ast.BinOp):  # 1+2j
        return isinstance(node.op, (ast.Add, ast.Sub)) and _is_number(node.left) and _is_number(node.right)
    if isinstance(node, ast.Name):
        return node.id in _FLOATS
    return isinstance(node, ast.Constant) and type(node.value) in (bool, int, float, complex)
