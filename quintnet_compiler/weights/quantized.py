"""Linear layers whose frozen weights are stored as integers with scales (QLoRA: Dettmers et al. 2023).

See arXiv:2305.14314. A quantising library (torchao, bitsandbytes) keeps the integers inside of one tensor of another
class. Here they are separate parameters, so that everything treats them as it does others: shardings, slices (ZeRO),
stages, checkpoints. The weight is computed from them in forward, by the operators of that library.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import CompileError

_INTEGERS = (torch.int8, torch.uint8)


class QuantizedLinear(nn.Linear):
    """A linear layer that stores integers and scales. ``weight`` [out, in] is computed whenever it is read."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self.train(layer.training)

    @property
    @abstractmethod
    def weight(self) -> Any: ...  # type: ignore[override]

    def reset_parameters(self) -> None:
        """Do nothing: stored integers keep their values."""

    def _keep(self, name: str, x: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(x.detach(), requires_grad=False))


class TorchaoLinear(QuantizedLinear):
    """A layer whose weight torchao has quantised. Forward is torchao's, on its tensor of these parts."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        x: Any = layer.weight
        self._parts, self._context = x.__tensor_flatten__()
        self._kind, self._size, self._stride = type(x), x.shape, x.stride()
        for name in self._parts:
            self._keep(name, getattr(x, name))

    @property
    def weight(self) -> Any:  # type: ignore[override]
        parts = {name: getattr(self, name).detach() for name in self._parts}
        return self._kind.__tensor_unflatten__(parts, self._context, self._size, self._stride)


class FourBitLinear(QuantizedLinear):
    """A bitsandbytes ``Linear4bit``: two numbers in a byte, the first in its upper half.

    Each number is the place of a value in a table of 16 (NF4, FP4), times a scale for every block.

    Parameters: ``packed`` uint8 [out, in / 2], ``absmax`` float32 [out, in / block], ``code`` float32 [16, 1]; where
    blocks do not divide rows, the first two are [blocks, block / 2] and [blocks, 1]. Scales that were quantised
    themselves are stored as the float32 that they stand for.
    """

    packed: Tensor
    absmax: Tensor
    code: Tensor

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        state = layer.weight.quant_state
        self._block, self._dtype = state.blocksize, state.dtype
        self._compute = layer.compute_dtype if layer.compute_type_is_set else None
        absmax = state.absmax
        if state.nested:
            absmax = sys.modules["bitsandbytes"].functional.dequantize_blockwise(absmax, state.state2) + state.offset
        rows = self.out_features if self.in_features % self._block == 0 else len(absmax)
        self._keep("packed", layer.weight.reshape(rows, -1))
        self._keep("absmax", absmax.float().reshape(rows, -1))
        self._keep("code", state.code.float().reshape(16, 1))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        packed, absmax = self.packed, self.absmax
        places = torch.stack([packed >> 4, packed & 15], -1).int()
        values = F.embedding(places, self.code).reshape(*absmax.shape, self._block) * absmax.unsqueeze(-1)
        return values.reshape(self.out_features, self.in_features).to(self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Compute as ``bitsandbytes.matmul_4bit`` where it trains: a matmul in the layer's compute dtype."""
        dtype = self._compute or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x.to(dtype), self.weight.to(dtype), bias).to(x.dtype)


def unpack_quantized(model: nn.Module) -> nn.Module:
    """Store quantised weights of linear layers as plain parameters: call it before ``compile``.

    Follows int8 and smaller integers of torchao (``Int8WeightOnlyConfig``, ``IntxWeightOnlyConfig``), and
    ``bitsandbytes.nn.Linear4bit`` (NF4, FP4). Integers and scales are frozen parameters in place of the weight, and
    the weight is computed from them in each forward and backward: sharding, ZeRO 3 and pipelines split and move the
    packed bytes. Layers compute what they did, bit by bit.

    Args:
        model: changed in place: quantised layers are replaced, also inside of PEFT's.

    Returns:
        ``model``.

    Raises:
        CompileError: QN105 for weights that are quantised in another way, by name. Nothing was changed.
    """
    replacements: list[tuple[nn.Module, str, QuantizedLinear]] = []
    for path, parent in model.named_modules():
        for name, layer in parent.named_children():
            kind = _kind(layer, f"{path}.{name}".removeprefix("."))
            if kind is not None:
                replacements.append((parent, name, kind(layer)))
    new: dict[int, QuantizedLinear] = {}
    for parent, name, replacement in replacements:
        setattr(parent, name, new.setdefault(id(getattr(parent, name)), replacement))
    check_quantized(model)
    return model


