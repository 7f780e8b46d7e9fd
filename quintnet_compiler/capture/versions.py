"""Captures of a module in several settings of its attributes, modes and flags, and for several forms of batches.

The programs that were used last are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..ir.batch_form import ROWS, BatchForm, FlatBatch
from ..ir.distributed_program import DistributedProgram
from ..ir.program import Captured

MAX_PROGRAMS = 64  # of each kind
Sizes = tuple[tuple[str, int], ...]  # of the dims of a batch that vary, by name


@dataclass(eq=False)
class Version:
    """A capture, and the programs compiled from it, by sizes of the batch; the one used last is the last."""

    captured: Captured
    made: dict[Sizes, DistributedProgram] = field(default_factory=dict)
    fixed: bool = False  # whether a capture for other lengths has failed
    gradients: frozenset[bool] = field(default_factory=lambda: frozenset([torch.is_grad_enabled()]))  # around the call

    @property
    def is_valid(self) -> bool:
        """Return whether the module is as it was captured, and gradients are, unless it trains: a step has them on."""
        is_mode = self.captured.training or torch.is_grad_enabled() in self.gradients
        return is_mode and (self.captured.guards is None or self.captured.guards.hold())

    def replace_capture(self, captured: Captured) -> None:
        """Take the capture of now, which has the same graph, also where only the mode of gradients differs."""
        unchanged = self.captured.guards is None or self.captured.guards.hold()
        self.gradients = (self.gradients if unchanged else frozenset()) | {torch.is_grad_enabled()}
        self.captured = captured

    def sizes(self, batch: FlatBatch, size: int) -> Mapping[str, int] | None:
        """Return the sizes of ``batch`` that vary, with ``size`` rows on all data ranks; None if its form differs."""
        sizes = self.captured.form.varying_sizes(batch) if self.captured.only_rows in (None, batch.rows) else None
        return None if sizes is None else {**sizes, ROWS: size}

    def get(self, sizes: Mapping[str, int]) -> DistributedProgram | None:
        """Return the program for these sizes, if there is one."""
        key = tuple(sizes.items())
        if key not in self.made:
            return None
        self.made[key] = self.made.pop(key)
        return self.made[key]


def is_same(then: Captured, now: Captured) -> bool:
    """Return whether two captures lead to the same program.

    They have the same graph, and only Python state that a trace reads has changed since the first one.
    """
    if then.guards is not None and not then.guards.only_reads_differ():
        return False
    keys = ("form", "only_rows", "output_spec", "training", "aliases", "symbols", "like", "changed", "assigned")
    if any(getattr(then, key) != getattr(now, key) for key in keys) or then.tensors.keys() != now.tensors.keys():
        return False
    return all(now.tensors[name] is x for name, x in then.tensors.items()) and str(then.graph) == str(now.graph)


class CapturedVersions:
    """The versions of each kind of program, the one used last at the front."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Version]] = {}
        self._first: dict[str, Version] = {}
        self._forgotten: list[DistributedProgram] = []

    def look(self, kind: str, batch: FlatBatch, size: int) -> tuple[Version, Mapping[str, int]] | None:
        """Return the version of the module as it is now for batches like this one, and the sizes that vary.

        ``size``: rows on all data ranks. If there are several versions, one with a program for these sizes is returned.
        """
        kept: list[Version] = self._kept.get(kind, [])
        fits: tuple[Version, Mapping[str, int]] | None = None
        for version in kept:
            sizes = version.sizes(batch, size)
            if sizes is None or (fits is not None and tuple(sizes.items()) not in version.made) or not version.is_valid:
                continue
            fits = version, sizes
            if tuple(sizes.items()) in version.made:
                break
        if fits is not None and fits[0] is not kept[0]:
            kept.insert(0, kept.pop(kept.index(fits[0])))
        return fits

    def alike(self, kind: str, batch: FlatBatch) -> tuple[Version, BatchForm] | None:
        """Return a version of the module as it is now for other lengths than those of a batch, and the form of both."""
        for version in self._kept.get(kind, []):
            form = version.captured.form
            wider = form.widened(BatchForm.of_batch(batch.batch, batch.rows, form))
            if wider is None or wider.varying_sizes(batch) is None:
                continue
            if not version.fixed and version.captured.only_rows is None and version.is_valid:
                return version, wider
        return None

    def of_other_containers(self, kind: str, batch: FlatBatch) -> Version | None:
        """Return the version for batches like this one that was used last, if only its module's containers changed."""
        fits = (version for version in self._kept.get(kind, []) if version.sizes(batch, batch.rows) is not None)
        guarded = ((version, version.captured.guards) for version in fits)
        return next((version for version, guards in guarded if guards and guards.only_containers_differ()), None)

    def equal_version(self, kind: str, captured: Captured) -> Version | None:
        """Return a version whose programs are those of ``captured``: the same graph of the same tensors."""
        return next((version for version in self._kept.get(kind, []) if is_same(version.captured, captured)), None)

    def first_capture(self, kind: str) -> Captured | None:
        """Return the first capture of this kind."""
        return self._first[kind].captured if kind in self._first else None

    def count(self, kind: str) -> int:
        """Return the number of versions."""
        return len(self._kept.get(kind, []))

    def add(self, kind: str, captured: Captured) -> Version:
        version = Version(captured)
        self._kept.setdefault(kind, []).insert(0, version)
        self._first.setdefault(kind, version)
        return version

    def record(self, kind: str, version: Version, sizes: Mapping[str, int], program: DistributedProgram) -> None:
        """Keep ``program``, and forget those that were not used for the longest time."""
        version.made[tuple(sizes.items())] = program
        kept = self._kept[kind]
        while sum(len(entry.made) for entry in kept) > MAX_PROGRAMS:
            oldest = next(entry for entry in reversed(kept) if entry.made)
            self._forgotten.append(oldest.made.pop(next(iter(oldest.made))))
        self._kept[kind] = [entry for entry in kept if entry.made]

    def latest(self, kind: str) -> DistributedProgram | None:
        """Return the program that was used last."""
        programs = [version.made for version in self._kept.get(kind, []) if version.made]
        return programs[0][next(reversed(programs[0]))] if programs else None

    def forgotten(self) -> list[DistributedProgram]:
        """Return the programs that are no longer kept, each once."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def changes_since_capture(self, kind: str) -> str:
        """Return a text about what of the module differs from the first capture; empty if nothing does."""
        first = self._first.get(kind)
        if first is None or first.is_valid or first.captured.guards is None:
            return ""
        return "; ".join(first.captured.guards.broken())
