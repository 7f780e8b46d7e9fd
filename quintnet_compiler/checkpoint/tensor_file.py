"""Safetensors files, written from where tensors lie and read in blocks of rows, straight to where they go.

safetensors' own functions take a whole file at a time and hold Python's lock for it. Its format is a length of 8 bytes,
a header in JSON (dtype, shape and place of each tensor), and the tensors' bytes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType

import torch
from pydantic import NonNegativeInt, StrictStr, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from ..weights.files import DTYPES, shown
from ..weights.safetensors_writer import TensorEntry, bytes_of, header
from .pieces import PIECE, FileSource

LARGEST_HEADER = 100_000_000  # bytes; safetensors reads no larger ones


@dataclass(frozen=True)
class StoredType:
    """A dtype's form in a file. ``carrier``: the dtype there, by safetensors' name. ``parts``: the dims after the
    tensor's own, if several numbers make an element."""

    dtype: torch.dtype
    carrier: str
    parts: tuple[int, ...] = ()


STORED_TYPES: Mapping[str, StoredType] = MappingProxyType(
    {
        **{name: StoredType(dtype, name) for name, dtype in DTYPES.items()},
        "C128": StoredType(torch.complex128, "F64", (2,)),  # safetensors has none of these
        "C32": StoredType(torch.complex32, "F16", (2,)),
        "F4_X2": StoredType(torch.float4_e2m1fn_x2, "U8"),
    }
)
TYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({kind.dtype: name for name, kind in STORED_TYPES.items()})


class _Entry(TypedDict):
    dtype: StrictStr
    shape: tuple[NonNegativeInt, ...]
    data_offsets: tuple[NonNegativeInt, NonNegativeInt]


_HEADER = TypeAdapter(dict[str, _Entry])


class BadHeader(Exception):
    """An error in a file's header."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file, whose bytes begin at ``start``. ``dtype``: a name in :data:`STORED_TYPES`."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    def carries(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """Return whether the file's tensor is one of this shape and dtype, or carries it."""
        kind = STORED_TYPES[dtype]
        return (self.dtype, self.shape) == (kind.carrier, (*shape, *kind.parts))

    def carried(self, dtype: str) -> FileTensor:
        """Return the tensor of ``dtype`` that lies in this one."""
        return FileTensor(dtype, self.shape[: len(self.shape) - len(STORED_TYPES[dtype].parts)], self.start)


def buffers(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of a file with ``tensors``, which are in host memory. Those that are not contiguous are copied,
    each when it is its turn."""
    entries = []
    for key, x in tensors.items():
        kind = STORED_TYPES[TYPE_NAMES[x.dtype]]
        entries.append(TensorEntry(key, key, (*x.shape, *kind.parts), DTYPES[kind.carrier]))
    entries.sort(key=lambda entry: -entry.dtype.itemsize)  # all are aligned then
    yield memoryview(header(entries))
    for entry in entries:
        yield bytes_of(tensors[entry.name])


def read_header(source: FileSource) -> dict[str, FileTensor]:
    """Return the tensors of a file.

    Raises:
        BadHeader: if it is not a safetensors file, or a tensor is not within it.
    """
    if source.size < 8:
        raise BadHeader("it has no header of a safetensors file: it is too short")
    try:
        first = bytearray(8)
        source.read_into(0, memoryview(first))
        length = int.from_bytes(first, "little")
        if length > min(LARGEST_HEADER, source.size - 8):
            raise BadHeader(f"its header would have {length} bytes")
        text = bytearray(length)
        source.read_into(8, memoryview(text))
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = _HEADER.validate_python(header)
    except (ValidationError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise BadHeader(f"it has no header of a safetensors file: {shown(str(error))}") from None
    tensors = {}
    for key, entry in entries.items():
        start, stop = entry["data_offsets"]
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None or stop - start != math.prod(entry["shape"]) * dtype.itemsize:
            raise BadHeader(f"the tensor {shown(key)} cannot be {shown(entry['dtype'])} {entry['shape']}")
        if 8 + length + stop > source.size:
            raise BadHeader(f"the tensor {shown(key)} ends after the file")
        tensors[key] = FileTensor(entry["dtype"], entry["shape"], 8 + length + start)
    _require_apart(entries)
    return tensors


def _require_apart(entries: Mapping[str, _Entry]) -> None:
    """Refuse tensors that have bytes in common, as safetensors does."""
    ranges = sorted((*entry["data_offsets"], key) for key, entry in entries.items())
    for (_, stop, key), (start, _, other) in pairwise(ranges):
        if start < stop:
            raise BadHeader(f"the tensors {shown(key)} and {shown(other)} have bytes in common")


@dataclass(frozen=True)
class RowBlock:
    """Rows ``first`` to ``last`` of a tensor in a file, of which ``part`` goes ``into`` a tensor."""

    tensor: FileTensor
    first: int
    last: int
    part: tuple[slice, ...]
    into: Tensor

    @cached_property
    def begins_at(self) -> int:
        """Return where its bytes begin in the file."""
        return self.tensor.start + self.first * self._bytes_of_row

    @cached_property
    def ends_at(self) -> int:
        """Return where they end."""
        return self.tensor.start + self.last * self._bytes_of_row

    @property
    def _bytes_of_row(self) -> int:
        return math.prod(self.tensor.shape[1:]) * STORED_TYPES[self.tensor.dtype].dtype.itemsize

    def room(self) -> Tensor:
        """Return memory for its bytes, to be given to :meth:`deliver`: where they go, if they can be read to there."""
        dtype, row = STORED_TYPES[self.tensor.dtype].dtype, self.tensor.shape[1:]
        if self._in_place(dtype) and not row:
            return self.into
        return torch.empty((self.last - self.first, *row), dtype=dtype)

    def deliver(self, room: Tensor) -> None:
        """Bring what was read to where it goes."""
        if room is not self.into:
            self.into.copy_(room[:, *self.part])

    def _in_place(self, dtype: torch.dtype) -> bool:
        into = self.into
        plain = into.device.type == "cpu" and into.dtype == dtype and into.is_contiguous()
        return plain and not into.is_conj() and not into.is_neg()


def blocks(tensor: FileTensor, box: tuple[slice, ...], into: Tensor) -> Iterator[RowBlock]:
    """Return what to read for a ``box`` of a tensor: blocks of about :data:`.pieces.PIECE` bytes, or one row.

    They end where pieces of the file do, if that is between two rows.
    """
    if all(span == slice(0, n) for span, n in zip(box[1:], tensor.shape[1:], strict=True)) and into.is_contiguous():
        # one run of bytes, cut anywhere
        row = math.prod(tensor.shape[1:])
        run = box[0] if box else slice(0, 1)
        tensor = FileTensor(tensor.dtype, (math.prod(tensor.shape),), tensor.start)
        box, into = (slice(run.start * row, run.stop * row),), into.view(-1)
    whole, part = box[0], box[1:]
    size = max(1, math.prod(tensor.shape[1:]) * into.element_size())
    first = whole.start
    while first < whole.stop:
        offset = tensor.start + first * size
        last = min(first + max(1, (PIECE - offset % PIECE) // size), whole.stop)
        yield RowBlock(tensor, first, last, part, into[first - whole.start : last - whole.start])
        first = last
