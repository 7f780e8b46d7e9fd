"""Saves and loads what training needs to go on: parameters, the optimizer's state, and where random numbers stand."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..compat.distributed import save_state_dict
from ..core.empty_storage import is_of_other_ranks
from ..core.errors import CheckpointError
from ..weights.files import refuse_all, shown
from ..weights.folded_buffers import unfold_buffers
from .folder import CheckpointFolder, PublishedError, name_of
from .lock import FolderLocks
from .optimizer_state import merged, restored, tensors_and_note
from .parts import ParameterPlace, SavedPart, local_of
from .pretrained import WeightsSubject, everywhere
from .reading.choice import Chosen, with_newest
from .reading.stored_tensors import ReadPlan, StoredTensors
from .reading.together import attempted
from .staging import copy_to_host
from .storage import SavePlanning, Writer, error_of_ranks, reasons_of_ranks
from .tied import torn_ties, under_stored_names
from .values import extra_of, stored_extra

MODEL, OPTIMIZER = "model/", "optimizer/"


@dataclass(frozen=True)
class Restored:
    """Values of a checkpoint other than tensors. ``extra``: what was given to ``save``."""

    step: int
    path: Path | str
    extra: Mapping[str, Any]
    run: Mapping[str, Any] = field(repr=False)


Accept = Callable[[Restored], object]


@dataclass(frozen=True)
class Snapshot:
    """One rank's state to save: tensors, and the rest as JSON."""

    parts: Mapping[str, SavedPart]
    note: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Raises: CheckpointError: QN603 for a tensor of a kind that a checkpoint cannot hold."""
        for name, part in self.parts.items():
            part.require_storable(name)

    def copy_to_host(self, copies: Callable[[Sequence[Tensor]], Sequence[Tensor]] = copy_to_host) -> Snapshot:
        """Return the same in host memory, by ``copies`` of all tensors."""
        boxes = iter(copies([box for part in self.parts.values() for box in part.boxes.values()]))
        parts = {name: replace(part, boxes={at: next(boxes) for at in part.boxes}) for name, part in self.parts.items()}
        return Snapshot(parts, self.note)


def snapshot(
    subject: WeightsSubject, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any], run: Mapping[str, Any]
) -> Snapshot:
    """Return a snapshot of the tensors where they lie.

    Raises:
        CheckpointError: QN603 or QN604, on every rank.
    """
    with everywhere(subject.backend, "QN603"):
        return snapshot_here(subject, optimizer, extra, run)


def as_stored(extra: Mapping[str, Any]) -> str:
    """Return what a checkpoint has of ``extra``, a value on each line. What it cannot hold is refused later."""
    try:
        (stored_values,) = stored_extra(extra).values()
        return json.dumps(stored_values, indent=1, sort_keys=True)
    except (CheckpointError, ValueError, RecursionError):  # also of a number with too many digits
        return "what a checkpoint cannot hold"


def snapshot_here(
    subject: WeightsSubject, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any], run: Mapping[str, Any]
) -> Snapshot:
    """As :func:`snapshot`, of this rank alone.

    Raises:
        CheckpointError: QN603 or QN604.
    """
    unset = sorted(subject.backend.unset & subject.program.state.keys())
    refuse_all("QN604", Path(), [f"{name} has no values" for name in unset], fix="load or initialise the model first")
    parts, places = _parts(subject)
    note: dict[str, Any] = {**stored_extra(extra), "run": dict(run), "torch": torch.__version__}
    if optimizer is not None:
        tensors, note["optimizer"] = tensors_and_note(optimizer, places)
        parts |= {f"{OPTIMIZER}{name}": part for name, part in tensors.items()}
    return Snapshot(parts, note)


@dataclass(frozen=True)
class Destination:
    """The place of a checkpoint: the folder that has it, its step, how many to keep (None: all), and the folders that
    this program has locked."""

    folder: CheckpointFolder
    step: int
    keep: int | None
    locks: FolderLocks

    def __post_init__(self) -> None:
        """Raises: CheckpointError: QN603 for a step or a number to keep that cannot be."""
        require_number("step", self.step, 0)
        if self.keep is not None:
            require_number("keep", self.keep, 1)


def require_number(name: str, x: object, least: int) -> None:
    """Raises: CheckpointError: QN603 if ``x`` is not an int of at least ``least``."""
    if type(x) is not int or x < least:
        raise CheckpointError("QN603", f"{name} is {x!r}", fix=f"give an int that is at least {least}")


def write(
    state: Snapshot, to: Destination, group: dist.ProcessGroup | None = None, *, alone: bool = False
) -> Path | str:
    """Write a snapshot; every rank takes part. With ``group``, that is how they talk. ``alone``: this rank has all.

    Raises:
        CheckpointError: QN603 on every rank. The folder's other checkpoints are as they were, unless the error says
            that this one is there.
        BaseException: what interrupted this rank (KeyboardInterrupt, SystemExit), instead of its CheckpointError.
    """
    folder, step = to.folder, to.step
    alone = alone or (group is None and (not dist.is_initialized() or dist.get_world_size() == 1))
    rank = 0 if alone else dist.get_rank(group)
    kinds = {name: (part.local.dtype, tuple(part.shape)) for name, part in state.parts.items()}
    writer = Writer(folder, step, to.keep, state.note, kinds, lambda notes: _merged(step, notes), rank, to.locks)
    try:
        with to.locks.turn(folder) if rank == 0 else contextlib.nullcontext():
            save_state_dict(dict(state.parts), writer, process_group=group, no_dist=alone, planner=SavePlanning())
    except CheckpointException as error:
        published = _published(error)
        if published is None and writer.temporary is not None:
            with contextlib.suppress(Exception):  # a later save removes it; why this one failed is what is told
                folder.remove(writer.temporary)
        if (interrupt := _interrupt(error, rank)) is not None:
            raise interrupt from error
        if published is not None:
            text = f"the checkpoint of step {step} is whole and has its name in {shown(str(folder.path))}"
            if not published.certain:
                text = f"whether the checkpoint of step {step} has its name in {shown(str(folder.path))} is not known"
            raise CheckpointError(
                "QN603",
                "\n  ".join([f"{text}; then failed:", *reasons_of_ranks(error)]),
                fix="go on from it if it is there; the next save finishes what failed",
            ) from error
        fix = f"see the reason; this save changed no other checkpoint in {shown(str(folder.path))}"
        raise error_of_ranks("QN603", error, fix) from error
    return folder.at(name_of(step)).path


def _published(error: CheckpointException) -> PublishedError | None:
    causes = (cause for cause, _ in error.failures.values())
    return next((cause for cause in causes if isinstance(cause, PublishedError)), None)


def _interrupt(error: CheckpointException, rank: int) -> BaseException | None:
    """Return what ended the save on this rank, if that was no error: Ctrl+C, or a signal's handler that exits."""
    causes = [cause for failed, (cause, _) in error.failures.items() if failed == rank]
    causes = [cause.interrupt or cause if isinstance(cause, PublishedError) else cause for cause in causes]
    return next((cause for cause in causes if not isinstance(cause, Exception)), None)


