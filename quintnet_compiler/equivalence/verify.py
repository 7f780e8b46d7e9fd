"""Compare a compiled program, all of its ranks in this process, with the user's module."""

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
from ..ops.catalog import op_spec
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
ROUNDINGS = 10.0  # a tensor may differ by this multiple of the error that rounding makes in the module itself
MAX_ROUNDING_ERROR = 1e-2  # ... but by no more than this


@dataclass(frozen=True)
class Comparison:
    """A tensor of both sides.

    ``error`` is relative to its largest element, or to 1e-3 of that of all gradients, or parameters, if that is more.
    """

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
        """Return whether everything is equal, up to the limits."""
        return all(comparison.ok for comparison in self.comparisons)

    @property
    def worst(self) -> Comparison:
        """Return the comparison with the largest error; if some exceed their limits, among these."""
        return self.comparisons[0]

    def to_json(self) -> str:
        """Return all comparisons as JSON."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        wrong = [comparison for comparison in self.comparisons if not comparison.ok]
        verdict = "equal" if self.ok else f"NOT EQUAL in {len(wrong)} of {len(self.comparisons)} tensors"
        head = f"{self.mesh}, {self.ranks} ranks against the unsplit model: {verdict}"
        lines = [head, f"{self.dtype}, {self.steps} steps, {self.seconds:.1f} s; relative errors, worst first:"]
        shown = (wrong or list(self.comparisons))[:12]
        lines += [f"  {c.error:8.1e}  (limit {c.limit:.0e})  {c.what:<9} {c.name}, step {c.step}" for c in shown]
        hidden = len(self.comparisons) - len(shown)
        lines += [f"  and {hidden} more" if hidden else ""]
        lines += [f"note: {note}" for note in self.notes]
        lines += [str(self.culprit)] if self.culprit else []
        return "\n".join(line for line in lines if line)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{c.error:.1e}</td><td>{c.what}</td><td><code>{_escaped(c.name)}</code></td>"
            f"<td>{c.step}</td><td>{'ok' if c.ok else '<b>wrong</b>'}</td></tr>"
            for c in self.comparisons[:40]
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
    """A module and loss, the program, all tensors, and a program for outputs (or the reason why there is none)."""

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

    ``unsplit``: one rank, if the precision is not the model's own. Then the other side is the model in float64, and the
    limit is ``SLACK`` times the error of this rank: two programs that round equally often, in another order, have
    about the same error (on average over many elements; the largest difference of a few may be larger).
    """
    start = time.perf_counter()
    users = objects_kept({"": subject.model, "loss_fn": subject.loss_fn})  # a copy shares closures with the module
    with random_numbers_kept(subject.tensors.values()), users:
        own = {} if unsplit is None or limit is not None else _distances(unsplit, batch, steps)
        return _compare(subject, batch, steps, Tolerances(limit, own), start, exact=unsplit is not None)


@dataclass(frozen=True)
class Tolerances:
    """The relative errors that count as equal.

    They are ``given``, or SLACK times ``own`` by (what, step), or those of a dtype (always for buffers, which may be
    integers).
    """

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
    distances: dict[tuple[str, int], float] = {}
    for comparison in report.comparisons:
        key = comparison.what, comparison.step
        distances[key] = max(distances.get(key, least), comparison.error)
    return distances


def _compare(
    subject: VerifySubject, batch: Any, steps: int, bounds: Tolerances, start: float, *, exact: bool
) -> VerifyReport:
    """Train both sides, and compare outputs, losses, gradients, parameters and buffers."""
    sides = _BothSides(subject, batch, steps, bounds, exact=exact)
    notes = [*sides.compare_outputs(), *sides.dtype_notes()]
    for step in range(steps):
        sides.compare_step(step)
    comparisons = sides.judged(sides.comparisons + sides.buffer_comparisons)
    comparisons.sort(key=lambda comparison: (comparison.ok, -comparison.error))
    return VerifyReport(
        repr(subject.program.mesh),
        subject.program.mesh.size,
        _name(sides.parameter_dtype),
        steps,
        time.perf_counter() - start,
        tuple(comparisons),
        sides.culprit,
        tuple(notes),
    )


