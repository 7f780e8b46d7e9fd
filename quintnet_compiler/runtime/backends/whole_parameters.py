"""Parameters that are whole on one of the ranks that share them, which computes their updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...compat.torch_codegen import SHIPPED
from ...core import slices
from ...core.errors import RunError
from ...core.mesh import Mesh
from ...core.sharding import local_shape
from ...ir.distributed_program import StateSpec
from ...ir.program import Axis
from ..launch.consistency import tell
from ..state.module_parameters import local_of
from ..state.true_part import with_padding, without_padding
from ..state.whole_optimizer import Pairs
from ..transport.distributed import DistributedTransport
from ..transport.host_copies import PLAIN, host_room
from ..transport.transport import Pending


def owners_of(sizes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Return the rank that owns each parameter: the largest first, each on the rank that has fewest elements so far."""
    elements, owners = dict.fromkeys(ranks, 0), dict[int, int]()
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = owner = min(elements, key=elements.__getitem__)
        elements[owner] += sizes[index]
    return [owners[index] for index in range(len(sizes))]


class AllHere:
    """Parameters where all ranks are in this process: they are whole."""

    label = ""
    apart = False

    def owner(self, parameter: nn.Parameter) -> None:
        """Return None: all ranks run in this process."""

    def here(self, parameter: nn.Parameter) -> bool:
        return True

    def told(self, text: str) -> tuple[str, ...]:
        return (text,)

    def stand_ins(self, parameters: Sequence[nn.Parameter]) -> dict[int, nn.Parameter]:
        return {id(p): p for p in parameters}

    def collect(self, pairs: Pairs) -> None:
        """Do nothing: the parameters themselves are updated."""

    def fetch(self, pairs: Pairs) -> None:
        """Do nothing: the parameters themselves are updated."""

    def spread(self, pairs: Pairs) -> None:
        """Do nothing: the parameters themselves are updated."""


class AllOnHost:
    """Copies of parameters in memory of the host, where all ranks are in this process."""

    label = ""
    apart = False

    def owner(self, parameter: nn.Parameter) -> None:
        """Return None: all ranks run in this process."""

    def here(self, parameter: nn.Parameter) -> bool:
        return True

    def told(self, text: str) -> tuple[str, ...]:
        return (text,)

    def stand_ins(self, parameters: Sequence[nn.Parameter]) -> dict[int, nn.Parameter]:
        copies = {
            id(p): nn.Parameter(host_copy(p.detach(), p.device), requires_grad=p.requires_grad) for p in parameters
        }
        self._wait(parameters)
        return copies

    def collect(self, pairs: Pairs) -> None:
        for p, copy in pairs:
            copy.grad = None
            if p.grad is not None:  # the values, too: others may have been loaded
                copy.copy_(local_of(p), non_blocking=True)
                copy.grad = host_copy(p.grad, p.device)
        self._wait([p for p, _ in pairs])

    def fetch(self, pairs: Pairs) -> None:
        for p, copy in pairs:
            copy.copy_(local_of(p), non_blocking=True)
        self._wait([p for p, _ in pairs])

    def spread(self, pairs: Pairs) -> None:
        for p, copy in pairs:
            p.copy_(copy, non_blocking=True)
            copy.grad = None

    def _wait(self, parameters: Sequence[nn.Parameter]) -> None:
        for device in {p.device for p in parameters}:
            await_copies(device)


def host_copy(x: Tensor, device: torch.device) -> Tensor:
    """Return a plain copy on the host, which is complete when :func:`await_copies` has returned."""
    plain = local_of(x).as_subclass(Tensor)
    return host_room(plain.shape, plain.dtype, device).copy_(plain, non_blocking=True)


def await_copies(device: torch.device) -> None:
    """Wait until copies from ``device`` to the host are complete."""
    if device.type not in PLAIN:
        torch.accelerator.current_stream(device).synchronize()


