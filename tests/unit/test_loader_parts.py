"""What loaders say about themselves: whether their state is enough, and whether epochs depend on those before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler

from quintnet_compiler.training.resume.loader_parts import (
    begins_anew,
    has_state,
    parts_with_epochs,
    restores_itself,
)

ROWS = list(range(8))


class _Own(Sampler[int]):
    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return iter(ROWS)

    def __len__(self) -> int:
        return len(ROWS)


class _WithEpochs(_Own):
    def set_epoch(self, epoch: int) -> None:
        pass


class _WithState(_Own):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(ROWS)


class _StreamWithEpochs(_Stream):
    def set_epoch(self, epoch: int) -> None:
        pass


class _StreamWithState(_Stream, _WithState):
    pass


class BufferShuffledExamplesIterable:
    """Has the name of the class of datasets."""


class _Subclass(DataLoader[int]):
    def __iter__(self) -> Any:
        return super().__iter__()


def test_an_epoch_depends_on_those_before_unless_all_that_is_iterated_is_torchs_or_has_set_epoch() -> None:
    rows: Any = ROWS
    anew = [
        DataLoader(rows, shuffle=True),
        DataLoader(rows, batch_sampler=BatchSampler(RandomSampler(ROWS), 2, False)),
        DataLoader(rows, sampler=DistributedSampler(rows, 2, 0)),
        DataLoader(rows, sampler=_WithEpochs()),
        DataLoader(rows, batch_size=None),
        DataLoader(_StreamWithEpochs()),
    ]
    assert [begins_anew(loader) for loader in anew] == [True] * len(anew)
    other = [
        DataLoader(rows, sampler=_Own()),
        DataLoader(rows, batch_sampler=BatchSampler(_Own(), 2, False)),
        DataLoader(_Stream()),
        _Subclass(rows),
        rows,
        iter(rows),
    ]
    assert [begins_anew(loader) for loader in other] == [False] * len(other)
    assert parts_with_epochs(anew[3]) == [anew[3].sampler]
    assert parts_with_epochs(rows) == []


def test_a_state_counts_if_all_that_draws_has_one() -> None:
    assert has_state(_WithState())
    assert restores_itself(_WithState())
    assert not restores_itself(_Own())
    losing: Any = _WithState()
    losing.dataset = BufferShuffledExamplesIterable()
    assert not restores_itself(losing)


def test_a_state_of_torchdatas_loader_counts_if_its_parts_have_one() -> None:
    make = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    own_batches = BatchSampler(RandomSampler(ROWS), 2, False)
    assert restores_itself(make(ROWS, shuffle=True))
    assert restores_itself(make(ROWS, sampler=DistributedSampler(ROWS, 2, 0)))  # type: ignore[arg-type]
    assert restores_itself(make(ROWS, sampler=_WithState()))
    assert restores_itself(make(_StreamWithState(), num_workers=2))
    assert not restores_itself(make(ROWS, sampler=_Own()))
    assert not restores_itself(make(ROWS, batch_sampler=own_batches))
    assert not restores_itself(make(_Stream()))
    assert begins_anew(make(ROWS, shuffle=True))


def test_a_stream_of_datasets_in_workers_does_not_count() -> None:
    make = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    stream = pytest.importorskip("datasets").Dataset.from_dict({"row": ROWS}).to_iterable_dataset()
    assert restores_itself(make(stream))
    assert restores_itself(stream)
    assert not restores_itself(make(stream, num_workers=1))
    assert not restores_itself(stream.shuffle(seed=1, buffer_size=4))
