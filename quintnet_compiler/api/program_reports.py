"""What a compiled program says of itself: its plan, ranks and schedule, explanations, predictions, dumps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..capture.step_module import LossFn
from ..core.errors import CompileError, RunError
from ..core.files import path_of
from ..core.mesh import Mesh
from ..driver.compiler import Compiled, Runner, compile_program
from ..driver.pipeline import Request
from ..ir.batch_form import FlatBatch
from ..ir.cost_protocol import RankCosts
from ..ir.distributed_program import DistributedProgram, RankProgram
from ..ir.plan import Plan, check_plan
from ..runtime.execute.engines import ENGINES
from .program_checkpoints import ProgramCheckpoints

if TYPE_CHECKING:
    from ..cost_models.cluster import Cluster
    from ..planner.report import PlanReport
    from ..reports.explain import Explanation, LayoutDifference
    from ..reports.tensor_picture import TensorPicture
    from ..schedules.schedule import Schedule
    from ..simulation.faults import Faults
    from ..simulation.timeline import Timeline


class ProgramReports(ProgramCheckpoints):
    """Reports of a compiled program; nothing here runs or changes it."""

    @property
    def mesh(self) -> Mesh:
        """The mesh that the program was compiled for."""
        return self._task.mesh

    @property
    def loss_fn(self) -> LossFn | None:
        """The loss function given to compile; None if the model computes its loss itself."""
        return self._task.loss_fn

    @property
    def first(self) -> bool:
        """Return whether this process is rank 0, which writes logs and files."""
        return self._state().first

    @property
    def model_flops(self) -> float:
        """FLOPs of one step of the unsplit model on the latest batch (before any: what it was compiled for)."""
        from ..cost_models.operators import model_flops

        program = self._programs.latest(self._task.primary_kind) or self._primary().program
        flops = program.flops
        return model_flops(program.source.local.staged.sharded.program.graph) if flops is None else flops

    @property
    def plan(self) -> Plan:
        """The complete plan: compiling with it gives this program."""
        return self._primary().plan

    @property
    def ranks(self) -> Sequence[RankProgram]:
        """Every rank's generated functions and actions."""
        program = self._primary().program
        return [program.rank(rank) for rank in range(self.mesh.size)]

    @property
    def schedule(self) -> Schedule:
        """The pipeline schedule: every rank's actions, in order."""
        return self._primary().program.schedule

    @property
    def unsplit(self) -> tuple[str, ...]:
        """Return what is not split, one line for each kind; empty if everything is.

        It names operators that run replicated on a tensor or context axis because no size of theirs divides (exact, but
        not faster than one rank), parameters that ZeRO leaves whole, and values of a batch that are exchanged between
        data ranks.
        """
        return self._primary().unsplit

    @property
    def kept_in_16_bits(self) -> tuple[str, ...]:
        """With ``precision="fp8"``: the linear layers that do not multiply 8-bit numbers, with the reason of each."""
        return self._primary().wide

    @property
    def compile_seconds(self) -> Mapping[str, float]:
        """Seconds of each pass and check."""
        return dict(self._primary().seconds)

    @property
    def seconds_compiling(self) -> float:
        """Seconds that this process has spent so far on tracing and compiling this program: for training, evaluation
        and outputs, for all forms of batches."""
        return self._compiling

    def _repr_html_(self) -> str:
        from ..dump.notebook import program_figure, waiting_figure

        if not self._programs.led:
            return waiting_figure(self._task.model, self.mesh, self._task.plan)
        program, predicted, unpriced = self._primary().program, None, ""
        if program.has_source:
            try:
                predicted = self.simulate()
            except CompileError as error:
                if error.code != "QN210":
                    raise
                unpriced = error.message
        return program_figure(program, self.plan, predicted, unpriced)

    def passes(self) -> list[tuple[str, Any]]:
        """Return the name of each pass and the program after it. They are not kept: this compiles once more."""
        return self._primary().passes()

    def dump(
        self,
        folder: str | os.PathLike[str],
        *,
        costs: RankCosts | Cluster | None = None,
        measured: Timeline | None = None,
        report: PlanReport | None = None,
    ) -> Path:
        """Write the plan, the text after each pass, the schedule, and each rank's code into ``folder``, with a page
        that shows all of it (``index.html``, which needs no network).

        Equal programs give equal bytes, on every rank and every run. The program after each pass is not kept, so this
        compiles once more.

        Args:
            costs: of the timeline, as for :meth:`simulate`.
            measured: a timeline of a real step, to be shown with the predicted one.
            report: of :func:`quintnet.plan`; its plans are compared with this one.

        Raises:
            CompileError: QN211 if ``measured`` is of another layout or schedule; QN701 for a folder that is no path.
        """
        from ..dump.folder import dump_program
        from ..dump.page import Extras

        primary = self._primary()
        if measured is not None:
            measured.require_schedule(self.mesh.size, self.schedule)
        predicted, unpriced = None, ""
        try:
            predicted = self.simulate(costs)
        except CompileError as error:
            if error.code != "QN210":
                raise
            unpriced = error.message
        rows = zip(report.found.ranked, report.plans, strict=True) if report is not None else ()
        plans = tuple((str(ranked.layout), ranked.numbers(), plan) for ranked, plan in rows)
        extras = Extras(predicted, unpriced, measured, plans, report.svg() if report is not None else "")
        return dump_program(primary.program, primary.plan, primary.passes(), path_of(folder, "QN701"), extras)

    # -- why, and what it costs

    def prove(self, name: str) -> str:
        """Prove that the gradient of the parameter ``name`` is that of the unsplit model: its types on every axis, each
        operator and conversion on its way to the loss with their transposes, and the reduction at the end.

        Raises:
            CompileError: QN204 if no trained parameter has this name.
        """
        from ..reports.explain_gradient import prove_gradients

        return prove_gradients(self._primary().program, name)

    def explain(
        self,
        name: str,
        *,
        why_not: str | Mapping[str, str] | None = None,
        costs: RankCosts | Cluster | None = None,
    ) -> Explanation:
        """Explain what the program does with a module, an operator or a parameter, and what that costs.

        Args:
            name: of a module, an operator or a parameter.
            why_not: another sharding of its parameters: ``"column"``, ``"row"`` or ``"replicated"`` over tp, or types
                by axis (``{"tp": "S(0)"}``). The model is compiled again with it, and both programs are compared.
            costs: as for :meth:`simulate`.

        Raises:
            CompileError: QN204 for a name or a way that the model does not have.
        """
        from ..reports.explain import Explain

        primary, task = self._primary(), self._task

        def recompile(plan: Plan) -> tuple[DistributedProgram, Plan]:
            other = self._recompiled(primary.program, plan)
            return other.program, other.plan

        return Explain(primary.program, task.plan, primary.plan, task.rules, self._prices(costs), recompile)(
            name, why_not
        )

    def _recompiled(self, program: DistributedProgram, plan: Plan) -> Compiled:
        """Compile the same captured model for the same rows, with another plan."""
        task, rows = self._task, program.source.local.staged.sharded.program.batch_size
        request = Request(task.mesh, plan, rows, task.device, task.rules, absent=task.absent, fused=task.fused)
        return compile_program(program.captured, request, Runner(), training=task.training)

    def visualize(self, what: str | Tensor, *, optimizer: torch.optim.Optimizer | None = None) -> TensorPicture:
        """Show which rank holds which part of a parameter, buffer, activation, gradient or optimizer state; see
        :func:`quintnet.visualize`.

        Raises:
            CompileError: QN204 for a name or a tensor that the program does not have.
        """
        from ..reports.program_tensors import optimizer_state, picture_of
        from ..reports.tensor_picture import picture_of_dtensor

        program = self._primary().program
        if isinstance(what, Tensor):
            for name, p in self.named_parameters():
                if what is p or what is p.grad:
                    return picture_of(program, name if what is p else f"{name}.grad")
            if (picture := picture_of_dtensor(what)) is not None:
                return picture
            shape = list(what.shape)
            message = (
                f"the tensor {shape} is neither a parameter of the program, nor the gradient of one, nor a DTensor"
            )
            raise CompileError("QN204", message, fix='give its name: program.visualize("gelu")')
        if optimizer is not None:
            return optimizer_state(program, dict(self.named_parameters()), what, optimizer)
        return picture_of(program, what)

    def diff(self, other: ProgramReports, *, costs: RankCosts | Cluster | None = None) -> LayoutDifference:
        """Return what differs between two programs of one model: plan, placements, and costs of a step."""
        from ..reports.explain import layout_difference

        mine, yours = self._primary(), other._primary()
        return layout_difference(mine.program, yours.program, (mine.plan, yours.plan), self._prices(costs))

    # -- prediction

    def _prices(self, costs: RankCosts | Cluster | None) -> RankCosts:
        from ..cost_models.cluster_costs import costs_of_ranks

        return costs_of_ranks(costs, self.mesh, ENGINES[self._task.backend].replayed)

    def _with_estimates(self, error: RunError) -> RunError:
        """Return the error of a training step that ran out of memory, with estimates of what would fit."""
        from .memory_estimates import with_estimates

        program, plan = self._programs.latest("train") or self._primary().program, self._task.plan

        def recompile(option: Mapping[str, Any]) -> DistributedProgram:
            other = plan.changed(option)
            check_plan(other, self.mesh)
            return self._recompiled(program, other).program

        seconds = sum(self.compile_seconds.values())
        return with_estimates(error, program, plan, recompile, self._prices(None), seconds)

    def simulate(self, costs: RankCosts | Cluster | None = None, *, faults: Faults | None = None) -> Timeline:
        """Predict a step, without any device: when each rank does what, what it waits for, and how much memory it
        needs. Packed rows are taken to hold the documents of the latest batch, where the plan expects none.

        Args:
            costs: prices of operators and communication: a cluster, or a calibration of this machine
                (:mod:`quintnet_compiler.cost_models.calibration`). Default: nodes of 8 H100.
            faults: ranks and links that are slower than others.

        Returns:
            A timeline; ``html()`` and ``svg()`` are pictures, ``chrome_trace()`` is for Perfetto.

        Raises:
            CompileError: QN102 if the program is not compiled yet, QN201 for what are no costs or no faults, and for
                faults of ranks and links that do not exist, QN210 if an operator has no price, QN301 for a cluster with
                fewer devices than ranks.
        """
        from ..simulation.program import simulate_program

        return simulate_program(self._primary().program, self._prices(costs), faults, documents=self._documents())

    def _documents(self) -> tuple[int, ...]:
        """Those of the latest batch (before any: of that which it was compiled for)."""
        from ..passes.frontend.document_ids import documents_in

        compiled = self._primary()
        if compiled.plan.expect.documents or self._batch is None:
            return ()
        whole = compiled.program.source.local.staged.sharded.program
        return documents_in(whole, FlatBatch.flatten(self._batch).leaves)
