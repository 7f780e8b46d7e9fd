"""The work of a step, which no layout changes, and throughput, energy and cost that follow from its time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..compat.torch import pytree
from ..core.errors import CompileError
from ..cost_models.hardware import Hardware
from ..cost_models.operators import kernel_of
from ..passes.sharding.fold_blocks import Folded

MILLION, HOUR, KILOWATT_HOUR = 1e6, 3600.0, 3.6e6


@dataclass(frozen=True)
class Goal:
    """The size and price of a training run.

    ``tokens``: to train on (rows, where a batch has no tokens); ``price``: of an hour of one device, in any currency.

    Raises:
        CompileError: QN216 for what is no number, not above 0, or not finite.
    """

    tokens: float | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and math.isfinite(value) and value > 0):
                raise CompileError("QN216", f"{name}={value!r}", fix="give a number above 0, or leave it out")


NO_GOAL = Goal()


@dataclass(frozen=True)
class Figures:
    """Throughput, utilisation, energy and cost of a step. None where the device's power, price or goal is unknown.

    Attributes:
        unit: what is counted, ``"token"`` or ``"row"``.
        per_second: units a second.
        flops: of the unsplit model, see :class:`Workload`.
        utilisation: these over the peak of the devices' datasheets; None without matrix products.
        joules: of all devices at the datasheet's power, without hosts and network.
        cost_per_million: of a million units.
        train_seconds: of the whole goal.
        train_cost: of the whole goal.
        train_joules: of the whole goal.
    """

    unit: str
    devices: int
    seconds: float
    per_second: float
    per_second_per_device: float
    flops: float
    utilisation: float | None
    joules: float | None
    cost_per_million: float | None
    train_seconds: float | None
    train_cost: float | None
    train_joules: float | None

    def numbers(self) -> dict[str, float | str | None]:
        """Return all fields: seconds, joules, FLOP, and the price's currency."""
        kind = f"{self.unit}s"
        return {
            "counted": kind,
            "devices": self.devices,
            f"{kind}_per_second": self.per_second,
            f"{kind}_per_second_per_device": self.per_second_per_device,
            "model_flops": self.flops,
            "model_flop_utilisation": self.utilisation,
            "step_joules": self.joules,
            f"cost_per_million_{kind}": self.cost_per_million,
            "train_seconds": self.train_seconds,
            "train_cost": self.train_cost,
            "train_joules": self.train_joules,
        }

    @property
    def share(self) -> str:
        """Return the utilisation in percent."""
        return "-" if self.utilisation is None else f"{100 * self.utilisation:.3g}%"