class _BothSides:
    """The module in training, and all ranks of its program in this process.

    ``exact``: compare in float64. ``rounding``: errors of rounding in the module itself; None if they do not count.
    """

    def __init__(self, subject: VerifySubject, batch: Any, steps: int, bounds: Tolerances, *, exact: bool) -> None:
        self.subject, self.program, self.bounds, self.exact = subject, subject.program, bounds, exact
        self.batch = pytree.tree_map(lambda x: x.to(subject.device) if isinstance(x, Tensor) else x, batch)
        self.module = ModuleTraining(subject.model, subject.loss_fn, subject.device, exact=exact)
        tensors = {name: x.detach().clone() for name, x in subject.tensors.items()}
        self.names = frozenset(tensors)
        self.backend = LocalBackend(self.program.mesh, self.program, tensors, subject.device)
        self.optimizer = sgd(self.backend.parameters.values())
        self.dtype = coarsest(self.program)
        dtypes = (p.dtype for p in subject.model.parameters() if p.is_floating_point())
        self.parameter_dtype = next(dtypes, torch.float32)
        judges = bounds.given is None and not exact
        self.rounding = _OwnErrors(subject, self.batch, steps) if judges else None
        self.comparisons: list[Comparison] = []
        self.buffer_comparisons: list[Comparison] = []
        self.buffers = self.module.buffers()
        self.culprit: Culprit | None = None

    def dtype_notes(self) -> list[str]:
        """Return a note if some values have another dtype than parameters."""
        if self.exact:
            return [f"the program computes some values in {_name(self.dtype)}; both sides are compared in float64"]
        if self.dtype is not self.parameter_dtype:
            return [f"the model itself computes some values in {_name(self.dtype)}"]
        return []

    def compare_outputs(self) -> list[str]:
        """Compare outputs in evaluation mode; return notes."""
        limit = partial(self._limit, step=0)
        comparisons, notes = _outputs(self.subject, self.module, self.backend, self.batch, limit)
        self.comparisons += comparisons
        return notes

    def compare_step(self, step: int) -> None:
        """Train one step on both sides, and compare."""
        self.optimizer.zero_grad()
        run = Run(train=True, seed=self.subject.seed, step=step, check_finite=False)
        old_buffers = swap_buffers(self.program, self.backend)
        loss, forwards = self._run(run)
        expected = self.module.step(_batches(self.subject, self.batch, step), forwards)
        error = differs(loss, expected.loss)
        self.comparisons.append(Comparison("loss", "", step, error, self._limit("loss", step)))
        gradients = {name: parameter.grad for name, parameter in self.backend.parameters.items()}
        self._compare_tensors("gradient", gradients, expected.gradients, step)
        self.comparisons = self.judged(self.comparisons)
        if self.culprit is None and not all(comparison.ok for comparison in self.comparisons):
            self._localize(run, old_buffers)
        self.optimizer.step()
        self._compare_tensors("parameter", self.backend.parameters, expected.parameters, step)
        self._compare_buffers(expected.buffers, step)

    def judged(self, comparisons: list[Comparison]) -> list[Comparison]:
        """Return the comparisons with limits that allow for rounding in the module itself."""
        return comparisons if self.rounding is None else self.rounding.judged(comparisons)

    def _limit(self, what: str, step: int) -> float:
        return self.bounds(what, step, self.dtype)

    def _run(self, run: Run) -> tuple[Any, int]:
        """Run the program's step until its gradients are finite; return the loss and the number of forwards."""
        leaves, forwards = _tensors(self.batch), 1
        (loss, *_) = self.backend.run(self.program, leaves, run)
        while self.backend.scaler.skipped:
            (loss, *_), forwards = self.backend.run(self.program, leaves, run), forwards + 1
        return loss, forwards

    def _compare_tensors(
        self, what: str, tensors: Mapping[str, Any], expected: Mapping[str, Tensor], step: int
    ) -> None:
        pairs = {name: (_whole(tensors[name], x), x) for name, x in expected.items() if name in self.names}
        self.comparisons += _compared(what, pairs, step, self._limit(what, step))

    def _compare_buffers(self, expected: Mapping[str, Tensor], step: int) -> None:
        """Compare buffers. Counters apart: they may be large, and say nothing of the floor of averages."""
        changed = self.program.captured.changed
        self.buffers |= {name: as_float64(self.backend.tensors[name]) for name in changed}
        for real in (True, False):
            names = [name for name in expected if name in self.buffers and self.module.real(name) is real]
            pairs = {name: (self.buffers[name], expected[name]) for name in names}
            self.buffer_comparisons += _compared("buffer", pairs, step, self._limit("buffer", step))

    def _localize(self, run: Run, old_buffers: Mapping[str, Tensor]) -> None:
        """Find the first wrong operator by running the step again, and restore gradients and buffers."""
        gradients = {name: parameter.grad for name, parameter in self.backend.parameters.items()}
        new_buffers = swap_buffers(self.program, self.backend, old_buffers)
        limit = LIMITS[self.dtype] if self.bounds.given is None else self.bounds.given
        self.culprit = localize(self.program, self.backend, self.batch, run, limit)
        swap_buffers(self.program, self.backend, new_buffers)
        for name, parameter in self.backend.parameters.items():
            parameter.grad = gradients[name]


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _outputs(
    subject: VerifySubject,
    module: ModuleTraining,
    backend: LocalBackend,
    batch: Any,
    limit: Callable[[str], float],
) -> tuple[list[Comparison], list[str]]:
    """Compare the model's outputs (logits, for example) in evaluation mode; return comparisons and notes."""
    if isinstance(subject.outputs, str):
        return [], [f"outputs were not compared: {subject.outputs}"]
    inputs = model_inputs(batch, subject.loss_fn)
    module_inputs, run = rebuilt(module.inputs(inputs)), Run()
    ours = backend.run(subject.outputs, _tensors(inputs), run)
    masks = _masks(subject.outputs, run.seed, run.step)
    with failing("evaluation"), evaluating(module.model), in_python(), masks:
        theirs = _tensors(
            module.model(**module_inputs) if isinstance(module_inputs, dict) else module.model(*module_inputs)
        )
    if len(ours) != len(theirs):
        return [], [f"outputs were not compared: {len(ours)} against {len(theirs)} tensors"]
    pairs = zip(ours, theirs, strict=True)
    return [Comparison("output", str(i), 0, differs(a, b), limit("output")) for i, (a, b) in enumerate(pairs)], []


