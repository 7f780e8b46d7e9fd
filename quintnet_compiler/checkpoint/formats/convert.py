"""From one format to another, in one process, which holds the whole checkpoint in its memory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...core.errors import CheckpointError
from ...weights.files import INDEX, METADATA, SINGLE, shown
from ..documents import is_checkpoint
from ..reading.together import alone, raised_together
from ..stores.disk_folder import DiskFolder
from ..stores.new_folder import new_folder
from .contents import Contents
from .dcp_folder import read_dcp, write_dcp
from .format import Format
from .megatron import as_hugging_face, is_megatron
from .quintnet_folder import OneCheckpoint, read_quintnet, write_quintnet
from .safetensors_folder import read_safetensors, write_safetensors


@dataclass(frozen=True)
class Choices:
    """Options of a conversion. ``step``: which checkpoint of a folder of several, or the number of what is written;
    ``model_key``: see :func:`.dcp_folder.read_dcp`; ``rename``: see :meth:`.Contents.renamed`; ``config``: see
    :func:`.safetensors_folder.write_safetensors` and :func:`.megatron.as_hugging_face`."""

    step: int | None = None
    model_key: str | None = None
    rename: tuple[tuple[str, str], ...] = ()
    config: Path | None = None


@dataclass(frozen=True)
class Conversion:
    """A report of what was read and written. ``left_out``: what the source has and the destination does not."""

    source: Format
    destination: Format
    tensors: int
    bytes: int
    optimizer: int
    step: int
    left_out: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        lines = [
            f"{self.source} -> {self.destination}: {self.tensors} tensors, {self.bytes / 2**20:.1f} MiB, "
            f"the optimizer's state of {self.optimizer} parameters, step {self.step}"
        ]
        if self.left_out:
            more = f" and {len(self.left_out) - 10} more" if len(self.left_out) > 10 else ""
            lines.append(f"left out: {', '.join(map(shown, self.left_out[:10]))}{more}")
        return "\n".join(lines)


def format_of(folder: Path) -> Format:
    """Return the format of a folder.

    Raises:
        CheckpointError: QN601 if it is none of the formats.
    """
    if is_checkpoint(folder) or DiskFolder(folder).named():
        return Format.QUINTNET
    if (folder / METADATA).is_file():
        return Format.DCP
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return Format.SAFETENSORS
    raise CheckpointError(
        "QN601",
        f"{shown(str(folder))} is no checkpoint: it has neither step-00000001/ and the like, nor {METADATA}, nor "
        f"{SINGLE} or {INDEX}",
        fix="give the folder that has them",
    )


def convert(source: Path, destination: Path, to: Format, choices: Choices = Choices()) -> Conversion:
    """Write ``destination``, a new folder, with what ``source`` has.

    Raises:
        CheckpointError: QN601 or QN602 if the source cannot be read, QN603 if the destination cannot be written; there
            is none then.
    """
    with raised_together(alone, "QN601"):
        kind = format_of(source)
        contents = _read(source, kind, choices).renamed(choices.rename)
    left_out = contents.left_out
    if to is Format.SAFETENSORS and contents.optimizer is not None:
        left_out = ("the optimizer's state", *left_out)
        contents = replace(contents, optimizer=None)
    with new_folder(destination) as temporary:
        if to is Format.QUINTNET:
            write_quintnet(temporary, contents)
        elif to is Format.DCP:
            write_dcp(temporary, contents)
        else:
            write_safetensors(temporary, contents, choices.config)
    size = sum(x.nbytes for x in contents.model.values())
    states = 0 if contents.optimizer is None else sum(1 for state in contents.optimizer.state.values() if state)
    return Conversion(kind, to, len(contents.model), size, states, contents.step, left_out)


def _read(source: Path, kind: Format, choices: Choices) -> Contents:
    if kind is Format.QUINTNET and not is_checkpoint(source):
        return read_quintnet(DiskFolder(source), choices.step)
    contents = _one(source, kind, choices)
    return contents if choices.step is None else replace(contents, step=choices.step)


def _one(source: Path, kind: Format, choices: Choices) -> Contents:
    """Return what a folder has that is one checkpoint."""
    if kind is Format.QUINTNET:
        return read_quintnet(OneCheckpoint(source.absolute().parent, source.absolute().name), None)
    contents = read_dcp(source, choices.model_key) if kind is Format.DCP else read_safetensors(source)
    if is_megatron(contents.model) and choices.config is not None:
        contents = replace(contents, model=as_hugging_face(contents.model, choices.config))
    elif is_megatron(contents.model) and not choices.rename:
        raise CheckpointError(
            "QN602",
            f"{shown(str(source))} has Megatron-core's tensors, which no plain module has",
            fix="--config config.json of the same model gives them the names of transformers; --rename keeps theirs",
        )
    return contents
