"""Measurements of a Trainer besides the loss."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..api.compiled_program import CompiledProgram
from ..compat.torch import pytree
from ..core.errors import CompileError
from ..cost_models.hardware import hardware_by_product
from ..ir.batch_form import plain_batch

Metric = Callable[[Any, Any], tuple[float, float]]
"""(the model's outputs, the batch's labels) -> a sum over rows, and the number of rows."""


def accuracy(outputs: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the number of rows whose largest logit (in the last dim) is the label's, and the number of rows.

    Labels of -100 do not count.

    Raises:
        CompileError: QN108 if outputs are not logits for each label.
    """
    if not isinstance(outputs, Tensor) or not isinstance(labels, Tensor) or outputs.shape[:-1] != labels.shape:
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in (outputs, labels)]
        raise CompileError(
            "QN108",
            f"accuracy compares logits [..., classes] with labels [...], and got {shapes[0]} and {shapes[1]}",
            fix="give a metric of your own: lambda outputs, labels: quintnet.accuracy(outputs.logits, labels)",
        )
    counts = labels != -100
    return float(((outputs.argmax(-1) == labels) & counts).sum()), float(counts.sum())


def device_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the nominal FLOP/s of this device, if the cost models know it by its full name."""
    if device.type != "cuda":
        return None
    hardware = hardware_by_product(torch.cuda.get_device_name(device))
    kind = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, "fp32")
    try:
        return hardware.flops_per_second(kind) if hardware is not None else None
    except CompileError:
        return None


def memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process so far, in GiB: of its device, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def step_speed(
    program: CompiledProgram, batch: Any, rows: int, device: torch.device, seconds: float
) -> dict[str, float]:
    """Return the memory, and the speed of a step of ``rows`` rows of all data ranks."""
    numbers = {"memory_gib": memory_gib(device)}
    first = next((x for x in pytree.tree_leaves(plain_batch(batch)) if isinstance(x, Tensor)), None)
    if first is not None and first.dim() == 2 and not first.is_floating_point():
        numbers["tokens_per_second"] = rows * first.shape[1] / seconds
    else:
        numbers["rows_per_second"] = rows / seconds
    peak_flops = device_flops(device, next(program.parameters()).dtype)
    if peak_flops is not None:
        numbers["mfu"] = program.model_flops / (seconds * peak_flops * program.mesh.size)
    return numbers
