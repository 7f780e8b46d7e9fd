"""What a generated function is to whoever runs or reads it: made by torch.fx here, or read from a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import fx

from .codegen_allowlist import check_source

# what code of torch.fx may name, beside what it is given
_NAMES = {"torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan")}


class GeneratedModule(Protocol):
    """A generated function: ``forward([comm, *values])`` empties the list and returns a tuple; ``code``: its source;
    ``graph``: what it was written from."""

    @property
    def forward(self) -> Callable[..., Any]: ...

    @property
    def code(self) -> str: ...

    @property
    def graph(self) -> fx.Graph: ...


@dataclass(frozen=True, eq=False)
class StoredModule:
    """A function whose source was read. ``code``: with comments where the module path changes; ``name``: what
    tracebacks call it; ``made``: makes the module that the source was written from, by compiling."""

    code: str
    name: str
    made: Callable[[], GeneratedModule]

    @cached_property
    def forward(self) -> Callable[[list[Any]], Any]:
        """The function. It is checked before it runs, as one that was just generated.

        Raises:
            CompileError: QN701 for source of another form.
        """
        space = dict(_NAMES)
        exec(compile(check_source(self.code), f"<{self.name}>", "exec"), space)
        function: Callable[[Any, list[Any]], Any] = space["forward"]  # type: ignore[assignment]
        return lambda args: function(None, args)

    @property
    def graph(self) -> fx.Graph:
        return self.made().graph


@dataclass(frozen=True, eq=False)
class UnwrittenModule:
    """A function of a program that is priced and never run: code is not written for it."""

    graph: fx.Graph

    @property
    def forward(self) -> Callable[..., Any]:
        raise AssertionError("a program that is only priced does not run")

    @property
    def code(self) -> str:
        raise AssertionError("a program that is only priced has no code")
