"""Check of what rules in notation say of the operators of a program: a second reading of their text.

Types are checked against factors (:mod:`.strategies`), and factors here against what the author of a rule wrote:
a bias that is not added to a sum by one rank alone, or a dim that may be split though the rule says that it is whole,
would pass every other check.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from ...core.annotations import facts, is_getitem, shape, tensor_inputs, values
from ...core.errors import REPORT, CompileError
from ...ops.rules.notation import Factors, Rule


def check_notation(graph: fx.Graph, rules: Mapping[Any, Rule]) -> None:
    """Raises: CompileError QN209 with the operator of whose rule something else was understood."""
    seen: set[Hashable] = set()
    for node in graph.nodes:
        rule = rules.get(node.target) if node.op == "call_function" and not is_getitem(node) else None
        if rule is None or not rule.text:
            continue
        given, made = tuple(map(shape, tensor_inputs(node))), tuple(tuple(x.shape) for x in values(node))
        if (rule.target, given, made) in seen:  # rules read nothing else
            continue
        seen.add((rule.target, given, made))
        why = _misread(rule, given, made, node)
        if why:
            raise CompileError(
                "QN209",
                f"notation check: the rule {rule.text!r} of {node.target} is read wrongly: {why}",
                where=facts(node).where,
                fix=REPORT,
            )


def _misread(rule: Rule, given: Sequence[Sequence[int]], made: Sequence[Sequence[int]], node: fx.Node) -> str:
    """What is wrong with the factors that the rule gives for ``node`` (empty: nothing)."""
    found = rule.factors(node)
    plain = rule.text.replace("[", "").replace("]", "")
    left, right = ([re.findall(r"\(.*?\)|[^ ()]+", group) for group in side.split(",")] for side in plain.split("->"))
    words, sizes = [*left[: len(given)], *right], [*given, *made]
    places = [*found.inputs, *found.outputs]
    if not len(words) == len(sizes) == len(places):
        return "the number of tensors"
    longest: dict[str, int] = {}
    leading: set[str] = set()
    named = [_named(tensor, dims, leading) for tensor, dims in zip(words, sizes, strict=True)]
    several: set[str] = set()  # factors that have no dim of their own: what they are multiplied to is checked below
    for tensor in named:
        for name, size in tensor:
            if name.isdigit():
                longest |= {name: int(name)} if name != "1" else {}
            elif name.isidentifier():
                longest[name] = size if size != 1 else longest.get(name, 1)
            else:
                several |= {word for word in name[1:-1].split() if word != "1"}
    longest |= {word: int(word) if word.isdigit() else found.sizes.get(word, 0) for word in several - longest.keys()}
    if dict(found.sizes) != longest:
        return f"sizes {dict(found.sizes)}, not {longest}"
    for tensor, place in zip(named, places, strict=True):
        wanted = []
        for name, size in tensor:
            factors = tuple(word for word in name.strip("()").split() if word != "1")
            whole = math.prod(longest[word] for word in factors)
            if size not in (1, whole):
                return f"a dim {name} of size {size} has factors of {whole}"
            wanted.append(factors if size == whole else ())
        if place != tuple(wanted):
            return f"the dims {place} of a tensor {tensor}"
    numbers = {word for word in longest if word.isdigit()}
    return _options(rule.options, found, len(given), leading, numbers)


def _named(tensor: Sequence[str], dims: Sequence[int], leading: set[str]) -> list[tuple[str, int]]:
    """The name of each dim, counted from the last; ``...`` are b0, b1, ... from its right."""
    names = [word for word in tensor if word != "..."][::-1]
    found = list(zip(names, reversed(dims), strict=False))
    for i, size in enumerate(reversed(dims[: max(len(dims) - len(names), 0)])):
        found.append((f"b{i}", size))
        leading.add(f"b{i}")
    return found[::-1]


def _options(options: Mapping[str, Any], found: Factors, inputs: int, leading: Iterable[str], numbers: set[str]) -> str:
    def factors(option: str) -> set[str]:
        words = set(options[option].split())
        return words - {"..."} | (set(leading) if "..." in words else set())

    linear = [list(group) for group in options["linear"] if max(group, default=0) < inputs]
    wanted: dict[str, tuple[Any, Any]] = {
        "whole": (set(found.whole), factors("whole") | numbers),
        "contiguous": (set(found.contiguous), factors("contiguous")),
        "linear": ([list(group) for group in found.linear], linear),
        "additive": (set(found.additive), {i for i in options["additive"] if i < inputs}),
        "settled": (set(found.settled), set()),
        "joint": (set(found.joint), set()),
        "dual": (list(found.dual), []),
    }
    wrong = [f"{option}: {has}, not {says}" for option, (has, says) in wanted.items() if has != says]
    return "; ".join(wrong)
