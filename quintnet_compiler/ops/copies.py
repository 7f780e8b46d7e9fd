"""Copies between a rank's device and its host, as operators: every move of data is a node of the graph.

Each can be started early and waited for late, as collectives can (see :mod:`.collectives`). What is elsewhere is read
by the operator alone that brings it back. On a device that is the host itself, copies to its memory are plain ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch

from ..compat.torch import OpOverload, operator_name
from ..compat.torch_codegen import SHIPPED
from .define import define_operator

# a value of the device, in pinned host memory
copy_out = define_operator("copy_out(Tensor x) -> Tensor", lambda x: SHIPPED.empty_like(x, device="cpu"))
# what ``copy_out`` made, on the device again
copy_in = define_operator(
    "copy_in(Tensor x, Device device) -> Tensor", lambda x, device: torch.empty_like(x, device=device)
)
# a value of the device, in a file
write_out = define_operator("write_out(Tensor x) -> Tensor", lambda x: SHIPPED.empty_like(x, device="cpu"))
# what ``write_out`` made, on the device again
read_in = define_operator(
    "read_in(Tensor x, Device device) -> Tensor", lambda x, device: torch.empty_like(x, device=device)
)

# what takes a value away -> what brings it back
BACK: Mapping[OpOverload, OpOverload] = MappingProxyType({copy_out: copy_in, write_out: read_in})
COPIES: Mapping[OpOverload, OpOverload] = MappingProxyType(
    {
        copy_out: define_operator("start_copy_out(Tensor x) -> Tensor", copy_out),
        copy_in: define_operator("start_copy_in(Tensor x, Device device) -> Tensor", copy_in),
        write_out: define_operator("start_write_out(Tensor x) -> Tensor", write_out),
        read_in: define_operator("start_read_in(Tensor x, Device device) -> Tensor", read_in),
    }
)
Way = Literal["to host", "from host", "to disk", "from disk"]  # a link; its two ways are independent
_WAYS: tuple[tuple[OpOverload, Way], ...] = (
    (copy_out, "to host"),
    (copy_in, "from host"),
    (write_out, "to disk"),
    (read_in, "from disk"),
)
WAY_OF: Mapping[OpOverload, Way] = MappingProxyType(
    {target: way for copy, way in _WAYS for target in (copy, COPIES[copy])}
)
# what generated code calls -> the link that it takes
WAYS: Mapping[str, Way] = MappingProxyType({operator_name(target): way for target, way in WAY_OF.items()})
