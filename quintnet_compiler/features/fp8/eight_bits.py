"""Program -> Program: linear layers whose products, forward and backward, are of 8-bit numbers with scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import fx

from ...core.annotations import facts, is_getitem, leaf, needs_grad, shape, value
from ...core.errors import CompileError
from ...ir.builder import GraphBuilder
from ...ir.program import Program, outputs
from ...ops.catalog import op_spec
from ...ops.derivatives.user_derivatives import after_gradients, declare_gradient, with_tangent
from ...ops.experts.expert_linear import expert_linear
from ...ops.rules.work import work_of
from .ops.scaled_groups import scaled_expert_linear
from .ops.scaled_products import (
    FORWARD,
    OF_INPUT,
    OF_WEIGHT,
    block_max,
    block_scale,
    scaled_cast,
    scaled_matmul,
)

aten = torch.ops.aten
MULTIPLE = 16  # of which GPUs' 8-bit kernels take sizes (torch._scaled_mm)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# what may have 8 bits, and which argument is the weight
LAYERS: Mapping[Any, int] = MappingProxyType({aten.linear.default: 1, expert_linear: 2})
Operand = Literal["input", "weight", "gradient"]


@dataclass(frozen=True)
class Recipe:
    """How operands are scaled.

    Attributes:
        along: how many numbers have one scale, along the dim that a product sums over; 0: all of it; None: there is one
            scale for a tensor.
        square: whether a weight has one for ``along`` rows and columns.
        gradient: the format of gradients of results; all else is E4M3.
        power_of_two: whether scales are powers of two.
        of_weight: whether the gradient of a weight is an 8-bit product, too.
    """

    along: int | None = None
    square: bool = False
    gradient: torch.dtype = E4M3
    power_of_two: bool = False
    of_weight: bool = True

    def block(self, operand: Operand, size: Sequence[int], summed: int, *, rows: int = 1) -> list[int]:
        """Return the size of a block in each dim of an operand of shape ``size`` (:mod:`.ops.scaled_products`).

        ``summed``: the dim that is summed over, the first of ``rows`` that stand for one.
        """
        if self.along is None:
            each = len(size) - 2 if operand == "weight" else 0  # of experts, a matrix each
            return [1] * each + [0] * (len(size) - each)
        blocks = [1] * len(size)
        if self.square and operand == "weight":
            blocks[-2:] = [self.along] * 2
        elif self.along == 0:
            blocks[summed : summed + rows] = [0] * rows
        else:
            blocks[summed + rows - 1] = self.along
        return [0 if 1 < block >= count else block for block, count in zip(blocks, size, strict=True)]


# what each name means; the first three as torchao's recipes of the same names
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "tensorwise": Recipe(gradient=E5M2),
        "rowwise": Recipe(along=0, power_of_two=True),
        "rowwise_with_gw_hp": Recipe(along=0, power_of_two=True, of_weight=False),
        "blockwise": Recipe(along=128, square=True),
        "mxfp8": Recipe(along=32, power_of_two=True),
    }
)


@dataclass(frozen=True)
class EightBits:
    """Replace linear layers by products of 8-bit numbers, with the gradients that these have by definition.

    Before: %y = linear(%x, %w)
    After:  %y0 = scaled_matmul(%x8, %w8, %x_scale, %w_scale, "mk,nk->mn");  %y1, %t = with_tangent(%y0)
            declare_gradient(%x, scaled_matmul(%t8, %w8, ..., "mn,nk->mk"))
            declare_gradient(%w, scaled_matmul(%t8, %x8, ..., "mn,mk->nk"))
            %y = after_gradients(%y1, ...)
    Ensures: what is not replaced is as before; scales are values, of whole tensors and each microbatch. Everything that
    is made has a sharding rule, so that a scale over a dim which ranks split is the largest of theirs, and what ranks
    gather has 8 bits.

    ``wide``: patterns of names of parameters, or of modules, that keep their bits. So do layers for which
    :func:`kept_wide` names a reason. A pattern that names nothing is error QN204.
    (Micikevicius et al. 2022; Rouhani et al. 2023; DeepSeek-AI 2024.)
    """

    recipe: Recipe
    wide: tuple[str, ...] = ()

    def __call__(self, program: Program, /) -> Program:
        """Return the rewritten program."""
        _check_patterns(program, self.wide)
        return _Lowering(program, self.recipe, kept_wide(program, self.recipe, self.wide)).run()


def kept_wide(program: Program, recipe: Recipe, patterns: Sequence[str] = ()) -> dict[fx.Node, str]:
    """Return the linear layers that keep their bits, and why."""
    nodes = list(program.graph.nodes)
    feeds: set[fx.Node] = set()  # what a product depends on
    for node in reversed(nodes):
        if node in feeds or (node.op == "call_function" and work_of(node.target) in ("matmul", "attention")):
            feeds.update(node.all_input_nodes)
    reasons = {}
    for node in (n for n in nodes if n.target in LAYERS):
        reason = _reason(node, recipe, patterns)
        if not reason and node not in feeds:
            reason = "no further product reads its result: it is a head, such as logits"
        if reason:
            reasons[node] = reason
    return reasons


def _check_patterns(program: Program, patterns: Sequence[str]) -> None:
    """Check that every pattern names something: what it was meant for would be rounded.

    Raises:
        CompileError: QN204 for a pattern that names nothing.
    """
    names = [info.name for info in program.leaves.values() if info.kind == "parameter"]
    names += [name.rpartition(".")[0] for name in names]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = get_close_matches(pattern, names, n=3, cutoff=0.3)
            raise CompileError(
                "QN204",
                f"fp8_skip: {pattern!r} matches no parameter and no module that has one",
                fix=f"did you mean {', '.join(close)}?" if close else "see program.named_parameters()",
            )


def wide_layers(program: Program, recipe: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return, in lines, what :func:`kept_wide` says of a program in which all other layers have 8 bits."""
    reasons = kept_wide(program, RECIPES[recipe], patterns)
    return tuple(
        f"{facts(node).where.module or _weight_of(node) or 'the loss'}: {why}" for node, why in reasons.items()
    )


