"""Operators of features on a rank: functions that generated code calls by name, and what their calls share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ...compat.torch import operator_name
from ...ir.distributed_program import DistributedProgram
from ...ops.extensions import extensions_of
from ..transport.host_copies import HostCopies


class RankService(Protocol):
    """Holds memory, files or threads that the calls of some operators on one rank share."""

    def drop_values(self) -> None:
        """Drop what a step that failed has left."""


# takes the program, the rank, its device and its copies; returns None where the program needs no service
ServiceMaker = Callable[[DistributedProgram, int, torch.device, HostCopies], RankService | None]
Services = Mapping[ServiceMaker, RankService]


@dataclass(frozen=True)
class RankMethod:
    """Carry out an operator on a rank, where generated code calls it by its name.

    Attributes:
        run: takes the rank's :class:`.comm.Comm`, or the service, and what generated code passes: the operator's
            arguments, without the size of an axis, and the index of the call.
        service: makes what calls share on a rank; ranks that need none run the operator as without the feature.
    """

    run: Callable[..., Any]
    service: ServiceMaker | None = None


def rank_services(program: DistributedProgram, rank: int, device: torch.device, copies: HostCopies) -> Services:
    """Return the services that a rank of a program needs, by what made them."""
    makers = dict.fromkeys(method.service for method in extensions_of(RankMethod).values())
    services = {maker: maker(program, rank, device, copies) for maker in makers if maker is not None}
    return {maker: service for maker, service in services.items() if service is not None}


def methods_of(services: Services) -> dict[str, Callable[..., Any]]:
    """Return what generated code calls of services, by name."""
    return {
        operator_name(operator): partial(method.run, services[method.service])
        for operator, method in extensions_of(RankMethod).items()
        if method.service is not None and method.service in services
    }
