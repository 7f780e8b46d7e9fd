"""A loader whose position is saved and restored, so that a resumed run reads the same batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data import sampler as torch_samplers

from ...api.compiled_program import CompiledProgram
from ...checkpoint.values import from_json, to_json
from ...core.errors import CheckpointError, CheckpointWarning
from ...runtime.launch.accelerator import group_accelerator
from ...runtime.launch.calls import announced
from ...runtime.launch.consistency import tell
from ...runtime.launch.world import many, own_rank, world_size
from ..batches import BatchSampler
from .loader_parts import begins_anew, parts_with_epochs, restores_itself
from .position import Position
from .random_states import RandomStates
from .rank_states import RowReader, choose_state, gathered
from .stored_checks import require_data_state

_END = object()
_DOUBT = "rows may come twice, or never. An order that a seed decides (quintnet.BatchSampler), or a loader with "
_DOUBT += "state_dict and load_state_dict, can be restored"


@dataclass(frozen=True)
class _Saved:
    """A saved position.

    ``states``: of this rank's random generators and loader. ``comparable``: whether the digest is of the batches that
    this rank will read again.
    """

    at: Position
    states: Mapping[str, Any]
    comparable: bool


class ResumableLoader:
    """A loader that resumes where a run was interrupted.

    Example::

        data = quintnet.ResumableLoader(loader, program)
        if there_is_a_checkpoint:
            data.load_state_dict(program.load(folder, optimizer=optimizer).extra["data"])
        while data.epoch < epochs:
            for batch in data:  # what is left of this epoch
                ...
                program.save(folder, step=step, optimizer=optimizer, extra={"data": data.state_dict()})

    A loader with ``state_dict`` and ``load_state_dict`` (torchdata's StatefulDataLoader, if its samplers are torch's or
    have these, too) saves and restores its own state. A :class:`BatchSampler` begins at the saved position. For all
    others, the states of random generators at the beginning of the epoch are saved: those of torch, NumPy and Python,
    and all that the loader holds. They are restored before the epoch begins again, and the batches that were read are
    read once more and compared by a digest; between two epochs, those of the epoch before, unless all that the loader
    iterates is torch's or has ``set_epoch``. In each case, the generators then get the states that they had when the
    position was saved. Before each epoch, ``set_epoch`` of the loader, its samplers and its dataset is called if it
    exists.

    Args:
        loader: gives batches.
        program: that trains on them.
        batch_is_local: batches have only this data rank's rows.
    """

    def __init__(self, loader: Iterable[Any], program: CompiledProgram, *, batch_is_local: bool = False) -> None:
        self.loader, self.program, self.batch_is_local = loader, program, batch_is_local
        self.keeps_states = False  # record states before each batch, for state_before_batch
        self._at = Position()
        self._random: RandomStates | None = None
        self._begin: Any = None  # random states when the epoch began
        self._last: Mapping[str, Any] | None = None  # the epoch before, as JSON, if this one may depend on it
        self._before: tuple[Position, Any] | None = None
        self._saved: _Saved | None = None  # the position to resume from

    @property
    def epoch(self) -> int:
        """Return the number of the epoch that is read, or will be next."""
        return self._at.epoch

    @property
    def has_own_state(self) -> bool:
        """Return whether the loader saves its own state."""
        return self._sampler() is None and self._restores_itself

    @cached_property
    def _restores_itself(self) -> bool:
        return restores_itself(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of this epoch.

        Raises:
            CheckpointError: QN602 if the data does not have what the run had read.
        """
        saved, self._saved = self._saved, None
        if saved is None and self._at.batches:  # an iteration before this one was left
            saved = _Saved(self._at, self._states(), comparable=True)
        self._random = RandomStates(self.loader)
        if saved is not None:
            self._repeat_epochs_before(saved)
        for part in parts_with_epochs(self.loader):
            part.set_epoch(self.epoch)
        if saved is None:
            self._begin = self._random.now()  # before the loader draws any
        batches = self._batches() if saved is None else self._continued(saved)
        while True:
            self._before = (self._at, self._random.now()) if self.keeps_states else None
            batch = next(batches, _END)
            if batch is _END:
                break
            self._at = self._at.after(batch, self._ways)
            yield batch
        sampler = self._sampler()
        seen = self._at.seen if sampler is None else sampler.after(self._at.seen)
        self._last = None if self.has_own_state or sampler is not None else self._ended_epoch()
        self._at, self._begin, self._before = Position(self.epoch + 1, seen), None, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this loader, as JSON. Every rank calls this at the same time.

        Raises:
            CheckpointError: QN603 if the loader's own state has values that a checkpoint cannot hold.
        """
        with announced("state_dict of a ResumableLoader"):
            return self._at.to_json() | self._ranks() | gathered(self._states(), _tell_all)

    def state_before_batch(self) -> dict[str, Any] | None:
        """Return the position before the last batch, without communication; None if other ranks' may differ."""
        own_rows = self._ways > 1 and not self._any_ranks
        if self._before is None or self.has_own_state or own_rows:
            return None
        at, now = self._before
        states = self._json(at, self._begin, now, None)
        return at.to_json() | self._ranks() | {"states": [states], "of": [0] * world_size()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume, in the next iteration, at the position of another loader.

        Raises:
            CheckpointError: QN602 if each data rank read its own rows, and there are others now, unless a
                :class:`BatchSampler` or torch's DistributedSampler says which ones; or for what is no such state.
        """
        require_data_state(state)
        states: Mapping[str, Any] = {"begin": None, "now": None, "loader": None, "digest": 0}
        comparable = False
        if "states" in state:  # else of an earlier version
            me = RowReader(own_rank(), self.program.data_rank if self.batch_is_local else 0, self._ways)
            states, comparable = choose_state(state, me, any_ranks=self._any_ranks)
        at = Position.from_json(state, states["digest"])
        if (sampler := self._sampler()) is not None:
            at = _of_these_samples(at, sampler)
        self._at, self._saved = at, _Saved(at, states, comparable)

    # -- resuming

    def _continued(self, saved: _Saved) -> Iterator[Any]:
        """Return the remaining batches of the epoch, with random generators as when the position was saved."""
        assert self._random is not None
        begin, now, own = (from_json(saved.states[key]) for key in ("begin", "now", "loader"))
        first = now if begin is None else begin
        if first is not None:
            self._random.restore(first)
        self._begin = first
        if own is not None and self.has_own_state:
            self._load_own(own, None if saved.at.batches else first)
            batches = self._batches()
        else:
            batches = self._batches()
            if saved.at.batches and self._sampler() is None:
                self._read_again(batches, saved)
        if now is not None and saved.at.batches:
            self._random.restore(now)
        return batches

    def _load_own(self, state: Any, first: Any) -> None:
        """Give the loader its own state; ``first``: random states of an epoch that has not begun."""
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]
        if first is not None and hasattr(self.loader, "dataset"):
            assert self._random is not None
            iter(self.loader)  # torchdata's finishes the epoch before, which draws numbers
            self._random.restore(first)

    def _repeat_epochs_before(self, saved: _Saved) -> None:
        """Put the loader where it stood when this epoch began, if that depends on the epochs before."""
        last = None if saved.at.batches or self.has_own_state else saved.states.get("last")
        if last is None or begins_anew(self.loader):
            self._make_workers(self.epoch)
            return
        goal = Position.from_json(last, last["digest"])
        self._make_workers(goal.epoch)
        for part in parts_with_epochs(self.loader):
            part.set_epoch(goal.epoch)
        assert self._random is not None
        self._random.restore(from_json(last["begin"]))
        at = Position(goal.epoch)
        for batch in self.loader:
            at = at.after(batch, self._ways)
            if at.batches > goal.batches and at.reaches(goal):
                break  # it would end here
        if reason := self._doubt(at, goal, comparable=saved.comparable):
            warnings.warn(CheckpointWarning(reason), stacklevel=4)

    def _make_workers(self, epoch: int) -> None:
        """Make workers that stay, which draws a number, as the run's first epoch did."""
        if epoch > 0 and getattr(self.loader, "persistent_workers", False):
            iter(self.loader)

    def _read_again(self, batches: Iterator[Any], saved: _Saved) -> None:
        goal = saved.at
        at = Position(goal.epoch)
        while not at.reaches(goal):
            batch = next(batches, _END)
            if batch is _END:
                break
            at = at.after(batch, self._ways)
        if not at.reaches(goal) or (goal.rows is not None and at.rows != goal.rows):
            raise CheckpointError(
                "QN602",
                f"the run had read {goal.rows if goal.rows is not None else goal.batches} rows of epoch {goal.epoch}, "
                f"and the loader has {at.rows} rows in its first {at.batches} batches: no batch ends there",
                fix="go on with the data and the batch size of the run",
            )
        self._at = replace(at, seen=goal.seen)
        if saved.states["begin"] is not None:
            reason = self._doubt(at, goal, comparable=saved.comparable)
        else:
            draws = not isinstance(getattr(self.loader, "sampler", None), torch_samplers.SequentialSampler)
            reason = f"the checkpoint has no states of random generators: {_DOUBT}" if draws else ""
        if reason:
            warnings.warn(CheckpointWarning(reason), stacklevel=4)

    def _doubt(self, at: Position, goal: Position, *, comparable: bool) -> str:
        """Return the reason why rows may come twice or never; "" if they do not.

        ``at``: what was read again; ``goal``: what the run had read.
        """
        if comparable and at.batches == goal.batches:
            differ = at.digest != goal.digest
            return f"the batches that were read again are not those that the run had read: {_DOUBT}" if differ else ""
        has_torch_sampler = (
            isinstance(self.loader, DataLoader) and type(self.loader.sampler).__module__ == torch_samplers.__name__
        )
        if has_torch_sampler or self._any_ranks:
            return ""
        return f"batches have other sizes now, and could not be compared with those of the run: {_DOUBT}"

    # -- batches and states

    def _batches(self) -> Iterator[Any]:
        """Return the loader's batches: with a BatchSampler, the remaining ones of the epoch."""
        sampler = self._sampler()
        if sampler is None:
            return iter(self.loader)
        if sampler.after(self._at.seen) // sampler.samples != self.epoch:
            return iter(())
        sampler.start_at(self._at.seen)
        return iter(self.loader)

    def _sampler(self) -> BatchSampler | None:
        sampler = getattr(self.loader, "batch_sampler", None)
        return sampler if isinstance(sampler, BatchSampler) else None

    @property
    def _ways(self) -> int:
        """Return the number of data ranks that read different rows."""
        return self.program.data_ranks if self.batch_is_local else 1

    @property
    def _any_ranks(self) -> bool:
        """Return whether any number of data ranks reads the same rows, in the same order of global batches."""
        return self._sampler() is not None or isinstance(getattr(self.loader, "sampler", None), DistributedSampler)

    def _ranks(self) -> dict[str, Any]:
        mesh = self.program.mesh
        of = [mesh.data_rank(rank) if self._ways > 1 else 0 for rank in range(world_size())]
        return {"data_ranks": self._ways, "data_rank_of": of}

    def _states(self) -> dict[str, Any]:
        if self._saved is not None:  # nothing was read since
            return dict(self._saved.states)
        random = self._random or RandomStates(self.loader)
        own = self.loader.state_dict() if self.has_own_state else None  # type: ignore[attr-defined]
        return self._json(self._at, self._begin, random.now(), own)

    def _json(self, at: Position, begin: Any, now: Any, own: Any) -> dict[str, Any]:
        kind = type(self.loader).__name__
        return {
            "begin": _as_json(begin),
            "now": _as_json(now),
            "loader": None if own is None else to_json(own, f"the state of the {kind}"),
            "digest": at.digest,
            "last": None if at.batches else self._last,
        }

    def _ended_epoch(self) -> Mapping[str, Any] | None:
        """Return the epoch that ends as JSON, if the next one may depend on it."""
        if self._begin is None or begins_anew(self.loader):
            return None
        return self._at.to_json() | {"begin": _as_json(self._begin), "digest": self._at.digest}


def _as_json(states: Any) -> Any:
    return None if states is None else to_json(states, "a random generator's state")


def _of_these_samples(at: Position, sampler: BatchSampler) -> Position:
    """Return ``at`` in the epochs of the current data."""
    after = sampler.after(at.seen)
    ends = at.batches > 0 and after // sampler.samples == at.epoch + 1  # the epoch's end was not handled yet
    return at if ends else replace(at, seen=after, epoch=after // sampler.samples)


def _tell_all(text: str) -> Sequence[str]:
    return tell(text, group_accelerator() or torch.device("cpu")) if many() else (text,)
