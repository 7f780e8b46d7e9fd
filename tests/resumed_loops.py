"""Loaders of every kind, and the loop that reads them in plain PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

ROWS, BATCH = 24, 4
Batch = tuple[Tensor, Tensor, Tensor]


class Rows(Dataset[tuple[Tensor, Tensor, int]]):
    """Rows with their numbers; ``noise``: adds what it draws."""

    def __init__(self, noise: Callable[[], float] = lambda: 0.0) -> None:
        self.x = torch.linspace(-1, 1, ROWS * 4, dtype=torch.float64).reshape(ROWS, 4)
        self.noise = noise

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index] + self.noise(), (self.x[index] ** 2)[:2], index


class Stream(IterableDataset[tuple[Tensor, Tensor, int]]):
    """Rows in an order that it draws, from a generator of its own or from Python's."""

    def __init__(self, own: bool) -> None:
        self.rows, self.rng = Rows(), random.Random(5) if own else random

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        order = list(range(ROWS))
        self.rng.shuffle(order)
        for index in order:
            yield self.rows[index]


class DrawnLate(Sampler[int]):
    """Draws each index when it is asked for, from torch's generator."""

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        for _ in range(ROWS):
            yield int(torch.randint(ROWS, ()))


class Counting(Sampler[int]):
    """An order that depends on how often it was asked for one: nothing can restore that."""

    def __init__(self) -> None:
        self.times = 0

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.times)).tolist())


class Wrapped:
    """A loader in an object that only iterates."""

    def __init__(self) -> None:
        self.inner = DataLoader(Rows(), BATCH, shuffle=True)

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


class Stateful:
    """A loader that says where it stands, as torchdata's does: tensors, bytes and tuples are in its state."""

    def __init__(self) -> None:
        self.data, self.order, self.given, self.loaded = Rows(), torch.empty(0), 0, False

    def __iter__(self) -> Iterator[Any]:
        if not self.loaded:
            self.order, self.given = torch.randperm(ROWS), 0
        self.loaded = False
        while self.given < ROWS:
            rows = self.order[self.given : self.given + BATCH].tolist()
            self.given += BATCH
            yield torch.utils.data.default_collate([self.data[row] for row in rows])

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "given": (self.given,), "kind": b"\0rows", "array": np.arange(3)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state["kind"] == b"\0rows"
        assert state["array"].tolist() == [0, 1, 2]
        self.order, (self.given,) = state["order"], state["given"]
        self.loaded = self.given < ROWS


def _noisy(draw: Callable[[], float], **options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(draw), BATCH, shuffle=True, **options)


def _own_numpy() -> DataLoader[Any]:
    rng = np.random.default_rng(3)
    return _noisy(lambda: float(rng.random()))


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: DataLoader(Rows(), BATCH, shuffle=True),
    "its generator": lambda: DataLoader(Rows(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "sampler's generator": lambda: DataLoader(
        Rows(), BATCH, sampler=RandomSampler(Rows(), generator=torch.Generator().manual_seed(3))
    ),
    "replacement": lambda: DataLoader(Rows(), BATCH, sampler=RandomSampler(Rows(), replacement=True, num_samples=64)),
    "weighted": lambda: DataLoader(Rows(), BATCH, sampler=WeightedRandomSampler([1.0] * ROWS, ROWS)),
    "subset": lambda: DataLoader(Rows(), BATCH, sampler=SubsetRandomSampler(range(3, ROWS))),
    "batch sampler": lambda: DataLoader(
        Rows(), batch_sampler=BatchSampler(RandomSampler(Rows()), BATCH, drop_last=True)
    ),
    "drawn late": lambda: DataLoader(Rows(), BATCH, sampler=DrawnLate()),
    "distributed": lambda: DataLoader(Rows(), BATCH, sampler=DistributedSampler(Rows(), num_replicas=1, rank=0)),
    "noise of torch": lambda: _noisy(lambda: float(torch.rand(()))),
    "noise of python": lambda: _noisy(random.random),
    "noise of numpy": lambda: _noisy(np.random.random),
    "noise of its own": _own_numpy,
    "workers": lambda: _noisy(lambda: float(torch.rand(())), num_workers=2, multiprocessing_context="fork"),
    "persistent workers": lambda: DataLoader(
        Rows(), BATCH, shuffle=True, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    ),
    "stream": lambda: DataLoader(Stream(own=False), BATCH),
    "stream of its own": lambda: DataLoader(Stream(own=True), BATCH),
    "wrapped": Wrapped,
    "stateful": Stateful,
}


def seed(number: int) -> None:
    """As scripts begin."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out + 0 * index.unsqueeze(1)


def net() -> Net:
    torch.manual_seed(7)
    return Net().double()


def arranged(batch: Any) -> Batch:
    x, y, index = batch
    return x, index, y


def plain_losses(loader: Any, epochs: int, model: nn.Module) -> list[float]:
    """The loop of plain PyTorch, without an interruption; it draws a number in each step, as callbacks may."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for epoch in range(epochs):
        if isinstance(getattr(loader, "sampler", None), DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for x, y, index in loader:
            loss = F.mse_loss(model(x, index), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


@dataclass(frozen=True)
class OwnRows:
    """What one of ``ranks`` reads: a loader of its own, with generators of its own."""

    kind: str
    rank: int
    ranks: int

    def loader(self) -> DataLoader[Any]:
        if self.kind == "stream":
            return DataLoader(Part(self.rank, self.ranks), BATCH // self.ranks)
        sampler = DistributedSampler(Rows(), num_replicas=self.ranks, rank=self.rank)
        noise = {"noise": lambda: float(torch.rand(()))}.get(self.kind, lambda: 0.0)
        return DataLoader(Rows(noise), BATCH // self.ranks, sampler=sampler)


class Part(IterableDataset[tuple[Tensor, Tensor, int]]):
    """Each ``ranks``-th row, in an order that Python's generator gives."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        order = list(range(self.rank, ROWS, self.ranks))
        random.shuffle(order)
        for index in order:
            yield Rows()[index]


def joined_losses(kind: str, epochs: int, ranks: int = 2) -> list[float]:
    """Plain PyTorch's, on the rows of all ranks together, each read as in a process of its own."""
    batches: list[list[Any]] = []
    for rank in range(ranks):
        seed(1 + rank)
        loader, read = OwnRows(kind, rank, ranks).loader(), []
        for epoch in range(epochs):
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)
            read += list(loader)
        batches.append(read)
    joined = [tuple(torch.cat(parts) for parts in zip(*step, strict=True)) for step in zip(*batches, strict=True)]
    return plain_losses(joined, 1, net())