def read(
    subject: WeightsSubject,
    folder: CheckpointFolder,
    step: int | None,
    optimizer: torch.optim.Optimizer | None,
    accept: Accept | None = None,
) -> Restored:
    """Load the newest whole checkpoint of a folder, or that of ``step``.

    ``accept`` gets what it has beside tensors before anything is changed, and raises if that will not do.

    Raises:
        CheckpointError: QN601 or QN602 on every rank; nothing was changed, unless files could no longer be read when
            they had been checked: parameters have no values then.
    """

    def planned_load(chosen: Chosen) -> Callable[[], Restored]:
        restoring = _Restoring(subject, chosen)
        planned = attempted(lambda: restoring.plan_load(optimizer))
        return lambda: restoring.load_all(planned, accept)

    return with_newest(subject.backend.told, folder, step, planned_load)


@dataclass(frozen=True)
class _LoadPlan:
    """A plan of reading a checkpoint into a program and its optimizer.

    ``targets``: parts to fill, by stored names. ``finish``: gives the optimizer its state when they are.
    """

    targets: Mapping[str, SavedPart]
    tensors: ReadPlan
    finish: Callable[[], None]


@dataclass(frozen=True)
class _Restoring:
    """A program, and the checkpoint that it is to have."""

    subject: WeightsSubject
    chosen: Chosen

    def plan_load(self, optimizer: torch.optim.Optimizer | None) -> _LoadPlan:
        """Compare this rank's program and optimizer with the checkpoint. Nothing is changed.

        Raises:
            CheckpointError: QN602 if they do not fit.
            VanishedError, Damaged, OSError: if a file cannot be read.
        """
        targets, places = self._targets()
        finish = _nothing_to_finish
        if optimizer is not None:
            room, finish = self._optimizer_room(optimizer, places)
            targets |= room
        return _LoadPlan(targets, self._stored.plan_reading(targets), finish)

    def load_all(self, planned: Callable[[], _LoadPlan], accept: Accept | None) -> Restored:
        """Check everything, then read tensors to where they go.

        Raises:
            CheckpointError: on every rank.
            VanishedError: on every rank. If parameters were changed, they have no values now.
        """
        subject, note, backend = self.subject, self.chosen.state, self.subject.backend
        restored_note = Restored(note["step"], self.chosen.folder_or_url, extra_of(note), note["run"])
        with everywhere(backend, "QN601"):
            plan = planned()
            if accept is not None:
                accept(restored_note)
        self._require_ties(plan.targets)
        names = {subject.aliases.get(name, name) for name in _names(self._saved)}
        backend.unset |= names  # until all are read: what fails half-way must not run
        self._read(plan.tensors)
        backend.unset -= names
        plan.finish()
        return restored_note

    @cached_property
    def _stored(self) -> StoredTensors:
        return StoredTensors(self.chosen.files, self.chosen.index)

    @property
    def _saved(self) -> Mapping[str, TensorStorageMetadata]:
        return self._stored.metadata

    @cached_property
    def _aliases(self) -> Mapping[str, str]:
        return {f"{MODEL}{alias}": f"{MODEL}{kept}" for alias, kept in self.subject.aliases.items()}

    def _targets(self) -> tuple[dict[str, SavedPart], dict[str, ParameterPlace]]:
        """Return what is to be read, and the places of parameters.

        Raises:
            CheckpointError: QN602 if the model is another.
        """
        saved = self._saved
        unfold_buffers(self.subject.model)
        parts, places = _parts(self.subject)
        targets = under_stored_names(parts, self._aliases, saved)
        targets = {n: part for n, part in targets.items() if n in saved or not _left_out(n, part, self.subject)}
        misfits = [*_misfits(targets, places, saved), *self._nowhere()]
        refuse_all("QN602", self.chosen.folder_or_url, misfits, fix="load into the model that was saved")
        return targets, places

    def _nowhere(self) -> list[str]:
        """Return a line for each tensor that the model has on no rank."""
        kept = self.subject.model.state_dict(keep_vars=True)
        names = {*kept, *self.subject.program.state, *self.subject.aliases, *self.subject.aliases.values()}
        return [f"{shown(name)} is not in the model" for name in _names(self._saved) if name not in names]

    def _optimizer_room(
        self, optimizer: torch.optim.Optimizer, places: Mapping[str, ParameterPlace]
    ) -> tuple[dict[str, SavedPart], Callable[[], None]]:
        note = self.chosen.state
        if "optimizer" not in note:
            where = shown(str(self.chosen.folder_or_url))
            raise CheckpointError("QN602", f"{where} has no optimizer", fix="leave optimizer= out")
        mine = {n.removeprefix(OPTIMIZER): x for n, x in self._saved.items() if n.startswith(OPTIMIZER)}
        elsewhere = _names_elsewhere(self.subject.model)
        room, finish = restored(optimizer, places, note["optimizer"], mine, elsewhere)
        return {f"{OPTIMIZER}{name}": part for name, part in room.items()}, finish

    def _require_ties(self, targets: Mapping[str, SavedPart]) -> None:
        """Compare tied parameters that were stored twice.

        Raises:
            CheckpointError: QN602 if they differ.
        """
        with everywhere(self.subject.backend, "QN601"):
            pairs = torn_ties(
                targets, self._aliases, self._saved, lambda parts: self._stored.plan_reading(parts).fill_parts()
            )
            torn = [
                f"{alias.removeprefix(MODEL)} and {kept.removeprefix(MODEL)} are tied in the model, and differ here"
                for alias, kept in pairs
            ]
            refuse_all("QN602", self.chosen.folder_or_url, torn, fix="load a checkpoint of a model that ties them")

    def _read(self, tensors: ReadPlan) -> None:
        """Read what this rank wants.

        Raises:
            CheckpointError: QN601 on every rank.
            VanishedError: on every rank, if another checkpoint is to be looked for.
        """
        with everywhere(self.subject.backend, "QN601"):
            tensors.fill_parts()