@dataclass(frozen=True)
class Workload:
    """The work of a step.

    Attributes:
        rows: of the global batch.
        tokens: positions of all rows; 0 where a batch has none.
        flops: of matrix products and attention, forward and twice as many backward. Causal attention counts half, and
            recomputing does not count.
        dtype: in which most of them are computed.
        device: the first kind of device.
        goal: of the training run.
        mixed: kinds of devices in the order of ranks, with their numbers, where a cluster has several.
    """

    rows: int
    tokens: int
    flops: float
    dtype: str
    device: Hardware
    goal: Goal = NO_GOAL
    mixed: tuple[tuple[Hardware, int], ...] = ()

    @classmethod
    def from_program(cls, folded: Folded, tokens: int, kinds: Sequence[tuple[Hardware, int]], goal: Goal) -> Workload:
        """Return the work of a folded program on ``kinds`` of devices."""
        flops: Counter[str] = Counter()
        for node, times in folded.repeats.items():
            if node.op == "call_function" and (kernel := kernel_of(node, "memory")).flops:
                flops[kernel.dtype] += 3 * times * kernel.flops  # type: ignore[assignment]
        dtype = max(flops, key=lambda dtype: flops[dtype], default="bf16")
        mixed = tuple(kinds) if len({device for device, _ in kinds}) > 1 else ()
        return cls(folded.program.batch_size, tokens, float(flops.total()), dtype, kinds[0][0], goal, mixed)

    def kinds_used(self, devices: int) -> list[tuple[Hardware, int]]:
        """Return the kinds of the first ``devices``, with their numbers."""
        counts, remaining = Counter[Hardware](), devices
        for device, count in self.mixed or ((self.device, devices),):
            counts[device] += min(remaining, count)
            remaining -= min(remaining, count)
        return [(device, count) for device, count in counts.items() if count]

    @property
    def counted(self) -> tuple[str, int]:
        """Return the unit that is counted, and how many of it a step has."""
        return ("token", self.tokens) if self.tokens else ("row", self.rows)

    def figures(self, seconds: float, devices: int) -> Figures:
        """Return the figures of a step that takes ``seconds`` on ``devices``."""
        unit, counted = self.counted
        goal, used = self.goal, self.kinds_used(devices)
        flops = self.flops or None
        peak = sum(count * device.flops_per_second(self.dtype) for device, count in used)
        watts = [count * device.watts for device, count in used]
        joules = seconds * sum(watts) if all(watts) else None
        cost = goal.price * devices * seconds / HOUR if goal.price else None
        steps = goal.tokens / counted if goal.tokens else None
        return Figures(
            unit=unit,
            devices=devices,
            seconds=seconds,
            per_second=counted / seconds,
            per_second_per_device=counted / seconds / devices,
            flops=self.flops,
            utilisation=flops / (seconds * peak) if flops else None,
            joules=joules,
            cost_per_million=MILLION * cost / counted if cost else None,
            train_seconds=steps * seconds if steps else None,
            train_cost=steps * cost if steps and cost else None,
            train_joules=steps * joules if steps and joules else None,
        )

    def text(self, figures: Figures) -> list[str]:
        """Return lines for people."""
        unit, counted = self.counted
        size = f"{self.tokens} tokens in {self.rows} rows" if self.tokens else f"{self.rows} rows"
        speed = f"{four_digits(figures.per_second)} {unit}s/s, {four_digits(figures.per_second_per_device)} per device"
        lines = [f"a step is {size}: {speed}"]
        if figures.utilisation:
            kinds = self.kinds_used(figures.devices)
            peaks = [f"{count} x {device.flops_per_second(self.dtype) / 1e12:.4g}" for device, count in kinds]
            said = f"{self.flops:.3g} FLOP a step, {' + '.join(peaks)} TFLOP/s ({self.dtype})"
            lines.append(f"model FLOP utilisation {figures.share}: {said}")
        if figures.joules:
            energy = f"{figures.joules / counted:.3g} J a {unit}"
            watts = ", ".join(dict.fromkeys(f"{device.watts:g}" for device, _ in self.kinds_used(figures.devices)))
            lines.append(f"energy {energy}, with devices at {watts} W and nothing else")
        if figures.cost_per_million:
            cost = four_digits(figures.cost_per_million)
            lines.append(f"a million {unit}s cost {cost}, at {self.goal.price:g} a device hour")
        if figures.train_seconds:
            parts = [f"{self.goal.tokens:g} {unit}s take {long_time(figures.train_seconds)}"]
            parts += [f"cost {four_digits(figures.train_cost)}"] if figures.train_cost else []
            parts += [f"use {four_digits(figures.train_joules / KILOWATT_HOUR)} kWh"] if figures.train_joules else []
            lines.append(", ".join(parts))
        return lines


def four_digits(number: float) -> str:
    """Return a number with four digits, without an exponent: ``12,350`` or ``0.1235``."""
    if number == 0:
        return "0"
    digits = 3 - math.floor(math.log10(abs(number)))
    return f"{round(number, digits):,.{max(0, digits)}f}"


def long_time(seconds: float) -> str:
    """Return a duration for people: ``1.5 hours`` or ``24.1 days``."""
    return f"{seconds / HOUR:.3g} hours" if seconds < 48 * HOUR else f"{seconds / HOUR / 24:,.1f} days"


def tokens_of(leaves: Sequence[object]) -> int:
    """Return the number of tokens of a batch: the elements of its first integer tensor [rows, positions].

    0 where it has none.
    """
    tokens = _tokens_in(leaves)
    return 0 if tokens is None else tokens.numel()


def with_length(batch: Any, length: int) -> Any:
    """Return a batch with rows of ``length`` positions.

    Tensors whose second dim is as long as that of the tokens are replaced by zeros of the new length.
    """
    tokens = _tokens_in(pytree.tree_leaves(batch))

    def like(x: Any) -> Any:
        if tokens is None or not isinstance(x, torch.Tensor) or x.dim() < 2 or x.shape[1] != tokens.shape[1]:
            return x
        return x.new_zeros((x.shape[0], length, *x.shape[2:]))

    return pytree.tree_map(like, batch)


def _tokens_in(leaves: Sequence[object]) -> torch.Tensor | None:
    whole = (torch.int64, torch.int32)
    return next((x for x in leaves if isinstance(x, torch.Tensor) and x.dtype in whole and x.dim() == 2), None)