@dataclass
class OneOwnerEach:
    """Whole parameters, each on one of the ranks of its stage, see :func:`owners_of`.

    ``specs``: of this rank's parameters, by id. ``host``: the whole parameters are in memory of the owner's host; then
    one at a time is gathered, so that the device needs room for only one. All ranks of a stage call each method with
    the same parameters.
    """

    mesh: Mesh
    transport: DistributedTransport
    axes: Sequence[Axis]
    specs: Mapping[int, StateSpec]
    device: torch.device
    label: str = ""
    host: bool = False
    apart: bool = True

    def __post_init__(self) -> None:
        stages: dict[int, list[int]] = {}
        for rank in range(self.mesh.size):
            stages.setdefault(self.mesh.coordinate(rank).get("pp", 0), []).append(rank)
        self.transport.add_groups([tuple(ranks) for ranks in stages.values()])
        self.ranks = tuple(stages[self.mesh.coordinate(self.transport.rank).get("pp", 0)])
        self.sizes = [axis.size for axis in self.axes]
        places = [self.mesh.coordinate(rank) for rank in self.ranks]
        self.places = [tuple(place.get(axis.name, 0) for axis in self.axes) for place in places]
        self.owners: dict[int, int] = {}

    def owner(self, parameter: nn.Parameter) -> int:
        return self.owners[id(parameter)]

    def here(self, parameter: nn.Parameter) -> bool:
        return self.owners.get(id(parameter)) == self.transport.rank

    def told(self, text: str) -> tuple[str, ...]:
        return tell(text, self.device)

    def stand_ins(self, parameters: Sequence[nn.Parameter]) -> dict[int, nn.Parameter]:
        mine = [p for p in parameters if id(p) in self.specs]
        other = next((p for p in parameters if id(p) not in self.specs and not p.is_meta), None)
        if other is not None:
            raise RunError(
                "QN113",
                f"the optimizer has a parameter {tuple(other.shape)} that is not this program's",
                fix="give it parameters of program.parameters()",
            )
        owners = owners_of([p.numel() for p in mine], self.ranks)
        self.owners |= {id(p): owner for p, owner in zip(mine, owners, strict=True)}
        wholes: dict[int, nn.Parameter] = {}
        for p in parameters:
            wholes[id(p)] = nn.Parameter(self._room(p), requires_grad=p.requires_grad)
        with torch.no_grad():
            self.fetch([(p, wholes[id(p)]) for p in mine])
        return wholes

    def fetch(self, pairs: Pairs) -> None:
        for group in self._groups(pairs):
            self._take(group)
        if self.host:
            await_copies(self.device)

    def collect(self, pairs: Pairs) -> None:
        with_gradients = [(p, whole) for p, whole in pairs if p.grad is not None]
        for _, whole in pairs:
            whole.grad = None
        for group in self._groups(with_gradients):
            self._take(group)
            self._take_gradients(group)
        if self.host:
            await_copies(self.device)

    def spread(self, pairs: Pairs) -> None:
        for group in self._groups(pairs):
            self._spread(group)

    def _groups(self, pairs: Pairs) -> list[Pairs]:
        """Return the groups of tensors that are gathered, or scattered, at once."""
        return [[pair] for pair in pairs] if self.host else [pairs]

    def _room(self, p: nn.Parameter) -> Tensor:
        if not self.here(p):
            # one element, on the right device: an optimizer may make tensors on that of a group's first parameter
            place = torch.device("cpu") if self.host else self.device
            return SHIPPED.zeros((), dtype=p.dtype, device=place).expand(p.shape)
        if self.host:
            return host_room(p.shape, p.dtype, self.device)
        return torch.empty(p.shape, dtype=p.dtype, device=self.device)

    def _spread(self, pairs: Pairs) -> None:
        waits: list[Pending] = []
        for p, whole in pairs:
            spec, part = self.specs[id(p)], local_of(p)
            into = part.new_empty(local_shape(spec.shape, spec.sharding, self.sizes), device=self.device)
            parts = None
            if self.here(p):
                on_device = whole.to(self.device, non_blocking=True)
                cut = [slices.take_all(on_device, spec.sharding, self.sizes, place) for place in self.places]
                parts = [x.contiguous() for x in cut]
            waits.append(self.transport.scatter_parts(parts, into, self.ranks, self.owners[id(p)]))
        for p, _ in pairs:
            into = waits.pop(0)()
            local_of(p).copy_(without_padding(into, local_of(p).shape))
        if self.host:
            for _, whole in pairs:
                whole.grad = None

    def _take(self, pairs: Pairs) -> None:
        waits = [self._gather(p, local_of(p)) for p, _ in pairs]
        for (_, whole), wait in zip(pairs, waits, strict=True):
            gathered = wait()
            if gathered is not None:
                whole.copy_(gathered, non_blocking=self.host)

    def _take_gradients(self, pairs: Pairs) -> None:
        waits = [self._gather(p, _gradient(p)) for p, _ in pairs]
        for (_, whole), wait in zip(pairs, waits, strict=True):
            gathered = wait()
            whole.grad = host_copy(gathered, self.device) if gathered is not None and self.host else gathered

    def _gather(self, p: nn.Parameter, part: Tensor) -> Pending:
        """Gather the ranks' parts of a tensor like ``p`` on the one that owns it."""
        spec = self.specs[id(p)]
        part = part.detach().to(self.device)
        mine = with_padding(part, local_shape(spec.shape, spec.sharding, self.sizes)).contiguous()
        wait = self.transport.gather_parts(mine, self.ranks, self.owners[id(p)])

        def whole() -> Tensor | None:
            parts = wait()
            if parts is None:
                return None
            by_place = dict(zip(self.places, parts, strict=True))
            return slices.assemble(by_place, spec.sharding, self.sizes, spec.shape).contiguous()

        return whole


def _gradient(p: nn.Parameter) -> Tensor:
    """Return this rank's part of the gradient, sharded as the parameter is."""
    gradient = p.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and isinstance(p, DTensor) and gradient.placements != p.placements:
        gradient = gradient.redistribute(p.device_mesh, p.placements)
    return local_of(gradient)
