"""Run a few rows through a program and the module that it was captured from, and describe differences."""

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
from .swapped_values import rounded_otherwise
from .unsplit_step import UnsplitStep
from .verify import LIMITS, Comparison

WRITE_TRACEABLE = "write that part so that tracing can follow it"
DRAW_OUTSIDE = "draw them outside and pass them in the batch"
NO_CHECKPOINT = 'leave torch.utils.checkpoint out, and compile with recompute="full"'


@dataclass(frozen=True)
class Sides:
    """The program and the module on a few rows, and the step of the module (``theirs``)."""

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
        """Return the tensors that are not equal, the largest error first."""
        theirs, limit = self.theirs.gradients, self.limit
        floor = FLOOR * largest([x for x in theirs.values() if x is not None])
        remaining = {name: x for name, x in theirs.items() if x is not None}
        comparisons: list[Comparison] = []

        def settle(name: str, gradient: Tensor) -> None:
            expected = remaining.pop(name, None)
            expected = torch.zeros_like(gradient) if expected is None else expected
            comparisons.append(Comparison("gradient", name, 0, differs(gradient, expected, floor), limit))

        results = self.step.run_step(self.owner.tensors, tensors_of(self.batch), settle)
        changed = self.step.changed
        outputs, new = results[: len(results) - len(changed)], results[len(results) - len(changed) :]
        for name, expected in remaining.items():
            error = differs(torch.zeros_like(expected), expected, floor)
            comparisons.append(Comparison("gradient", name, 0, error, limit))
        comparisons += _outputs(self.owner.want, outputs, self.theirs.outputs, limit)
        comparisons += self._changed_tensors(new)
        return sorted((c for c in comparisons if not c.ok), key=lambda c: -c.error)

    def _changed_tensors(self, new: Sequence[Tensor]) -> list[Comparison]:
        """Compare the ``new`` values of buffers and parameters that forward changes."""
        names, changes = self.step.changed, self.theirs.changes.tensors
        expected = {name: changes.get(name, (None, self.owner.tensors[name]))[1].detach() for name in names}
        # the mean of normalized values is nothing but rounding
        floor = FLOOR * largest([x for x in expected.values() if x.is_floating_point()])
        comparisons = []
        for name, value in zip(names, new, strict=True):
            error = differs(value, expected[name], floor if expected[name].is_floating_point() else 0.0)
            what = "parameter" if isinstance(self.owner.tensors[name], nn.Parameter) else "buffer"
            comparisons.append(Comparison(what, name, 0, error, self.limit))
        return comparisons

    def again(self, **options: Any) -> ModuleStep:
        """Run the module's step again, with ``options`` of :func:`module_step`."""
        return module_step(self.owner, self.batch, self.masks, **options)

    def noise(self) -> str:
        """Return why the module is no function of its parameters and its batch; empty if it is."""
        if self.differs_from(self.again()):
            return "two runs of the module on the same batch, with the same random numbers, have different results"
        return self._random()

    def is_random(self) -> bool:
        """Return whether the module's result depends on random numbers that no program draws."""
        return bool(self._random())

    def is_due_to_checkpoints(self) -> bool:
        """Return whether the module equals the program if ``torch.utils.checkpoint`` runs nothing again."""
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
        drawn = [names[source] for source in self.theirs.changes.draws if source != "torch" or self.masks is None]
        if drawn and any(self.differs_from(self.again(reseed=seed)) for seed in (1, 2, 3)):
            return f"the module's result depends on {' and on '.join(drawn)}"
        return ""

    def differs_from(self, other: ModuleStep) -> bool:
        pairs = list(zip(other.outputs, self.theirs.outputs, strict=False))
        mine = self.theirs.gradients
        floor = 1e-3 * largest([x for x in mine.values() if x is not None])
        errors = [differs(a, b) for a, b in pairs if a.is_floating_point()]
        errors += [
            differs(g, x, floor) for n, x in mine.items() if x is not None and (g := other.gradients.get(n)) is not None
        ]
        return len(other.outputs) != len(self.theirs.outputs) or any(error > self.limit for error in errors)

    def left_behind(self) -> CompileError | None:
        """Return an error if a step of the module changes or reads state that a program does not, else None."""
        changes = self.theirs.changes
        for name, (old, new) in changes.tensors.items():
            if name in self.step.changed:
                continue
            return CompileError(
                "QN111",
                f"forward changes {name} (by {differs(new, old):.1e} of its largest element), and the program "
                f"leaves it as it was",
                fix="change it outside forward, between steps",
            )
        if changes.draws and (noise := self._random()):
            return CompileError("QN111", noise, fix=DRAW_OUTSIDE)
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
        """Return the names of attributes that hooks compute from parameters and buffers: a program does so, too."""
        roots = [{label: module} for label in ("", "loss_fn") for module in self.owner.modules]
        attributes = [attribute for root in roots for attribute in call_attributes(root)]
        return {f"{attribute.path}.{attribute.name}".lstrip(".") for attribute in attributes}

    def sensitivity(self, **options: Any) -> dict[tuple[str, str], float]:
        """Return the effect of rounding each parameter on each result. ``options``: of :func:`module_step`."""
        owner = self.owner
        with rounded_otherwise(owner):
            other = self.again(**options)
        floor = 1e-3 * largest([x for x in self.theirs.gradients.values() if x is not None])
        effects: dict[tuple[str, str], float] = {}
        for name, expected in self.theirs.gradients.items():
            gradient = other.gradients.get(name)
            if expected is not None and gradient is not None:
                effects["gradient", name] = differs(gradient, expected, floor)
        for i, (output, expected) in enumerate(zip(other.outputs, self.theirs.outputs, strict=False)):
            if output.is_floating_point():
                effects[_label(owner.want, i)] = differs(output, expected)
        return effects

    def describe_differences(self, wrong: Sequence[Comparison]) -> str:
        """Return a text about the first differences."""
        lines = [f"what was traced and the module itself, with {self.rows} rows of the batch:"]
        lines += [f"  {_described(comparison)}" for comparison in wrong[:4]]
        lines += [f"  and {len(wrong) - 4} more"] if len(wrong) > 4 else []
        return "\n  ".join(lines)


def _described(comparison: Comparison) -> str:
    if comparison.what == "outputs":
        return f"the program has {comparison.name}"
    if comparison.name.startswith("?"):
        shape = comparison.name.split(" ", 2)[2]
        return f"the loss depends on a tensor {shape} that requires a gradient and is no parameter of the program"
    return f"{comparison.what} {comparison.name}".strip() + f" differs by {comparison.error:.1e} of its largest element"


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
