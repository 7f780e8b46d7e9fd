"""Textbook examples of parallel training: a few steps per rank, on a machine described by a few numbers.

>>> from quintnet_compiler import textbook
>>> machine = textbook.Machine(2, flops_per_second=1e12, link=textbook.Link(1e-6, 1e9))
>>> steps = [textbook.Compute("work", flops=1e9), textbook.Collective("all_reduce", (0, 1), 1e6)]
>>> round(textbook.simulate([steps, steps], machine).seconds, 6)
0.002002
"""

from __future__ import annotations

from .machine import Link, Machine
from .programs import (
    data_parallel,
    expert_parallel,
    one_device,
    pipeline,
    ring_all_reduce,
    ring_attention,
    tensor_parallel,
)
from .simulate import simulate
from .steps import Collective, Compute, Hold, Receive, Release, Send, Step, Wait

__all__ = [
    "Collective",
    "Compute",
    "Hold",
    "Link",
    "Machine",
    "Receive",
    "Release",
    "Send",
    "Step",
    "Wait",
    "data_parallel",
    "expert_parallel",
    "one_device",
    "pipeline",
    "ring_all_reduce",
    "ring_attention",
    "simulate",
    "tensor_parallel",
]
