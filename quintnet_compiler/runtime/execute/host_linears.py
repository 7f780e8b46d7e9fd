"""Linear layers of programs that generate, on CPUs: in oneDNN, with weights that are laid out for it while they stay.

A call has a few rows, so reading the weight is most of the time. For 32-bit numbers PyTorch calls MKL, which on some
processors takes twice as long as oneDNN does for the same weight, as it lies in memory. Where many calls read a weight
before anybody may change it, it is laid out once as oneDNN reads it fastest: else each call does that again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compat.torch import host_linear, linear, packed_weight, packs, torch_with_linear
from ...ir.codegen_allowlist import check_source
from ...ir.distributed_program import DistributedProgram
from ...ir.generated import GeneratedModule
from .engines import Engine, eager

_CALL = "torch._C._nn.linear("  # as generated code spells it


@dataclass
class HostLinears:
    """An engine: generated Python, with another ``torch._C._nn.linear``. ``staying``: weights that nobody changes now,
    by identity; ``packed``: those of them that were read, as oneDNN reads them."""

    staying: dict[int, Tensor] = field(default_factory=dict)
    packed: dict[int, Tensor] = field(default_factory=dict)

    def of(self, program: DistributedProgram, engine: Engine) -> Engine:
        """What runs the functions of ``program``: this, where it has caches and ``engine`` is that of plain Python."""
        generates = any(spec.kind == "cache" for spec in program.state.values())
        return self if engine is eager and generates and host_linear is not None else engine

    def __call__(self, module: GeneratedModule, name: str) -> Callable[[list[Any]], Sequence[Any]]:
        if _CALL not in module.code:
            return eager(module, name)
        read = torch_with_linear(self.few_rows)
        space: dict[str, Any] = {"torch": read, "device": torch.device, "inf": float("inf"), "nan": float("nan")}
        exec(compile(check_source(module.code), f"<{name}, with oneDNN>", "exec"), space)
        return partial(space["forward"], None)

    @contextlib.contextmanager
    def weights_stay(self, weights: Iterable[Tensor]) -> Iterator[None]:
        """While inside, nobody changes ``weights``: those that are read are in memory twice."""
        self.staying = {id(x): x for x in weights if x.dim() == 2 and x.is_cpu and x.numel() and packs(x.dtype)}
        try:
            yield
        finally:
            self.changed()

    def changed(self) -> None:
        """Weights have other values now, or may have."""
        self.staying, self.packed = {}, {}

    def few_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As torch.nn.functional.linear; ``x`` [..., I], ``weight`` [O, I]."""
        known = self.packed.get(id(weight))
        if known is None and id(weight) in self.staying:
            known = self.packed[id(weight)] = packed_weight(weight.contiguous())
        if known is None and (x.dtype is not torch.float32 or not x.is_cpu):
            return linear(x, weight, bias)
        if host_linear is None:
            return linear(x, weight, bias)
        found: Tensor = host_linear(x, weight if known is None else known, bias, "none", [], "")
        return found
