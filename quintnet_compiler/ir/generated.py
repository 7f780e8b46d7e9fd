"""Generated functions, as those who run or read them see them: made by torch.fx, or read from a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import fx

from ..compat.torch_codegen import SHIPPED
from .codegen_allowlist import check_source

# global names of torch.fx's code
_NAMES: dict[str, Any] = {"torch": SHIPPED, "device": torch.device, "inf": float("inf"), "nan": float("nan")}


class GeneratedModule(Protocol):
    """A generated function.

    Attributes:
        forward: ``forward([comm, *values])`` empties the list and returns a tuple.
        code: its source.
        graph: the graph from which it was generated.
    """

    @property
    def forward(self) -> Callable[..., Any]: ...

    @property
    def code(self) -> str: ...

    @property
    def graph(self) -> fx.Graph: ...


@dataclass(frozen=True, eq=False)
class StoredModule:
    """A function whose source was read from a file.

    Attributes:
        code: the source, with comments where the module path changes.
        name: the name in tracebacks.
        made: returns the module from which the source was written, by compiling.
    """

    code: str
    name: str
    made: Callable[[], GeneratedModule]

    @cached_property
    def forward(self) -> Callable[[list[Any]], Any]:
        """Return the function, checked like one that was just generated.

        Raises:
            CompileError: QN701 for source of another form.
        """
        space = dict(_NAMES)
        exec(compile(check_source(self.code), f"<{self.name}>", "exec"), space)
        function: Callable[[Any, list[Any]], Any] = space["forward"]
        return lambda args: function(None, args)

    @property
    def graph(self) -> fx.Graph:
        """Compile the program, and return the function's graph."""
        return self.made().graph


@dataclass(frozen=True, eq=False)
class UnwrittenModule:
    """A function of a program that is priced and never run: no code is written for it."""

    graph: fx.Graph

    @property
    def forward(self) -> Callable[..., Any]:
        """Raise: there is no code to run."""
        raise AssertionError("a program that is only priced does not run")

    @property
    def code(self) -> str:
        """Raise: no code was written."""
        raise AssertionError("a program that is only priced has no code")
