"""A program's weights, written as the folder that Hugging Face's ``from_pretrained`` loads."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..compat.transformers import ignored_on_save
from ..weights.files import refuse_all
from ..weights.meta_buffers import computed_buffers
from ..weights.names import is_hugging_face, misread_names
from ..weights.safetensors_writer import TensorEntry, files_of, storable, write_weights
from .pretrained import WeightsSubject, everywhere
from .stores.new_folder import new_folder


def save_weights(subject: WeightsSubject, folder: Path, max_file_bytes: int) -> None:
    """Write configuration and weights into a new folder, which appears when it is complete.

    Raises:
        CheckpointError: QN603 or QN604, on every rank.
    """
    backend = subject.backend
    with everywhere(backend, "QN603"):
        entries, loose = _entries(subject, folder)
    with new_folder(folder, backend.told, writes=backend.first) as temporary:
        files = files_of(entries, max_file_bytes)
        ordered = [entry for group in files.values() for entry in group]
        tensors = _wholes(subject, ordered, loose)
        try:
            if backend.first:
                write_weights(temporary, files, (x for x in tensors if x is not None))
                _configure(subject, temporary)
        finally:
            for _ in tensors:  # the other ranks hand over theirs, wanted or not
                pass


def _entries(subject: WeightsSubject, folder: Path) -> tuple[list[TensorEntry], dict[str, Tensor]]:
    """Return what to write, each tied tensor once, and the values of tensors that no rank's program holds."""
    values = _values_to_save(subject)
    unstorable = {name: text for name, x in values.items() if (text := _why_not_stored(name, x))}
    entries = _entry_of_each(subject, {name: x for name, x in values.items() if name not in unstorable})
    misread = misread_names(subject.model, [entry.name for entry in entries.values()])
    refuse_all("QN603", folder, [*unstorable.values(), *misread], fix="save model.state_dict() in another way")
    loose = {
        key: _value_outside(subject, key, values[entry.name])
        for key, entry in entries.items()
        if key not in subject.program.state
    }
    unset = sorted((subject.backend.unset & entries.keys()) | {key for key, x in loose.items() if x.is_meta})
    refuse_all("QN604", folder, [f"{name} has no values" for name in unset], fix="load or initialise the model first")
    return list(entries.values()), loose


def _values_to_save(subject: WeightsSubject) -> dict[str, Any]:
    """Return what the model's ``state_dict`` has, but what it says to leave out."""
    skipped = [re.compile(pattern) for pattern in ignored_on_save(subject.model)]
    values = subject.model.state_dict(keep_vars=True).items()
    return {name: x for name, x in values if not any(pattern.search(name) for pattern in skipped)}


def _why_not_stored(name: str, x: Any) -> str:
    """Return why a value cannot be written; an empty text if it can."""
    if not isinstance(x, Tensor):
        return f"{name} is a {type(x).__name__}, and only tensors can be written"
    return "" if storable(x.dtype) else f"{name} is {x.dtype}, which safetensors cannot hold"


def _entry_of_each(subject: WeightsSubject, values: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Return the entry of each tensor by its name in the program: under the name that is not tied to another."""
    tied = getattr(subject.model, "all_tied_weights_keys", None) or {}
    entries: dict[str, TensorEntry] = {}
    for name, x in values.items():
        key = subject.aliases.get(name, name)
        if key not in entries or (entries[key].name in tied and name not in tied):
            entries[key] = TensorEntry(name, key, tuple(x.shape), x.dtype)
    return entries


def _value_outside(subject: WeightsSubject, key: str, x: Tensor) -> Tensor:
    """Return the value of a tensor that the program does not hold."""
    return computed_buffers(subject.model, [key]).get(key, x) if x.is_meta else x.detach()


def _wholes(subject: WeightsSubject, entries: list[TensorEntry], loose: dict[str, Tensor]) -> Iterator[Tensor | None]:
    """Yield the values of entries in order, whole on the first rank; others iterate as far, and may get None."""
    names = [entry.source for entry in entries if entry.source not in loose]
    shared = subject.backend.wholes(subject.program, names)
    for entry in entries:
        yield loose[entry.source] if entry.source in loose else next(shared)[1]


def _configure(subject: WeightsSubject, folder: Path) -> None:
    """Write config.json, and generation_config.json for models that generate."""
    model: Any = subject.model
    if not is_hugging_face(model):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    # from_pretrained makes all parameters of this dtype: one that holds the values of every parameter
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    config.dtype = str(widest).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
