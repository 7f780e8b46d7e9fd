"""Operators of generated code that features run on a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...ir.distributed_program import DistributedProgram
from ..transport.host_copies import HostCopies


class RankService(Protocol):
    """What runs some operators on one rank, and may hold memory, files or threads for them."""

    @property
    def operators(self) -> Mapping[str, Callable[..., Any]]:
        """Return what generated code calls, by name."""

    def clear(self) -> None:
        """Drop what a step that failed has left."""


@dataclass(frozen=True)
class RankOperators:
    """Run an operator on ranks otherwise than by copies to and from the host's memory.

    Attributes:
        make: takes the program, the rank, its device and its copies; returns None where there is no need.
    """

    make: Callable[[DistributedProgram, int, torch.device, HostCopies], RankService | None]
