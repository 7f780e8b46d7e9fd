"""Safetensors as storage of torch.distributed.checkpoint: a file of each rank, and an index in JSON. Nothing is pickled
on disk."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..core.errors import CheckpointError
from ..weights.files import shown
from .commit import commit, place_to_write
from .documents import INDEX, STATE, read_index, read_state
from .folder import CheckpointFiles, CheckpointFolder
from .lock import FolderLocks
from .manifest import WrittenFiles, write_text
from .parts import SavedPart
from .pieces import Digest, write
from .reading.open_files import Damaged
from .tensor_file import TYPE_NAMES, buffers

TensorKind = tuple[torch.dtype, tuple[int, ...]]  # of a whole tensor


class UnloadableError(Exception):
    """Why a checkpoint that was written could not be loaded."""


class SavePlanning(DefaultSavePlanner):
    """A plan to save :class:`.parts.SavedPart`: each box is written by one of the ranks that have it."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        part: SavedPart = self.state_dict[index.fqn]
        return part.box(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object


@dataclass
class Writer(StorageWriter):
    """Writes checkpoint ``step`` into ``folder``; the first rank then makes it appear (see :mod:`.manifest`).

    ``locks``: of the writing process. ``note``: this rank's part of what is not a tensor; ``merge``: makes one of all
    ranks'. ``kinds``: of all tensors of which this rank has a part. Documents are read back before a checkpoint is
    published: one that lacks a part of a tensor could never be loaded.
    """

    folder: CheckpointFolder
    step: int
    keep: int | None
    note: Mapping[str, Any]
    kinds: Mapping[str, TensorKind]
    merge: Callable[[list[Mapping[str, Any]]], Mapping[str, Any]]
    rank: int
    locks: FolderLocks
    temporary: CheckpointFiles | None = None
    merged: Mapping[str, Any] | None = None
    all_kinds: Mapping[str, TensorKind] = field(default_factory=dict)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self.locks.take(self.folder)
            self.temporary = place_to_write(self.folder, self.step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return replace(plan, storage_data=(dict(self.note), dict(self.kinds)))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        assert self.temporary is not None
        self.merged = self.merge([note for note, _ in (plan.storage_data for plan in plans)])
        self.all_kinds = _agreed([kinds for _, kinds in (plan.storage_data for plan in plans)])
        return [replace(plan, storage_data=self.temporary.name) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, torch.Tensor] = {}
        keys: dict[str, WriteItem] = {}
        for number, item in enumerate(plan.items):
            tensors[str(number)] = planner.resolve_data(item).detach().cpu()  # type: ignore[union-attr]
            keys[str(number)] = item
        done: Future[list[WriteResult]] = Future()
        name, results = f"rank-{self.rank:05}.safetensors", []
        if tensors:
            with self.folder.at(plan.storage_data).create(name) as file:
                digest = write(file, buffers(tensors))
            for key, item in keys.items():
                x = tensors[key]
                stored = StoredTensor(name, key, digest, x.dtype, tuple(x.shape))
                results.append(WriteResult(item.index, x.nbytes, storage_data=stored))
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self.temporary is not None and self.merged is not None
        files: dict[str, Digest] = {}
        boxes: dict[str, list[list[Any]]] = defaultdict(list)
        for result in (result for rank in results for result in rank):
            stored: StoredTensor = result.storage_data
            files[stored.file] = stored.digest
            fqn = result.index.fqn
            boxes[fqn].append([list(result.index.offset or ()), list(stored.shape), stored.file, stored.key])
            if fqn not in self.all_kinds or stored.dtype != self.all_kinds[fqn][0]:
                raise UnloadableError(f"{shown(fqn)} was written as {stored.dtype}, and is {self.all_kinds.get(fqn)}")
        index = {  # one without elements has no boxes
            fqn: {"dtype": TYPE_NAMES[dtype], "shape": list(shape), "boxes": sorted(boxes[fqn])}
            for fqn, (dtype, shape) in sorted(self.all_kinds.items())
        }
        for name, document in ((INDEX, index), (STATE, self.merged)):
            files[name] = write_text(self.temporary, name, json.dumps(document, indent=1) + "\n")
        try:
            with self.temporary.open() as opened:
                written = WrittenFiles(opened, files)
                read_state(written, self.step)
                read_index(written)
        except Damaged as error:
            raise UnloadableError(str(error)) from None
        self.locks.take(self.folder)  # no other has taken it meanwhile
        commit(self.folder, self.temporary, self.step, files, self.keep)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


@dataclass(frozen=True)
class StoredTensor:
    """A box as a rank wrote it, and what the whole file is then."""

    file: str
    key: str
    digest: Digest
    dtype: torch.dtype
    shape: tuple[int, ...]


def _agreed(ranks: Sequence[Mapping[str, TensorKind]]) -> dict[str, TensorKind]:
    """Return what all ranks have. Raises: UnloadableError for a tensor that two of them have as another."""
    kinds: dict[str, TensorKind] = {}
    for rank, mine in enumerate(ranks):
        for name, kind in mine.items():
            if kinds.setdefault(name, kind) != kind:
                raise UnloadableError(
                    f"{shown(name)} is {kind[0]} {kind[1]} on rank {rank}, and was {kinds[name]} before"
                )
    return kinds


def error_of_ranks(code: str, error: CheckpointException, fix: str) -> CheckpointError:
    """Return the error that says what each rank's was; ``fix`` is that of other libraries' and the system's errors."""
    for failure, _ in error.failures.values():
        if isinstance(failure, CheckpointError):
            return CheckpointError(failure.code, failure.message, fix=failure.fix)
    return CheckpointError(code, "\n  ".join(reasons_of_ranks(error)), fix=fix)


def reasons_of_ranks(error: CheckpointException) -> list[str]:
    """Return a line for each rank that failed, of the first twenty."""
    failures = [(rank, failure) for rank, (failure, _) in error.failures.items()][:20]
    return [f"rank {rank}: {type(failure).__name__}: {shown(str(failure))}" for rank, failure in failures]