def _weight_of(node: fx.Node) -> str:
    """Return the name of a layer's weight; empty if it is computed."""
    weight = node.args[LAYERS[node.target]]
    info = leaf(weight) if isinstance(weight, fx.Node) else None
    return info.name if info is not None and info.kind == "parameter" else ""


def _reason(node: fx.Node, recipe: Recipe, patterns: Sequence[str]) -> str:
    experts = op_spec(node).by_expert
    weight = node.args[LAYERS[node.target]]
    assert isinstance(weight, fx.Node)
    info = leaf(weight)
    if info is None or info.kind != "parameter":
        return "its weight is computed"
    module = info.name.rpartition(".")[0]
    if taken := [p for p in patterns if fnmatchcase(info.name, p) or fnmatchcase(module, p)]:
        return f"the plan keeps {taken[0]!r} wide"
    out, inside = shape(weight)[-2:]
    sizes = {"in": out, "out": inside} if experts and node.args[4] else {"in": inside, "out": out}
    step = max(MULTIPLE, recipe.along or 1)
    if odd := [f"{name}_features {size}" for name, size in sizes.items() if size % step]:
        return f"{' and '.join(odd)} is no multiple of {step}"
    return ""


@dataclass
class _Lowering:
    program: Program
    recipe: Recipe
    wide: Mapping[fx.Node, str]
    cast: dict[tuple[fx.Node, tuple[int, ...]], tuple[fx.Node, fx.Node]] = field(default_factory=dict)

    def run(self) -> Program:
        self.builder, self.env = GraphBuilder(self.program.mode), dict[fx.Node, fx.Node]()
        for node in self.program.graph.nodes:
            if node.op != "output":
                with self.builder.at(node):
                    self.env[node] = self._node(node)
        self.builder.output(tuple(self.env[node] for node in outputs(self.program.graph)))
        return replace(self.program, graph=self.builder.graph)

    def _node(self, node: fx.Node) -> fx.Node:
        if node.op == "placeholder":
            info = facts(node)
            return self.builder.placeholder(node.name, value(node), info.leaf, needs_grad=info.needs_grad)
        arguments: Any = fx.map_arg((node.args, node.kwargs), self.env.__getitem__)
        args, kwargs = arguments
        if is_getitem(node):
            return self.builder.getitem(args[0], int(args[1]))
        if node.target in LAYERS and node not in self.wide:
            return self._experts(*args) if op_spec(node).by_expert else self._linear(*args)
        target: Any = node.target
        return self.builder.call(target, *(list(a) if isinstance(a, (list, tuple)) else a for a in args), **kwargs)

    def _linear(self, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> fx.Node:
        call, rank = self.builder.call, len(shape(x))
        result = self._product(FORWARD, (x, "input", rank - 1, 1), (weight, "weight", 1, 1), value(x).dtype)
        if needs_grad(x) or needs_grad(weight):
            both = call(with_tangent, result, True)
            result, tangent = (self.builder.getitem(both, i) for i in range(2))
            done = []
            if needs_grad(x):
                back = (tangent, "gradient", rank - 1, 1), (weight, "weight", 0, 1)
                done.append(self._declared(x, self._product(OF_INPUT, *back, value(x).dtype)))  # type: ignore[arg-type]
            if needs_grad(weight):
                done.append(self._declared(weight, self._of_weight(tangent, x, value(weight).dtype)))
            result = call(after_gradients, result, done)
        return result if bias is None else call(aten.add.Tensor, result, bias)

    def _experts(self, rows: fx.Node, ids: fx.Node, weight: fx.Node, bias: fx.Node | None, transposed: bool) -> fx.Node:
        """Emit a layer of experts, whose rows ranks scale where they arrive: see :mod:`.scaled_experts`."""
        recipe, (outside, inside) = self.recipe, (2, 1) if transposed else (1, 2)
        ends: tuple[tuple[Operand, int], ...] = ("input", inside), ("gradient", outside)
        sizes = {operand: (1, shape(weight)[dim]) for operand, dim in ends}
        blocks = [] if recipe.along is None else [recipe.block(operand, size, 1)[1] for operand, size in sizes.items()]
        back = self._cast(weight, "weight", outside, 1) if needs_grad(rows) else (None, None)
        casts = *self._cast(weight, "weight", inside, 1), *back
        how = blocks, recipe.gradient, recipe.power_of_two, recipe.of_weight
        return self.builder.call(scaled_expert_linear, rows, ids, weight, bias, transposed, *casts, *how)

    def _declared(self, x: fx.Node, gradient: fx.Node) -> fx.Node:
        return self.builder.getitem(self.builder.call(declare_gradient, x, gradient), 0)

    def _of_weight(self, tangent: fx.Node, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        rows = len(shape(x)) - 1
        along = self.recipe.along or 1
        if self.recipe.of_weight and rows and shape(x)[rows - 1] % along == 0:
            return self._product(OF_WEIGHT, (tangent, "gradient", 0, rows), (x, "input", 0, rows), dtype)
        call = self.builder.call
        flat = [self.builder.reshape(n, [-1, shape(n)[-1]]) for n in (tangent, call(aten.detach.default, x))]
        return call(aten.mm.default, call(aten.t.default, flat[0]), flat[1])

    def _product(
        self, equation: str, a: tuple[fx.Node, Operand, int, int], b: tuple[fx.Node, Operand, int, int],
        dtype: torch.dtype,
    ) -> fx.Node:  # fmt: skip
        (a8, scale_a), (b8, scale_b) = (self._cast(*operand) for operand in (a, b))
        return self.builder.call(scaled_matmul, a8, b8, scale_a, scale_b, equation, dtype, self.recipe.power_of_two)

    def _cast(self, x: fx.Node, operand: Operand, summed: int, rows: int) -> tuple[fx.Node, fx.Node]:
        """Return ``x`` in 8 bits and its scale, which layers that read the same share."""
        block = self.recipe.block(operand, shape(x), summed, rows=rows)
        key = x, tuple(block)
        if key not in self.cast:
            call = self.builder.call
            kind = self.recipe.gradient if operand == "gradient" else E4M3
            bare = call(aten.detach.default, x) if needs_grad(x) else x
            scale = call(block_scale, call(block_max, bare, block), kind, self.recipe.power_of_two)
            self.cast[key] = call(scaled_cast, bare, scale, kind), scale
        return self.cast[key]
