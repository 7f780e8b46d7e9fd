"""Compare a captured program with the user's module, on a few rows."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..capture.capture import capture
from ..compat.torch import pytree
from ..core.annotations import leaf, num_bytes, values
from ..core.errors import CheckWarning, CompileError, QuintNetError
from ..ir.program import Captured
from ..ops.rules.notation import Rule
from ..runtime.state.module_parameters import has_values
from .drawn_blocks import drawn_batch, each_block_once, with_values
from .exact_step import SENSITIVITY_FACTOR, exact_differences, wrong_operators
from .free_memory import free_bytes
from .module_sides import DRAW_OUTSIDE, NO_CHECKPOINT, WRITE_TRACEABLE, Sides
from .module_step import ModuleStep, Owner, module_step, tensors_of
from .module_trace import FirstDifference, first_difference
from .swapped_values import double
from .unsplit_step import UnsplitStep, unsplit_step
from .verify import LIMITS, Comparison, coarsest_of

CHECKED_ELEMENTS = 256  # of a batch: so many rows are compared, but at least two
ROWS_FACTOR = 8  # this many times as many rows are compared if float64 does not decide
MAX_FLOAT64_ERROR = LIMITS[torch.float32]  # if rounding in float64 has a larger effect, float64 does not decide


@dataclass(frozen=True)
class ModuleCheck:
    """A module, the program captured from it, and the batch that it was captured with."""

    owner: Owner
    captured: Captured
    batch: Any
    rules: Mapping[Any, Rule]
    seed: int
    device: torch.device

    def difference(self) -> CompileError | None:
        """Return an error if the program and the module differ, else None. Nothing of the user's changes.

        If they differ in 32 bits or less, both run again in float64 before an error is returned: right programs may
        round differently, and if a model is ill-conditioned, by any amount.

        A module that does not fit into this process, or lacks values, runs with each distinct block once, with random
        values; if even that is not possible, there is a CheckWarning.

        Raises:
            CompileError: whatever makes it impossible to compile for this batch.
        """
        check = self
        sides: Sides | CompileError | None
        try:
            if not all(map(has_values, (*self.owner.tensors.values(), *tensors_of(self.batch)))):
                raise TooLarge("the module has no values here")
            sides = self._sides()
        except TooLarge:
            check, sides = self._by_blocks()
        if not isinstance(sides, Sides):
            return sides
        wrong = sides.compare()
        return check._explained(sides, wrong) if wrong else sides.left_behind()

    def _sides(self, counts: Sequence[int] = ()) -> Sides | CompileError:
        """Return both sides on the fewest rows with which the model works; ``counts``: numbers of rows to try."""
        device = next((x.device for x in self.owner.tensors.values()), torch.device("cpu"))
        failed: Exception | None = None
        size = self.captured.form.rows_in(self.batch)
        for rows in counts or dict.fromkeys((_few(self.batch, size, self.captured.only_rows), size)):
            batch = _rows(self.batch, size, rows, device)
            try:
                step = unsplit_step(
                    self.captured, rows, device, self.rules, self.seed, training=self.owner.training
                )  # fmt: skip
            except QuintNetError as error:
                failed = error
                continue
            require_memory(_bytes(step), device)
            try:
                masks = self.seed if step.draws else None
                theirs = module_step(self.owner, batch, masks)
            except Exception as error:
                failed = error
                continue
            if all(bool(x.isfinite().all()) for x in theirs.outputs) or rows == size or counts:
                return Sides(self.owner, self.seed, step, batch, rows, theirs, _coarsest(step, theirs))
        if isinstance(failed, QuintNetError):
            raise failed
        text = str(failed).strip().splitlines() or [""]
        return CompileError(
            "QN111",
            f"the module itself fails with this batch: {type(failed).__name__}: {text[0][:300]}",
            fix="call model(*batch) on its own to see the whole error",
        )

    def _by_blocks(self) -> tuple[ModuleCheck, Sides | None]:
        """Return the check of each distinct block once and its sides, or warn that it is not possible."""
        reason = ""
        for short in (True, False):
            try:
                return self._blocks(short=short)
            except TooLarge as error:
                reason = str(error)
                break  # longer rows take more
            except Exception as error:  # the values are not the user's: the module need not work with them
                reason = f"with drawn values, {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        warnings.warn(CheckWarning(f"what was traced is not compared with the module: {reason}"), stacklevel=2)
        return self, None

    def _blocks(self, *, short: bool) -> tuple[ModuleCheck, Sides]:
        """Return the same check of each distinct block once, with random values, and its sides."""
        owner, only = self.owner, self.captured.only_rows
        device = self.device if self.device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")
        require_memory(_drawn_bytes(_outside_blocks(self.captured.tensors)), device)  # before a trace, which takes long
        batch = drawn_batch(self.batch, only or 2, short=short)
        training = owner.training
        captured = capture(
            owner.model, batch, owner.loss_fn, want=owner.want, training=training, trained=training, once=True
        )
        require_memory(_drawn_bytes(captured.tensors), device)
        copies, tensors = with_values(owner.model, owner.modules[1:], captured.tensors, device)
        loss_fn = copies[1] if len(copies) > 1 else owner.loss_fn
        once = replace(
            owner, model=copies[0], loss_fn=loss_fn, tensors=tensors, around=lambda: each_block_once(copies[0])
        )  # fmt: skip
        check = replace(self, owner=once, captured=replace(captured, tensors=tensors), batch=batch)
        sides = check._sides()
        if isinstance(sides, CompileError):
            raise sides
        return check, sides

    def _explained(self, sides: Sides, wrong: list[Comparison]) -> CompileError | None:
        """Return an error that states what is established, or None if a difference is rounding."""
        noise = sides.noise()
        if not noise and not self._established(sides, wrong):
            return None
        if not noise and sides.is_due_to_checkpoints():
            cause = "torch.utils.checkpoint is the cause: the backward runs again what it runs; without, both are equal"
            return CompileError("QN111", f"{sides.describe_differences(wrong)}\n  {cause}", fix=NO_CHECKPOINT)
        forward = any(comparison.what in ("loss", "output") for comparison in wrong)
        first = FirstDifference()
        with contextlib.suppress(Exception):  # the difference is established even if its beginning is not found
            first = first_difference(sides.step, self.owner, sides.batch, sides.limit, forward=forward)
        changed = ", ".join(name for name in sides.theirs.changes.tensors if name not in sides.step.changed)
        state = f"forward changes {changed}, which the program does not" if changed else ""
        text = "\n  ".join(filter(None, (noise or sides.describe_differences(wrong), state, first.text)))
        fix = DRAW_OUTSIDE if sides.is_random() else WRITE_TRACEABLE if forward and not noise else ""
        return CompileError("QN111", text, where=first.where, fix=fix)

    def _established(self, sides: Sides, wrong: Sequence[Comparison]) -> bool:
        """Return whether a difference is more than rounding.

        In 32 bits or less float64 decides; if the program or the module does not run in float64, the effect of another
        rounding on the module does.
        """
        if sides.dtype is torch.float64:
            return True
        with contextlib.suppress(Exception):
            return not self._right_in_float64(sides)
        with contextlib.suppress(Exception):
            if self._in_float64(sides):
                return True
        noise = sides.sensitivity()
        return any(c.error > SENSITIVITY_FACTOR * noise.get((c.what, c.name), 0.0) for c in wrong)

    def _right_in_float64(self, sides: Sides) -> bool:
        """Return whether the program is right in float64, on these rows or, if that does not decide, on more."""
        if not exact_differences(sides, MAX_FLOAT64_ERROR):
            return not wrong_operators(sides)
        size = self.captured.form.rows_in(self.batch)
        rows = min(size, ROWS_FACTOR * sides.rows)
        if rows > sides.rows and self.captured.only_rows is None:
            with contextlib.suppress(Exception):
                more = self._sides((rows,))
                sides = more if isinstance(more, Sides) else sides
        return not exact_differences(sides) and not wrong_operators(sides)

    def _in_float64(self, sides: Sides) -> bool:
        """Return whether they differ if the module is traced again in float64."""
        owner = self.owner
        with double(owner):
            batch = pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, sides.batch)
            captured = capture(
                owner.model,
                batch,
                owner.loss_fn,
                want=owner.want,
                training=owner.training,
                once=owner.around is not None,
            )
            check = replace(self, owner=replace(owner, tensors=captured.tensors), captured=captured, batch=batch)
            exact_sides = check._sides()
            return isinstance(exact_sides, Sides) and bool(exact_sides.compare())


class TooLarge(Exception):
    """A step of the module does not fit into this process."""


def require_memory(needed: int, device: torch.device) -> None:
    """Raise TooLarge if not so many bytes are free."""
    free = free_bytes(device)
    if free is not None and needed > 0.8 * free:
        raise TooLarge(f"it needs {needed / 2**30:.1f} GiB on {device.type}, where {free / 2**30:.1f} GiB are free")


def _drawn_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of random values for tensors without values, of their gradients, and of the module's."""
    return 3 * sum(num_bytes(x) for x in tensors.values() if not has_values(x))


