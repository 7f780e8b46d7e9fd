"""Weights in the format of Hugging Face, read into a program: each rank its own parts, checked before any changes."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..compat.transformers import ignored_on_load
from ..ir.distributed_program import DistributedProgram
from ..runtime.backends.backend import Backend
from ..weights.adapters import base_of, is_peft
from ..weights.files import Weights, open_weights, refuse_all, shown
from ..weights.folded_buffers import unfold_buffers
from ..weights.meta_buffers import computed_buffers
from ..weights.names import Assignment, assign, is_hugging_face
from ..weights.sources import Source, runs_of
from .reading.together import raised_together


@dataclass(frozen=True)
class WeightsSubject:
    """A program whose weights are read or written. ``aliases``: further name of a tied parameter -> the one kept."""

    model: nn.Module
    program: DistributedProgram
    backend: Backend
    aliases: Mapping[str, str]


@dataclass(frozen=True)
class Allowed:
    """Globs of the model's tensors that files may lack (they keep their values), and of stored ones to leave out."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def load_weights(subject: WeightsSubject, folder: Path, allowed: Allowed) -> None:
    """Read a folder's weights into the program.

    Raises:
        CheckpointError: QN601 or QN602 on every rank, with all problems; nothing was changed.
        RunError: QN403 if ranks see different files.
    """
    backend = subject.backend
    with contextlib.ExitStack() as stack:
        with everywhere(backend, "QN601"):
            weights = stack.enter_context(open_weights(folder))
            sources = _checked(subject, folder, weights, allowed)
        backend.agree({"weights": weights.text})
        read_parts(subject, sources)


def read_parts(subject: WeightsSubject, sources: Mapping[str, Sequence[Source]]) -> None:
    """Read this rank's parts. ``sources``: of each tensor, by its name."""
    backend = subject.backend
    unfold_buffers(subject.model)
    names = {name for name in sources if name in subject.program.state}
    with everywhere(backend, "QN601"), torch.no_grad():
        backend.unset |= names  # until all are read: what fails half-way must not run
        for spec, part, positions in backend.parts(subject.program, ("parameter", "buffer")):
            if spec.name in sources:
                sources[spec.name][0].read([runs_of(p) for p in positions], part)
        _unused_buffers(subject, sources)
    backend.unset -= names


def everywhere(backend: Backend, code: str) -> contextlib.AbstractContextManager[None]:
    """Raise on every rank of a program what a block raises on one: see :func:`.reading.together.raised_together`."""
    return raised_together(backend.told, code)


def _checked(subject: WeightsSubject, folder: Path, weights: Weights, allowed: Allowed) -> dict[str, list[Source]]:
    """Return kept name -> its sources (several for a tied parameter that is stored twice).

    Raises:
        CheckpointError: QN602 with everything that does not fit.
    """
    assignment = assign(subject.model, weights.stored)
    problems = list(assignment.problems)
    state = {name: x for name, x in subject.model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    sources: dict[str, list[Source]] = {}
    for name, source in assignment.sources.items():
        problem = misfit(source, state[name])
        if problem:
            problems.append(f"{name}: {problem}")
        else:
            sources.setdefault(subject.aliases.get(name, name), []).append(source)
    failed = {subject.aliases.get(name, name) for name in assignment.sources} - sources.keys()
    base, own = (subject.model, state.keys()) if not is_peft(subject.model) else base_of(subject.model)
    lacking = [name for name in _missing(subject, {*sources} | failed, state) if name in own]  # adapters keep theirs
    problems += [f"{name}: missing from the files" for name in lacking if not _matches(name, allowed.missing)]
    extra = [s for s in assignment.unexpected if not _matches(s.name, allowed.unexpected)]
    problems += [f"{shown(str(s))}: unexpected, {s.shape}" for s in _reported(base, extra)]
    problems += _useless(allowed, lacking, assignment)
    if not problems:
        problems += _torn_ties(subject, sources)
    refuse_all(
        "QN602",
        folder,
        problems,
        fix="load a model of this configuration, or allow names with missing=[...] or unexpected=[...]",
    )
    return sources


def misfit(source: Source, wanted: Tensor) -> str:
    if source.shape != tuple(wanted.shape):
        return f"{tuple(wanted.shape)} in the model, {source.shape} from {source}"
    if source.dtype != wanted.dtype and not _holds(wanted.dtype, source.dtype):
        return f"{wanted.dtype} in the model cannot hold {source.dtype} from {source}"
    return ""


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return whether every value of ``narrow`` is a value of ``wide``."""
    if not (wide.is_floating_point and narrow.is_floating_point) or narrow.itemsize < 2:
        return False
    return torch.promote_types(wide, narrow) == wide


def _missing(subject: WeightsSubject, stored: set[str], state: Mapping[str, Tensor]) -> list[str]:
    """Return parameters and stored buffers that no file has, but for buffers that the model's code computes."""
    specs = subject.program.state.values()
    lacking = [s.name for s in specs if s.name not in stored and (s.kind == "parameter" or s.name in state)]
    buffers = [s.name for s in specs if s.kind == "buffer" and s.name in lacking]
    computed = computed_buffers(subject.model, buffers) if buffers else {}
    return [name for name in lacking if name not in computed]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _reported(model: nn.Module, extra: Sequence[Source]) -> list[Source]:
    """Without what transformers leaves out for this model: buffers that older versions stored."""
    if not is_hugging_face(model):
        return list(extra)
    patterns = ignored_on_load(model)
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return [source for source in extra if not any(re.search(p, getattr(source, "name", "")) for p in patterns)]


def _useless(allowed: Allowed, lacking: Sequence[str], assignment: Assignment) -> list[str]:
    unexpected = [source.name for source in assignment.unexpected]
    return [
        f"{kind}={pattern!r} matches nothing"
        for kind, patterns, names in (
            ("missing", allowed.missing, lacking),
            ("unexpected", allowed.unexpected, unexpected),
        )
        for pattern in patterns
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names)
    ]


def _torn_ties(subject: WeightsSubject, sources: Mapping[str, Sequence[Source]]) -> list[str]:
    """Return a line for each tied parameter of which files hold two that differ (in this rank's part)."""
    problems = []
    for spec, part, positions in subject.backend.parts(subject.program):
        copies = list(sources.get(spec.name, ()))
        for other in copies[1:]:
            runs, values = [runs_of(p) for p in positions], [torch.empty_like(part), torch.empty_like(part)]
            for source, out in zip((copies[0], other), values, strict=True):
                source.read(runs, out)
            if not torch.equal(*values):
                problems.append(f"{spec.name}: tied in the model, but {copies[0]} and {other} differ")
    return problems


def _unused_buffers(subject: WeightsSubject, sources: Mapping[str, Sequence[Source]]) -> None:
    """Read buffers that the program does not use into the module, so that saving it stores them again."""
    for name, copies in sources.items():
        if name not in subject.program.state:
            path, _, last = name.rpartition(".")
            module = subject.model.get_submodule(path)
            old = module._buffers[last]
            assert old is not None
            new = torch.empty_like(old, device="cpu" if old.is_meta else None)
            copies[0].read([((0, size),) for size in new.shape], new)
            if old.is_meta:
                module._buffers[last] = new
            else:
                old.copy_(new)
