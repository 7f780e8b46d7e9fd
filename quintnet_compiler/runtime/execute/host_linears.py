"""Linear layers of programs that generate, on CPUs: in oneDNN, where PyTorch's own call goes to another library.

A call has a few rows, so reading the weight is most of the time. For 32-bit numbers PyTorch calls MKL, which on some
processors takes twice as long as oneDNN does for the same weight, as it lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compat.torch import host_linear, linear, torch_with_linear
from ...ir.codegen_allowlist import check_source
from ...ir.distributed_program import DistributedProgram
from ...ir.generated import GeneratedModule
from .engines import Engine, eager

_CALL = "torch._C._nn.linear("  # as generated code spells it


def engine_of(program: DistributedProgram, engine: Engine) -> Engine:
    """What runs the functions of ``program``: generated Python of programs with caches calls :func:`few_rows`."""
    generates = any(spec.kind == "cache" for spec in program.state.values())
    return host_linears if engine is eager and generates and host_linear is not None else engine


def host_linears(module: GeneratedModule, name: str) -> Callable[[list[Any]], Sequence[Any]]:
    """The generated Python, with another ``torch._C._nn.linear``."""
    if _CALL not in module.code:
        return eager(module, name)
    read = torch_with_linear(few_rows)
    space: dict[str, Any] = {"torch": read, "device": torch.device, "inf": float("inf"), "nan": float("nan")}
    exec(compile(check_source(module.code), f"<{name}, with oneDNN>", "exec"), space)
    return partial(space["forward"], None)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As torch.nn.functional.linear; ``x`` [..., I], ``weight`` [O, I]."""
    if host_linear is None or x.dtype is not torch.float32 or not x.is_cpu:
        return linear(x, weight, bias)
    found: Tensor = host_linear(x, weight, bias, "none", [], "")
    return found
