"""A Hugging Face model's own parallel plan as a :class:`Plan`.

transformers names a style for modules (``{"model.layers.*.mlp.up_proj": "colwise"}``): how their parameters are split,
and which collectives run around them. Here only the first is taken over: which collectives follow is derived.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ..compat.transformers import parallel_rules
from ..core.errors import CompileError
from ..core.mesh import Mesh
from ..ir.plan import Plan
from ..weights.names import is_hugging_face

Kind = tuple[int, int] | None  # (dim, counted from the end, and parts) of a shard; None: whole

# style -> how it lays out a weight, and how a bias (or another parameter of one dim)
STYLES: Mapping[str, tuple[Kind, Kind]] = MappingProxyType(
    {
        "colwise": ((-2, 1), (-1, 1)),
        "colwise_rep": ((-2, 1), (-1, 1)),
        "colwise_gather_output": ((-2, 1), (-1, 1)),
        "local_colwise": ((-2, 1), (-1, 1)),
        "packed_colwise": ((-2, 2), (-1, 1)),
        "local_packed_colwise": ((-2, 2), (-1, 1)),
        "rowwise": ((-1, 1), None),
        "rowwise_rep": ((-1, 1), None),
        "rowwise_split_input": ((-1, 1), None),
        "local_rowwise": ((-1, 1), None),
        "packed_rowwise": ((-1, 2), None),
        "local_packed_rowwise": ((-1, 2), None),
        "embedding_rowwise": ((-2, 1), None),
        "embedding_colwise": ((-1, 1), None),
        "sequence_parallel": (None, None),
        "replicated_with_grad_allreduce": (None, None),
        "replicate": (None, None),
        "mla_kv_a_proj": (None, None),
    }
)
# styles that lay out nothing: they say which collectives run, and those are derived here
BEHAVIOURS = frozenset({"moe_tp_experts", "moe_identity_expert", "all_reduce", "local_params", "gather", "local"})


@dataclass(frozen=True)
class PlanEntry:
    """A result of a rule of the model's plan: a type for each of ``count`` parameters like ``parameter``."""

    rule: str
    style: str
    parameter: str
    kind: str
    count: int


@dataclass(frozen=True)
class HuggingFacePlan:
    """The parallel plan of a Hugging Face model, as a plan of QuintNet; ``str()`` is a report.

    Attributes:
        model: its class.
        mesh: the mesh.
        plan: what :func:`quintnet.compile` takes.
        entries: the sharding that each rule of the model gives.
        open: parameters (layers as ``*``) that the model's plan does not mention; the compiler decides.
        left_out: rules that have no effect, with the reason.
        notes: anything else.
    """

    model: str
    mesh: str
    plan: Plan
    entries: tuple[PlanEntry, ...]
    open: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        width = max([len(e.parameter) for e in self.entries] + [0])
        lines = [f"{self.model}'s own plan on {self.mesh}"]
        lines += [f"  {e.parameter:<{width}}  {e.kind:<9} x {e.count:<4} {e.style}" for e in self.entries]
        lines += ["left to the compiler, for the model's plan says nothing of them:"] if self.open else []
        lines += [f"  {name}" for name in self.open]
        lines += ["rules that set nothing:"] if self.left_out else []
        lines += [f"  {rule}: {reason}" for rule, reason in self.left_out]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def hf_plan(model: nn.Module, mesh: Mesh, *, virtual_stages: int = 1) -> HuggingFacePlan:
    """Return the parallel plan that a Hugging Face model comes with, for ``mesh``: what ``plan="hf"`` compiles with.

    ``virtual_stages``: how many pipeline stages each rank has.

    Raises:
        CompileError: QN207 if the model has none, QN203 with every parameter that does not divide, QN206 if there are
            fewer layers than pipeline stages.
    """
    if not is_hugging_face(model):
        raise CompileError(
            "QN207", f"{type(model).__name__} is not a Hugging Face model, and has no plan", fix="pass plan=None"
        )
    rules = {
        "ep": dict(parallel_rules(model, "ep")) if mesh["ep"] > 1 else {},
        "tp": dict(parallel_rules(model, "tp")),
    }
    if not rules["tp"]:
        raise CompileError(
            "QN207",
            f"{type(model).__name__} comes without a tensor-parallel plan",
            fix="pass plan=None (the compiler finds a layout), or a quintnet.Plan of your own",
        )
    reading = _Reading(model, mesh, rules)
    stages, notes = _stages(model, mesh["pp"] * virtual_stages)
    plan = Plan(mesh=dict(mesh.axes), virtual_stages=virtual_stages, parameters=reading.parameters, stages=stages)
    entries = tuple(PlanEntry(*key, count) for key, count in reading.counts.items())
    return HuggingFacePlan(
        type(model).__name__,
        str(mesh),
        plan,
        entries,
        tuple(dict.fromkeys(reading.open)),
        tuple(reading.left_out()),
        tuple(reading.notes + notes),
    )


