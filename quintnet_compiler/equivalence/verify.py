"""Does a compiled program compute what the user's module computes? All of its ranks, in this process, beside it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..capture.modes import evaluating
from ..capture.step_module import LossFn
from ..compat.torch import pytree
from ..core.annotations import needs_grad, values
from ..core.errors import CompileError
from ..guards.python_objects import objects_kept
from ..ir.containers import model_inputs, rebuilt
from ..ir.distributed_program import DistributedProgram
from ..ops.rank_local import DRAWS
from ..runtime.backends.local import LocalBackend
from ..runtime.execute.executor import Run
from .localize import Culprit, localize, swap_buffers
from .module_training import (
    FLOOR,
    ModuleTraining,
    Numbers,
    as_float64,
    batches_of,
    failing,
    or_zeros,
    own_errors,
    sgd,
)
from .plain_control_flow import in_python
from .reference import differs, largest, same_numbers
from .unchanged import random_numbers_kept

# What rounding in another order may do, relative to the largest element; the tests' own limit in float64.
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
SLACK = 2.0
ROUNDINGS, MOST = 10.0, 1e-2  # how many times what rounding does to the module itself; never more than the second


@dataclass(frozen=True)
class Comparison:
    """One tensor of both sides. ``error`` is relative to its largest element (a floor is 1e-3 of that
    of all gradients, or parameters)."""

    what: str
    name: str
    step: int
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True)
class VerifyReport:
    """The result of :meth:`CompiledProgram.verify`; ``str()`` for people, ``to_json()`` for programs."""

    mesh: str
    ranks: int
    dtype: str
    steps: int
    seconds: float
    comparisons: tuple[Comparison, ...]
    culprit: Culprit | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything is equal, up to the limits."""
        return all(one.ok for one in self.comparisons)

    @property
    def worst(self) -> Comparison:
        """The comparison with the largest error, among those beyond their limit if there are any."""
        return self.comparisons[0]

    def to_json(self) -> str:
        """All comparisons."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        wrong = [one for one in self.comparisons if not one.ok]
        verdict = "equal" if self.ok else f"NOT EQUAL in {len(wrong)} of {len(self.comparisons)} tensors"
        head = f"{self.mesh}, {self.ranks} ranks against the unsplit model: {verdict}"
        lines = [head, f"{self.dtype}, {self.steps} steps, {self.seconds:.1f} s; relative errors, worst first:"]
        shown = (wrong or list(self.comparisons))[:12]
        lines += [
            f"  {one.error:8.1e}  (limit {one.limit:.0e})  {one.what:<9} {one.name}, step {one.step}" for one in shown
        ]
        hidden = len(self.comparisons) - len(shown)
        lines += [f"  and {hidden} more" if hidden else ""]
        lines += [f"note: {note}" for note in self.notes]
        lines += [str(self.culprit)] if self.culprit else []
        return "\n".join(line for line in lines if line)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{one.error:.1e}</td><td>{one.what}</td><td><code>{_escaped(one.name)}</code></td>"
            f"<td>{one.step}</td><td>{'ok' if one.ok else '<b>wrong</b>'}</td></tr>"
            for one in self.comparisons[:40]
        )
        head, *rest = str(self).splitlines()
        culprit = f"<pre>{_escaped(str(self.culprit))}</pre>" if self.culprit else ""
        return (
            f"<p><b>{_escaped(head)}</b><br>{_escaped(rest[0])}</p>{culprit}<table><tr><th>error</th><th></th>"
            f"<th>tensor</th><th>step</th><th></th></tr>{rows}</table>"
        )


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


@dataclass(frozen=True)
class VerifySubject:
    """What is verified: the module and its loss, and the program that was compiled from it with the values of all its
    tensors. ``outputs``: what computes the model's outputs, or why nothing does."""

    model: nn.Module
    loss_fn: LossFn | None
    program: DistributedProgram
    outputs: DistributedProgram | str
    tensors: Mapping[str, Tensor]
    seed: int
    device: torch.device


def verify_program(
    subject: VerifySubject, batch: Any, steps: int, limit: float | None = None, unsplit: VerifySubject | None = None
) -> VerifyReport:
    """Train ``steps`` steps on both sides from equal weights and compare everything. Nothing of the user's changes.

    ``unsplit``: one rank of a precision that is not the model's own. Then the other side is the model in float64, and
    the limit is ``SLACK`` times how far this rank is from it: two programs that round as often, in another order, are
    about as far (on average over many elements; the largest difference of a few may be larger)."""
    start = time.perf_counter()
    users = objects_kept({"": subject.model, "loss_fn": subject.loss_fn})  # a copy shares closures with the module
    with random_numbers_kept(subject.tensors.values()), users:
        own = {} if unsplit is None or limit is not None else _distances(unsplit, batch, steps)
        return _compare(subject, batch, steps, Tolerances(limit, own), start, exact=unsplit is not None)


