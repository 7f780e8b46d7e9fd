"""Which checkpoint of a folder is loaded: the newest whole one, of which every rank checks its share.

Others may write into the folder meanwhile. A checkpoint that is replaced or removed is looked for again, on all ranks.
Only wrong bytes and missing files are damage, for which an older checkpoint is taken. What cannot be read now, or is of
another format, may be whole: that is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Generic, TypeVar

import torch.distributed as dist

from ...core.errors import CheckpointError, CheckpointWarning
from ...weights.files import INDEX, METADATA, SINGLE, conversion, shown
from ..documents import IndexEntry, StateNote, check_tensors, is_checkpoint, read_index, read_state
from ..folder import CheckpointFolder
from ..manifest import WrittenFiles, available, files_checked, read_manifest
from ..pieces import Share
from .open_files import Damaged, OpenFiles, OtherFormatError, VanishedError
from .together import TellAll

LOOKS = 60  # at a folder whose checkpoints vanish while they are read
LONGEST_WAIT = 1.0  # seconds, before another look
LONGEST_LIST = 100  # checkpoints that are tried
T = TypeVar("T")


@dataclass(frozen=True)
class Chosen:
    """A whole checkpoint, which is open, with its documents."""

    files: WrittenFiles
    state: StateNote
    index: Mapping[str, IndexEntry]

    @property
    def folder_or_url(self) -> Path | str:
        """Return the folder's path, or its URL."""
        return self.files.files.path


Plan = Callable[[Chosen], Callable[[], T]]


def with_newest(tell_all: TellAll, folder: CheckpointFolder, step: int | None, plan: Plan[T]) -> T:
    """Return what is made of the newest whole checkpoint, or of that of ``step``.

    Every rank calls this. The checkpoint stays open until what ``plan`` returned returns. If that raises VanishedError,
    on all ranks, another checkpoint is looked for.

    Args:
        tell_all: gives every rank's text to every rank.
        folder: that has it.
        step: of the checkpoint.
        plan: is called while the files of a checkpoint are compared with their hashes, which may find that it is not
            whole, and returns what then uses it. It changes nothing, says nothing to other ranks, and raises nothing.

    Raises:
        CheckpointError: QN601 on every rank if there is none, or what is there cannot be read.
    """
    reason = ""
    for look in range(LOOKS):
        time.sleep(min(LONGEST_WAIT, 1.3**look / 1000) if look else 0)
        with contextlib.ExitStack() as stack:
            try:
                return _FolderLook.listed_by_first(tell_all, folder, step).open_newest(stack, plan)()
            except VanishedError as vanished:
                reason = str(vanished)
    raise CheckpointError(
        "QN601",
        f"{shown(str(folder.path))}: {LOOKS} times, a checkpoint was no longer what it was when listed: {reason}",
        fix="load while no other process writes there; if none does, from where files keep their numbers",
    )


class _Outcome(StrEnum):
    """A rank's result of reading a checkpoint. Of several ranks', the first of these counts."""

    VANISHED = "vanished"
    UNREADABLE = "unreadable"
    OTHER_FORMAT = "other format"
    DAMAGED = "damaged"
    WHOLE = "whole"


@dataclass(frozen=True)
class _Report:
    """A rank's report: why it did not read a checkpoint, or which one it has read."""

    outcome: _Outcome
    text: str

    def message(self) -> str:
        return f"{self.outcome}\n{self.text}"

    @classmethod
    def _parse(cls, message: str) -> _Report:
        outcome, _, text = message.partition("\n")
        return cls(_Outcome(outcome), text)


@dataclass(frozen=True)
class _Candidate(Generic[T]):
    """A checkpoint that this rank found whole as far as it looked, and what uses it."""

    chosen: Chosen
    use: Callable[[], T]


