"""capture.flex.masks, capture.flex.terms and capture.flex.followed: what a mask_mod says, as positions and ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_mask, or_masks

from quintnet_compiler.capture.flex.followed import flex_attention_followed
from quintnet_compiler.capture.flex.masks import mask_of
from quintnet_compiler.capture.flex.terms import IndexTerm, NotFollowed
from quintnet_compiler.compat import torch_flex
from quintnet_compiler.ops.attention.operator import visible

ROWS, LENGTH = 2, 12
CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [3, 3, -1, -1, 3, 3, 2, 2, 2, 2, 2, 9]])
GROUPS = torch.tensor([[0, 0, -1, 1, 1, 1, -1, -1, 0, 0, -2, -2], [-1] * 6 + [4] * 6])
SEEN = torch.tensor([[True] * 9 + [False] * 3, [False, True] * 6])
LENGTHS, ONE_ROW = torch.tensor([4, 7]), torch.tensor([0] * 7 + [1] * 5)
Mask = Callable[[Any, Any, Any, Any], Any]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return DOCUMENTS[b, q] == DOCUMENTS[b, k]


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k <= 3


FOLLOWED: dict[str, Mask] = {
    "causal": causal,
    "causal, the other way round": lambda b, h, q, k: k <= q,
    "causal as a distance": lambda b, h, q, k: q - k >= 0,
    "causal, strictly": lambda b, h, q, k: k < q + 1,
    "window": and_masks(causal, window),
    "window of keys": lambda b, h, q, k: (k > q - 4) & (q >= k),
    "two windows": lambda b, h, q, k: (q - k < 5) & (q - k < 3),
    "chunks": lambda b, h, q, k: (q // 4 == k // 4) & (k <= q),
    "documents": and_masks(causal, documents),
    "documents alone": documents,
    "documents of all rows": lambda b, h, q, k: ONE_ROW[q] == ONE_ROW[k],
    "documents and chunks": and_masks(documents, lambda b, h, q, k: k // 5 == q // 5),
    "documents, a function of them": lambda b, h, q, k: DOCUMENTS[b, k] // 2 == DOCUMENTS[b, q] // 2,
    "padding": lambda b, h, q, k: SEEN[b, k] & (q >= k),
    "lengths": lambda b, h, q, k: torch.logical_and(k < LENGTHS[b], causal(b, h, q, k)),
    "padding of several kinds": lambda b, h, q, k: (k < LENGTHS[b]) & SEEN[b, k] & (q >= k),
    "prefix": lambda b, h, q, k: (q >= k) | (k < 5),
    "prefixes": or_masks(causal, lambda b, h, q, k: LENGTHS[b] > k),
    "prefix of both": lambda b, h, q, k: (q >= k) | ((q < LENGTHS[b]) & (k < LENGTHS[b])),
    "groups": lambda b, h, q, k: ((GROUPS[b, q] == GROUPS[b, k]) & (GROUPS[b, q] >= 0)) | (q >= k),
    "groups and a window": or_masks(
        and_masks(causal, window), lambda b, h, q, k: (GROUPS[b, k] >= 0) & (GROUPS[b, q] == GROUPS[b, k])
    ),
    "prefix with padding": lambda b, h, q, k: ((q >= k) | (k < 5)) & SEEN[b, k],
}
NOT_FOLLOWED: dict[str, tuple[Mask, str]] = {
    "ahead": (lambda b, h, q, k: q >= k - 2, "places ahead"),
    "not itself": (lambda b, h, q, k: q > k, "don't see themselves"),
    "heads": (lambda b, h, q, k: (q >= k) & (h < 2), "heads"),
    "a query alone": (lambda b, h, q, k: SEEN[b, q] & (q >= k), "query and a key"),
    "two documents": (and_masks(documents, lambda b, h, q, k: ONE_ROW[q] == ONE_ROW[k]), "several equalities"),
    "two functions": (lambda b, h, q, k: DOCUMENTS[b, q] == ONE_ROW[k], "two different functions"),
    "if": (lambda b, h, q, k: q >= k and k >= 0, "an if"),
    "a prefix and a window": (lambda b, h, q, k: ((q >= k) & (q - k < 3)) | (k < 5), "alternatives"),
    "a prefix beside documents": (lambda b, h, q, k: documents(b, h, q, k) & ((q >= k) | (k < 5)), "alternatives"),
    "documents beside a prefix": (lambda b, h, q, k: ((q >= k) | (k < 5)) & documents(b, h, q, k), "alternatives"),
    "any key": (lambda b, h, q, k: (q >= k) | SEEN[b, k], "alternatives"),
    "products": (lambda b, h, q, k: 2 * q >= k, "a comparison"),
    "dilated": (lambda b, h, q, k: (q - k) % 2 == 0, "own value"),
    "no index": (lambda b, h, q, k: True, "does not depend"),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_mask_is_what_torch_makes_of_its_function(name: str) -> None:
    found = mask_of(FOLLOWED[name], ROWS, LENGTH, LENGTH, CPU)
    both: Callable[[Tensor | None], Any] = lambda x: None if x is None else (x, x)  # noqa: E731
    at = torch.arange(LENGTH)
    ids = {"padding": found.padding, "segments": both(found.segments), "groups": both(found.groups)}
    made = visible(at, at, found.sight, **ids)
    expected = create_mask(FOLLOWED[name], ROWS, 1, LENGTH, LENGTH, device="cpu")
    assert torch.equal(made.expand(ROWS, 1, LENGTH, LENGTH), expected)


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_all_else_is_told(name: str) -> None:
    mask, reason = NOT_FOLLOWED[name]
    with pytest.raises(NotFollowed, match=reason):
        mask_of(mask, ROWS, LENGTH, LENGTH, CPU)


def test_chunks_are_words_and_ids_are_the_users_own_tensor() -> None:
    assert str(mask_of(FOLLOWED["chunks"], ROWS, LENGTH, LENGTH, CPU).sight) == "causal_chunk_4"
    found = mask_of(FOLLOWED["documents"], ROWS, LENGTH, LENGTH, CPU)
    assert found.segments is not None and found.segments.data_ptr() == DOCUMENTS.data_ptr()
    assert found.padding is None and IndexTerm("q").reads == {"q"}


def test_outside_of_a_trace_torch_computes_what_it_did() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(3, 1, 2, 4, 8).unbind(0)
    assert torch_flex.__all__ == ["flex_attention_by"]
    with flex_attention_followed():
        found = flex_attention(*q)
    assert torch.allclose(found, torch.nn.functional.scaled_dot_product_attention(*q), atol=1e-6)
