"""One call that lets the DTensors of a process behave as whole tensors do."""

from __future__ import annotations

from .copied_slices import write_to_copied_slices
from .local_values import read_and_draw_whole_dtensors


def use_whole_dtensors() -> None:
    """Let DTensors of this process give numbers, draw, and be written in slices, as whole tensors do, from now on."""
    read_and_draw_whole_dtensors()
    write_to_copied_slices()
