"""Private names of transformers, and those of its modules that no documentation promises.

Importing this module imports nothing: a model from transformers has imported it already, and others need nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = [
    "EXPERTS_CHOICE", "MaskPart", "apply_gate", "attention_registries", "built_on_meta", "causal_class", "conversions",
    "experts_run_by", "ignored_on_load", "ignored_on_save", "initialize", "initialize_again", "is_conversion",
    "mask_parts", "norm_after_experts", "parallel_rules", "renamed", "sort_key", "without_method_caches",
    "without_packed_documents",
]  # fmt: skip

_MASKS = "transformers.masking_utils"

# -- attention and experts: what a model calls, by name

# A configuration's choice of what runs its experts; instead: set_experts_implementation, which tells nobody what was.
EXPERTS_CHOICE = "_experts_implementation"


def attention_registries() -> tuple[Any, Any] | None:
    """Return the registries of attention functions and of mask functions; None before such a model was imported.

    Instead of the second: every attention as its model writes it, as many operators.
    """
    functions = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    masks = getattr(sys.modules.get(_MASKS), "ALL_MASK_ATTENTION_FUNCTIONS", None)
    return None if functions is None or masks is None else (functions, masks)


@contextlib.contextmanager
def experts_run_by(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``function`` runs the experts of models whose choice is ``name``; instead: the models' own loop over
    experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    functions = ALL_EXPERTS_FUNCTIONS._global_mapping
    replaced = functions.get(name)
    ALL_EXPERTS_FUNCTIONS.register(name, function)
    try:
        yield
    finally:
        if replaced is None:
            del functions[name]
        else:
            functions[name] = replaced


def apply_gate(experts: Any, x: Any) -> Any:
    """Apply the activation of experts to gate and values in one tensor; instead: act_fn(gate) * values."""
    return experts._apply_gate(x)


def norm_after_experts(experts: Any) -> Any | None:
    """Return the norm after experts, if they have one: models of older versions have none, and do not say so."""
    return experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None


# Of a mask: its name, then what it is made of; instead: nothing, it is our own.
MaskPart = tuple[Any, ...]


def mask_parts(function: Any) -> MaskPart | None:
    """Return the parts of a mask function, a closure that is recognized by its name; None if a part is not recognized.

    Instead: evaluating masks, which costs the square of the sequence.

    ("causal",), ("all",), ("window", size), ("chunk", size, padding on the left of each row), ("segments", ids),
    ("groups", ids), ("at", positions, part): of these positions; ("and", parts), ("or", parts)
    """
    if getattr(function, "__module__", "") != _MASKS:
        return None
    name = function.__qualname__
    for suffix in (".<locals>.inner_mask", ".<locals>.and_mask", ".<locals>.or_mask"):
        name = name.removesuffix(suffix)
    inside = inspect.getclosurevars(function).nonlocals
    if name in ("causal_mask_function", "bidirectional_mask_function"):
        return ("causal",) if name.startswith("causal") else ("all",)
    if name == "sliding_window_overlay":
        return "window", inside["sliding_window"]
    if name == "chunked_overlay":
        return "chunk", inside["chunk_size"], inside["left_padding"]
    if name == "packed_sequence_mask_function":
        return "segments", inside["packed_sequence_mask"]
    if name == "blockwise_overlay":
        return "groups", inside["block_sequence_ids"]
    if name == "remap_positions_for_packed_sequence":
        part = mask_parts(inside["mask_function"])
        return part and ("at", inside["position_ids"], part)
    if name in ("and_masks", "or_masks"):
        parts = [mask_parts(mask) for mask in inside["mask_functions"]]
        return None if any(part is None for part in parts) else ("and" if name == "and_masks" else "or", parts)
    return None


@contextlib.contextmanager
def without_packed_documents(chosen: Callable[[Callable[..., Any], Callable[..., Any]], Any]) -> Iterator[None]:
    """Inside, position_ids that begin again are no documents of their own; instead: passing a mask that says so.

    ``chosen``: what is made of our function and the usual one is called.
    """
    with _replaced(_MASKS, "find_packed_sequence_indices", lambda position_ids: None, chosen):
        yield


@contextlib.contextmanager
def without_method_caches(chosen: Callable[[Callable[..., Any], Callable[..., Any]], Any]) -> Iterator[None]:
    """Inside, methods that keep tables under sizes compute them, as they do where torch.compile traces them: sizes that
    vary cannot be keys; instead: nothing. ``chosen``: as above."""
    with _replaced("transformers.pytorch_utils", "is_torchdynamo_compiling", lambda: True, chosen):
        yield


@contextlib.contextmanager
def _replaced(
    module: str, name: str, ours: Callable[..., Any], chosen: Callable[[Callable[..., Any], Callable[..., Any]], Any]
) -> Iterator[None]:
    """Inside, a function of a module is another one, if there is such a module and function."""
    there: Any = sys.modules.get(module)
    theirs = getattr(there, name, None)
    if theirs is None:
        yield
        return
    setattr(there, name, chosen(ours, theirs))
    try:
        yield
    finally:
        setattr(there, name, theirs)


# -- what a model says of itself


def parallel_rules(model: Any, axis: str) -> Mapping[str, Any]:
    """Return the model's own plan for "tp", "ep" or "pp"; instead: its configuration's (base_model_tp_plan)."""
    return getattr(model, f"_{axis}_plan", None) or {}


def ignored_on_load(model: Any) -> list[str]:
    """Return patterns of stored names that a model has no use for; instead: unexpected=... where weights are loaded."""
    return list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def ignored_on_save(model: Any) -> list[str]:
    """Return patterns of names that a model does not store; instead: storing them."""
    return list(getattr(model, "_keys_to_ignore_on_save", None) or ())


def initialize(model: Any, module: Any) -> None:
    """Initialize a module of ``model``, its buffers too; instead: building the model on a real device."""
    model._init_weights(module)


def initialize_again(model: Any) -> None:
    """Initialize a whole model as its constructor does; instead: ``init_weights``, which skips what has values."""
    for part in (*model.modules(), *model.parameters(), *model.buffers()):
        vars(part).pop("_is_hf_initialized", None)
    model.init_weights()


# -- models from configurations


def built_on_meta(kind: Any, config: Any) -> Any:
    """Build a model without weights in the configuration's dtype; instead: ``kind(config)``, in the default dtype."""
    return kind._from_config(config)


