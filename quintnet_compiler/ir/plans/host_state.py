"""What of a program is in memory or files of hosts while its devices have no use for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostState:
    """A record of what hosts hold for devices. Code is generated, run and priced by it, whoever decides it.

    Attributes:
        values: whether values that a forward saves leave the device until the backward.
        parameters: whether parameters that ranks store, and their gradients when they are added up, are on hosts, so
            that optimizers compute there.
        optimizer: whether optimizers that the program makes compute on hosts, with whole parameters.
        folder: a folder on a disk of each host, in files of which ``values`` wait; None: they wait in memory.
    """

    values: bool = False
    parameters: bool = False
    optimizer: bool = False
    folder: str | None = None

    @property
    def updates(self) -> bool:
        """Return whether hosts update parameters."""
        return self.parameters or self.optimizer

    def __or__(self, other: HostState) -> HostState:
        """Return the state with what either has on hosts."""
        return HostState(
            self.values or other.values,
            self.parameters or other.parameters,
            self.optimizer or other.optimizer,
            self.folder if self.folder is not None else other.folder,
        )
