"""What a checkpoint holds, whatever its format: whole tensors in host memory, under the module's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ...core.errors import CheckpointError
from ...weights.files import shown


@dataclass(frozen=True)
class OptimizerContents:
    """The optimizer's ``state`` (tensors, or other values) of each parameter, and the ``options`` of its group.

    ``kind``: the optimizer's class; empty where the format does not say it.
    """

    kind: str
    state: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Contents:
    """``left_out``: what the file has beside, and was not read. ``run``: as :class:`..documents.RunNote`."""

    model: Mapping[str, Tensor]
    optimizer: OptimizerContents | None = None
    step: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def renamed(self, changes: Iterable[tuple[str, str]]) -> Contents:
        """Return a copy with other prefixes of names: the second of a pair in place of the first.

        Raises:
            CheckpointError: QN602 for a pair that fits no name, and for two names that become one.
        """
        names = {name: name for name in self.model}
        for old, new in changes:
            fitting = [name for name, now in names.items() if now.startswith(old)]
            if not fitting:
                raise CheckpointError("QN602", f"no name begins with {shown(old)}", fix="see the names in the source")
            names |= {name: new + names[name].removeprefix(old) for name in fitting}
        if len(set(names.values())) < len(names):
            raise CheckpointError("QN602", "two tensors would have one name", fix="rename fewer of them")
        model = {names[name]: x for name, x in self.model.items()}
        if self.optimizer is None:
            return replace(self, model=model)
        state, options = (
            {names.get(name, name): x for name, x in by_parameter.items()}
            for by_parameter in (self.optimizer.state, self.optimizer.options)
        )
        return replace(self, model=model, optimizer=OptimizerContents(self.optimizer.kind, state, options))
