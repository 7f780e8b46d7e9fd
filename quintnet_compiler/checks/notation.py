"""Check of what rules in notation say of the operators of a program: a second reading of their text.

Types are checked against factors (:mod:`.strategies`), and factors here against what the author of a rule wrote:
a bias that is not added to a sum by one rank alone, or a dim that may be split though the rule says that it is whole,
would pass every other check.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from ..core.annotations import is_getitem, shape, tensor_inputs, values
from ..ops.rules.notation import Factors, Rule
from .failure import check_failure

Shapes = tuple[tuple[int, ...], ...]
NamedDims = list[tuple[str, int]]  # the name and the size of each dim of a tensor


def check_notation(graph: fx.Graph, rules: Mapping[Any, Rule]) -> None:
    """Check the factors of each operator that has a rule in notation.

    Raises:
        CompileError: QN209 with the operator whose factors are not what its rule says.
    """
    seen: set[Hashable] = set()
    for node in graph.nodes:
        rule = rules.get(node.target) if node.op == "call_function" and not is_getitem(node) else None
        if rule is None or not rule.text:
            continue
        inputs, outputs = tuple(map(shape, tensor_inputs(node))), tuple(tuple(x.shape) for x in values(node))
        if (rule.target, inputs, outputs) in seen:  # rules read nothing else
            continue
        seen.add((rule.target, inputs, outputs))
        error = _error_of_factors(rule, rule.factors(node), inputs, outputs)
        if error:
            message = f"the rule {rule.text!r} of {node.target} is read wrongly: {error}"
            raise check_failure("notation check", message, node)


@dataclass(frozen=True)
class _ReadRule:
    """The text of a rule, applied to shapes.

    Attributes:
        tensors: for each input and output, the name and the size of each dim.
        leading: names of the dims for which ``...`` stands.
    """

    tensors: list[NamedDims]
    leading: frozenset[str]

    @cached_property
    def factor_sizes(self) -> dict[str, int]:
        """Return the size of each factor that is a dim or a number by itself."""
        sizes: dict[str, int] = {}
        for name, size in self._dims():
            if name.isdigit():
                sizes |= {name: int(name)} if name != "1" else {}
            elif name.isidentifier():
                sizes[name] = size if size != 1 else sizes.get(name, 1)
        return sizes

    @cached_property
    def grouped(self) -> set[str]:
        """Return the factors in brackets, ``(heads size)``; a dim has the size of their product."""
        groups = (name[1:-1].split() for name, _ in self._dims() if not name.isdigit() and not name.isidentifier())
        return {word for words in groups for word in words if word != "1"}

    def _dims(self) -> Iterator[tuple[str, int]]:
        for tensor in self.tensors:
            yield from tensor


def _read(text: str, inputs: Shapes, outputs: Shapes) -> _ReadRule | None:
    """Return the names of dims; None if the rule has another number of tensors."""
    sides = text.replace("[", "").replace("]", "").split("->")
    left, right = ([re.findall(r"\(.*?\)|[^ ()]+", group) for group in side.split(",")] for side in sides)
    words, shapes = [*left[: len(inputs)], *right], [*inputs, *outputs]
    if len(words) != len(shapes):
        return None
    leading: set[str] = set()
    tensors = [_named(tensor, dims, leading) for tensor, dims in zip(words, shapes, strict=True)]
    return _ReadRule(tensors, frozenset(leading))


def _named(words: Sequence[str], dims: Sequence[int], leading: set[str]) -> NamedDims:
    """Return the name of each dim, counted from the last; ``...`` stands for b0, b1, ... from its right."""
    names = [word for word in words if word != "..."][::-1]
    named = list(zip(names, reversed(dims), strict=False))
    for i, size in enumerate(reversed(dims[: max(len(dims) - len(names), 0)])):
        named.append((f"b{i}", size))
        leading.add(f"b{i}")
    return named[::-1]


def _error_of_factors(rule: Rule, factors: Factors, inputs: Shapes, outputs: Shapes) -> str:
    """Return how ``factors`` differ from the text of ``rule``; empty if they do not."""
    read = _read(rule.text, inputs, outputs)
    tensors = [*factors.inputs, *factors.outputs]
    if read is None or len(tensors) != len(read.tensors):
        return "the number of tensors"
    sizes = dict(read.factor_sizes)
    for word in read.grouped - sizes.keys():
        sizes[word] = int(word) if word.isdigit() else factors.sizes.get(word, 0)
    if dict(factors.sizes) != sizes:
        return f"sizes {dict(factors.sizes)}, not {sizes}"
    for named, dims in zip(read.tensors, tensors, strict=True):
        if error := _error_of_dims(named, dims, sizes):
            return error
    numbers = {word for word in sizes if word.isdigit()}
    return _error_of_options(rule.options, factors, len(inputs), read.leading, numbers)


def _error_of_dims(named: NamedDims, dims: Sequence[tuple[str, ...]], sizes: Mapping[str, int]) -> str:
    expected = []
    for name, size in named:
        words = tuple(word for word in name.strip("()").split() if word != "1")
        product = math.prod(sizes[word] for word in words)
        if size not in (1, product):
            return f"a dim {name} of size {size} has factors of {product}"
        expected.append(words if size == product else ())
    return f"the dims {dims} of a tensor {named}" if dims != tuple(expected) else ""


def _error_of_options(
    options: Mapping[str, Any], factors: Factors, num_inputs: int, leading: frozenset[str], numbers: set[str]
) -> str:
    def factors_of(option: str) -> set[str]:
        words = set(options[option].split())
        return words - {"..."} | (leading if "..." in words else set())

    linear = [list(group) for group in options["linear"] if max(group, default=0) < num_inputs]
    pairs: dict[str, tuple[Any, Any]] = {
        "whole": (set(factors.whole), factors_of("whole") | numbers),
        "contiguous": (set(factors.contiguous), factors_of("contiguous")),
        "linear": ([list(group) for group in factors.linear], linear),
        "additive": (set(factors.additive), {i for i in options["additive"] if i < num_inputs}),
        "settled": (set(factors.settled), set()),
        "joint": (set(factors.joint), set()),
        "dual": (list(factors.dual), []),
    }
    errors = [
        f"{option}: {actual}, not {expected}" for option, (actual, expected) in pairs.items() if actual != expected
    ]
    return "; ".join(errors)