def generic(name: str) -> str:
    """Return a name with its layer numbers as ``*``, as rules have them.

    >>> generic("model.layers.10.mlp.w1.weight")
    'model.layers.*.mlp.w1.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


class _Reading:
    """One pass over the parameters: which rule speaks of each, and what it makes of it."""

    def __init__(self, model: Any, mesh: Mesh, rules: Mapping[str, Mapping[str, str]]) -> None:
        self.mesh, self.rules = mesh, rules
        self.modules = dict(model.named_modules())
        self.parameters: dict[str, dict[str, str]] = {}
        self.counts: dict[tuple[str, str, str, str], int] = {}
        self.open: list[str] = []
        self.notes: list[str] = []
        self.used: set[str] = set()
        self.reasons: dict[str, str] = {}
        problems: list[str] = []
        kept: dict[int, str] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            first = kept.setdefault(id(p), name)
            types = self._types(name, p, problems)
            if first != name:
                if types and types != self.parameters.get(first):
                    self.notes.append(f"{name} is tied to {first}, whose layout it follows")
            elif types:
                self.parameters[name] = types
            else:
                self.open.append(generic(name))
        if problems:
            raise CompileError(
                "QN203",
                "\n  ".join(problems[:12] + ([f"and {len(problems) - 12} more"] if len(problems) > 12 else [])),
                fix="use a smaller tp, or plan=None, which keeps whole what does not divide",
            )

    def _types(self, name: str, p: Tensor, problems: list[str]) -> dict[str, str]:
        types: dict[str, str] = {}
        for axis, rules in self.rules.items():
            rule = next((r for r in (generic(name), generic(name.rpartition(".")[0])) if r in rules), None)
            if rule is None or self.mesh[axis] == 1:
                self.used |= {rule} if rule else set()
                continue
            self.used.add(rule)
            kind = self._kind(rule, rules[rule], name, p)
            if kind is None:
                continue
            size = p.shape[kind[0]] if kind else 0
            if kind and size % (self.mesh[axis] * kind[1]):
                parts = f" in {kind[1]} parts" if kind[1] > 1 else ""
                problems.append(
                    f"{name} of shape {tuple(p.shape)}: {size}{parts} does not divide over {axis}={self.mesh[axis]}"
                )
                continue
            types[axis] = "I" if not kind else f"S({kind[0]})" if kind[1] == 1 else f"S({kind[0]},{kind[1]})"
            key = (rule, rules[rule], generic(name), f"{axis} {types[axis]}")
            self.counts[key] = self.counts.get(key, 0) + 1
            if axis == "ep":  # as in transformers: experts that are spread whole are not split as well
                self.used |= {rule, *self.rules["tp"].keys() & self.rules["ep"].keys()}
                break
        return types

    def _kind(self, rule: str, style: str, name: str, p: Tensor) -> tuple[int, int] | tuple[()] | None:
        """(dim, parts), or () for whole, or None if the rule does not set this parameter."""
        if style == "grouped_gemm":
            return 0, 1
        if style in BEHAVIOURS or style.startswith("ep_"):
            self.reasons[rule] = f"{style} only says which collectives run, and those are derived"
            return None
        if style not in STYLES:
            self.reasons[rule] = f"the style {style} is not known"
            return None
        module = self.modules[name.rpartition(".")[0]]
        if generic(name) != rule and p.dim() == 2 and not isinstance(module, (nn.Linear, nn.Embedding)):
            self.reasons[rule] = f"{type(module).__name__} is no linear layer: which dim is meant is not certain"
            return None
        weight, bias = STYLES[style]
        chosen = bias if p.dim() == 1 else weight
        return () if chosen is None else (chosen[0] % p.dim(), chosen[1])

    def left_out(self) -> list[tuple[str, str]]:
        reasons = dict(self.reasons)
        for axis, rules in self.rules.items():
            for rule, style in rules.items():
                if self.mesh[axis] == 1:
                    reasons.setdefault(rule, f"{style}: the mesh has no {axis}")
                elif rule not in self.used:
                    behaviour = style in BEHAVIOURS or style.startswith("ep_")
                    reason = (
                        "only says which collectives run, and those are derived" if behaviour else "matches nothing"
                    )
                    reasons.setdefault(rule, f"{style} {reason}")
        return list(reasons.items())


def _stages(model: Any, count: int) -> tuple[tuple[str, ...], list[str]]:
    """Cut the pipeline where transformers would: equal numbers of layers, the rest in the last stage."""
    if count == 1:
        return (), []
    rules = parallel_rules(model, "pp")
    layers = [(name, module) for name in rules if isinstance(module := _module(model, name), nn.ModuleList)]
    if len(layers) != 1:
        return (), ["the model has no pipeline plan: the compiler cuts it where stages balance"]
    ((name, blocks),) = layers
    if len(blocks) < count:
        raise CompileError(
            "QN206", f"{name} has {len(blocks)} layers, and the pipeline {count} stages", fix="use fewer stages"
        )
    return tuple(f"{name}.{len(blocks) // count * stage}" for stage in range(1, count)), []


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
