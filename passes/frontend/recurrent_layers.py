"""Recurrent layers one by one: torch's definitions of several layers have no dropout between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...compat.torch import composite_definition

aten = torch.ops.aten


def _layer_by_layer(
    definition: Callable[..., Any],
    x: Tensor,
    state: Tensor | Sequence[Tensor],
    parameters: Sequence[Tensor],
    *options: Any,
) -> tuple[Tensor, ...]:
    """Return the output and the last states, as ``definition`` computes one layer. The first dim is time meanwhile.

    ``state``: a tensor [layers * directions, rows, features], or two for an LSTM.
    """
    biases, layers, dropout, train, bidirectional, batch_first = options
    states = (state,) if isinstance(state, Tensor) else tuple(state)
    rows, count = 2 if bidirectional else 1, len(parameters) // layers
    last: list[tuple[Tensor, ...]] = []
    x = x.transpose(0, 1) if batch_first else x
    for layer in range(layers):
        initial = [s[layer * rows : (layer + 1) * rows] for s in states]
        own = list(parameters[layer * count : (layer + 1) * count])
        first = initial[0] if isinstance(state, Tensor) else initial
        x, *after = definition(x, first, own, biases, 1, 0.0, train, bidirectional, False)
        last.append(tuple(after))
        if train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    return (x.transpose(0, 1) if batch_first else x, *(torch.cat(after) for after in zip(*last, strict=True)))


def _definition(target: Any) -> Callable[..., Any]:
    of_torch = composite_definition(target)
    assert of_torch is not None, f"torch has no definition of {target}"
    return partial(_layer_by_layer, of_torch)


RECURRENT: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        target: _definition(target)
        for target in (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
    }
)
