"""Capture a call of a language model on the next tokens of texts, with keys and values as explicit state.

While the model is captured, each of its attentions becomes one operator that also owns a cache. The model's own cache
is not used, so that the caches of a program are sharded and cut into stages like any other value.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...capture.capture import capture
from ...capture.modes import evaluating
from ...capture.places import LEAF
from ...compat.torch import FakeTensorMode
from ...compat.transformers import MaskPart, attention_registries, mask_parts
from ...core.annotations import Leaf
from ...core.empty_storage import device_of, hollow_parameters
from ...core.errors import CompileError
from ...core.replaced import for_this_thread, one_thread
from ...huggingface.registries import traced_as_few_nodes
from ...ir.batch_form import BatchForm
from ...ir.program import Captured
from .ops import paged_attention

NUM_INPUTS = 3  # before the caches: ids, table, places
SAMPLE_PAGES = 3  # of each pool and each text while a model is captured
_WINDOW = "quintnet_window"
_NAME = "sdpa"


@dataclass(frozen=True)
class Shape:
    """The number of heads of an attention's cache, and the widths of keys and values."""

    heads: int
    keys: int
    values: int
    dtype: torch.dtype


def capture_call(model: nn.Module, shapes: Sequence[Shape], pools: int, page: int, tokens: int) -> Captured:
    """Capture the logits [rows, vocabulary] after ``tokens`` further tokens of each text; the last is no padding.

    Inputs: ids [rows, tokens], and ``table`` and ``places`` of :data:`.ops.paged_attention`. Leaves of
    the kind ``cache``: two for each of ``shapes``, with ``pools`` pools of pages of ``page`` tokens. The graph does not
    depend on the number of pages, so programs take caches and tables of any number.

    Raises:
        CompileError: QN101 or QN105 if the model cannot be captured in this way.
    """
    rows = 2 * pools
    ids, table = torch.zeros(rows, tokens, dtype=torch.int64), torch.zeros(rows, SAMPLE_PAGES, dtype=torch.int64)
    caches = [
        torch.zeros(pools, SAMPLE_PAGES, page, shape.heads, width, dtype=shape.dtype)
        for shape in shapes
        for width in (shape.keys, shape.values)
    ]

    def call(model: nn.Module, batch: Any) -> Tensor:
        (ids, table, places), caches = batch[:NUM_INPUTS], batch[NUM_INPUTS:]
        pairs = iter(list(zip(caches[::2], caches[1::2], strict=True)))

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
            out: Tensor = paged_attention(q, k, v, *next(pairs), table, places, scale, window)
            return out

        return _logits(model, ids, places.clamp(min=0), attend)[:, -1]

    batch = (ids, table, ids, *caches)
    form = BatchForm.of_batch(batch, rows)
    captured = capture(model, batch, want="outputs", training=False, trained=False, call=call, form=form)
    inputs = [node for node in captured.graph.nodes if node.op == "placeholder" and node.meta[LEAF].kind == "input"]
    for index, node in enumerate(inputs[NUM_INPUTS:]):
        node.meta[LEAF] = Leaf("cache", f"cache.{index // 2}.{('keys', 'values')[index % 2]}", batched=True)
    return captured


def cache_shapes(model: nn.Module) -> tuple[Shape, ...]:
    """Return the shape of each attention's cache, in the order of their calls; nothing is computed.

    Raises:
        CompileError: QN105 if the model has no causal attention that can be found, or takes no positions.
    """
    shapes: list[Shape] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        shapes.append(Shape(k.shape[1], k.shape[3], v.shape[3], k.dtype))
        return q.new_empty([*q.shape[:3], v.shape[3]])

    if not _takes_positions(model):
        raise _refusal("its forward takes no position_ids", "take the positions of tokens as a second argument")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    changed = evaluating(model), hollow_parameters(model), traced_as_few_nodes(model)
    with one_thread(), contextlib.ExitStack() as stack, fake, torch.no_grad():
        for context in changed:
            stack.enter_context(context)
        ids = torch.zeros(2, 3, dtype=torch.int64, device=device_of(model))
        _logits(model, ids, ids, attend)
    if not shapes:
        raise _refusal("none of its attentions could be found", "use sdpa, or F.scaled_dot_product_attention")
    return tuple(shapes)


Attend = Callable[[Tensor, Tensor, Tensor, float, int], Tensor]


def _logits(model: nn.Module, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    with _attending(attend):
        if not _hugging_face(model):
            out: Tensor = model(ids, positions)
            return out
        last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        logits: Tensor = model(input_ids=ids, position_ids=positions, **last).logits
        return logits


def _takes_positions(model: nn.Module) -> bool:
    names = list(inspect.signature(model.forward).parameters)
    return "position_ids" in names if _hugging_face(model) else len(names) == 2


def _hugging_face(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _refusal(what: str, fix: str) -> CompileError:
    return CompileError("QN105", f"the model cannot generate with a cache: {what}", fix=fix)


# -- attention, while inside


@contextlib.contextmanager
def _attending(attend: Attend) -> Iterator[None]:
    """Replace attention by ``attend`` inside: that of torch, and of Hugging Face's registries."""
    registries = attention_registries()
    if registries is None:
        with _Torchs(attend):
            yield
        return
    functions, masks = registries
    original, original_mask = functions[_NAME], masks[_NAME]
    functions.register(_NAME, for_this_thread(_hugging_faces(attend), original))
    masks.register(_NAME, for_this_thread(_window_alone(original_mask), original_mask))
    try:
        with _Torchs(attend):
            yield
    finally:
        functions.register(_NAME, original)
        masks.register(_NAME, original_mask)


class _Torchs(TorchFunctionMode):
    """A mode that replaces F.scaled_dot_product_attention."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attention(*args, **(kwargs or {}))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None or not is_causal or query.dim() != 4:
            raise _refusal("an attention has a mask of its own", "use is_causal=True")
        return self.attend(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale, 0)


def _window_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a mask function that records only the window; the cache knows which tokens there are."""
    bind = inspect.signature(original).bind

    def mask(*args: Any, **kwargs: Any) -> Tensor:
        call = bind(*args, **kwargs)
        call.apply_defaults()
        marker, part = torch.empty(0), mask_parts(call.arguments["mask_function"])
        parts = {} if part is None else dict(_terms(part))
        supported = parts.keys() <= {"causal", "window", "all", "segments"} and parts.keys() & {"causal", "window"}
        setattr(marker, _WINDOW, parts.get("window", 0) if supported else None)
        return marker

    return mask


def _terms(part: MaskPart) -> Iterator[tuple[str, Any]]:
    """Yield the terms of a conjunction; positions within a document are consecutive, so distances are the same."""
    if part[0] == "and":
        for term in part[1]:
            yield from _terms(term)
    elif part[0] == "at":
        yield from _terms(part[2])
    else:
        yield part[0], part[-1]


def _hugging_faces(attend: Attend) -> Callable[..., Any]:
    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        window = None if attention_mask is None else getattr(attention_mask, _WINDOW, None)
        more = any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux", "cache"))
        if window is None or more or dropout or kwargs.get("is_causal") is False:
            kind = "a bias, a soft cap or sinks" if more else "a mask of its own"
            raise _refusal(f"{type(module).__name__} has {kind}", "generate with transformers, on one device")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, scale, window).transpose(1, 2).contiguous(), None

    return attention
