"""The samplers and the dataset of a loader, and what is left in them when an epoch ends."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .random_states import reachable

_LOSES_ROWS = ("BufferShuffledExamplesIterable",)  # of datasets
_OF_TORCH = ("torch.utils.data.", "torchdata.stateful_dataloader.")


def has_state(x: Any) -> bool:
    """Return whether an object says where it stands."""
    return all(callable(getattr(x, name, None)) for name in ("state_dict", "load_state_dict"))


def restores_itself(loader: Any) -> bool:
    """Return whether ``load_state_dict`` of a loader restores what it reads.

    torchdata's StatefulDataLoader asks its parts. One without a state it iterates again up to where it stood, with the
    random numbers of that moment, and a dataset that is a stream once more in each further resumption. A stream of
    Hugging Face's datasets loses the rows that a shuffle has in memory; in a worker that gave nothing since it was
    restored, it says that it stands at its beginning.
    """
    if not has_state(loader) or any(type(part).__name__ in _LOSES_ROWS for _, part in reachable(loader)):
        return False
    if not hasattr(loader, "dataset"):
        return True
    if isinstance(loader.dataset, IterableDataset):
        forgets = getattr(loader, "num_workers", 0) > 0 and type(loader.dataset).__module__.startswith("datasets.")
        return has_state(loader.dataset) and not forgets
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", getattr(loader, "sampler", None))
    asks = has_state(batch_sampler) or type(batch_sampler).__module__.startswith("torchdata.")
    return asks and (has_state(batch_sampler) or has_state(sampler) or _is_of_torch(sampler))


def begins_anew(loader: Any) -> bool:
    """Return whether an epoch of a loader depends on random generators and the epoch's number alone.

    Else it may depend on the epochs before: an order that is shuffled again, a count of epochs, a stream that goes on.
    """
    iterates = getattr(type(loader), "__iter__", None)
    if not isinstance(loader, DataLoader) or not getattr(iterates, "__module__", "").startswith(_OF_TORCH):
        return False
    stream = isinstance(loader.dataset, IterableDataset)
    samplers = (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    parts = [part for part in samplers if part is not None]
    return all(_is_of_torch(part) or has_epochs(part) for part in parts) and (not stream or has_epochs(loader.dataset))


def has_epochs(x: Any) -> bool:
    """Return whether an object is told the number of each epoch."""
    return callable(getattr(x, "set_epoch", None))


def parts_with_epochs(loader: Any) -> list[Any]:
    """Return the loader, samplers and dataset that have ``set_epoch``."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, batch_sampler, getattr(batch_sampler, "sampler", None)]
    parts += [getattr(loader, name, None) for name in ("sampler", "dataset")]
    return list({id(part): part for part in parts if has_epochs(part)}.values())


def _is_of_torch(x: Any) -> bool:
    return type(x).__module__.startswith(_OF_TORCH)
