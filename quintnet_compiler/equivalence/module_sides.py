"""A few rows through a program and through the module that it was captured of: what is not equal, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.torch_checkpoints import without_checkpoints
from ..core.errors import CompileError
from ..core.replaced import for_this_thread, one_thread
from ..guards.call_attributes import call_attributes
from .module_step import ModuleStep, Owner, module_step, tensors_of
from .module_training import FLOOR
from .reference import differs, largest
from .swapped_values import rounded
from .unsplit_step import UnsplitStep
from .verify import LIMITS, Comparison

HOW = "write that part so that tracing can follow it"
OUTSIDE = "draw them outside and pass them in the batch"
NO_CHECKPOINT = 'leave torch.utils.checkpoint out, and compile with recompute="full"'


@dataclass(frozen=True)
class Sides:
    """Both sides on a few rows, and what the module made of them."""

    owner: Owner
    seed: int
    step: UnsplitStep
    batch: Any
    rows: int
    theirs: ModuleStep
    dtype: torch.dtype

    @property
    def limit(self) -> float:
        return LIMITS[self.dtype]

    @property
    def masks(self) -> int | None:
        return self.seed if self.step.draws else None

    def compare(self) -> list[Comparison]:
        """What is not equal."""
        theirs, limit = self.theirs.gradients, self.limit
        floor = FLOOR * largest([x for x in theirs.values() if x is not None])
        left = {name: x for name, x in theirs.items() if x is not None}
        found: list[Comparison] = []

        def settle(name: str, gradient: Tensor) -> None:
            expected = left.pop(name, None)
            expected = torch.zeros_like(gradient) if expected is None else expected
            found.append(Comparison("gradient", name, 0, differs(gradient, expected, floor), limit))

        made = self.step.run(self.owner.tensors, tensors_of(self.batch), settle)
        changed = self.step.changed
        outputs, new = made[: len(made) - len(changed)], made[len(made) - len(changed) :]
        for name, expected in left.items():
            found.append(Comparison("gradient", name, 0, differs(torch.zeros_like(expected), expected, floor), limit))
        found += _outputs(self.owner.want, outputs, self.theirs.outputs, limit)
        left_as = {name: self.theirs.changes.tensors.get(name, (None, self.owner.tensors[name]))[1] for name in changed}
        # a mean of what is normalised is nothing but rounding
        floor = FLOOR * largest([x.detach() for x in left_as.values() if x.is_floating_point()])
        for name, value in zip(changed, new, strict=True):
            expected = left_as[name].detach()
            own = floor if expected.is_floating_point() else 0.0
            what = "parameter" if isinstance(self.owner.tensors[name], nn.Parameter) else "buffer"
            found.append(Comparison(what, name, 0, differs(value, expected, own), limit))
        return sorted((one for one in found if not one.ok), key=lambda one: -one.error)

    def again(self, **how: Any) -> ModuleStep:
        return module_step(self.owner, self.batch, self.masks, **how)

    def noise(self) -> str:
        """Why the module is no function of its parameters and its batch; empty if that is not why it differs."""
        if self.differs_from(self.again()):
            return "two runs of the module on the same batch, with the same random numbers, have different results"
        return self._random()

    def is_random(self) -> bool:
        """Return whether the module's result depends on random numbers that no program draws."""
        return bool(self._random())

    def is_due_to_checkpoints(self) -> bool:
        """Return whether the module, if ``torch.utils.checkpoint`` runs nothing again, is equal to the program."""
        with contextlib.suppress(Exception), one_thread(), without_checkpoints(for_this_thread) as calls:
            theirs = self.again()
            return bool(calls) and not replace(self, theirs=theirs).compare()
        return False

    def _random(self) -> str:
        names = {
            "python": "Python's random, which tracing reads once",
            "numpy": "numpy.random, which tracing reads once",
            "torch": "torch's random numbers, and the program draws none",
        }
        drawn = [names[one] for one in self.theirs.changes.draws if one != "torch" or self.masks is None]
        if drawn and any(self.differs_from(self.again(reseed=seed)) for seed in (1, 2, 3)):
            return f"the module's result depends on {' and on '.join(drawn)}"
        return ""

    def differs_from(self, other: ModuleStep) -> bool:
        pairs = list(zip(other.outputs, self.theirs.outputs, strict=False))
        mine = self.theirs.gradients
        floor = 1e-3 * largest([x for x in mine.values() if x is not None])
        apart = [differs(a, b) for a, b in pairs if a.is_floating_point()]
        apart += [
            differs(g, x, floor) for n, x in mine.items() if x is not None and (g := other.gradients.get(n)) is not None
        ]
        return len(other.outputs) != len(self.theirs.outputs) or any(error > self.limit for error in apart)

    def left_behind(self) -> CompileError | None:
        """What a step of the module changes or reads that a program does not."""
        changes = self.theirs.changes
        for name, (before, after) in changes.tensors.items():
            if name in self.step.changed:
                continue
            return CompileError(
                "QN111",
                f"forward changes {name} (by {differs(after, before):.1e} of its largest element), and the program "
                f"leaves it as it was",
                fix="change it outside forward, between steps",
            )
        if changes.draws and (noise := self._random()):
            return CompileError("QN111", noise, fix=OUTSIDE)
        attributes = [name for name in changes.attributes if name not in self._made_in_calls()]
        if attributes and self.differs_from(self.again(again=True)):
            return CompileError(
                "QN111",
                f"forward sets {', '.join(attributes[:5])}, and with that the module's next step has another "
                f"result; the program's steps are all like the first one",
                fix="set it outside forward, between steps",
            )
        return None

    def _made_in_calls(self) -> set[str]:
        """Return the names of attributes that hooks make of parameters and buffers: a program makes them, too."""
        roots = [{label: module} for label in ("", "loss_fn") for module in self.owner.modules]
        made = [attribute for root in roots for attribute in call_attributes(root)]
        return {f"{attribute.path}.{attribute.name}".lstrip(".") for attribute in made}

    def sensitivity(self, **how: Any) -> dict[tuple[str, str], float]:
        """Return what a rounding of each parameter does to each result. ``how``: see :func:`module_step`."""
        owner = self.owner
        with rounded(owner):
            other = self.again(**how)
        floor = 1e-3 * largest([x for x in self.theirs.gradients.values() if x is not None])
        found = {("gradient", n): differs(g, x, floor) for n, x in self.theirs.gradients.items()
                 if x is not None and (g := other.gradients.get(n)) is not None}  # fmt: skip
        made = zip(other.outputs, self.theirs.outputs, strict=False)
        found |= {_label(owner.want, i): differs(a, b) for i, (a, b) in enumerate(made) if a.is_floating_point()}
        return found

    def told(self, wrong: Sequence[Comparison]) -> str:
        lines = [f"what was traced and the module itself, with {self.rows} rows of the batch:"]
        lines += [f"  {_said(one)}" for one in wrong[:4]]
        lines += [f"  and {len(wrong) - 4} more"] if len(wrong) > 4 else []
        return "\n  ".join(lines)


def _said(one: Comparison) -> str:
    if one.what == "outputs":
        return f"the program has {one.name}"
    if one.name.startswith("?"):
        shape = one.name.split(" ", 2)[2]
        return f"the loss depends on a tensor {shape} that requires a gradient and is no parameter of the program"
    return f"{one.what} {one.name}".strip() + f" differs by {one.error:.1e} of its largest element"


def _label(want: str, index: int) -> tuple[str, str]:
    return ("loss", "") if want == "loss" else ("output", str(index))


def _outputs(want: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], limit: float) -> list[Comparison]:
    if len(ours) != len(theirs):
        return [
            Comparison("outputs", f"{len(ours)} results where the module has {len(theirs)}", 0, float("inf"), limit)
        ]
    return [
        Comparison(*_label(want, i), 0, differs(a, b), limit) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
    ]
