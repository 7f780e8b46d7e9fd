"""The programs of one task: training, evaluation, outputs, each for any number of rows."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Hashable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..capture.capture import capture
from ..capture.modes import modes_left, modes_of_a_trace
from ..capture.versions import CapturedVersions, Version
from ..compat.torch import pytree
from ..core.errors import CompileError, CompileWarning, InputError
from ..core.sharding import AxisType
from ..equivalence.module_check import ModuleCheck
from ..equivalence.module_step import Owner
from ..equivalence.verdict import Verdict
from ..ir.batch_form import ROWS, BatchForm, FlatBatch, RowsElsewhere, plain_batch
from ..ir.containers import model_inputs
from ..ir.distributed_program import DistributedProgram
from ..ir.program import Captured
from ..runtime.backends.split_parameters import home_of
from ..runtime.launch.world import has_process, many
from ..runtime.state.module_parameters import Slots
from .any_length import LengthPrograms
from .compiler import Compiled, Runner, compile_program, follow_program
from .pipeline import Request
from .refusals import changed_how, check_divides, no_parameter
from .shared_parameters import join_program
from .task import Task, modules_of
from .unread_state import UnreadState
from .whole_loss.split import in_parts

if TYPE_CHECKING:
    from .program_cache import ProgramCache

Held = Mapping[tuple[str, str], AxisType]  # by (cache, axis)
MAX_SILENT_CAPTURES = 8  # of a kind; the next one is a warning


class Programs:
    """The programs of a task, compiled when they are first asked for.

    The primary one (see :class:`.task.Task`) decides where parameters live, and the others follow it.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.captured: dict[str, Captured] = {}
        self._versions = CapturedVersions()
        self._unread = UnreadState()
        self._brought: nn.Module | None = None  # what the loss function uses and the model does not have
        self._proven: set[Hashable] = set()
        self._rows_at: dict[pytree.TreeSpec, int] = {}  # which leaf has the rows, of some structures of batches
        self._any_length: WeakKeyDictionary[Version, dict[int, LengthPrograms]] = WeakKeyDictionary()
        self._primary: Compiled | None = None
        self._parameters: Mapping[str, Tensor] = {}
        self.slots: Slots | None = None  # of the parameters of the program that leads
        self.verdict = Verdict()

    @property
    def led(self) -> bool:
        """Return whether the primary program is compiled."""
        return self._primary is not None

    @property
    def primary(self) -> Compiled:
        """Return the primary program.

        Raises:
            CompileError: QN102 if there is none yet.
        """
        if self._primary is None:
            raise CompileError(
                "QN102",
                "the program is not compiled yet, because it has not seen a batch",
                fix="pass batch= to quintnet.compile, call prepare(batch), or run a step",
            )
        return self._primary

    def find_program(self, kind: str, batch: FlatBatch, size: int) -> DistributedProgram | None:
        """Return the program for ``size`` rows of batches like this one, if it exists and the module is as it was."""
        fits = self._versions.look(kind, batch, size)
        program = None if fits is None else fits[0].get(fits[1])
        if fits is not None and program is not None:
            self.captured[kind] = fits[0].captured
        return program

    def flat(self, batch: Any) -> FlatBatch:
        """Return the leaves of a batch, with its number of rows."""
        return FlatBatch.flatten(batch, self._rows_at)

    def get(self, kind: str, batch: Any, ways: int = 1) -> DistributedProgram:
        """Return the program for batches like this one.

        Args:
            kind: ``"train"``, ``"evaluate"`` (both give the loss), ``"outputs"``, or ``"parts"``: the loss in
                evaluation mode, and what it is computed from, see :mod:`.whole_loss`.
            ways: how many data ranks have a batch of their own.

        Raises:
            CompileError: whatever makes it impossible; QN102 for outputs of what is to be trained, and was not yet.
            InputError: QN102 if there are no rows, QN106 if they do not divide.
        """
        try:
            return self._get(kind, batch, ways * self.flat(batch).rows)
        except RowsElsewhere as elsewhere:
            self._rows_at[elsewhere.structure] = elsewhere.leaf
            return self._get(kind, batch, ways * self.flat(batch).rows)

    def _get(self, kind: str, batch: Any, size: int) -> DistributedProgram:
        if size == 0:
            raise InputError("QN102", "the batch has no rows", fix="leave empty batches out")
        program = self.find_program(kind, self.flat(batch), size)
        if program is not None:
            return program
        with modes_left():
            return self._new(kind, batch, size)

    def _new(self, kind: str, batch: Any, size: int) -> DistributedProgram:
        plan = self.task.plan
        training = kind == "train"
        if training and plan.batch_statistics == "microbatch":  # each microbatch is a batch of its own
            check_divides(self.task.mesh, plan.microbatches, size)
        if self._primary is None:
            self._lead(batch, size) if kind == self.task.primary_kind else self._lead_for(kind, batch, size)
            if kind == self.task.primary_kind:
                return self.primary.program
        version = self._capture(kind, batch, size)
        sizes = version.sizes(self.flat(batch), size) or {}
        if (program := version.get(sizes)) is not None:  # what changed made no difference
            return program
        program = self._further_sizes(kind, version, sizes, training=training)
        self._compare(kind, version.captured, batch, first=False)
        self._versions.record(kind, version, sizes, program)
        return program

    def _further_sizes(
        self, kind: str, version: Version, sizes: Mapping[str, int], *, training: bool
    ) -> DistributedProgram:
        """Return the program of further sizes; one compilation serves all lengths that it can be shown to serve."""
        size = sizes[ROWS]
        request = self._request(size, lengths=sizes, similar=self.latest(kind))
        if self.task.cache is not None or not version.captured.form.has_lengths:
            return self._followed(version.captured, request, training=training)
        programs = self._any_length.setdefault(version, {}).setdefault(size, LengthPrograms())
        program = programs.program_for(sizes)
        if program is None:
            program = self._followed(version.captured, request, training=training)
            programs.note_compiled(version.captured, request, self.primary, program, training=training)
        return program

    def changed(self, kind: str) -> str:
        """Return what of the module differs from the first program's capture of this kind; "" if nothing."""
        return self._versions.changes_since_capture(kind)

    def latest(self, kind: str) -> DistributedProgram | None:
        """Return the program of this kind that was asked for last."""
        return self._versions.latest(kind)

    def program_for_call(
        self,
        captured: Captured,
        size: int,
        held: Held = MappingProxyType({}),
        decisions: Mapping[str, Any] = MappingProxyType({}),
    ) -> DistributedProgram:
        """Return a program of another call of the model, on the parameters where the primary program has them.

        Args:
            captured: the call.
            size: the number of its rows.
            held: by (cache, axis), the type that caches have already.
            decisions: what its plan decides otherwise.
        """
        request = self._request(size, held)
        plan = request.plan.changed(decisions)
        return self._followed(captured, replace(request, plan=plan), training=False)

    def _request(
        self,
        size: int,
        held: Held = MappingProxyType({}),
        *,
        lengths: Mapping[str, int] = MappingProxyType({}),
        similar: DistributedProgram | None = None,
    ) -> Request:
        """Return the request of a program that follows; ``similar``: a program of the same kind."""
        task = self.task
        return Request(
            task.mesh,
            self.primary.plan,
            size,
            task.device,
            task.rules,
            held,
            task.absent,
            lengths,
            similar,
            task.fused,
            self._proven,
        )

    def _followed(self, captured: Captured, request: Request, *, training: bool) -> DistributedProgram:
        followed = follow_program if (cache := self._cache()) is None else cache.followed
        with modes_of_a_trace():
            return followed(captured, request, self.primary, Runner(), training=training)

    def _cache(self) -> ProgramCache | None:
        task = self.task
        if task.cache is None:
            return None
        from .cache_folder import CacheFolder
        from .program_cache import ProgramCache

        together = many() and has_process(task.mesh, task.device)
        return ProgramCache(CacheFolder(task.cache), together, type(task.model).__name__)

    def forgotten(self) -> list[DistributedProgram]:
        """Return the programs that will not run again, each once; never the primary one."""
        programs = self._versions.forgotten()
        return [program for program in programs if program is not self.primary.program] if programs else []

    def _lead_for(self, kind: str, batch: Any, size: int) -> None:
        """Compile the primary program, although another kind came first: training decides where parameters live."""
        if not self.task.training:
            batch = model_inputs(batch, self.task.loss_fn)
        elif kind == "outputs":
            raise CompileError(
                "QN102",
                "the model's outputs were asked for before a training batch was seen",
                fix="pass batch= to quintnet.compile, or training=False",
            )
        self._lead(batch, size)

    def _lead(self, batch: Any, size: int) -> None:
        task, home = self.task, home_of(self.task.model)
        version = self._capture(task.primary_kind, batch, size)
        with modes_of_a_trace():
            if home is None:
                request = Request(
                    task.mesh,
                    task.plan,
                    size,
                    task.device,
                    task.rules,
                    absent=task.absent,
                    fused=task.fused,
                    proven=self._proven,
                )
                compiled = compile_program if (cache := self._cache()) is None else cache.compiled
                primary = compiled(version.captured, request, Runner(), training=task.training)
            else:
                primary = join_program(version.captured, task, size, home)
        self._compare(task.primary_kind, version.captured, batch, first=True)
        self._primary = primary
        self._parameters = version.captured.tensors
        self._brought = version.captured.brought
        modules = modules_of(task) if self._brought is None else {**modules_of(task), "loss_fn": self._brought}
        self.slots = Slots(modules, primary.program.state)
        self._versions.record(task.primary_kind, version, version.sizes(self.flat(batch), size) or {}, primary.program)

    def _capture(self, kind: str, batch: Any, size: int) -> Version:
        fits = self._versions.look(kind, self.flat(batch), size)
        version = self._further(kind, batch) if fits is None else fits[0]
        self.captured[kind] = version.captured
        return version

    def _further(self, kind: str, batch: Any) -> Version:
        """Return a capture for batches like this one.

        Where there is one that differs in lengths alone, the new one is for all lengths that the model's code treats
        alike, if there is such a capture.

        Raises:
            CompileError: see :func:`capture`; also says in what the batch differs from the first one.
        """
        flat = self.flat(batch)
        if (same := self._of_unread_state(kind, batch)) is not None:
            return same
        other = self._versions.alike(kind, flat)
        if other is not None:
            with contextlib.suppress(CompileError):
                captured = self._traced(kind, batch, other[1])
                if captured.form.varying_sizes(flat) is not None:
                    return self._versions.add(kind, captured)
        first = self._versions.first_capture(kind)
        like = first or self._versions.first_capture(self.task.primary_kind)
        form = BatchForm.of_batch(batch, flat.rows, None if like is None else like.form)
        difference = "" if first is None else _difference(form, first, flat.rows)
        try:
            captured = self._traced(kind, batch, form)
        except RowsElsewhere:
            raise
        except CompileError as error:
            self._refuse_new_parameters(error)
            text = f"{error.message}\n  {difference}" if difference else error.message
            raise CompileError(error.code, text, where=error.where, fix=error.fix) from error
        if (same := self._versions.equal_version(kind, captured)) is not None:
            same.replace_capture(captured)
            return same
        if other is not None:
            other[0].fixed = True
        if difference and self._versions.count(kind) == MAX_SILENT_CAPTURES:
            text = f"forward is traced for the {MAX_SILENT_CAPTURES + 1}th time; for this batch, because {difference}"
            hint = "pass numbers that change as tensors, and pad lengths with quintnet.pad_to_bucket"
            warnings.warn(CompileWarning(f"{text}. To trace less often, {hint}."), stacklevel=2)
        return self._versions.add(kind, captured)

    def _of_unread_state(self, kind: str, batch: Any) -> Version | None:
        """Return a version for batches like this one, if all that changed since is shown not to be read."""
        version = self._versions.of_other_containers(kind, self.flat(batch))
        if version is None:
            return None
        form = version.captured.form
        captured = self._unread.without(version.captured, lambda: self._traced(kind, batch, form))
        if captured is None:
            return None
        version.replace_capture(captured)
        return version

    def _traced(self, kind: str, batch: Any, form: BatchForm) -> Captured:
        task = self.task
        want = "outputs" if kind == "outputs" else "loss"
        captured = capture(
            task.model,
            batch,
            task.loss_fn,
            want=want,
            training=kind == "train",
            trained=task.training,
            form=form,
            brought=self._brought,
        )
        if self._primary is not None:
            self._refuse_other_parameters(captured)
        return in_parts(captured) if kind == "parts" else captured

    def _refuse_new_parameters(self, error: CompileError) -> None:
        """Raise QN112 from ``error``, of a trace, if the modules have parameters that the primary program does not."""
        if self._primary is None:
            return
        current = self.current_tensors(self._parameters)
        own = set(map(id, current.values()))
        for label, module in modules_of(self.task).items():
            for path, x in module.named_parameters():
                if id(x) not in own:
                    name = f"{label}.{path}".lstrip(".")
                    raise no_parameter(name, changed_how(name, current)) from error

    def _refuse_other_parameters(self, captured: Captured) -> None:
        """Raise QN112 if a parameter is not in the place where the primary program has it."""
        current = self.current_tensors(self._parameters)
        for name, x in captured.tensors.items():
            if isinstance(x, nn.Parameter) and current.get(name) is not x:
                raise no_parameter(name, changed_how(name, current))

    def current_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the module has now in the places of these captured tensors."""
        current = {} if self.slots is None else self.slots.current_tensors
        return {name: current.get(name, x) for name, x in tensors.items()}

    def captured_parts(self, batch: Any) -> Captured:
        """Return the loss of batches like this one in parts, see :mod:`.whole_loss`.

        Raises:
            CompileError: QN108 if it has none.
        """
        return self._capture("parts", batch, self.flat(batch).rows).captured

    def _compare(self, kind: str, captured: Captured, batch: Any, *, first: bool) -> None:
        """Compare what was captured with the module itself, if the task asks for it."""
        task = self.task
        if kind == "parts" or task.check == "off" or (task.check == "first" and not first):
            return
        self.verdict.judge(self._check(kind, captured, batch).difference)

    def difference(self, kind: str, batch: Any) -> CompileError | None:
        """Return what the module does otherwise than its capture; None if nothing."""
        return self._check(kind, self._capture(kind, batch, self.flat(batch).rows).captured, batch).difference()

    def _check(self, kind: str, captured: Captured, batch: Any) -> ModuleCheck:
        task = self.task
        want = "outputs" if kind == "outputs" else "loss"
        owner = Owner(task.model, task.loss_fn, self.current_tensors(captured.tensors), want, kind == "train")
        return ModuleCheck(owner, captured, plain_batch(batch), task.rules, task.plan.seed, task.device)


def _difference(form: BatchForm, first: Captured, rows: int | None) -> str:
    """Return in what batches of this form and number of rows differ from those of the first capture."""
    difference = form.difference_from(first.form)
    if first.only_rows not in (None, rows) and not difference:
        return f"the first batch had {first.only_rows} rows, and the model's code fixes their number"
    return difference