@dataclass(frozen=True)
class _FolderLook:
    """One look of all ranks at a folder: ``names`` of what may be loaded, as ``step/name``, the newest first."""

    tell_all: TellAll
    folder: CheckpointFolder
    step: int | None
    names: Sequence[str]
    ranks: int

    @classmethod
    def listed_by_first(cls, tell_all: TellAll, folder: CheckpointFolder, step: int | None) -> _FolderLook:
        """List what there is, as the first rank sees it.

        Raises:
            CheckpointError: QN601 on every rank, if the folder cannot be read.
        """
        try:
            entries = [entry for entry in available(folder) if step is None or entry.step == step][:LONGEST_LIST]
            report = _Report(_Outcome.WHOLE, "\0".join(f"{entry.step}/{entry.files.name}" for entry in entries))
        except Exception as error:
            report = _Report(_Outcome.UNREADABLE, _words(error))
        messages = tell_all(report.message())
        first = _Report._parse(messages[0])
        if first.outcome is _Outcome.UNREADABLE:
            raise _unusable(first, shown(str(folder.path)))
        return cls(tell_all, folder, step, [name for name in first.text.split("\0") if name], len(messages))

    def open_newest(self, stack: contextlib.ExitStack, plan: Plan[T]) -> Callable[[], T]:
        """Return what uses the checkpoint to load, which ``stack`` keeps open.

        Raises:
            CheckpointError: QN601 on every rank.
            VanishedError: on every rank, if another look may find one.
        """
        damaged = []
        for name in self.names:
            with contextlib.ExitStack() as own:
                report, candidate = self._examine(name, own, plan)
                if report.outcome is _Outcome.WHOLE:
                    assert candidate is not None
                    self._require_one(candidate.chosen, report, name)
                    stack.push(own.pop_all())
                    return candidate.use
            self._refuse(report, name)
            damaged.append(f"{name.partition('/')[2]}: {report.text}")
            if name != self.names[-1]:
                text = f"{shown(str(self.folder.path))}/{damaged[-1]}; trying the one before"
                warnings.warn(CheckpointWarning(text), stacklevel=6)
        raise _nothing(self.folder, self.step, damaged)

    def _examine(self, name: str, stack: contextlib.ExitStack, plan: Plan[T]) -> tuple[_Report, _Candidate[T] | None]:
        """Return what counts of all ranks' reports, and the checkpoint if this rank has read it."""
        rank = dist.get_rank() if self.ranks > 1 else 0
        mine, candidate = _read_share(self.folder, name, Share(rank, self.ranks), stack, plan)
        reports = [_Report._parse(message) for message in self.tell_all(mine.message())]
        order = list(_Outcome)
        worst = min(reports, key=lambda report: order.index(report.outcome))
        return (mine if worst.outcome is _Outcome.WHOLE else worst), candidate

    def _require_one(self, chosen: Chosen, report: _Report, name: str) -> None:
        """Refuse checkpoints of one name that have other contents on some ranks.

        Raises:
            CheckpointError: QN601 on every rank.
            VanishedError: on every rank, if one of them was replaced while ranks opened it.
        """
        messages = self.tell_all(f"{report.text} {chosen.folder_or_url}")
        different = dict.fromkeys(text.partition(" ")[0] for text in messages)
        if len(different) == 1:
            return
        if any(self.tell_all("replaced" if _is_replaced(chosen.files.files) else "")):
            raise VanishedError(f"{name} was replaced")
        first = [next(i for i, text in enumerate(messages) if text.startswith(digest)) for digest in different]
        lines = [f"rank {rank}: {shown(messages[rank].partition(' ')[2])}" for rank in first[:20]]
        step = name.partition("/")[0]
        message = "\n  ".join([f"ranks would load {len(different)} different checkpoints of step {step}", *lines])
        raise CheckpointError("QN601", message, fix="give every rank the same folder, on a disk that all ranks share")

    def _refuse(self, report: _Report, name: str) -> None:
        """Raise what a checkpoint that is not whole leads to, unless the one before it is to be tried."""
        again = _FolderLook.listed_by_first(self.tell_all, self.folder, self.step)
        if report.outcome is _Outcome.VANISHED or again.names != self.names:
            raise VanishedError(report.text)
        where = f"{shown(str(self.folder.path))}/{name.partition('/')[2]}"
        if report.outcome is not _Outcome.DAMAGED:
            raise _unusable(report, where)
        if self.step is not None:
            fix = "load another step, or none to get the newest whole one"
            raise CheckpointError("QN601", f"{where}: {report.text}", fix=fix)


