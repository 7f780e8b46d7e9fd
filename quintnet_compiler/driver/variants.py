"""The programs of one task: training, evaluation, outputs, each for any number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ..capture.capture import capture, plain_batch
from ..capture.modes import without_autocast
from ..capture.versions import CapturedVersions, Version
from ..compat.torch import pytree
from ..core.errors import CompileError, InputError
from ..core.mesh import Mesh
from ..equivalence.module_check import ModuleCheck
from ..equivalence.module_step import Owner
from ..equivalence.module_training import model_inputs
from ..equivalence.verdict import Verdict
from ..ir.program import Captured, DistributedProgram
from ..runtime.backends.split_parameters import home_of
from ..runtime.state.module_parameters import Slots
from .compiler import Compiled, Runner, compile_program, follow_program
from .generation import Held
from .pipeline import Request
from .shared_parameters import join_program
from .task import Task, modules_of


class Programs:
    """Makes programs when they are first asked for, and keeps them. The one that leads (see :class:`.task.Task`)
    decides where parameters live, and the others follow it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.captured: dict[str, Captured] = {}
        self._versions = CapturedVersions()
        self._primary: Compiled | None = None
        self._parameters: Mapping[str, Tensor] = {}
        self.slots: Slots | None = None  # of the parameters of the program that leads
        self.verdict = Verdict()

    @property
    def led(self) -> bool:
        """Whether there is one that leads."""
        return self._primary is not None

    @property
    def primary(self) -> Compiled:
        """Raises: CompileError QN102 if there is none yet."""
        if self._primary is None:
            raise CompileError(
                "QN102",
                "the program is not compiled yet, because it has not seen a batch",
                fix="pass batch= to quintnet.compile, call prepare(batch), or run a step",
            )
        return self._primary

    def get(self, kind: str, batch: Any, size: int) -> DistributedProgram:
        """The program for ``size`` rows of batches like this one.

        Args:
            kind: ``"train"``, ``"evaluate"`` (both give the loss) or ``"outputs"``.

        Raises:
            CompileError: whatever makes it impossible; QN102 for outputs of what is to be trained, and was not yet.
            InputError: QN106 if the rows do not divide.
        """
        version = self._versions.look(kind)
        if version is not None:
            self.captured[kind] = version.captured
            if size in version.made:
                return version.made[size]
        check_divides(self.task.mesh, self.task.plan.microbatches if kind == "train" else 1, size)
        if self._primary is None:
            self._lead(batch, size) if kind == self.task.primary_kind else self._lead_for(kind, batch, size)
            if kind == self.task.primary_kind:
                return self.primary.program
        version = self._capture(kind, batch)
        found = self.follow(version.captured, size, training=kind == "train")
        self._compare(kind, version.captured, batch, first=False)
        version.made[size] = found
        return found

    def changed(self, kind: str) -> str:
        """What of the module is not as it was when the first program of this kind was captured; "" if all is."""
        return self._versions.difference(kind, self._versions.look(kind))

    def follow(
        self, captured: Captured, size: int, held: Held = MappingProxyType({}), *, training: bool = False
    ) -> DistributedProgram:
        """A program of another kind, on the parameters where the leader has them."""
        task, primary = self.task, self.primary
        request = Request(task.mesh, primary.plan, size, task.device, task.rules, held, task.absent)
        with without_autocast():
            return follow_program(captured, request, primary, Runner(), training=training)

    def _lead_for(self, kind: str, batch: Any, size: int) -> None:
        """Evaluation came first: the training program still decides where parameters live."""
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
        version = self._capture(task.primary_kind, batch)
        with without_autocast():
            if home is None:
                request = Request(task.mesh, task.plan, size, task.device, task.rules, absent=task.absent)
                primary = compile_program(version.captured, request, Runner(), training=task.training)
            else:
                primary = join_program(version.captured, task, size, home)
        self._compare(task.primary_kind, version.captured, batch, first=True)
        self._primary = primary
        self._parameters = version.captured.tensors
        self.slots = Slots(modules_of(task), primary.program.state)
        version.made[size] = primary.program

    def _capture(self, kind: str, batch: Any) -> Version:
        version = self._versions.look(kind)
        if version is None:
            task = self.task
            want = "outputs" if kind == "outputs" else "loss"
            captured = capture(
                task.model, batch, task.loss_fn, want=want, training=kind == "train", trained=task.training
            )
            if self._primary is not None:
                self._refuse_other_parameters(captured)
            version = self._versions.add(kind, captured)
        self.captured[kind] = version.captured
        return version

    def _refuse_other_parameters(self, captured: Captured) -> None:
        """Raises: CompileError QN112 if a parameter is not in the place where the program that leads has it."""
        there = self.now(self._parameters)
        for name, x in captured.tensors.items():
            if isinstance(x, nn.Parameter) and there.get(name) is not x:
                what = "is another object now" if name in there else "was not there when it was compiled"
                raise CompileError(
                    "QN112",
                    f"the program has no parameter for {name}, which {what}",
                    fix="compile the module again, and give the new program's parameters to the optimizer",
                )

    def now(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the module has now in the places of these tensors, which were captured."""
        there = {} if self.slots is None else self.slots.now
        return {name: there.get(name, x) for name, x in tensors.items()}

    def _compare(self, kind: str, captured: Captured, batch: Any, *, first: bool) -> None:
        """Compare what was captured with the module itself, if the task asks for it."""
        task = self.task
        if task.check == "off" or (task.check == "first" and not first):
            return
        self.verdict.judge(self._check(kind, captured, batch).difference)

    def difference(self, kind: str, batch: Any) -> CompileError | None:
        """What the module does otherwise than what was captured of it; None if nothing."""
        return self._check(kind, self._capture(kind, batch).captured, batch).difference()

    def _check(self, kind: str, captured: Captured, batch: Any) -> ModuleCheck:
        task = self.task
        want = "outputs" if kind == "outputs" else "loss"
        owner = Owner(task.model, task.loss_fn, self.now(captured.tensors), want, kind == "train")
        return ModuleCheck(owner, captured, plain_batch(batch), task.rules, task.plan.seed, task.device)

    def inputs(self, kind: str, program: DistributedProgram, batch: Any, local: bool) -> list[Tensor]:
        """The batch's tensors, as ``program`` takes them; ``local``: this data rank's rows.

        Raises:
            InputError: QN102 for a batch of another structure, other constants, or other shapes.
        """
        leaves, spec = pytree.tree_flatten(batch)
        captured = self.captured[kind]
        if spec != captured.input_spec:
            raise InputError(
                "QN102",
                f"the batch has another structure than the first one: {_outline(batch)}",
                fix="pass the same kinds of arguments in the same order",
            )
        literals = tuple(x for x in leaves if not isinstance(x, Tensor))
        if literals != captured.literals:
            raise InputError(
                "QN102",
                f"the batch has {_values(literals)} where the first one had {_values(captured.literals)}",
                fix="compile again for other values: the model's code may take another way with them",
            )
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        for x, want in zip(tensors, program.inputs, strict=True):
            expected = list(want.shape)
            if local and x.dim() and expected[0] != x.shape[0]:
                expected[0] //= self.task.mesh.data_ways
            if list(x.shape) != expected or x.dtype != want.dtype:
                raise InputError(
                    "QN102",
                    f"batch{want.path} is {tuple(x.shape)} {x.dtype}, and {tuple(expected)} {want.dtype} was compiled",
                    fix="pass batches like the first one (any number of rows that divides)",
                )
        return tensors


def check_divides(mesh: Mesh, microbatches: int, rows: int) -> None:
    """Raises: InputError QN106 if a global batch of ``rows`` does not split over data ranks and microbatches."""
    ways = mesh.data_ways * microbatches
    if rows % ways:
        near = max(ways, rows // ways * ways)
        split = f"dp={mesh['dp']}" + (f" x ep={mesh['ep']}" if mesh["ep"] > 1 else "")
        split += f" x {microbatches} microbatches" if microbatches > 1 else ""
        raise InputError(
            "QN106",
            f"a batch of {rows} rows does not divide over {split}",
            fix=f"use a batch of {near} rows, or drop the last incomplete batch",
        )


def _values(literals: tuple[Any, ...]) -> str:
    return ", ".join(map(repr, literals))[:200]


def _outline(batch: Any) -> str:
    def one(x: Any) -> str:
        return f"{x.dtype}{list(x.shape)}".removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__

    if isinstance(batch, dict):
        return "{" + ", ".join(f"{name}: {one(x)}" for name, x in batch.items()) + "}"
    return "(" + ", ".join(one(x) for x in batch) + ")"