def _nothing_to_finish() -> None:
    """Do nothing: there is no optimizer."""


def _parts(subject: WeightsSubject) -> tuple[dict[str, SavedPart], dict[str, ParameterPlace]]:
    """Return this rank's parts of parameters and stored buffers, and the parameters' places."""
    kept, parameters = subject.model.state_dict(keep_vars=True), subject.backend.parameters
    parts: dict[str, SavedPart] = {}
    places: dict[str, ParameterPlace] = {}
    for spec, tensor, positions in subject.backend.parts(subject.program, ("parameter", "buffer")):
        if spec.kind == "parameter" or spec.name in kept:
            shape = torch.Size(spec.shape)
            if spec.kind == "buffer":
                parts[f"{MODEL}{spec.name}"] = SavedPart.of(tensor.detach(), shape, positions)
                continue
            place = places[spec.name] = ParameterPlace(parameters[spec.name], shape, positions)
            parts[f"{MODEL}{spec.name}"] = place.part(tensor.detach())
            assert local_of(place.parameter).shape == tensor.shape
    for name, buffer in subject.model.named_buffers(remove_duplicate=False):
        if name in kept and _is_unread(name, subject) and not buffer.is_meta:
            parts[f"{MODEL}{name}"] = SavedPart.whole(buffer.detach())
    return parts, places


