"""Tensors of an open checkpoint: which bytes of its files the parts of a rank are made of, and reading them there.

torch.distributed.checkpoint finds the stored boxes that overlap a part. No rank's plan depends on another's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..documents import IndexEntry
from ..manifest import WrittenFiles
from ..parts import SavedPart
from ..tensor_file import STORED_TYPES, RowBlock, blocks, read_header
from .block_reading import Region, read_regions, regions


@dataclass(frozen=True)
class ReadPlan:
    """The regions of files to read for some parts."""

    checkpoint: WrittenFiles
    regions: Sequence[Region]

    def fill_parts(self) -> None:
        """Fill the parts.

        Raises:
            VanishedError: if files are no longer what they were when the checkpoint was opened.
            Damaged: if they have other bytes than were written. Parts may have been filled with them.
            OSError: naming the file.
        """
        read_regions(self.regions)
        self.checkpoint.files.require_unchanged()


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a checkpoint, which ``index`` finds in its files."""

    checkpoint: WrittenFiles
    index: Mapping[str, IndexEntry]

    @cached_property
    def metadata(self) -> dict[str, TensorStorageMetadata]:
        """Return what torch.distributed.checkpoint plans with."""
        return {name: _metadata(entry) for name, entry in self.index.items()}

    def plan_reading(self, parts: Mapping[str, SavedPart]) -> ReadPlan:
        """Return how to fill ``parts``, of tensors with the same shapes. The headers of files are read.

        Raises:
            VanishedError, Damaged, OSError: as :meth:`ReadPlan.read` does.
        """
        wanted: dict[str, list[tuple[str, str, tuple[slice, ...], torch.Tensor]]] = defaultdict(list)
        for name, part in parts.items():
            entry = self.index[name]
            stored = {box.at: box for box in entry.boxes}
            for item in create_read_items_for_chunk_list(name, self.metadata[name], part.__create_chunk_list__()):
                assert item.storage_index.offset is not None
                box = stored[tuple(item.storage_index.offset)]
                into = part.box(item.dest_index)[_slices(item.dest_offsets, item.lengths)]
                wanted[box.file].append((box.key, entry.dtype, _slices(item.storage_offsets, item.lengths), into))
        all_regions: list[Region] = []
        for file, wishes in wanted.items():
            header = read_header(self.checkpoint.verified(file))
            rows: list[RowBlock] = []
            for key, dtype, slices, into in wishes:
                rows += blocks(header[key].carried(dtype), slices, into.detach())
            all_regions += regions(self.checkpoint.pieces_of_file(file), rows)
        return ReadPlan(self.checkpoint, all_regions)


def _metadata(entry: IndexEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(box.at), torch.Size(box.sizes)) for box in entry.boxes]
    properties = TensorProperties(dtype=STORED_TYPES[entry.dtype].dtype)
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)


def _slices(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
