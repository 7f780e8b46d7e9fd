"""Adapters of PEFT: which of a model's tensors belong to one, and what its files call them.

Nothing here imports peft unless the model is one of its own.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import CheckpointError
from .quantized import QuantizedLinear

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def is_peft(model: nn.Module) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def adapters_of(model: Any) -> dict[str, dict[str, str]]:
    """Return adapter -> (name in its file -> name in the model), as PEFT's ``get_peft_model_state_dict`` decides.

    Raises:
        CheckpointError: QN603 for adapters that PEFT computes from the model when it saves them (prompts).
    """
    marks = {name: torch.empty(x.shape, device="meta") for name, x in _tensors(model).items()}
    names = {id(x): name for name, x in marks.items()}
    adapters: dict[str, dict[str, str]] = {}
    for adapter, config in model.peft_config.items():
        if config.is_prompt_learning:
            raise CheckpointError(
                "QN603",
                f"the adapter {adapter!r} ({config.peft_type.value}) is computed from the model when PEFT saves it",
                fix="program.close() on every rank, which makes the model whole; then model.save_pretrained(folder)",
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT says again what it says when it writes
            chosen = sys.modules["peft"].get_peft_model_state_dict(model, state_dict=marks, adapter_name=adapter)
        adapters[adapter] = {stored: names[id(x)] for stored, x in chosen.items()}
    return adapters


def base_of(model: Any) -> tuple[nn.Module, dict[str, str]]:
    """Return the model that PEFT has wrapped, and the names of its tensors without PEFT, by those in ``model``.

    Layers that an adapter trains whole (``modules_to_save``) begin as copies of the model's own, and have their names.
    """
    base: nn.Module = model.get_base_model()
    start = next(f"{name}." for name, module in model.named_modules() if module is base)
    names = {}
    for name in _tensors(model):
        plain = _without_wrappers(base, name.removeprefix(start)) if name.startswith(start) else None
        if plain is not None:
            names[name] = plain
    return base, names


def _without_wrappers(base: nn.Module, name: str) -> str | None:
    """Return the name that a tensor has where no layer is wrapped; None for an adapter's own."""
    other = sys.modules["peft.utils.other"]
    module, path, parts = base, list[str](), name.split(".")
    while len(parts) > 1:
        part = parts.pop(0)
        inside = module.get_submodule(part)
        if isinstance(module, other.ModulesToSaveWrapper):
            if part == "modules_to_save":
                inside = inside.get_submodule(parts.pop(0))
            elif part != "original_module":
                return None
        elif hasattr(module, "base_layer"):
            if part != "base_layer":
                return None
        else:
            path.append(part)
        module = inside
    return None if hasattr(module, "base_layer") else ".".join([*path, *parts])


def place_of(adapter: str) -> str:
    """The folder of an adapter in the folder that PEFT writes."""
    return "" if adapter == "default" else adapter


def merged(model: Any) -> nn.Module:
    """Return the model that ``merge_and_unload`` makes of a whole one, which it changes.

    Raises:
        CheckpointError: QN603 if the frozen weights are quantised.
    """
    stored = next((name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)), None)
    if stored is not None:
        raise CheckpointError(
            "QN603",
            f"{stored} stores integers, and what is merged into them would be rounded",
            fix="save the adapter alone, and merge it into the model that was not quantised: "
            "PeftModel.from_pretrained(model, folder).merge_and_unload()",
        )
    merged_model: nn.Module = model.merge_and_unload()
    return merged_model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