def _outside_blocks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are in no repeated block, and so in every trace."""
    return {name: x for name, x in tensors.items() if not any(part.isdigit() for part in name.split("."))}


def _bytes(step: UnsplitStep) -> int:
    """Return the bytes that both sides need besides parameters: values that autograd saves, one side's gradients."""
    total = 0
    for node in step.graph.nodes:
        node_leaf = leaf(node) if node.op == "placeholder" else None
        if node.op == "call_function" or (node_leaf is not None and node_leaf.trainable):
            total += sum(num_bytes(x) for x in values(node) if isinstance(x, Tensor))
    return total


def _coarsest(step: UnsplitStep, theirs: ModuleStep) -> torch.dtype:
    """Return the least precise dtype that both compute in; one that only the program has does not count."""
    coarsest = coarsest_of(step.graph)
    if coarsest in theirs.dtypes:
        return coarsest
    finer = [dtype for dtype in theirs.dtypes if dtype in LIMITS and LIMITS[dtype] <= LIMITS[coarsest]]
    return max(finer, key=lambda dtype: LIMITS[dtype], default=coarsest)


def _few(batch: Any, size: int, only: int | None) -> int:
    if only is not None:
        return only
    row = max((x[0].numel() for x in tensors_of(batch) if x.dim() and x.shape[0] == size), default=1)
    return min(size, max(2, CHECKED_ELEMENTS // max(row, 1)))


def _rows(batch: Any, size: int, rows: int, device: torch.device) -> Any:
    """Return the first rows of a batch, copied to ``device``."""

    def first_rows(x: Tensor) -> Tensor:
        return (x[:rows] if x.dim() and x.shape[0] == size else x).detach().to(device).requires_grad_(x.requires_grad)

    return pytree.tree_map_only(Tensor, first_rows, batch)
