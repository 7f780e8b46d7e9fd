"""What a rank of a textbook program does, one step after another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Compute:
    """Work on the rank's own device: ``flops`` at the machine's speed, or ``seconds``, or both. ``kind``: how a picture
    draws it (F forward, B backward); ``microbatch``: of a pipeline."""

    name: str
    flops: float = 0.0
    seconds: float = 0.0
    kind: str = "once"
    microbatch: int = -1


@dataclass(frozen=True)
class Send:
    """Hand ``bytes`` to the link to rank ``to``, and go on. Messages between two ranks keep their order."""

    to: int
    bytes: float
    name: str = "send"


@dataclass(frozen=True)
class Receive:
    """Wait for the next message from rank ``source``."""

    source: int
    name: str = "receive"


@dataclass(frozen=True)
class Collective:
    """An operation that all ranks of ``over`` take part in: nobody's begins before everybody is there.

    ``kind``: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``broadcast``. ``bytes``: of the
    whole value. ``background``: go on, and be told by ``Wait(name)`` when it is done; what a rank does in the
    background is one after the other.
    """

    kind: str
    over: tuple[int, ...]
    bytes: float
    name: str = ""
    axis: str = "all"
    background: bool = False


@dataclass(frozen=True)
class Wait:
    """Until the background collective ``name`` is done."""

    name: str


@dataclass(frozen=True)
class Hold:
    """``bytes`` of memory under a name, from here on."""

    name: str
    bytes: float


@dataclass(frozen=True)
class Release:
    """The memory of this name is free again."""

    name: str


Step = Compute | Send | Receive | Collective | Wait | Hold | Release
