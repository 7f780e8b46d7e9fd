"""What a step does whatever its layout, and what follows from its time for who rents the devices."""

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
    """What a person asks for beside time and memory. ``tokens``: how many to train on (rows, where a batch has no
    tokens); ``price``: of an hour of one device, in any currency.

    Raises:
        CompileError: QN216 for what is no number, not above 0, or not finite.
    """

    tokens: float | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        for name, found in asdict(self).items():
            number = isinstance(found, (int, float)) and not isinstance(found, bool)
            if found is not None and not (number and math.isfinite(found) and found > 0):
                raise CompileError("QN216", f"{name}={found!r}", fix="give a number above 0, or leave it out")


NO_GOAL = Goal()


@dataclass(frozen=True)
class Figures:
    """Of a step of so many ``seconds`` on so many ``devices``; ``unit``: what is counted, a token or a row.

    ``flops``: of the unsplit model, see :class:`Workload`; ``utilisation``: these over what the devices' datasheets
    promise for that time, None without products. ``joules``: of all devices at the datasheet's power, without hosts and
    network; ``train_*``: of the whole goal. None where the device's power, the price or the goal is not known.
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
        """Everything: seconds, joules, FLOP, and the price's currency."""
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
        """The utilisation in percent."""
        return "-" if self.utilisation is None else f"{100 * self.utilisation:.3g}%"


@dataclass(frozen=True)
class Workload:
    """What a step computes. ``rows``: of the global batch; ``tokens``: positions of all rows, 0 where a batch has none.
    ``flops``: of products and attention, forward and twice as much backward (causal attention: the half that is seen;
    what is computed again does not count); ``dtype``: in which most of them are computed. ``mixed``: kinds of devices
    in the order of ranks, and how many there are of each, where a cluster has several."""

    rows: int
    tokens: int
    flops: float
    dtype: str
    device: Hardware
    goal: Goal = NO_GOAL
    mixed: tuple[tuple[Hardware, int], ...] = ()

    @classmethod
    def of(cls, folded: Folded, tokens: int, kinds: Sequence[tuple[Hardware, int]], goal: Goal) -> Workload:
        flops: Counter[str] = Counter()
        for node, times in folded.repeats.items():
            if node.op == "call_function" and (kernel := kernel_of(node, "memory")).flops:
                flops[kernel.dtype] += 3 * times * kernel.flops  # type: ignore[assignment]
        most = max(flops, key=lambda dtype: flops[dtype], default="bf16")
        mixed = tuple(kinds) if len({device for device, _ in kinds}) > 1 else ()
        return cls(folded.program.batch_size, tokens, float(flops.total()), most, kinds[0][0], goal, mixed)

    def used(self, devices: int) -> list[tuple[Hardware, int]]:
        """Kinds of the first so many devices."""
        found, left = Counter[Hardware](), devices
        for device, count in self.mixed or ((self.device, devices),):
            found[device] += min(left, count)
            left -= min(left, count)
        return [(device, count) for device, count in found.items() if count]

    @property
    def counted(self) -> tuple[str, int]:
        """What a step has, and how many."""
        return ("token", self.tokens) if self.tokens else ("row", self.rows)

    def figures(self, seconds: float, devices: int) -> Figures:
        """Of a step that takes so many seconds on so many devices."""
        unit, counted = self.counted
        goal, used = self.goal, self.used(devices)
        peak = sum(count * device.flops_per_second(self.dtype) for device, count in used)
        watts = sum(count * device.watts for device, count in used) if all(one.watts for one, _ in used) else 0.0
        joules = seconds * watts if watts else None
        cost = goal.price * devices * seconds / HOUR if goal.price else None
        steps = goal.tokens / counted if goal.tokens else None
        return Figures(
            unit=unit,
            devices=devices,
            seconds=seconds,
            per_second=counted / seconds,
            per_second_per_device=counted / seconds / devices,
            flops=self.flops,
            utilisation=self.flops / (seconds * peak) if self.flops else None,
            joules=joules,
            cost_per_million=MILLION * cost / counted if cost else None,
            train_seconds=steps * seconds if steps else None,
            train_cost=steps * cost if steps and cost else None,
            train_joules=steps * joules if steps and joules else None,
        )

    def text(self, found: Figures) -> list[str]:
        """Lines for people."""
        unit, counted = self.counted
        size = f"{self.tokens} tokens in {self.rows} rows" if self.tokens else f"{self.rows} rows"
        speed = f"{rounded(found.per_second)} {unit}s/s, {rounded(found.per_second_per_device)} per device"
        lines = [f"a step is {size}: {speed}"]
        if found.utilisation:
            peaks = [f"{n} x {one.flops_per_second(self.dtype) / 1e12:.4g}" for one, n in self.used(found.devices)]
            said = f"{self.flops:.3g} FLOP a step, {' + '.join(peaks)} TFLOP/s ({self.dtype})"
            lines.append(f"model FLOP utilisation {found.share}: {said}")
        if found.joules:
            each = f"{found.joules / counted:.3g} J a {unit}"
            watts = ", ".join(dict.fromkeys(f"{one.watts:g}" for one, _ in self.used(found.devices)))
            lines.append(f"energy {each}, with devices at {watts} W and nothing else")
        if found.cost_per_million:
            cost = rounded(found.cost_per_million)
            lines.append(f"a million {unit}s cost {cost}, at {self.goal.price:g} a device hour")
        if found.train_seconds:
            parts = [f"{self.goal.tokens:g} {unit}s take {long_time(found.train_seconds)}"]
            parts += [f"cost {rounded(found.train_cost)}"] if found.train_cost else []
            parts += [f"use {rounded(found.train_joules / KILOWATT_HOUR)} kWh"] if found.train_joules else []
            lines.append(", ".join(parts))
        return lines


def rounded(number: float) -> str:
    """To four digits, without an exponent: ``12,350`` or ``0.1235``."""
    if number == 0:
        return "0"
    digits = 3 - math.floor(math.log10(abs(number)))
    return f"{round(number, digits):,.{max(0, digits)}f}"


def long_time(seconds: float) -> str:
    """``1.5 hours`` or ``24.1 days``."""
    return f"{seconds / HOUR:.3g} hours" if seconds < 48 * HOUR else f"{seconds / HOUR / 24:,.1f} days"


def tokens_of(leaves: Sequence[object]) -> int:
    """How many tokens a batch has: the elements of its first tensor of whole numbers with two dims, rows and positions;
    0 where it has none."""
    found = _tokens_in(leaves)
    return 0 if found is None else found.numel()


def with_length(batch: Any, length: int) -> Any:
    """A batch like ``batch``, with rows of ``length`` positions: its tensors whose second dim is as long as that of its
    tokens are zeros of the new length."""
    tokens = _tokens_in(pytree.tree_leaves(batch))

    def like(x: Any) -> Any:
        if tokens is None or not isinstance(x, torch.Tensor) or x.dim() < 2 or x.shape[1] != tokens.shape[1]:
            return x
        return x.new_zeros((x.shape[0], length, *x.shape[2:]))

    return pytree.tree_map(like, batch)


def _tokens_in(leaves: Sequence[object]) -> torch.Tensor | None:
    whole = (torch.int64, torch.int32)
    return next((x for x in leaves if isinstance(x, torch.Tensor) and x.dtype in whole and x.dim() == 2), None)