@dataclass(frozen=True)
class _OwnErrors:
    """The errors of rounding in the module itself, measured when a comparison fails.

    Then a tensor may differ by ``ROUNDINGS`` times its error. If the loss itself differs in float64, this is not
    rounding, and allows nothing.
    """

    subject: VerifySubject
    batch: Any
    steps: int

    @cached_property
    def errors(self) -> Mapping[tuple[str, str, int], float]:
        subject = self.subject
        steps = [_batches(subject, self.batch, step) for step in range(self.steps)]
        with contextlib.suppress(CompileError):  # no module must run in float64
            errors = own_errors(subject.model, subject.loss_fn, subject.device, steps)
            if all(errors["loss", "", step] <= LIMITS[torch.float32] for step in range(self.steps)):
                return errors
        return {}

    def judged(self, comparisons: list[Comparison]) -> list[Comparison]:
        """Return the comparisons with limits of at least ``ROUNDINGS`` times these errors."""
        if all(comparison.ok for comparison in comparisons):
            return comparisons
        limits = {key: min(ROUNDINGS * error, MAX_ROUNDING_ERROR) for key, error in self.errors.items()}
        return [replace(c, limit=max(c.limit, limits.get((c.what, c.name, c.step), 0.0))) for c in comparisons]


def _batches(subject: VerifySubject, batch: Any, step: int) -> list[tuple[Any, Numbers]]:
    """Return the batches of a step, each with the random numbers that it would draw as a step of its own."""
    parts = batches_of(subject.program, batch)
    return [
        (rows, partial(_masks, subject.program, subject.seed, step * len(parts) + i)) for i, rows in enumerate(parts)
    ]


def _masks(program: DistributedProgram, seed: int, step: int) -> contextlib.AbstractContextManager[None]:
    """Return a context with the random masks of a program, if it draws any."""
    draws = any(op_spec(node).random for node in program.source.graph.nodes)
    return same_numbers(seed, step) if draws else contextlib.nullcontext()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def coarsest(program: DistributedProgram) -> torch.dtype:
    """Return the least precise dtype in which the model computes a value that a gradient reaches."""
    return coarsest_of(program.source.local.staged.sharded.program.graph)


def coarsest_of(graph: fx.Graph) -> torch.dtype:
    """Return the least precise dtype of the values of a graph that a gradient reaches."""
    used = {v.dtype for n in graph.nodes if n.op != "output" and needs_grad(n) for v in values(n) if v is not None}
    return max((d for d in used if d in LIMITS), key=lambda d: LIMITS[d], default=torch.float32)


def _compared(what: str, pairs: Mapping[str, tuple[Tensor, Tensor]], step: int, limit: float) -> list[Comparison]:
    floor = FLOOR * largest([expected for _, expected in pairs.values()])
    return [Comparison(what, name, step, differs(a, b, floor), limit) for name, (a, b) in pairs.items()]


def _whole(x: Any, like: Tensor) -> Tensor:
    return or_zeros(None if x is None else x.full_tensor().detach().to(like.device), like)
