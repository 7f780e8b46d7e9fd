"""Saves and loads what training needs to go on: parameters, the optimizer's state, and where random numbers stand."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from ..compat.distributed import save_state_dict
from ..core.empty_storage import is_of_other_ranks
from ..core.errors import CheckpointError, CheckpointWarning
from ..weights.files import INDEX, METADATA, SINGLE, conversion, refuse_all, shown
from .documents import IndexEntry, StateNote, check_tensors, read_index, read_state
from .folder import CheckpointFiles, CheckpointFolder, Entry, name_of
from .lock import FolderLocks
from .manifest import Damaged, available, check_files, read_manifest
from .optimizer_state import ParameterPlace, local_of, merged, plain, restored, stored
from .parts import SavedPart
from .pretrained import WeightsSubject, everywhere
from .staging import on_host
from .storage import LoadPlanning, Reader, SavePlanning, Writer
from .tied import torn_ties, under_stored_names

MODEL, OPTIMIZER = "model/", "optimizer/"


@dataclass(frozen=True)
class Restored:
    """What a checkpoint had beside tensors. ``extra``: what was given to ``save``."""

    step: int
    path: Path | str
    extra: Mapping[str, Any]
    run: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Snapshot:
    """What is saved of one rank: tensors, and the rest as JSON."""

    parts: Mapping[str, SavedPart]
    note: Mapping[str, Any]

    def on_host(self, copies: Callable[[Sequence[Tensor]], Sequence[Tensor]] = on_host) -> Snapshot:
        """The same in host memory, by ``copies`` of all tensors."""
        made = iter(copies([box for part in self.parts.values() for box in part.boxes.values()]))
        parts = {name: replace(part, boxes={at: next(made) for at in part.boxes}) for name, part in self.parts.items()}
        return Snapshot(parts, self.note)


def snapshot(
    subject: WeightsSubject, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any], run: Mapping[str, Any]
) -> Snapshot:
    """What to save, where it lies.

    Raises:
        CheckpointError: QN603 or QN604, on every rank.
    """
    with everywhere(subject.backend, "QN603"):
        return snapshot_here(subject, optimizer, extra, run)


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
    note: dict[str, Any] = {"extra": plain(extra, "extra"), "run": dict(run), "torch": torch.__version__}
    if optimizer is not None:
        tensors, note["optimizer"] = stored(optimizer, places)
        parts |= {f"{OPTIMIZER}{name}": part for name, part in tensors.items()}
    return Snapshot(parts, note)


@dataclass(frozen=True)
class Destination:
    """Where a checkpoint is written: the folder that has it, its step, how many to keep (None: all), and the folders
    that this program has locked."""

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
    found: Snapshot, to: Destination, group: dist.ProcessGroup | None = None, *, alone: bool = False
) -> Path | str:
    """Write a snapshot; every rank takes part. With ``group``, that is how they talk. ``alone``: this rank has all.

    Raises:
        CheckpointError: QN603 on every rank; the folder's other checkpoints are as they were.
    """
    folder, step = to.folder, to.step
    alone = alone or not dist.is_initialized() or dist.get_world_size() == 1
    rank = 0 if alone else dist.get_rank()
    writer = Writer(folder, step, to.keep, found.note, lambda notes: _merged(step, notes), rank, to.locks)
    try:
        save_state_dict(dict(found.parts), writer, process_group=group, no_dist=alone, planner=SavePlanning())
    except CheckpointException as error:
        if writer.temporary is not None:
            with contextlib.suppress(Exception):  # a later save removes it; why this one failed is what is told
                folder.remove(writer.temporary)
        raise _failed("QN603", error, "see the reason; the checkpoints before are whole") from error
    return folder.at(name_of(step)).path


def read(
    subject: WeightsSubject, folder: CheckpointFolder, step: int | None, optimizer: torch.optim.Optimizer | None
) -> Restored:
    """Load the newest whole checkpoint of a folder, or that of ``step``.

    Raises:
        CheckpointError: QN601 or QN602 on every rank; nothing was changed.
    """
    chosen = choose(subject.backend.told, folder, step)
    checkpoint, note, reader = chosen.files.path, chosen.state, Reader(chosen.files, chosen.index)
    with everywhere(subject.backend, "QN601"):
        saved: dict[str, TensorStorageMetadata] = reader.read_metadata().state_dict_metadata  # type: ignore[assignment]
        targets, places = _parts(subject)
        aliases = {f"{MODEL}{alias}": f"{MODEL}{kept}" for alias, kept in subject.aliases.items()}
        targets = under_stored_names(targets, aliases, saved)
        refuse_all("QN602", checkpoint, _misfits(targets, places, saved), fix="load into the model that was saved")
        finish = None
        if optimizer is not None:
            if "optimizer" not in note:
                raise CheckpointError("QN602", f"{shown(str(checkpoint))} has no optimizer", fix="leave optimizer= out")
            mine = {n.removeprefix(OPTIMIZER): x for n, x in saved.items() if n.startswith(OPTIMIZER)}
            room, finish = restored(optimizer, places, note["optimizer"], mine, _names_elsewhere(subject.model))
            targets |= {f"{OPTIMIZER}{name}": part for name, part in room.items()}
    alone = not dist.is_initialized() or dist.get_world_size() == 1

    def fill(parts: dict[str, SavedPart]) -> None:
        with _quiet():
            dcp_load(dict(parts), storage_reader=reader, planner=LoadPlanning(), no_dist=alone)

    with everywhere(subject.backend, "QN601"):
        torn = [
            f"{one.removeprefix(MODEL)} and {other.removeprefix(MODEL)} are tied in the model, and differ here"
            for one, other in torn_ties(targets, aliases, saved, fill)
        ]
        refuse_all("QN602", checkpoint, torn, fix="load a checkpoint of a model that ties them")
    names = {subject.aliases.get(name, name) for name in _names(saved)}
    subject.backend.unset |= names  # until all are read: what fails half-way must not run
    try:
        fill(targets)
    except CheckpointException as error:
        raise _failed("QN601", error, "load again: parameters may be of two checkpoints now") from error
    subject.backend.unset -= names
    if finish is not None:
        finish()
    return Restored(note["step"], checkpoint, note["extra"], note["run"])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that one process is alone: it is meant to be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _parts(subject: WeightsSubject) -> tuple[dict[str, SavedPart], dict[str, ParameterPlace]]:
    """This rank's parts of parameters and stored buffers, and the parameters' places."""
    kept, parameters = subject.model.state_dict(keep_vars=True), subject.backend.parameters
    parts: dict[str, SavedPart] = {}
    places: dict[str, ParameterPlace] = {}
    for spec, tensor, positions in subject.backend.parts(subject.program, ("parameter", "buffer")):
        if spec.kind == "parameter" or spec.name in kept:
            shape = torch.Size(spec.shape)
            parts[f"{MODEL}{spec.name}"] = SavedPart.of(tensor.detach(), shape, positions)
            if spec.kind == "parameter":
                places[spec.name] = ParameterPlace(parameters[spec.name], shape, positions)
                assert local_of(parameters[spec.name]).shape == tensor.shape
    return parts, places


def _names_elsewhere(model: nn.Module) -> dict[int, str]:
    """The parameters that other ranks have, by id."""
    return {id(p): name for name, p in model.named_parameters() if is_of_other_ranks(p)}


def _merged(step: int, notes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    found = {"step": step, **notes[0]}
    if "optimizer" in found:
        found["optimizer"] = merged([note["optimizer"] for note in notes])
    return found


def _names(saved: Iterable[str]) -> Iterator[str]:
    return (name.removeprefix(MODEL) for name in saved if name.startswith(MODEL))


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


@dataclass(frozen=True)
class Chosen:
    """A whole checkpoint, with its documents."""

    files: CheckpointFiles
    state: StateNote
    index: Mapping[str, IndexEntry]


def choose(told_by_all: Callable[[str], Sequence[str]], folder: CheckpointFolder, step: int | None) -> Chosen:
    """The checkpoint to load: the newest whole one, or that of ``step``. All ranks read it together, each some
    pieces of its files. ``told_by_all``: what every rank has to tell, given what this one has.

    Raises:
        CheckpointError: QN601 if there is none.
    """
    mine = [entry for entry in available(folder) if step is None or entry.step == step][:100]
    there = told_by_all(" ".join(f"{entry.step}/{entry.files.name}" for entry in mine))
    world = len(there)
    rank = dist.get_rank() if world > 1 else 0
    for one in there[0].split():
        number, _, name = one.partition("/")
        entry, trouble, found = Entry(int(number), folder.at(name)), "", None
        try:
            files = read_manifest(entry)
            check_files(entry.files, files, slice(rank, None, world))
            index = read_index(entry.files, files)
            check_tensors(entry.files, index, sorted(files)[rank::world])
            found = Chosen(entry.files, read_state(entry.files), index)
        except (Damaged, OSError) as error:
            trouble = str(error) or type(error).__name__
        told = next((text for text in told_by_all(trouble) if text), "")
        if not told:
            _require_one(told_by_all, entry, files)
        if not told:
            assert found is not None
            return found
        message = f"{shown(str(entry.files.path))}: {told}"
        if step is not None:
            raise CheckpointError("QN601", message, fix="load another step, or none to get the newest whole one")
        warnings.warn(CheckpointWarning(f"{message}; trying the one before"), stacklevel=4)
    if step is not None and available(folder):
        steps = ", ".join(str(entry.step) for entry in available(folder)[:10])
        raise CheckpointError(
            "QN601",
            f"{shown(str(folder.path))} has no checkpoint of step {step}",
            fix=f"load one that is there: {steps}",
        )
    raise CheckpointError("QN601", f"{shown(str(folder.path))} has no whole checkpoint", fix=_instead(folder.path))


def _require_one(told_by_all: Callable[[str], Sequence[str]], entry: Entry, files: Mapping[str, object]) -> None:
    """Raises: CheckpointError QN601 on every rank, if they see checkpoints of one name with other contents."""
    contents = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
    told = told_by_all(f"{contents} {entry.files.path}")
    different = dict.fromkeys(text.partition(" ")[0] for text in told)
    if len(different) > 1:
        first = [next(i for i, text in enumerate(told) if text.startswith(one)) for one in different]
        lines = [f"rank {rank}: {shown(told[rank].partition(' ')[2])}" for rank in first[:20]]
        raise CheckpointError(
            "QN601",
            "\n  ".join([f"ranks would load {len(different)} different checkpoints of step {entry.step}", *lines]),
            fix="give every rank the same folder, on a disk that all ranks share",
        )


def _instead(folder: Path | str) -> str:
    """How to load what is in a folder that has no checkpoint of this package."""
    if isinstance(folder, str):
        return "give the URL that was given to save"
    within = sorted(folder.iterdir()) if folder.is_dir() else []
    dcp = next((path for path in (folder, *within) if (path / METADATA).is_file()), None)
    if dcp is not None:
        return f"torch.distributed.checkpoint wrote it: {conversion(dcp, 'quintnet')}; then load NEW_FOLDER"
    if any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return "it has safetensors: program.load_pretrained(folder)"
    return "give the folder that was given to save"


def _failed(code: str, error: CheckpointException, fix: str) -> CheckpointError:
    reasons = [f"rank {rank}: {type(one).__name__}: {shown(str(one))}" for rank, (one, _) in error.failures.items()]
    return CheckpointError(code, "\n  ".join(reasons[:20]), fix=fix)
