"""A rank's part of a tensor as boxes, which torch.distributed.checkpoint plans with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ..core.errors import CheckpointError
from ..weights.files import shown
from ..weights.sources import Runs, runs_of
from .tensor_file import TYPE_NAMES


@dataclass(frozen=True)
class SavedPart:
    """One rank's part of a tensor of global ``shape``: ``local``, whose ``boxes`` lie at these global offsets.

    A DTensor would say it too, but for slices of several pieces (a fused projection's columns): torch takes those for
    one run.
    """

    shape: torch.Size
    local: Tensor
    boxes: dict[torch.Size, Tensor]

    @classmethod
    def of(cls, local: Tensor, shape: Sequence[int], positions: Sequence[Tensor]) -> SavedPart:
        """Return ``local`` as a part. ``positions``: for each dim, the global indices that it holds."""
        return cls.of_runs(local, shape, [runs_of(indices) for indices in positions])

    @classmethod
    def of_runs(cls, local: Tensor, shape: Sequence[int], runs: Sequence[Runs]) -> SavedPart:
        """Return the part that holds ``local``. ``runs``: for each dim, those of the global indices that it holds."""
        boxes = {}
        for corner in itertools.product(*map(_placed, runs)):
            box = local
            for dim, (_, start, size) in enumerate(corner):
                if size != box.shape[dim]:
                    box = box.narrow(dim, start, size)
            boxes[torch.Size(first for first, _, _ in corner)] = box
        return cls(torch.Size(shape), local, boxes)

    @classmethod
    def whole(cls, local: Tensor) -> SavedPart:
        """Return the part of a tensor that every rank has whole."""
        return cls(local.shape, local, {torch.Size([0] * local.dim()): local})

    # -- what torch.distributed.checkpoint asks of a tensor

    def size(self) -> torch.Size:
        return self.shape

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.local.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(at, box.shape) for at, box in self.boxes.items() if box.numel()]

    def require_storable(self, name: str) -> None:
        """Raises: CheckpointError: QN603 for a kind of tensor that a checkpoint cannot hold."""
        x = self.local
        if x.is_meta:
            text = f"{shown(name)} is on the device meta: it has no values"
            raise CheckpointError("QN603", text, fix="give it some, or remove it")
        if x.layout is not torch.strided or x.dtype not in TYPE_NAMES:
            kind = str(x.dtype if x.layout is torch.strided else x.layout)
        elif x.numel() and not x.data_ptr():
            kind = f"a {type(x).__qualname__} without memory of its own"
        else:
            return
        fix = "keep it as another plain tensor, such as one of torch.uint8, or in a buffer that is not persistent"
        raise CheckpointError("QN603", f"{shown(name)} is {kind}, which a checkpoint cannot hold", fix=fix)

    def box(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.boxes[index.offset]


@dataclass(frozen=True)
class ParameterPlace:
    """A parameter of this rank: its global shape, and the global indices of each dim in its part."""

    parameter: nn.Parameter
    shape: torch.Size
    positions: Sequence[Tensor]

    def part(self, local: Tensor) -> SavedPart:
        return SavedPart.of_runs(local, self.shape, self._runs)

    @cached_property
    def _runs(self) -> list[Runs]:
        return [runs_of(indices) for indices in self.positions]


def local_of(x: Tensor) -> Tensor:
    """Return this process's part of a tensor, without its graph."""
    local: Tensor = x.to_local() if isinstance(x, DTensor) else x
    return local.detach()


def _placed(runs: Runs) -> list[tuple[int, int, int]]:
    """Return where each run begins in the whole and in the part, and its size."""
    placed, start = [], 0
    for first, last in runs:
        placed.append((first, start, last - first))
        start += last - first
    return placed
