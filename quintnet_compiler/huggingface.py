"""Hugging Face models as they are: while one is captured, its own registries hold functions that trace to few nodes.

Nothing here imports transformers: a model from it has imported it already, and other models need nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


@contextlib.contextmanager
def traced_as_few_nodes(model: nn.Module) -> Iterator[None]:
    """While inside, the Hugging Face modules of ``model`` call the functions of this file.

    Each configuration gets its own choice back at the end.
    """
    configs = _configs(model)
    before = [(config, name, getattr(config, name, None)) for config in configs for name in _CHOICES]
    try:
        for config, name, _ in before:
            setattr(config, name, _CHOICES[name])
        yield
    finally:
        for config, name, was in before:
            setattr(config, name, was)


# attribute of a configuration -> the name under which a function of ours is registered
_CHOICES: Mapping[str, str] = {}


def _configs(model: nn.Module) -> list[Any]:
    """The configurations of all Hugging Face modules, each once."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(c): c for c in found if isinstance(c, transformers.PreTrainedConfig)}.values())