def _read_share(
    folder: CheckpointFolder, name: str, share: Share, stack: contextlib.ExitStack, plan: Plan[T]
) -> tuple[_Report, _Candidate[T] | None]:
    """Open a checkpoint, check a share of its files, and plan with its documents; report how far that came."""
    number, _, name_in_folder = name.partition("/")
    files = None
    try:
        files = stack.enter_context(folder.at(name_in_folder).open())
        written = read_manifest(files, int(number))
        with files_checked(written, share):
            index = read_index(written)
            check_tensors(written, index, share.share_of(sorted(written.digests)))
            chosen = Chosen(written, read_state(written, int(number)), index)
            candidate = _Candidate(chosen, plan(chosen))
        contents = hashlib.sha256(repr(sorted(written.digests.items())).encode()).hexdigest()
        return _Report(_Outcome.WHOLE, contents), candidate
    except VanishedError as error:
        report = _Report(_Outcome.VANISHED, str(error))
    except Damaged as error:
        report = _Report(_Outcome.DAMAGED, str(error))
    except OtherFormatError as error:
        report = _Report(_Outcome.OTHER_FORMAT, str(error))
    except Exception as error:  # of the system, or of a store's library
        report = _Report(_Outcome.UNREADABLE, _words(error))
    if files is not None and _is_replaced(files):
        report = _Report(_Outcome.VANISHED, report.text)
    return report, None


def _is_replaced(files: OpenFiles) -> bool:
    try:
        return files.replaced()
    except Exception:  # it is not known: what was found counts
        return False


def _words(error: Exception) -> str:
    """Return what the system or a library says, on one line."""
    text = shown(str(error))
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}"


def _unusable(report: _Report, where: str) -> CheckpointError:
    if report.outcome is _Outcome.OTHER_FORMAT:
        fix = "load it with the version of QuintNet that wrote it, or another one with load(folder, step=...)"
        return CheckpointError("QN601", f"{where}: {report.text}", fix=fix)
    fix = "see the reason; load(folder, step=...) loads another one"
    return CheckpointError("QN601", f"{where} cannot be read: {report.text}", fix=fix)


def _nothing(folder: CheckpointFolder, step: int | None, damaged: Sequence[str]) -> CheckpointError:
    """Return the error of a folder that does not have what is to be loaded, but perhaps ``damaged`` ones."""
    where = shown(str(folder.path))
    others = [] if step is None else available(folder)[:10]
    if others:
        steps = ", ".join(str(entry.step) for entry in others)
        fix = f"load one that is there: {steps}"
        return CheckpointError("QN601", f"{where} has no checkpoint of step {step}", fix=fix)
    more = [f"and {len(damaged) - 10} more"] if len(damaged) > 10 else []
    text = "\n  ".join([f"{where} has no whole checkpoint", *damaged[:10], *more])
    fix = "restore what is missing or was changed, or begin again in another folder" if damaged else _instead(folder)
    return CheckpointError("QN601", text, fix=_set_aside(folder) or fix)


def _set_aside(folder: CheckpointFolder) -> str:
    """Return how to load what a run that went back has left; an empty text if there is none."""
    for aside in folder.abandoned():
        steps = ", ".join(str(entry.step) for entry in aside.named()[:10])
        if steps:
            where = shown(str(aside.path))
            return f"a run that went back had set its later steps aside: load {where}, which has {steps}"
    return ""


def _instead(of: CheckpointFolder) -> str:
    """Return how to load what is in a folder that has no checkpoint of this package."""
    folder = of.path
    if isinstance(folder, str):
        return "give the URL that was given to save"
    within = sorted(folder.iterdir()) if folder.is_dir() else []
    dcp = next((path for path in (folder, *within) if (path / METADATA).is_file()), None)
    if dcp is not None:
        return f"torch.distributed.checkpoint wrote it: {conversion(dcp, 'quintnet')}; then load NEW_FOLDER"
    if is_checkpoint(folder):
        return "it is one checkpoint: give the folder that has it, and step="
    if any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return "it has safetensors: program.load_pretrained(folder)"
    return "give the folder that was given to save"
