"""Buffers of a model that was built on the meta device: computed again, by the code that computed them first.

Parameters come from files or are drawn, but many buffers (the frequencies of rotary embeddings) are in no file.
transformers computes them in ``_init_weights``, also in its own ``from_pretrained``; so that is what is called here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.torch import version
from ..compat.transformers import initialize
from .names import is_hugging_face


def with_buffers(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` with values for every buffer on the meta device that can be computed; the others stay as they are."""
    parameters = {name for name, _ in model.named_parameters()}
    return dict(tensors) | computed_buffers(model, [n for n, x in tensors.items() if x.is_meta and n not in parameters])


def computed_buffers(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the values of those of these buffers that the model's own code can compute."""
    values: dict[str, Tensor] = {}
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        owner = _owner(model, path)
        if owner is not None:
            buffers = {n.rpartition(".")[2] for n in names if n.rpartition(".")[0] == path}
            computed = _computed(owner, model.get_submodule(path), buffers)
            values |= {f"{path}.{name}" if path else name: x for name, x in computed.items()}
    return values


def _owner(model: nn.Module, path: str) -> Any | None:
    """The innermost Hugging Face model around a module: the one that initialises it."""
    parts = path.split(".") if path else []
    for count in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:count]))
        if is_hugging_face(module):
            return module
    return None


def _computed(owner: Any, module: nn.Module, names: set[str]) -> dict[str, Tensor]:
    # A copy with the same (meta) parameters and buffers of its own: the user's module stays as it is.
    twin = copy.copy(module)
    blank = {n: None if b is None else torch.zeros_like(b, device="cpu") for n, b in module._buffers.items()}
    twin.__dict__["_buffers"] = blank
    versions = {name: version(x) for name, x in blank.items() if x is not None}
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        initialize(owner, twin)
    now = {name: x for name, x in twin._buffers.items() if name in names and x is not None}
    # what was not written, or not with a real tensor, is not known
    return {n: x for n, x in now.items() if not x.is_meta and (x is not blank[n] or version(x) > versions[n])}