def _is_unread(name: str, subject: WeightsSubject) -> bool:
    """Return whether no operator of the program reads a buffer, so that it is whole in the module of every rank."""
    return name not in subject.program.state and name not in subject.aliases


def _names_elsewhere(model: nn.Module) -> dict[int, str]:
    """Return the names of parameters that other ranks have, by id."""
    return {id(p): name for name, p in model.named_parameters() if is_of_other_ranks(p)}


def _merged(step: int, notes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    merged_note = {"step": step, **notes[0]}
    if "optimizer" in merged_note:
        merged_note["optimizer"] = merged([note["optimizer"] for note in notes])
    return merged_note


def _names(saved: Iterable[str]) -> Iterator[str]:
    return (name.removeprefix(MODEL) for name in saved if name.startswith(MODEL))


def _left_out(name: str, part: SavedPart, subject: WeightsSubject) -> bool:
    """Return whether earlier versions did not store it: it has no elements, or is a buffer that nothing reads."""
    spec = subject.program.state.get(name.removeprefix(MODEL))
    return spec is None or not part.shape.numel()


def _misfits(
    mine: Mapping[str, SavedPart], places: Mapping[str, ParameterPlace], saved: Mapping[str, TensorStorageMetadata]
) -> list[str]:
    problems = []
    for name, part in mine.items():
        short, meta = name.removeprefix(MODEL), saved.get(name)
        if meta is None:
            problems.append(f"{short} is missing")
        elif meta.size != part.shape:
            problems.append(f"{short} is {tuple(meta.size)}, and {tuple(part.shape)} in the model")
        elif meta.properties.dtype != part.local.dtype:
            problems.append(f"{short} is {meta.properties.dtype}, and {part.local.dtype} in the model")
    return problems