def check_quantized(model: nn.Module) -> None:
    """Refuse parameters and buffers that are several tensors in one, or packed by bitsandbytes.

    Raises:
        CompileError: QN105 with their names.
    """
    for path, module in model.named_modules():
        for name, x in (*module._parameters.items(), *module._buffers.items()):
            if x is not None and _is_packed(x):
                supported = isinstance(module, nn.Linear) and _kind(module, path) is not None
                raise _refused(
                    f"{path}.{name}".removeprefix("."),
                    f"a {type(x).__name__}, several tensors in one",
                    "quintnet.unpack_quantized(model) before compile" if supported else None,
                )


def _is_packed(x: Any) -> bool:
    flattens = next((kind for kind in type(x).__mro__ if "__tensor_flatten__" in vars(kind)), None)
    foreign = flattens is not None and flattens.__module__.partition(".")[0] != "torch"
    packed = foreign and hasattr(x, "__tensor_flatten__")  # parameters of a program have none
    return packed or type(x).__module__.startswith("bitsandbytes.")


def _kind(layer: nn.Module, path: str) -> type[QuantizedLinear] | None:
    """Return the class that replaces a layer; None if its weight is a plain one.

    Raises:
        CompileError: QN105 if there is none.
    """
    x: Any = layer._parameters.get("weight")
    if not isinstance(layer, nn.Linear) or x is None or not _is_packed(x):
        return None
    name = f"{path}.weight"
    if hasattr(x, "__tensor_flatten__"):
        _require_frozen_integers(x, name)
        return TorchaoLinear
    if type(x).__name__ != "Params4bit":
        raise _refused(name, f"a {type(x).__name__}, whose layer rounds its inputs to 8 bits, too")
    _require_four_bits(layer, x, name)
    return FourBitLinear


def _require_frozen_integers(x: Any, name: str) -> None:
    """Raise QN105 unless torchao's parts have integers, and are not trained."""
    parts, _ = x.__tensor_flatten__()
    if x.requires_grad or not any(getattr(x, part).dtype in _INTEGERS for part in parts):
        problem = "trained" if x.requires_grad else "without integers"
        raise _refused(name, f"a {type(x).__name__} {problem}", "model.requires_grad_(False), and int8 or int4 weights")


def _require_four_bits(layer: nn.Linear, x: Any, name: str) -> None:
    """Raise QN105 unless bitsandbytes has packed the weight of this layer in whole blocks of bytes."""
    state = getattr(x, "quant_state", None)
    if state is None or getattr(state, "packing_format_for_cpu", False) or layer.weight.dtype != torch.uint8:
        raise _refused(name, "not quantised, or packed for inference, or not in bytes", "move the model to its device")
    if len(state.shape) != 2 or tuple(state.shape) != (layer.out_features, layer.in_features):
        raise _refused(name, f"of shape {tuple(state.shape)} inside")
    if layer.out_features * layer.in_features % state.blocksize:
        raise _refused(name, f"of {tuple(state.shape)} in blocks of {state.blocksize}, the last of which is not full")


def _refused(name: str, problem: str, fix: str | None = None) -> CompileError:
    configs = "torchao's Int8WeightOnlyConfig or IntxWeightOnlyConfig, or by bitsandbytes' Linear4bit"
    supported = f"weights that are quantised by {configs}, in linear layers"
    return CompileError("QN105", f"{name} is {problem}", fix=fix or supported)
