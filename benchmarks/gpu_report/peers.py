"""Times, kernels and idle shares of steps that do the same work in different ways, side by side."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from .entries import Check, Entry, Figures, NotRun
from .setting import Setting

Step = Callable[[], object]
OURS = ("eager", "inductor", "cudagraphs")
COMPILERS = ("inductor", "cudagraphs", "graph", "compiled")  # first words of peers that need a compiler for the device
BASIS = {"inductor": "eager", "cudagraphs": "eager", "graph": "eager", "compiled": "plain"}  # whose FLOPs they have
STEPS = 5


@dataclass(frozen=True)
class Activity:
    """The kernels of one step. ``idle``: the share of time without one, from the first kernel to the last."""

    kernels: int
    idle: float | None


def compared(
    setting: Setting, what: str, builders: Mapping[str, Callable[[], Step]], top: float, work: int | None = None
) -> Iterator[Entry]:
    """A row for each peer; ``top``: FLOP/s that its utilisation is a share of; ``work``: FLOPs of a step, else those
    of products and attention by torch's counter. One that fails does not stop others."""
    left_out = [name for name in builders if setting.emulated and name.startswith(COMPILERS)]
    if left_out:
        yield NotRun(f"{what}: {', '.join(left_out)}", "nothing compiles kernels for the emulated accelerator")
    flops = {} if work is None else dict.fromkeys(builders, work)
    for name, build in builders.items():
        if name in left_out:
            continue
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                yield from _row(setting, what, name, build, flops, top)
            for text in dict.fromkeys(str(w.message) for w in said if "Backend" in w.category.__name__):
                yield NotRun(f"{what}: {name}, a segment as it should be", text[:300])
        except Exception as error:  # torch's compilers raise of all kinds
            yield Check(f"{what}: {name} runs", False, f"{type(error).__name__}: {error}"[:600])
        setting.free()


def _row(
    setting: Setting, what: str, name: str, build: Callable[[], Step], flops: dict[str, int], top: float
) -> Iterator[Entry]:
    step = build()
    first = setting.seconds(step, times=1, warm=0)
    if name not in BASIS and name not in flops:
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm: _addmm_flops}) as counter:
            step()
        flops[name] = counter.get_total_flops()
    seconds = setting.seconds(step, times=STEPS, warm=2)
    seen = activity(setting, step)
    work = flops.get(BASIS.get(name, name), 0)
    yield Figures(
        what,
        {
            "peer": name,
            "ms": 1e3 * seconds,
            "TFLOP": work / 1e12,
            "% of the ceiling": 100 * work / seconds / top,
            "kernels": seen.kernels,
            "% idle": "not measured" if seen.idle is None else 100 * seen.idle,
            "first step, s": first,
        },
    )


def _addmm_flops(_: Sequence[int], a: Sequence[int], b: Sequence[int], *__: object, **___: object) -> int:
    """Count the FLOPs of all overloads; torch 2.11 takes the dtype that one of them gets for a shape."""
    return 2 * a[0] * a[1] * b[1]


def activity(setting: Setting, step: Step) -> Activity:
    if setting.emulated:
        from tests.accelerator.device import install

        with install().counting() as counted:
            step()
        return Activity(sum(counted.kernels.values()), None)
    setting.wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        setting.wait()
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    kernels = sum(not name.startswith(("Memcpy", "Memset")) for _, _, name in spans)
    return Activity(kernels, idle_share([(start, end) for start, end, _ in spans]))


def idle_share(spans: list[tuple[float, float]]) -> float | None:
    """Return the share of the time from the first start to the last end that no span covers.

    >>> idle_share([(0, 2), (1, 3), (5, 10)])
    0.2
    """
    if not spans:
        return None
    spans = sorted(spans)
    covered, until = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    whole = until - spans[0][0]
    return 1 - covered / whole if whole else 0.0


def ceiling(setting: Setting) -> float:
    """Return the FLOP/s of large bf16 products, measured now, since clocks vary from minute to minute."""
    from .machine import SIDE, SMALL, product_rate

    return statistics.median(
        product_rate(setting, SMALL[0] if setting.emulated else SIDE, torch.bfloat16) for _ in range(3)
    )
