"""Linear layers of generation on CPUs: run by oneDNN, on packed weights while the weights do not change.

A call has few rows, so reading the weight takes most of the time. For fp32, PyTorch calls MKL, which on some processors
takes twice as long as oneDNN on the same weight. A weight that many calls read before it may change is packed once into
oneDNN's fastest layout; oneDNN would otherwise do that in each call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compat.torch import host_linear, linear, packed_weight, packs
from ...compat.torch_codegen import torch_with_linear
from ...ir.codegen_allowlist import check_source
from ...ir.distributed_program import DistributedProgram
from ...ir.generated import GeneratedModule
from .engines import Engine, eager

_CALL = "torch._C._nn.linear("  # as generated code spells it


@dataclass
class HostLinears:
    """An engine: generated Python, with oneDNN's linear in place of ``torch._C._nn.linear``.

    Attributes:
        constant: weights that do not change at present, by ``id()``.
        packed: those of them that were read, in oneDNN's layout, by the same keys.
    """

    constant: dict[int, Tensor] = field(default_factory=dict)
    packed: dict[int, Tensor] = field(default_factory=dict)

    def wrap(self, program: DistributedProgram, engine: Engine) -> Engine:
        """Return this engine for a ``program`` with caches whose ``engine`` is the eager one, else ``engine``."""
        generates = any(spec.kind == "cache" for spec in program.state.values())
        return self if engine is eager and generates and host_linear is not None else engine

    def __call__(self, module: GeneratedModule, name: str) -> Callable[[list[Any]], Sequence[Any]]:
        if _CALL not in module.code:
            return eager(module, name)
        patched = torch_with_linear(self.few_rows)
        space: dict[str, Any] = {"torch": patched, "device": torch.device, "inf": float("inf"), "nan": float("nan")}
        exec(compile(check_source(module.code), f"<{name}, with oneDNN>", "exec"), space)
        return partial(space["forward"], None)

    @contextlib.contextmanager
    def weights_stay(self, weights: Iterable[Tensor]) -> Iterator[None]:
        """Pack ``weights`` that are read in the context; the caller promises not to change them in it.

        Packed weights are copies: they take as much memory again.
        """
        self.constant = {id(x): x for x in weights if x.dim() == 2 and x.is_cpu and x.numel() and packs(x.dtype)}
        try:
            yield
        finally:
            self.changed()

    def changed(self) -> None:
        """Drop packed weights, because weights may have changed."""
        self.constant, self.packed = {}, {}

    def few_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``torch.nn.functional.linear``; shapes: ``x`` [..., I], ``weight`` [O, I], ``bias`` [O]."""
        packed = self.packed.get(id(weight))
        if packed is None and id(weight) in self.constant:
            packed = self.packed[id(weight)] = packed_weight(weight.contiguous())
        if packed is None and (x.dtype is not torch.float32 or not x.is_cpu):
            return linear(x, weight, bias)
        if host_linear is None:
            return linear(x, weight, bias)
        result: Tensor = host_linear(x, weight if packed is None else packed, bias, "none", [], "")
        return result
