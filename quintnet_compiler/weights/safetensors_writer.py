"""Writing safetensors one tensor at a time: the format is a JSON header with shapes and offsets, then the bytes."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from .files import DTYPES, INDEX, SINGLE

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to write. ``source``: what it is called where its values are."""

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def bytes_of(x: Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, row after row; they are a copy if they lie otherwise."""
    x = x.resolve_conj().resolve_neg().contiguous()
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().data  # a dim of size 1 may have any stride


def storable(dtype: torch.dtype) -> bool:
    return dtype in _NAMES


def files_of(entries: Sequence[TensorEntry], max_file_bytes: int) -> dict[str, tuple[TensorEntry, ...]]:
    """File name -> its tensors, in order; a file is larger than ``max_file_bytes`` only if it holds one tensor."""
    groups: list[list[TensorEntry]] = [[]]
    for entry in entries:
        if groups[-1] and sum(e.bytes for e in groups[-1]) + entry.bytes > max_file_bytes:
            groups.append([])
        groups[-1].append(entry)
    # wide dtypes first: every tensor begins at a multiple of its item size
    tidy = [tuple(sorted(group, key=lambda e: -e.dtype.itemsize)) for group in groups]
    if len(tidy) == 1:
        return {SINGLE: tidy[0]}
    return {f"model-{i + 1:05}-of-{len(tidy):05}.safetensors": group for i, group in enumerate(tidy)}


def write_weights(folder: Path, files: dict[str, tuple[TensorEntry, ...]], tensors: Iterator[Tensor]) -> None:
    """Write ``files`` into ``folder``, taking the tensors in their order; with several files also the index."""
    for name, entries in files.items():
        with _durable(folder / name) as file:
            file.write(header(entries))
            for entry in entries:
                x = next(tensors).detach().cpu()
                assert tuple(x.shape) == entry.shape and x.dtype == entry.dtype, entry.name
                file.write(bytes_of(x))
    if len(files) > 1:
        places = {entry.name: name for name, entries in files.items() for entry in entries}
        size = sum(entry.bytes for entries in files.values() for entry in entries)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        with _durable(folder / INDEX) as file:
            file.write((json.dumps(index, indent=2) + "\n").encode())


def header(entries: Sequence[TensorEntry]) -> bytes:
    """Return the bytes of a file before those of the tensors, which follow each other in this order."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.bytes
        fields[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextlib.contextmanager
def _durable(path: Path) -> Iterator[BinaryIO]:
    """A new file that is on the disk, not only on its way there, when the block ends."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