def causal_class(config: Any) -> Any:
    """Return the class of a configuration's causal language model; instead: AutoModelForCausalLM.from_config."""
    import transformers

    return transformers.AutoModelForCausalLM._model_mapping[type(config)]


# -- stored names


def conversions(model: Any) -> tuple[list[Any], list[Any]]:
    """Return a model's renamings of stored names and converters of tensors; instead: checkpoints in its own names."""
    from transformers import conversion_mapping, core_model_loading

    table = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [c for c in table if isinstance(c, core_model_loading.WeightRenaming)]
    return renamings, [c for c in table if isinstance(c, core_model_loading.WeightConverter)]


def renamed(
    name: str, renamings: list[Any], converters: list[Any], prefix: str, state: dict[str, Any]
) -> tuple[str, str | None]:
    """Return the model's name for a stored one, and the pattern of the converter that takes it, if one does."""
    from transformers.core_model_loading import rename_source_key

    name_and_pattern: tuple[str, str | None] = rename_source_key(name, renamings, converters, prefix, state)
    return name_and_pattern


def sort_key(name: str) -> Any:
    """Return a key that sorts stored names as transformers does, numbers as numbers; instead: re.split on digits."""
    from transformers.core_model_loading import dot_natural_key

    return dot_natural_key(name)


def is_conversion(operation: Any) -> bool:
    """Return whether a step of a conversion is transformers' own, whose name says what it does."""
    return type(operation).__module__ == "transformers.core_model_loading"
