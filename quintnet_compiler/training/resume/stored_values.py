"""Store the states of loaders and random generators as JSON, with tensors and arrays."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...checkpoint.values import decoded, encoded


def to_json(state: Any, what: str) -> Any:
    """Return ``state`` as JSON. ``what`` names it in errors.

    Raises:
        CheckpointError: QN603 for a value that is no number, text, bytes, tensor, NumPy array, or list, tuple or dict.
    """
    tensors: dict[str, Any] = {}

    def put(path: str, x: Tensor) -> None:
        x = x.detach().cpu().contiguous()
        data = x.reshape(-1).view(torch.uint8).numpy().tobytes()
        tensors[path] = [str(x.dtype).removeprefix("torch."), list(x.shape), base64.b64encode(data).decode()]

    return {"value": encoded(_without_arrays(state), "", what, put), "tensors": tensors}


def from_json(stored: Any) -> Any:
    """Return the value of :func:`to_json`; None for None."""
    if stored is None:
        return None

    def get(path: str) -> Tensor:
        dtype, shape, data = stored["tensors"][path]
        words = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8) if data else torch.empty(0)
        return words.view(getattr(torch, dtype)).reshape(shape) if data else words.to(getattr(torch, dtype))

    return _with_arrays(decoded(stored["value"], get))


_ARRAY, _BYTES, _FLOAT = "\0array", "\0bytes", "\0number"


def _without_arrays(x: Any) -> Any:
    """Return ``x`` with arrays and bytes as marked dicts, which :func:`encoded` accepts."""
    if isinstance(x, (np.ndarray, np.generic)) and x.dtype != object:
        kind = _ARRAY if isinstance(x, np.ndarray) else _FLOAT
        return {kind: [x.dtype.str, list(x.shape), base64.b64encode(np.ascontiguousarray(x).tobytes()).decode()]}
    if isinstance(x, (bytes, bytearray)):
        return {_BYTES: base64.b64encode(x).decode()}
    if type(x) in (list, tuple):
        return type(x)(_without_arrays(item) for item in x)
    if isinstance(x, dict):
        return {key: _without_arrays(item) for key, item in x.items()}
    return x


def _with_arrays(x: Any) -> Any:
    match x:
        case {"\0array": [dtype, shape, data]}:
            return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
        case {"\0number": [dtype, _, data]}:
            return np.frombuffer(base64.b64decode(data), dtype)[0]
        case {"\0bytes": str(data)}:
            return base64.b64decode(data)
    if type(x) in (list, tuple):
        return type(x)(_with_arrays(item) for item in x)
    if isinstance(x, dict):
        return {key: _with_arrays(item) for key, item in x.items()}
    return x
