"""Adapters of PEFT on disk, in PEFT's own format, and models with adapters merged into their weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..core.errors import CheckpointError
from ..weights.adapters import CONFIG, WEIGHTS, adapters_of, is_peft, merged, place_of
from ..weights.files import open_weights, refuse_all, shown
from ..weights.sources import Stored
from .pretrained import WeightsSubject, everywhere, misfit, read_parts
from .stores.new_folder import new_folder


def save_adapters(subject: WeightsSubject, folder: Path) -> None:
    """Write what PEFT's ``save_pretrained`` writes: for each adapter its configuration and its tensors.

    Raises:
        CheckpointError: QN603 or QN604, on every rank.
    """
    model: Any = subject.model
    with everywhere(subject.backend, "QN603"):
        names = sorted({name for tensors in adapters_of(model).values() for name in tensors.values()})

    def write(place: Path, tensors: dict[str, Tensor]) -> None:
        model.save_pretrained(place, state_dict=tensors, safe_serialization=True)

    _write(subject, folder, names, write)


def save_merged(subject: WeightsSubject, folder: Path) -> None:
    """Write the model that ``merge_and_unload`` makes. Rank 0 holds it whole, on the host.

    Raises:
        CheckpointError: QN603 if there are no adapters, or QN604, on every rank.
    """
    model: Any = subject.model
    if not is_peft(model):
        message = "merged=True, and the model is no peft.PeftModel"
        raise CheckpointError("QN603", message, fix="save_pretrained(folder) without merged")
    names = [name for name, _ in model.named_parameters()]

    def write(place: Path, tensors: dict[str, Tensor]) -> None:
        own = dict(model.named_parameters())
        memo = {id(p): nn.Parameter(tensors[name], requires_grad=p.requires_grad) for name, p in own.items()}
        merged(copy.deepcopy(model, memo)).save_pretrained(place)  # type: ignore[operator]

    _write(subject, folder, names, write)


def _write(
    subject: WeightsSubject, folder: Path, names: Sequence[str], write: Callable[[Path, dict[str, Tensor]], None]
) -> None:
    """Give ``write`` these tensors whole, on the first rank, and a new folder, which appears when it is complete."""
    backend, state = subject.backend, subject.program.state
    kept = {name: subject.aliases.get(name, name) for name in names}
    unset = sorted(backend.unset & set(kept.values()))
    with everywhere(backend, "QN603"):
        refuse_all("QN604", folder, [f"{name} has no values" for name in unset], fix="load or initialise them first")
    with new_folder(folder, backend.told, writes=backend.first) as temporary:
        loose = {n: x.detach().cpu() for n, x in subject.model.state_dict().items() if kept.get(n, "") not in state}
        held = list(dict.fromkeys(name for name in kept.values() if name in state))
        wholes = {name: x.cpu().clone() for name, x in backend.wholes(subject.program, held) if x is not None}
        if backend.first:
            write(temporary, {name: wholes[key] if key in wholes else loose[name] for name, key in kept.items()})


def has_adapters(folder: Path, model: nn.Module) -> bool:
    """Return whether a folder is what PEFT writes for a model of its own."""
    names = [place_of(adapter) for adapter in getattr(model, "peft_config", {})] if is_peft(model) else []
    return any((folder / name / CONFIG).is_file() for name in names)


def load_adapters(subject: WeightsSubject, folder: Path) -> None:
    """Read every adapter of the model; other parameters keep their values.

    Raises:
        CheckpointError: QN601 or QN602 on every rank, with all problems; nothing was changed.
    """
    backend, model = subject.backend, subject.model
    own = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    sources: dict[str, list[Stored]] = {}
    with contextlib.ExitStack() as stack:
        with everywhere(backend, "QN601"):
            problems, texts = list[str](), list[str]()
            for adapter, names in adapters_of(model).items():
                weights = stack.enter_context(open_weights(folder / place_of(adapter), WEIGHTS))
                texts.append(weights.text)
                problems += [f"{shown(name)}: missing from {adapter!r}" for name in names.keys() - weights.stored]
                problems += [f"{shown(name)}: unexpected in {adapter!r}" for name in weights.stored.keys() - names]
                for stored in names.keys() & weights.stored.keys():
                    problem = misfit(weights.stored[stored], own[names[stored]])
                    problems += [f"{names[stored]}: {problem}"] if problem else []
                    sources[subject.aliases.get(names[stored], names[stored])] = [weights.stored[stored]]
            refuse_all("QN602", folder, sorted(problems), fix="load adapters of this model and configuration")
        backend.agree({"adapters": "\n".join(texts)})
        read_parts(subject, sources)
