"""A device that :data:`.hardware.HARDWARE` does not have, described in numbers: a mapping, or a JSON file. An example
is in docs/cost_models.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..core.absent_gpu import AbsentGpu
from ..core.errors import CompileError
from ..core.files import path_of
from .hardware import GB, TFLOPS, Efficiency, Hardware, hardware

Positive = Annotated[float, Field(gt=0)]
Dtype = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
Share = Literal["matmul", "attention", "memory", "link", "network", "host", "low_precision"]


class _HardwareDocument(BaseModel):
    """``tflops``: dense, by dtype; ``memory_gb``: 1e9 bytes; bandwidths: 1e9 bytes a second, one way, per device;
    ``host``, ``host_memory``, ``disk``, ``bridge`` and ``domain``: see :class:`.hardware.Hardware`.
    ``multiprocessors``: by default as many as usual GPUs have, which matters for small products. ``efficiency``: shares
    that differ from those of :class:`.hardware.Efficiency`, which are typical of GPUs. ``capability``: of CUDA, by
    which PyTorch chooses kernels.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    name: str = Field(min_length=1, max_length=80)
    tflops: dict[Dtype, Positive]
    memory_gb: Positive
    memory_gb_per_second: Positive
    link_gb_per_second: Positive
    network_gb_per_second: Positive
    host_gb_per_second: Positive = 32.0
    host_memory_gb_per_second: Positive = 51.2
    disk_read_gb_per_second: Positive = 6.9
    disk_write_gb_per_second: Positive = 4.1
    bridge_gb_per_second: float = Field(default=0.0, ge=0)
    domain: int = Field(default=8, ge=1)
    multiprocessors: int = Field(default=100, ge=1)
    watts: float = Field(default=0.0, ge=0)
    link: str = "link"
    efficiency: dict[Share, Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=dict)
    capability: tuple[int, int] = (8, 0)

    def hardware(self) -> Hardware:
        """Raises: ValueError if there is no rate for 32 bits, which every step needs, or none for 16."""
        if "fp32" not in self.tflops or not self.tflops.keys() & {"fp16", "bf16"}:
            raise ValueError("tflops: give fp32, and bf16 or fp16")
        half = max(self.tflops.get("bf16", 0.0), self.tflops.get("fp16", 0.0))
        return Hardware(
            self.name, tuple((k, v * TFLOPS) for k, v in {"fp16": half, **self.tflops}.items()), self.memory_gb * GB,
            self.memory_gb_per_second * GB, self.link_gb_per_second * GB, self.network_gb_per_second * GB,
            self.multiprocessors, domain=self.domain, efficiency=Efficiency(**self.efficiency),
            gpu=AbsentGpu(self.capability, cudnn=False), link=self.link,
            bridge_bytes_per_second=self.bridge_gb_per_second * GB,
            host_bytes_per_second=self.host_gb_per_second * GB,
            host_memory_bytes_per_second=self.host_memory_gb_per_second * GB,
            disk_read_bytes_per_second=self.disk_read_gb_per_second * GB,
            disk_write_bytes_per_second=self.disk_write_gb_per_second * GB, watts=self.watts,
        )  # fmt: skip


DeviceDescription = str | os.PathLike[str] | Mapping[str, Any] | Hardware


def described(device: DeviceDescription) -> Hardware:
    """Hardware by its name, by the path of a file that ends in ``.json``, or by numbers.

    Raises:
        CompileError: QN210 for an unknown name, a file that cannot be read, or numbers that describe no device.
    """
    if isinstance(device, Hardware):
        return device
    if isinstance(device, Mapping):
        return _read(json.dumps(dict(device)), "the mapping")
    name = device if isinstance(device, str) else str(path_of(device, "QN210"))
    if not name.endswith(".json"):
        return hardware(name)
    try:
        return _read(Path(name).read_text(), name)
    except (OSError, UnicodeDecodeError) as error:
        raise CompileError("QN210", f"{name} cannot be read: {error}", fix="pass the path of a JSON file") from None


def _read(text: str, source: str) -> Hardware:
    try:
        return _HardwareDocument.model_validate_json(text).hardware()
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        said = f"{'.'.join(map(str, first['loc'])) or 'the document'}: {first['msg']}"
    except (TypeError, ValueError) as error:
        said = str(error)
    fields = ", ".join(_HardwareDocument.model_fields)
    raise CompileError("QN210", f"{source} describes no device: {said}", fix=f"give {fields}")
