"""Store the states of loaders, schedulers and random generators as JSON, with tensors."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.values import GetOther, PutOther, decoded, encoded
from ...core.errors import CheckpointError


def to_json(state: Any, what: str, put_other: PutOther | None = None) -> Any:
    """Return ``state`` as JSON. ``what`` names it in errors; ``put_other``: see :func:`...checkpoint.values.encoded`.

    Raises:
        CheckpointError: QN603 for a value that ``encoded`` does not have, or that holds itself.
    """
    tensors: dict[str, Any] = {}

    def put(path: str, x: Tensor) -> None:
        x = x.detach().cpu().contiguous()
        data = x.reshape(-1).view(torch.uint8).numpy().tobytes()
        tensors[path] = [str(x.dtype).removeprefix("torch."), list(x.shape), base64.b64encode(data).decode()]

    try:
        return {"value": encoded(state, "", what, put, put_other), "tensors": tensors}
    except RecursionError:
        raise CheckpointError("QN603", f"{what} holds itself", fix="keep values that do not") from None


def from_json(stored: Any, get_other: GetOther | None = None) -> Any:
    """Return the value of :func:`to_json`; None for None."""
    if stored is None:
        return None

    def get(path: str) -> Tensor:
        dtype, shape, data = stored["tensors"][path]
        words = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8) if data else torch.empty(0)
        return words.view(getattr(torch, dtype)).reshape(shape) if data else words.to(getattr(torch, dtype))

    return decoded(stored["value"], get, get_other)