@dataclass(frozen=True)
class Tolerances:
    """Which relative error counts as equal: ``given``, or SLACK times ``own`` by (what, step), or what a dtype
    allows (always for buffers, which may be whole numbers)."""

    given: float | None
    own: Mapping[tuple[str, int], float]

    def __call__(self, what: str, step: int, dtype: torch.dtype) -> float:
        if self.given is not None:
            return self.given
        if what == "buffer" or not self.own:  # one rank that leaves a buffer as it was is as wrong as several
            return LIMITS[dtype]
        return SLACK * self.own[what, step]


def _distances(unsplit: VerifySubject, batch: Any, steps: int) -> dict[tuple[str, int], float]:
    report = _compare(unsplit, batch, steps, Tolerances(float("inf"), {}), 0.0, exact=True)
    precision = unsplit.program.precision
    # one number may be nearer by chance than one rounding; and one rank has no sums over ranks that could be rounded
    least = torch.finfo(precision.compute or torch.float32).eps / 2
    least = LIMITS[torch.bfloat16] / SLACK if precision.reduce is torch.bfloat16 else least
    found: dict[tuple[str, int], float] = {}
    for one in report.comparisons:
        key = one.what, one.step
        found[key] = max(found.get(key, least), one.error)
    return found


def _compare(
    subject: VerifySubject, batch: Any, steps: int, bounds: Tolerances, start: float, *, exact: bool
) -> VerifyReport:
    batch = pytree.tree_map(lambda x: x.to(subject.device) if isinstance(x, Tensor) else x, batch)
    module = ModuleTraining(subject.model, subject.loss_fn, subject.device, exact=exact)
    tensors = {name: x.detach().clone() for name, x in subject.tensors.items()}
    program = subject.program
    backend = LocalBackend(program.mesh, program, tensors, subject.device)
    optimizer = sgd(backend.parameters.values())
    parameters = next((p.dtype for p in subject.model.parameters() if p.is_floating_point()), torch.float32)
    dtype = coarsest(program)
    found, notes = _outputs(subject, module, backend, batch, lambda what: bounds(what, 0, dtype))
    if exact:
        notes += [f"the program computes some values in {_name(dtype)}; both sides are compared in float64"]
    elif dtype is not parameters:
        notes += [f"the model itself computes some values in {_name(dtype)}"]
    own = _OwnErrors(subject, batch, steps) if bounds.given is None and not exact else None
    culprit = None
    leaves, buffers, left = _tensors(batch), module.buffers(), list[Comparison]()
    for step in range(steps):
        optimizer.zero_grad()
        how = Run(train=True, seed=subject.seed, step=step, check_finite=False)
        was = swap_buffers(program, backend)
        (loss, *_) = backend.run(program, leaves, how)
        forwards = 1
        while backend.scaler.skipped:
            (loss, *_), forwards = backend.run(program, leaves, how), forwards + 1
        theirs = module.step(_batches(subject, batch, step), forwards)
        found.append(Comparison("loss", "", step, differs(loss, theirs.loss), bounds("loss", step, dtype)))
        pairs = {n: (_whole(backend.parameters[n].grad, x), x) for n, x in theirs.gradients.items() if n in tensors}
        found += _compared("gradient", pairs, step, bounds("gradient", step, dtype))
        found = found if own is None else own.judged(found)
        if culprit is None and not all(one.ok for one in found):
            kept = {name: p.grad for name, p in backend.parameters.items()}
            now = swap_buffers(program, backend, was)
            culprit = localize(program, backend, batch, how, LIMITS[dtype] if bounds.given is None else bounds.given)
            swap_buffers(program, backend, now)
            for name, p in backend.parameters.items():
                p.grad = kept[name]
        optimizer.step()
        pairs = {n: (_whole(backend.parameters[n], x), x) for n, x in theirs.parameters.items() if n in tensors}
        found += _compared("parameter", pairs, step, bounds("parameter", step, dtype))
        buffers |= {name: as_float64(backend.tensors[name]) for name in program.captured.changed}
        for real in (True, False):  # a counter may be large, and says nothing of what an average may differ by
            of = {n: x for n, x in theirs.buffers.items() if n in buffers and module.real(n) is real}
            pairs = {n: (buffers[n], x) for n, x in of.items()}
            left += _compared("buffer", pairs, step, bounds("buffer", step, dtype))
    found = found + left if own is None else own.judged(found + left)
    found.sort(key=lambda one: (one.ok, -one.error))
    return VerifyReport(
        repr(program.mesh),
        program.mesh.size,
        _name(parameters),
        steps,
        time.perf_counter() - start,
        tuple(found),
        culprit,
        tuple(notes),
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _outputs(
    subject: VerifySubject,
    module: ModuleTraining,
    backend: LocalBackend,
    batch: Any,
    limit: Callable[[str], float],
) -> tuple[list[Comparison], list[str]]:
    """The model's outputs (logits, say) in evaluation mode."""
    if isinstance(subject.outputs, str):
        return [], [f"outputs were not compared: {subject.outputs}"]
    inputs = model_inputs(batch, subject.loss_fn)
    asked, how = rebuilt(module.inputs(inputs)), Run()
    ours = backend.run(subject.outputs, _tensors(inputs), how)
    masks = _masks(subject.outputs, how.seed, how.step)
    with failing("evaluation"), evaluating(module.model), in_python(), masks:
        theirs = _tensors(module.model(**asked) if isinstance(asked, dict) else module.model(*asked))
    if len(ours) != len(theirs):
        return [], [f"outputs were not compared: {len(ours)} against {len(theirs)} tensors"]
    pairs = zip(ours, theirs, strict=True)
    return [Comparison("output", str(i), 0, differs(a, b), limit("output")) for i, (a, b) in enumerate(pairs)], []


@dataclass(frozen=True)
class _OwnErrors:
    """What rounding does to the module itself, measured when something seems wrong: then a tensor may differ by
    ``ROUNDINGS`` times that. Where the loss itself differs in float64, this is not rounding, and says nothing."""

    subject: VerifySubject
    batch: Any
    steps: int

    @cached_property
    def errors(self) -> Mapping[tuple[str, str, int], float]:
        subject = self.subject
        steps = [_batches(subject, self.batch, step) for step in range(self.steps)]
        with contextlib.suppress(CompileError):  # no module must run in float64
            found = own_errors(subject.model, subject.loss_fn, subject.device, steps)
            if all(found["loss", "", step] <= LIMITS[torch.float32] for step in range(self.steps)):
                return found
        return {}

    def judged(self, found: list[Comparison]) -> list[Comparison]:
        """The same comparisons with these limits."""
        if all(one.ok for one in found):
            return found
        own = {key: min(ROUNDINGS * error, MOST) for key, error in self.errors.items()}
        return [replace(one, limit=max(one.limit, own.get((one.what, one.name, one.step), 0.0))) for one in found]


def _batches(subject: VerifySubject, batch: Any, step: int) -> list[tuple[Any, Numbers]]:
    """The batches of a step, each with the numbers that it draws: as a step of its own would."""
    own = batches_of(subject.program, batch)
    return [(rows, partial(_masks, subject.program, subject.seed, step * len(own) + i)) for i, rows in enumerate(own)]


def _masks(program: DistributedProgram, seed: int, step: int) -> contextlib.AbstractContextManager[None]:
    """The masks of a program, if it draws any."""
    draws = any(node.target in DRAWS for node in program.source.graph.nodes)
    return same_numbers(seed, step) if draws else contextlib.nullcontext()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def coarsest(program: DistributedProgram) -> torch.dtype:
    """The least precise dtype in which the model computes a value that a gradient reaches."""
    return coarsest_of(program.source.local.staged.sharded.program.graph)


def coarsest_of(graph: fx.Graph) -> torch.dtype:
    """The same, of a graph."""
    used = {v.dtype for n in graph.nodes if n.op != "output" and needs_grad(n) for v in values(n) if v is not None}
    return max((d for d in used if d in LIMITS), key=lambda d: LIMITS[d], default=torch.float32)


def _compared(what: str, pairs: Mapping[str, tuple[Tensor, Tensor]], step: int, limit: float) -> list[Comparison]:
    floor = FLOOR * largest([expected for _, expected in pairs.values()])
    return [Comparison(what, name, step, differs(a, b, floor), limit) for name, (a, b) in pairs.items()]


def _whole(x: Any, like: Tensor) -> Tensor:
    return or_zeros(None if x is None else x.full_tensor().detach().to(like.device), like)
