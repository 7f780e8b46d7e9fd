"""``.metadata`` of a folder of torch.distributed.checkpoint, checked: it is a pickle, which is read as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ...core.errors import CheckpointError
from ...core.pickle_records import Pickled, records_in
from ...weights.files import METADATA, shown
from ..documents import StoredBox, covers

LARGEST_METADATA = 2**30
_OF_TORCH = "torch.distributed.checkpoint.metadata"

Paths = Mapping[str, tuple[str | int, ...]]


@dataclass(frozen=True)
class StoredAt:
    """The place of an item in a folder, as torch's own reader asks for it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] = ()


@dataclass(frozen=True)
class DcpMetadata:
    """The items of a folder. ``paths``: where in nested state dicts each key was, as the file says."""

    metadata: Metadata
    paths: Paths


def read_dcp_metadata(folder: Path) -> DcpMetadata:
    """Read which tensors a folder has, and which file holds them.

    Raises:
        CheckpointError: QN601 if ``.metadata`` is damaged, names files that are not in the folder, or has boxes that do
            not cover their tensors exactly.
    """
    path = folder / METADATA
    try:
        if path.stat().st_size > LARGEST_METADATA:
            raise ValueError(f"it is larger than {LARGEST_METADATA} bytes")
        with path.open("rb") as file:
            record = records_in(file)
        return _checked(folder, record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            "QN601",
            f"{shown(str(folder))}: {METADATA}: {shown(str(error) or type(error).__name__)}",
            fix="write the checkpoint again, with torch.distributed.checkpoint",
        ) from None


def _checked(folder: Path, record: Any) -> DcpMetadata:
    top = _state(record, "Metadata")
    metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for key, item in top["state_dict_metadata"].items():
        metadata[_text(key)] = _tensor(key, item) if _is(item, "TensorStorageMetadata") else _bytes(key, item)
    file_sizes = {
        path.name: path.stat().st_size for path in folder.iterdir() if path.is_file() and not path.is_symlink()
    }
    storage: dict[MetadataIndex, Any] = {}
    for index, place in top["storage_data"].items():
        at, where = _state(index, "MetadataIndex"), place.state
        key, offset = _text(at["fqn"]), at.get("offset")
        if (file := _text(where["relative_path"])) not in file_sizes:
            raise ValueError(f"{shown(key)} is in {shown(file)}, which is not a file of the folder")
        if where.get("transform_descriptors"):
            raise ValueError(f"{shown(key)} is stored in another form: {shown(str(where['transform_descriptors']))}")
        stored_index = MetadataIndex(key, None if offset is None else _sizes(offset))
        storage[stored_index] = StoredAt(file, _number(where["offset"]), _number(where["length"]))
        if storage[stored_index].offset + storage[stored_index].length > file_sizes[file]:
            raise ValueError(f"{shown(key)} lies behind the end of {shown(file)}")
    for key, tensor in metadata.items():
        for index, size in _items(key, tensor):
            if index not in storage:
                raise ValueError(f"{shown(key)} is in no file")
            if size > storage[index].length:
                raise ValueError(f"{shown(key)} has {size} bytes, of which {storage[index].length} are in the file")
    return DcpMetadata(Metadata(metadata, storage_data=storage, storage_meta=StorageMeta()), _paths(top))


def _tensor(key: str, record: Pickled) -> TensorStorageMetadata:
    fields = record.state
    properties = fields["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]  # earlier versions: a dict
    kind = getattr(torch, dtype.kind[1], None) if dtype.kind[0] == "torch" else None
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{shown(key)} has the dtype {shown('.'.join(dtype.kind))}")
    size = _sizes(fields["size"])
    chunks = []
    for chunk in fields["chunks"]:
        box = _state(chunk, "ChunkStorageMetadata")
        chunks.append(ChunkStorageMetadata(_sizes(box["offsets"]), _sizes(box["sizes"])))
    boxes = [StoredBox(tuple(c.offsets), tuple(c.sizes), "", "") for c in chunks if c.sizes.numel()]
    if not covers(size, boxes):
        raise ValueError(f"the boxes of {shown(key)} do not cover {tuple(size)} exactly")
    return TensorStorageMetadata(TensorProperties(dtype=kind), size, chunks)


def _items(key: str, tensor: TensorStorageMetadata | BytesStorageMetadata) -> Iterator[tuple[MetadataIndex, int]]:
    """Yield each part of a key, and the bytes that it has at least."""
    if not isinstance(tensor, TensorStorageMetadata):
        yield MetadataIndex(key), 0
        return
    for chunk in tensor.chunks:
        yield MetadataIndex(key, chunk.offsets), chunk.sizes.numel() * tensor.properties.dtype.itemsize


def _bytes(key: str, record: Any) -> BytesStorageMetadata:
    if not _is(record, "BytesStorageMetadata"):
        raise ValueError(f"{shown(key)} is neither a tensor nor bytes")
    return BytesStorageMetadata()


def _paths(top: Mapping[str, Any]) -> Paths:
    paths = top.get("planner_data")
    if not isinstance(paths, dict):
        return {}
    return {
        key: path
        for key, path in paths.items()
        if isinstance(path, tuple) and all(type(part) in (str, int) for part in path)
    }


def _is(x: Any, name: str) -> bool:
    return isinstance(x, Pickled) and x.kind == (_OF_TORCH, name)


def _state(x: Any, name: str) -> Any:
    if not _is(x, name):
        raise ValueError(f"where torch.distributed.checkpoint has a {name} is something else")
    return x.state


def _sizes(x: Any) -> torch.Size:
    numbers = x.args[0] if isinstance(x, Pickled) and x.kind == ("torch", "Size") else x
    return torch.Size(map(_number, numbers))


def _number(x: Any) -> int:
    if type(x) is not int or x < 0:
        raise ValueError(f"{shown(str(x))} is no size")
    return x


def _text(x: Any) -> str:
    if type(x) is not str:
        raise ValueError(f"{shown(str(x))} is no name")
    return x
