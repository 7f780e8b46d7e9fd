"""What ``quintnet.compile`` returns: a model, ready to train on a mesh."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from ..capture.modes import refuse_modes
from ..checkpoint.lock import FolderLocks
from ..compat.torch import pytree
from ..compat.torch_hooks import share_backward_hooks
from ..core.errors import CompileError, InputError, QuintNetError, RunError
from ..core.mesh import Mesh
from ..driver.task import Task, modules_of
from ..driver.variants import Programs
from ..guards.call_attributes import without_values
from ..ir.batch_form import plain_batch
from ..ir.containers import model_inputs
from ..ir.distributed_program import DistributedProgram
from ..ir.loss_parts import LossParts
from ..ir.plan import Plan, precision_of
from ..runtime.backends.backend import Backend, refuse_unset
from ..runtime.backends.backends import open_backend
from ..runtime.backends.local import require_measure
from ..runtime.backends.split_parameters import Home, attach_split_parameters, home_of, refuse_split
from ..runtime.execute.engines import ENGINES
from ..runtime.execute.executor import Run
from ..runtime.execute.record import Recorder
from ..runtime.launch.calls import announced, collective, running
from ..runtime.launch.rank_status import MODULE_CHANGES
from ..runtime.launch.world import has_process, own_rank
from ..runtime.state.changed_state import remake
from ..runtime.state.computed_loss import SettledLoss
from ..runtime.state.module_parameters import check_fits
from ..runtime.threads.turns import Turn, in_turn, turn_of, turn_of_world
from ..weights.meta_buffers import with_buffers
from .loss_total import LossTotal
from .program_generation import ProgramGeneration

if TYPE_CHECKING:
    from ..equivalence.verify import VerifyReport, VerifySubject
    from ..simulation.timeline import Timeline

_CALLS = {"train": "a step", "evaluate": "evaluate", "parts": "evaluate", "outputs": "calling the program"}


class CompiledProgram(ProgramGeneration):
    """A model compiled for a mesh. It is captured when it is compiled with a batch, otherwise at the first step.

    Threads that run programs of one module take turns. With one process per rank, a second thread is error QN113 while
    a first one runs a program: they could come in another order on other ranks.

    ``step`` and ``evaluate`` take the global batch, on every rank. ``parameters`` are the module's own. Without an
    initialised process group, all ranks run in this process in lockstep, and parameters are whole; with one process per
    rank, they are DTensors.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._turn_here: Turn = turn_of(list(modules_of(task).values()))
        self._programs = Programs(task)
        self._backend: Backend | None = None
        self._home: Home | None = None  # who split the module's parameters: this program, or one before
        self._batch: Any = None
        self._steps = 0
        self._given: dict[Any, Any] = {}
        self._kept: dict[str, Any] = {}
        self._saving = None
        self._locks = FolderLocks()
        self._preemption = None
        self._compiling = 0.0  # seconds
        self._closed = self._interrupted = False
        self._apart: InputError | None = None  # why this rank is not in a step that the others are in

    def __reduce__(self) -> NoReturn:
        raise RunError(
            "QN113",
            "a program cannot be copied or pickled",
            fix="copy the module, whose parameters are the program's: copy.deepcopy(model), AveragedModel(model)",
        )

    # -- training

    @in_turn
    def step(self, batch: Any, *, batch_is_local: bool = False) -> Tensor:
        """Run forward and backward of one global batch and reduce gradients over ranks: then every parameter's
        ``grad`` is that of the unsplit model.

        Args:
            batch: what one step consumes: the same global batch on every rank.
            batch_is_local: ``batch`` has only this data rank's rows (what a DistributedSampler gives).

        Returns:
            The loss of the global batch, a scalar, the same on every rank.

        Raises:
            InputError: QN102 or QN106 if the batch does not fit.
            RunError: QN501 on every rank if the loss or a gradient is NaN or Inf, with the operator, the rank and the
                microbatch that made the first one. No parameter or gradient was changed. (With fp16, while the loss
                scale may be the reason: no error, and every gradient is None, so that optimizers skip the step.)
            CompileError: if this is the first step, see :func:`quintnet.compile`.
        """
        self._require_training("step")
        return self._run("train", batch, batch_is_local)[0].as_subclass(SettledLoss)

    @in_turn
    def measure(self, batch: Any, *, batch_is_local: bool = False) -> tuple[Tensor, Timeline]:
        """Run a step and measure it: the loss, and a timeline of what each rank did and waited for, the same on
        every rank. Gradients are those of :meth:`step`.

        The first steps of a program are slower than others, so run some before. With many ranks, the timeline has
        only as many whole pipelines as a picture can show.

        Raises:
            RunError: QN301 if several ranks share this process, where they take turns.
        """
        from ..simulation.measured import measured_timeline, shown_ranks

        self._require_training("measure")
        recorder = Recorder()
        loss = self._run("train", batch, batch_is_local, recorder, name="measure")[0]
        assert recorder.recorded is not None
        shown = recorder.recorded.rank in shown_ranks(self.mesh)
        texts = self._state().told(recorder.recorded.to_json() if shown else "")
        program = self._primary().program
        return loss, measured_timeline(program, [text for text in texts if text], self._task.device)

    def require_measure(self) -> None:
        """Raises: RunError QN301 if :meth:`measure` cannot measure here."""
        if not self._spread:
            require_measure(self.mesh)

    @in_turn
    def evaluate(self, batch: Any, *, batch_is_local: bool = False) -> Tensor:
        """Return the loss of one global batch with the model in evaluation mode; no gradients."""
        return self._run("evaluate", batch, batch_is_local)[0]

    def evaluate_together(self, batches: Iterable[Any]) -> Tensor:
        """Return the loss that :meth:`evaluate` gives for all these batches as if they were one, whose rows may not
        fit into memory: sums over rows are added up, and means are over all that they are over (labels that are not
        ignored, rows, elements). A scalar in float64 on the CPU, the same on every rank.

        Raises:
            CompileError: QN108, before anything runs, if the loss takes something else of all rows.
            InputError: QN102 if there are no batches, or what belongs to no row differs between them.
        """
        total = self.loss_total()
        for batch in batches:
            total.add(batch)
        return total.loss()

    def loss_total(self) -> LossTotal:
        """Return what :meth:`evaluate_together` adds batches to, for loops that do more with each batch."""
        return LossTotal(self)

    @in_turn
    def require_parts(self, batch: Any) -> None:
        """Raises: CompileError QN108 if :meth:`evaluate_together` cannot be given batches like this one."""
        self._programs.captured_parts(batch)

    @property
    def latest_batch(self) -> Any:
        """The batch that the program was compiled with, or the latest that it trained on; None if there is none."""
        return self._batch

    @in_turn
    def _evaluated_parts(self, batch: Any) -> tuple[LossParts, list[Tensor], Mapping[str, int]]:
        """Return what the loss of a batch is computed from, the loss and the values of that, and the batch's sizes."""
        results = self._run("parts", batch, False)
        captured = self._programs.captured["parts"]
        sizes = captured.form.varying_sizes(self._programs.flat(batch))
        assert captured.parts is not None and sizes is not None
        return captured.parts, results, sizes

    @in_turn
    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return outputs for global inputs, whole and the same on every rank; evaluation mode, no gradients."""
        batch = kwargs if kwargs else inputs
        tensors, captured = self._run("outputs", batch, False), self._programs.captured["outputs"]
        sizes = captured.form.varying_sizes(self._programs.flat(batch)) or {}
        return captured.output_spec.result(tensors, captured.symbols, sizes)

    # -- proof

    @collective
    def verify(
        self, batch: Any = None, *, steps: int = 2, float64: bool = False, limit: float | None = None
    ) -> VerifyReport:
        """Compare with the module itself, with all ranks in this process: loss, outputs, every gradient, and parameters
        and buffers after each optimizer step. The module, its gradients and this program's state do not change.

        Args:
            batch: what to train on; without it, the batch that the program was compiled with or saw last.
            steps: training steps (SGD with momentum).
            float64: compare copies in float64, where rounding hides nothing.
            limit: the relative error that counts as equal; by default what the dtype allows. Where the plan's precision
                is not the model's own, both are compared with the module in float64, and by default a program may be
                twice as far from it as one rank of the same precision is.

        Returns:
            A report; ``report.ok`` is whether all is equal. If not, ``report.culprit`` is the first wrong operator.

        Raises:
            CompileError: QN102 if there is no batch yet, QN604 if the module is on the meta device.
        """
        self._require_training("verify")
        self._require_device("verify")
        batch = self._batch if batch is None else plain_batch(batch)
        if batch is None:
            raise CompileError("QN102", "there is no batch to verify with", fix="pass batch= to verify")
        if self._spread:  # beside a copy of the module that is whole on each rank
            whole = CompiledProgram(self._task.for_comparison(model=self._whole_model(), plan=self.plan))
            return whole._compiled(batch)._verified(batch, steps, float64, limit)
        return self._verified(batch, steps, float64, limit)

    def _verified(self, batch: Any, steps: int, float64: bool, limit: float | None) -> VerifyReport:
        from ..equivalence.verify import verify_program

        self._refuse_meta()
        if float64:
            return self._in_float64(batch).verify(steps=steps, limit=limit)
        subject = self._subject(batch)
        low = precision_of(self.plan).rounds
        report = verify_program(subject, batch, steps, limit, self._unsplit(batch)._subject(batch) if low else None)
        if report.ok or report.culprit is not None:
            return report
        with contextlib.suppress(QuintNetError):  # ranks agree with what was traced: is that what the module does?
            difference = self._programs.difference("train", batch)
            report = report if difference is None else replace(report, notes=(*report.notes, str(difference)))
        return report

    def _whole_model(self) -> nn.Module:
        """Return a copy of the module that is whole on this rank."""
        program, backend, model = self._primary().program, self._state(), self._task.model
        refuse_unset(backend.unset, program)
        whole = backend.everywhere(program, [s.name for s in program.state.values() if s.kind == "parameter"])
        own = {name: p for name, p in model.named_parameters() if name in whole}
        twins = {id(p): nn.Parameter(whole[name], requires_grad=p.requires_grad) for name, p in own.items()}
        copied = copy.deepcopy(model, without_values({"": model}) | twins)
        for p in own.values():
            share_backward_hooks(p, twins[id(p)])
        return copied

    def _refuse_meta(self) -> None:
        empty = next((name for name, x in self._task.model.named_parameters() if x.is_meta), None)
        if empty is not None:
            raise CompileError(
                "QN604",
                f"verify compares with the module itself, and its {empty} is on the meta device",
                fix="verify a small model of the same kind, built on a real device",
            )

    def _subject(self, batch: Any) -> VerifySubject:
        from ..equivalence.verify import VerifySubject

        programs = self._programs
        program = programs.get("train", batch)
        task, tensors = self._task, programs.current_tensors(programs.captured["train"].tensors)
        try:
            inputs = model_inputs(batch, task.loss_fn)
            outputs: DistributedProgram | str = programs.get("outputs", inputs)
            tensors = {**programs.current_tensors(programs.captured["outputs"].tensors), **tensors}
        except CompileError as error:
            outputs = error.message
        return VerifySubject(task.model, task.loss_fn, program, outputs, tensors, task.plan.seed, task.device)

    def _unsplit(self, batch: Any) -> CompiledProgram:
        """One rank that computes in the same dtypes."""
        plan = self.plan
        same = Plan(precision=plan.precision, reduce_dtype=plan.reduce_dtype, seed=plan.seed)
        same = same.changed({"unknown_ops": plan.unknown_ops})
        if plan.batch_statistics == "microbatch":
            same = same.changed({"batch_statistics": "microbatch", "microbatches": plan.microbatches})
        return CompiledProgram(self._task.for_comparison(mesh=Mesh(dp=1), plan=same))._compiled(batch)

    def _in_float64(self, batch: Any) -> CompiledProgram:
        from ..equivalence.module_copy import module_copy

        plan = self.plan.changed({"precision": "model", "reduce_dtype": "parameter", "sum_dtype": "value"})
        task = self._task.for_comparison(model=module_copy(self._task.model)[0].double(), plan=plan)
        double = pytree.tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, batch)
        return CompiledProgram(task)._compiled(double)

    # -- compiling

    @in_turn
    def prepare(self, batch: Any) -> CompiledProgram:
        """Compile for batches like this one now, without running anything. With one process per rank, the module's
        parameters become this rank's shards."""
        self._compiled(batch)
        if self._spread:
            self._state()
        return self

    def _compiled(self, batch: Any) -> CompiledProgram:
        self._require_open()
        self._batch = plain_batch(batch)
        self._get(self._task.primary_kind, self._batch)
        return self

    def _get(self, kind: str, batch: Any, ways: int = 1) -> DistributedProgram:
        start = time.perf_counter()
        try:
            return self._programs.get(kind, batch, ways)
        finally:
            self._compiling += time.perf_counter() - start

    # -- how

    def _require_device(self, what: str) -> None:
        if self._task.absent is not None:
            from ..runtime.backends.absent import refuse_absent

            refuse_absent(what, self._task.absent)

    def _require_training(self, what: str) -> None:
        if not self._task.training:
            message = f"{what} was called, and the program has no backward"
            raise CompileError("QN107", message, fix="compile without training=False")

    @property
    def _spread(self) -> bool:
        """Return whether each rank is a process."""
        return has_process(self.mesh, self._task.device)

    @property
    def data_ranks(self) -> int:
        """The number of ranks that read different rows with ``batch_is_local=True``; 1 where all ranks of the mesh are
        in this process, which reads global batches."""
        return self.mesh.data_ways if self._spread else 1

    @property
    def data_rank(self) -> int:
        """The number of this process among :attr:`data_ranks`. Processes that differ along other axes alone (``tp``,
        ``pp``, ``cp``) have the same one, and read the same rows::

            DistributedSampler(data, num_replicas=program.data_ranks, rank=program.data_rank)
            datasets.distributed.split_dataset_by_node(stream, rank=program.data_rank, world_size=program.data_ranks)
        """
        return self.mesh.data_rank(own_rank()) if self._spread else 0

    @property
    def _turn(self) -> Turn:
        """Return the turn of the thread that may run this program, or read what a run changes."""
        if self._backend is None and self._spread and self.mesh.size > 1:
            return turn_of_world()
        return self._turn_here

    @property
    def _label(self) -> str:
        return "" if self._backend is None else self._backend.label

    def _require_open(self) -> None:
        if self._closed or (self._home is not None and self._home.closed):
            raise RunError("QN113", "this program was closed", fix="compile the module again")

    def _state(self) -> Backend:
        self._require_open()
        return self._opened() if self._backend is None else self._backend

    @in_turn
    def _opened(self) -> Backend:
        if self._backend is None:
            primary, task, slots = self._primary(), self._task, self._programs.slots
            assert slots is not None
            for name, x in slots.changed().items():
                check_fits(name, x, primary.program.state[name], x.device)
            slots.look()
            now = self._programs.current_tensors(self._programs.captured[task.primary_kind].tensors)
            if task.absent is not None:
                from ..runtime.backends.absent import AbsentBackend

                self._backend = AbsentBackend(primary.program, now, task.absent)
                return self._backend
            tensors = with_buffers(task.model, now)
            home = home_of(task.model)
            if home is not None:
                self._backend = home.backend_for(slots)
                self._backend.learn(primary.program, tensors)
            else:
                refuse_split(tensors)
                plan, engine = primary.plan.agreed, ENGINES[task.backend].make()
                with announced("the set-up of a program"):
                    self._backend = open_backend(
                        self.mesh,
                        primary.program,
                        tensors,
                        task.device,
                        plan,
                        engine,
                        slots,
                        tune_process=task.tune_process,
                        compare_every=task.compare_every,
                    )
                attach_split_parameters(slots, primary, self._backend)
                if self._spread:
                    from ..checkpoint.dtensors import know_all_boxes

                    know_all_boxes(primary.program.state.values())
            self._home = home_of(task.model)
            many = self._spread and self.mesh.size > 1
            # with the modules that the loss brought
            self._turn_here = turn_of_world() if many else turn_of(list(slots.modules.values()))
        return self._backend

    @in_turn
    def close(self) -> None:
        """Give the module plain, whole parameters again, so that it can be called or compiled for another mesh, and
        free what the program held: its parts of parameters, and the folders that it saved to. Waits for a save that is
        under way, and warns if it failed and nobody asked for its result. Every rank calls this; after it, no program
        of this module can run any more. Once is enough: further calls do nothing.

        A program that is not closed is freed with its module, when nothing refers to them. Process groups belong to the
        mesh: all programs of this process share them, and they end with the world's group.
        """
        if self._closed:
            return
        if self._saving is not None:
            self._saving.close()
        home = self._home or home_of(self._task.model)
        if home is not None and not home.closed:
            program = home.primary.program
            names = [spec.name for spec in program.state.values() if spec.kind == "parameter"]
            with announced("close", home.backend.label):
                home.leave(home.backend.everywhere(program, names))
        self._locks.release()
        self._backend, self._home, self._kept, self._saving, self._closed = None, None, {}, None, True

    def _run(
        self, kind: str, batch: Any, local: bool, recorder: Recorder | None = None, *, name: str = ""
    ) -> list[Tensor]:
        self._require_open()
        self._require_device(_CALLS[kind])
        if self._apart is not None:
            raise RunError(
                "QN401",
                f"this rank got a batch that does not fit the program, and the others did not: they are blocked in "
                f"that step\n  the batch: {self._apart.message}",
                fix="do not catch that error: quintnet.launch then ends all ranks, and restarts them if it may",
            )
        begun = self._interrupted = False

        def given() -> Any:
            return {"batch": batch, MODULE_CHANGES: changed} if (changed := self._programs.changed(kind)) else batch

        try:
            with running(self._given, self._steps, kind, local, given, name=name, label=self._label):
                begun = True
                results = self._run_here(kind, batch, local, recorder)
        except InputError as error:
            if not begun:  # the others' batch was as usual, so they did not stop to compare
                self._apart = error
            raise
        except RunError as error:
            # what a step changes, it changes after it has communicated; QN303: it has not begun
            unchanged = error.code in ("QN303", "QN402") and kind == "train"
            self._interrupted = unchanged and self._backend is not None
            if error.code == "QN405" and kind == "train":
                raise self._with_estimates(error) from error
            raise
        self._steps += kind == "train"
        return results

    def _run_here(self, kind: str, batch: Any, local: bool, recorder: Recorder | None) -> list[Tensor]:
        refuse_modes(self._task.device)
        flat, ways = self._programs.flat(batch), self.mesh.data_ways if local else 1
        program = self._programs.find_program(kind, flat, ways * flat.rows) or self._get(kind, flat.batch, ways)
        if kind == "train" and not local:
            self._batch = flat.batch
        backend = self._state() if self._backend is None else self._backend
        self._programs.verdict.raise_error_of_any_rank(backend)
        if program is not self._primary().program:
            backend.learn(program, self._programs.captured[kind].tensors)
        for old in self._programs.forgotten():
            backend.forget(old)
        results = backend.run(program, flat.tensors, self._how(kind, local), recorder=recorder)
        captured = self._programs.captured[kind]
        if captured.guards is not None and captured.guards.source.of_calls:
            remake(captured.guards.source.of_calls)
        return [x.to(dtype) for x, dtype in zip(results, captured.result_dtypes, strict=True)]

    def _how(self, kind: str, local: bool) -> Run:
        task = self._task
        seed, preemption = task.plan.seed, self._preemption
        return Run(kind == "train", local, seed, self._steps, task.check_finite, preemption=preemption)
