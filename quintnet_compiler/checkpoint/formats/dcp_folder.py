"""Folders of torch.distributed.checkpoint: its own reader and writer, with metadata that was checked."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ...core.errors import CheckpointError
from ...weights.files import shown
from ..values import extra_of, stored_extra
from .contents import Contents, OptimizerContents
from .dcp_keys import STEP, layout_of, optimizer_of
from .dcp_metadata import DcpMetadata, read_dcp_metadata

OWN = "quintnet"  # the key of what training needs beside, as JSON
MODEL, OPTIMIZER = "model", "optimizer"


class _Folder(FileSystemReader):
    """Reads a folder by metadata that was checked: its own is never unpickled."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


class _Planner(DefaultLoadPlanner):
    """Values that are no tensors are read by torch's restricted unpickler."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = torch.load(value, weights_only=True)
        except Exception as error:
            raise ValueError(f"{key} cannot be read without running code: {error}") from None


def values_of(folder: Path, stored: DcpMetadata, keys: Iterable[str]) -> dict[str, Any]:
    """Read these items of a folder, whole.

    Raises:
        CheckpointError: QN601 if one cannot be read without running code, or is damaged.
    """
    state: dict[str, Any] = {}
    for key in keys:
        item = stored.metadata.state_dict_metadata[key]
        tensor = isinstance(item, TensorStorageMetadata)
        state[key] = torch.empty(item.size, dtype=item.properties.dtype) if tensor else None  # type: ignore[union-attr]
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _alone(folder, "QN601"):
        dcp_load(state, storage_reader=_Folder(folder, stored.metadata), planner=planner, no_dist=True)
    return state


@contextlib.contextmanager
def _alone(folder: Path, code: str) -> Iterator[None]:
    """Let torch read or write a folder in this process, and say what was wrong."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failed:  # of torch, for anything that is wrong with a file
        error = failed.failures[0][0]
        if not isinstance(error, Exception):  # Ctrl+C
            raise error from None
        text = f"{shown(str(folder))}: {type(error).__name__}: {shown(str(error))}"
        raise CheckpointError(code, text, fix="see the reason") from None


def read_dcp(folder: Path, model_key: str | None) -> Contents:
    """Read model and optimizer. ``model_key``: the key that the model has in the state dict that was saved, empty if it
    was saved alone; None: what :func:`.dcp_keys.layout_of` finds.

    Raises:
        CheckpointError: QN601 if it cannot be read, QN602 if its keys cannot be told apart.
    """
    stored = read_dcp_metadata(folder)
    items = stored.metadata.state_dict_metadata
    layout = layout_of(items, model_key, own=OWN)
    values = values_of(folder, stored, layout.keys | ({OWN, STEP} & items.keys()))
    own = _own(folder, values.pop(OWN, "{}"))
    names = {key.removeprefix(layout.model): key for key in layout.model_keys}
    return Contents(
        {name: values[key] for name, key in names.items() if isinstance(values[key], torch.Tensor)},
        optimizer_of(layout, values, names.keys(), stored.paths, own.get("class", "")),
        own.get("step", int(values.get(STEP, 0))),
        extra_of(own),
        own.get("run", {}),
        tuple(sorted(items.keys() - values.keys() - {OWN})),
    )


def _own(folder: Path, text: Any) -> Mapping[str, Any]:
    try:
        note = json.loads(text)
        if isinstance(note, dict) and type(note.get("step", 0)) is int:
            return note
    except (ValueError, TypeError, RecursionError):
        pass
    raise CheckpointError("QN601", f"{shown(str(folder))}: the item {OWN!r} is damaged", fix="convert it again")


def write_dcp(folder: Path, contents: Contents) -> None:
    """Write ``{"model": ..., "optimizer": ...}`` as ``get_model_state_dict`` and ``get_optimizer_state_dict`` of
    torch.distributed.checkpoint.state_dict name what is in it: options of the optimizer both by group and by parameter
    (``flatten_optimizer_state_dict=True``)."""
    own: dict[str, Any] = {"step": contents.step, **stored_extra(contents.extra), "run": contents.run}
    state: dict[str, Any] = {MODEL: dict(contents.model)}
    if contents.optimizer is not None:
        own["class"] = contents.optimizer.kind
        state[OPTIMIZER] = _optimizer(contents.optimizer)
    state[OWN] = json.dumps(own)
    with _alone(folder, "QN603"):
        dcp_save(state, storage_writer=FileSystemWriter(folder), no_dist=True)


def _optimizer(contents: OptimizerContents) -> dict[str, Any]:
    groups: list[dict[str, Any]] = []
    flat: dict[str, Any] = {}
    for name, group_options in contents.options.items():
        options = {key: tuple(x) if isinstance(x, list) else x for key, x in group_options.items()}
        alike = (group for group in groups if {k: x for k, x in group.items() if k != "params"} == options)
        group = next(alike, None)
        if group is None:
            group = {**options, "params": []}
            groups.append(group)
        group["params"].append(name)
        if not name.isdecimal():  # else they would have the keys of a group
            flat |= {f"param_groups.{name}.{key}": x for key, x in options.items()}
    return {"state": {name: dict(state) for name, state in contents.state.items()}, "param_groups": groups, **flat}
