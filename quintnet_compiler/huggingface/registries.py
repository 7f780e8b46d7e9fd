"""Hugging Face models as they are: while one is captured, its own registries hold functions that trace to few nodes.

Nothing here imports transformers: a model from it has imported it already, and other models need nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ..compat.transformers import (
    EXPERTS_CHOICE,
    apply_gate,
    experts_run_by,
    norm_after_experts,
    without_method_caches,
    without_packed_documents,
)
from ..core.replaced import for_this_thread
from .adapted_parameters import AdaptedExperts, adapters_without_classes
from .attention import attention_as_one_operator


@contextlib.contextmanager
def traced_as_few_nodes(model: nn.Module, *, as_shipped: bool = False) -> Iterator[None]:
    """While inside, the Hugging Face modules of ``model`` call the functions of this file.

    Each configuration gets its own choice back at the end. ``as_shipped``: where a configuration has ``use_cache``,
    position_ids that begin again are no documents of their own, as in a call that makes a cache (which no trace does).
    """
    configs = _configs(model)
    joined = as_shipped and any(getattr(config, "use_cache", False) for config in configs)
    choices = [(c, name, getattr(c, name)) for c in configs for name in _CHOICES if hasattr(c, name)]
    with contextlib.ExitStack() as stack:
        for config, name, was in choices:
            stack.callback(setattr, config, name, was)
            setattr(config, name, _CHOICES[name])
        if joined:
            stack.enter_context(without_packed_documents(for_this_thread))
        running = stack.enter_context(adapters_without_classes(model, str(_CHOICES[EXPERTS_CHOICE])))
        if configs:
            stack.enter_context(without_method_caches(for_this_thread))
            stack.enter_context(experts_run_by("quintnet", partial(_experts, running)))
            stack.enter_context(attention_as_one_operator())
        yield


@contextlib.contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Let Hugging Face modules of ``model`` make no cache of keys and values while inside, as no trace does."""
    with contextlib.ExitStack() as stack:
        for config in _configs(model):
            if hasattr(config, "use_cache"):
                stack.callback(setattr, config, "use_cache", config.use_cache)
                config.use_cache = _CHOICES["use_cache"]
        yield


# Attributes of a configuration while it is captured: the name under which a function of ours is registered, and no
# cache of keys, which is for generating.
_CHOICES: Mapping[str, str | bool] = MappingProxyType({EXPERTS_CHOICE: "quintnet", "use_cache": False})


def _experts(running: AdaptedExperts, module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Send every token to each of its experts: [N, H], the experts [N, K], and their weights [N, K]."""
    tokens, ways, width = *chosen.shape, hidden.shape[-1]
    rows = hidden.unsqueeze(1).expand(tokens, ways, width).reshape(tokens * ways, width)
    ids = chosen.reshape(-1)

    def layer(x: Tensor, name: str) -> Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        return running.layer(module, name, x, ids, bias, module.is_transposed)

    if module.has_gate:
        inner = apply_gate(module, layer(rows, "gate_up_proj"))
    else:
        inner = module.act_fn(layer(rows, "up_proj"))
    out = layer(inner, "down_proj")
    norm = norm_after_experts(module)
    if norm is not None:
        out = norm(out)
    return (out.view(tokens, ways, width) * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _configs(model: nn.Module) -> list[Any]:
    """Return the configurations of all Hugging Face modules, each once."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(c): c for c in configs if isinstance(c, transformers.PreTrainedConfig)}.values())
