"""This package's own checkpoints, whole in one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..folder import Entry
from ..lock import FolderLocks
from ..manifest import step_of_manifest
from ..optimizer_state import decoded_state, encoded_state
from ..parts import SavedPart
from ..reading.choice import Chosen, with_newest
from ..reading.stored_tensors import StoredTensors
from ..reading.together import alone, raised_together
from ..stores.disk_folder import DiskFolder
from ..training_state import MODEL, OPTIMIZER, Destination, Snapshot, write
from ..values import extra_of, plain, stored_extra
from .contents import Contents, OptimizerContents


@dataclass(frozen=True)
class OneCheckpoint(DiskFolder):
    """A folder as if it had one checkpoint alone, ``name``, which may be any: the manifest says the step."""

    name: str

    def named(self) -> list[Entry]:
        with self.at(self.name).open() as files:
            return [Entry(step_of_manifest(files), self.at(self.name))]

    def leftovers(self) -> list[Entry]:
        return []

    def read_mark(self) -> bytes:
        return b""


def read_quintnet(folder: DiskFolder, step: int | None) -> Contents:
    """Read the newest whole checkpoint, or that of ``step``. A tied parameter is under each of its names.

    Raises:
        CheckpointError: QN601 if none is whole.
    """
    return with_newest(alone, folder, step, lambda chosen: partial(_contents, chosen))


def _contents(chosen: Chosen) -> Contents:
    """Return all that a checkpoint has.

    Raises:
        VanishedError: if its files were removed or changed while they were read.
    """
    stored = StoredTensors(chosen.files, chosen.index)
    wholes = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in stored.metadata.items()}
    with raised_together(alone, "QN601"):
        stored.plan_reading({name: SavedPart.whole(x) for name, x in wholes.items()}).fill_parts()
    note = chosen.state
    model = {name.removeprefix(MODEL): x for name, x in wholes.items() if name.startswith(MODEL)}
    model |= {other: model[kept] for other, kept in note["run"].get("tied", {}).items() if kept in model}
    optimizer = None
    if "optimizer" in note:
        tensors: dict[str, dict[str, Tensor]] = {}
        for full, x in wholes.items():
            if full.startswith(OPTIMIZER):
                name, _, path = full.removeprefix(OPTIMIZER).rpartition("/")
                tensors.setdefault(name, {})[path] = x
        saved = note["optimizer"]
        optimizer = OptimizerContents(
            saved["class"],
            {name: decoded_state(saved["values"].get(name, {}), tensors.get(name, {})) for name in saved["of"]},
            {name: saved["options"][number] for name, number in saved["of"].items()},
        )
    return Contents(model, optimizer, note["step"], extra_of(note), note["run"])


def write_quintnet(folder: Path, contents: Contents) -> None:
    """Write ``contents`` as the checkpoint of its step.

    Raises:
        CheckpointError: QN603 if the folder cannot be written, or an optimizer's value cannot be kept.
    """
    parts = {f"{MODEL}{name}": SavedPart.whole(x) for name, x in contents.model.items()}
    note: dict[str, Any] = {**stored_extra(contents.extra), "run": dict(contents.run), "torch": torch.__version__}
    optimizer = contents.optimizer
    if optimizer is not None:
        values, options = {}, {}
        for name, group_options in optimizer.options.items():
            options[name] = {key: plain(x, f"option {key} of {name}") for key, x in group_options.items()}
        for name, state in optimizer.state.items():

            def put(path: str, key: str, x: Tensor, name: str = name) -> None:
                parts[f"{OPTIMIZER}{name}/{path}"] = SavedPart.whole(x)

            values[name] = encoded_state(name, state, put)
        note["optimizer"] = {"class": optimizer.kind, "options": options, "values": values}
    write(Snapshot(parts, note), Destination(DiskFolder(folder), contents.step, None, FolderLocks()))
