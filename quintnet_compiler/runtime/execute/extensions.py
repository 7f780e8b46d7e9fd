"""Operators of generated code that features run on a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...ir.distributed_program import DistributedProgram
from ...ops.extensions import extensions_of
from ..transport.host_copies import HostCopies


class RankService(Protocol):
    """Runs some operators on one rank, and may hold memory, files or threads for them."""

    @property
    def rank_operators(self) -> Mapping[str, Callable[..., Any]]:
        """Return what generated code calls, by name."""

    def drop_values(self) -> None:
        """Drop what a step that failed has left."""


@dataclass(frozen=True)
class RankOperators:
    """Run an operator on ranks otherwise than by copies to and from the host's memory.

    Attributes:
        make: takes the program, the rank, its device and its copies; returns None where there is no need.
    """

    make: Callable[[DistributedProgram, int, torch.device, HostCopies], RankService | None]


def rank_services(
    program: DistributedProgram, rank: int, device: torch.device, copies: HostCopies
) -> list[RankService]:
    """Return the services that a rank of a program needs."""
    services = [kind.make(program, rank, device, copies) for kind in extensions_of(RankOperators)]
    return [service for service in services if service is not None]
