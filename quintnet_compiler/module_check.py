"""Does a captured program compute what the user's module computes? The module itself beside it, on a few rows."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .annotations import leaf, num_bytes, values
from .capture import batch_size_of, capture
from .capture_once import blocks_once
from .drawn_blocks import drawn_batch, with_values
from .errors import CheckWarning, CompileError, QuintNetError
from .free_memory import free_bytes
from .module_step import ModuleStep, Owner, module_step, tensors_of
from .module_trace import Difference, first_difference
from .passes.rule_notation import Rule
from .program import Captured
from .reference import differs, largest
from .runtime.module_parameters import has_values
from .unsplit_step import UnsplitStep, unsplit_step
from .verification import LIMITS, Comparison, coarsest_of

ELEMENTS = 4096  # of a batch that is checked: as many rows as have so many, but two at least
SENSITIVE = 100.0  # how much more than what rounding does to the module's parameters is no rounding


@dataclass(frozen=True)
class ModuleCheck:
    """What to compare: a module, what was captured of it, and the batch that it was captured with."""

    owner: Owner
    captured: Captured
    batch: Any
    rules: Mapping[Any, Rule]
    seed: int
    device: torch.device

    def difference(self) -> CompileError | None:
        """What the program does not do as the module does it; None if there is nothing. Nothing of the user's changes.

        Where they differ in 32 bits or less, both are run again in float64 before anything is said: deep models may
        round differently.

        A module that does not fit into this process, or has no values (or parts of them), runs with each distinct block
        once, and with drawn values; a CheckWarning says where even that is not possible.

        Raises:
            CompileError: whatever makes it impossible to compile for this batch.
        """
        sides: _Sides | CompileError | None
        try:
            if not all(map(has_values, (*self.owner.tensors.values(), *tensors_of(self.batch)))):
                raise TooLarge("the module has no values here")
            sides = self._sides()
        except TooLarge:
            sides = self._by_blocks()
        if not isinstance(sides, _Sides):
            return sides
        wrong = sides.compare()
        if wrong:
            return sides.check._explained(sides, wrong)
        return sides.left_behind()

    def _sides(self) -> _Sides | CompileError:
        """Both sides on the fewest rows with which the model works."""
        device = next((x.device for x in self.owner.tensors.values()), torch.device("cpu"))
        failed: Exception | None = None
        size = batch_size_of(self.batch)
        for rows in dict.fromkeys((_few(self.batch, size, self.captured.only_rows), size)):
            batch = _rows(self.batch, size, rows, device)
            try:
                step = unsplit_step(
                    self.captured, rows, device, self.rules, self.seed, training=self.owner.training
                )  # fmt: skip
            except QuintNetError as error:
                failed = error
                continue
            fits(_bytes(step), device)
            try:
                masks = self.seed if step.draws else None
                theirs = module_step(self.owner, batch, masks)
            except Exception as error:
                failed = error
                continue
            if all(bool(x.isfinite().all()) for x in theirs.outputs) or rows == size:
                return _Sides(self, step, batch, rows, theirs, coarsest_of(step.graph))
        if isinstance(failed, QuintNetError):
            raise failed
        text = str(failed).strip().splitlines() or [""]
        return CompileError(
            "QN111",
            f"the module itself fails with this batch: {type(failed).__name__}: {text[0][:300]}",
            fix="call model(*batch) on its own to see the whole error",
        )

    def _by_blocks(self) -> _Sides | None:
        reason = ""
        for short in (True, False):
            try:
                return self._blocks(short=short)
            except TooLarge as error:
                reason = str(error)
            except Exception as error:  # the values are not the user's: the module need not work with them
                reason = f"with drawn values, {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        warnings.warn(CheckWarning(f"what was traced is not compared with the module: {reason}"), stacklevel=2)
        return None

    def _blocks(self, *, short: bool) -> _Sides:
        owner, only = self.owner, self.captured.only_rows
        batch = drawn_batch(self.batch, only or 2, short=short)
        training = owner.training
        captured = capture(
            owner.model, batch, owner.loss_fn, want=owner.want, training=training, trained=training, once=True
        )
        device = self.device if self.device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")
        fits(3 * sum(num_bytes(x) for x in captured.tensors.values() if not has_values(x)), device)
        copies, tensors = with_values(owner.model, owner.modules[1:], captured.tensors, device)
        loss_fn = copies[1] if len(copies) > 1 else owner.loss_fn
        once = replace(
            owner, model=copies[0], loss_fn=loss_fn, tensors=tensors, around=lambda: blocks_once(copies[0])
        )  # fmt: skip
        found = replace(self, owner=once, captured=replace(captured, tensors=tensors), batch=batch)._sides()
        if isinstance(found, CompileError):
            raise found
        return found

    def _explained(self, sides: _Sides, wrong: list[Comparison]) -> CompileError | None:
        """An error that says what is established: not less, and not more."""
        noise = sides.noise()
        if not noise and not self._established(sides, wrong):
            return None
        forward = any(one.what in ("loss", "output") for one in wrong)
        first = Difference()
        with contextlib.suppress(Exception):  # the difference is established; where it begins may not be
            first = first_difference(sides.step, self.owner, sides.batch, sides.limit, forward=forward)
        changed = ", ".join(sides.theirs.changes.tensors)
        state = f"forward changes {changed}, which the program does not" if changed else ""
        text = "\n  ".join(filter(None, (noise or sides.told(wrong), state, first.text)))
        return CompileError("QN111", text, where=first.where, fix=_HOW)

    def _established(self, sides: _Sides, wrong: Sequence[Comparison]) -> bool:
        if sides.dtype is torch.float64:
            return True
        with contextlib.suppress(Exception):
            if self._in_float64(sides):
                return True
        noise = sides.sensitivity()
        return any(one.error > SENSITIVE * noise.get((one.what, one.name), 0.0) for one in wrong)

    def _in_float64(self, sides: _Sides) -> bool:
        """Whether they differ in float64 too."""
        owner = self.owner
        with _double(owner):
            batch = pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, sides.batch)
            captured = capture(
                owner.model,
                batch,
                owner.loss_fn,
                want=owner.want,
                training=owner.training,
                once=owner.around is not None,
            )
            there = replace(self, owner=replace(owner, tensors=captured.tensors), captured=captured, batch=batch)
            again = there._sides()
            return isinstance(again, _Sides) and bool(again.compare())


_HOW = "write that part so that tracing can follow it"


@dataclass(frozen=True)
class _Sides:
    """Both sides on a few rows, and what the module made of them."""

    check: ModuleCheck
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
        return self.check.seed if self.step.draws else None

    def compare(self) -> list[Comparison]:
        """What is not equal."""
        theirs, limit = self.theirs.gradients, self.limit
        floor = 1e-3 * largest([x for x in theirs.values() if x is not None])
        left = {name: x for name, x in theirs.items() if x is not None}
        found: list[Comparison] = []

        def settle(name: str, gradient: Tensor) -> None:
            expected = left.pop(name, None)
            expected = torch.zeros_like(gradient) if expected is None else expected
            found.append(Comparison("gradient", name, 0, differs(gradient, expected, floor), limit))

        outputs = self.step.run(self.check.owner.tensors, tensors_of(self.batch), settle)
        for name, expected in left.items():
            found.append(Comparison("gradient", name, 0, differs(torch.zeros_like(expected), expected, floor), limit))
        found += _outputs(self.check.owner.want, outputs, self.theirs.outputs, limit)
        return sorted((one for one in found if not one.ok), key=lambda one: -one.error)

    def again(self, **how: Any) -> ModuleStep:
        return module_step(self.check.owner, self.batch, self.masks, **how)

    def noise(self) -> str:
        """Why the module is no function of its parameters and its batch; empty if that is not why it differs."""
        if self._apart(self.again()):
            return "two runs of the module on the same batch, with the same random numbers, have different results"
        return self._random()

    def _random(self) -> str:
        names = {
            "python": "Python's random, which tracing reads once",
            "numpy": "numpy.random, which tracing reads once",
            "torch": "torch's random numbers, and the program draws none",
        }
        drawn = [names[one] for one in self.theirs.changes.draws if one != "torch" or self.masks is None]
        if drawn and any(self._apart(self.again(reseed=seed)) for seed in (1, 2, 3)):
            return f"the module's result depends on {' and on '.join(drawn)}"
        return ""

    def _apart(self, other: ModuleStep) -> bool:
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
            return CompileError(
                "QN111",
                f"forward changes {name} (by {differs(after, before):.1e} of its largest element), and the program "
                f"leaves it as it was",
                fix="change it outside forward, between steps",
            )
        if changes.draws and (noise := self._random()):
            return CompileError("QN111", noise, fix=_HOW)
        if changes.attributes and self._apart(self.again(again=True)):
            return CompileError(
                "QN111",
                f"forward sets {', '.join(changes.attributes[:5])}, and with that the module's next step has another "
                f"result; the program's steps are all like the first one",
                fix="set it outside forward, between steps",
            )
        return None

    def sensitivity(self) -> dict[tuple[str, str], float]:
        """What a rounding of each parameter does to each result of the module."""
        owner = self.check.owner
        with _rounded(owner):
            other = self.again()
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


class TooLarge(Exception):
    """A step of the module does not fit into this process."""


def fits(needed: int, device: torch.device) -> None:
    """Raises: TooLarge if so many bytes are not free."""
    free = free_bytes(device)
    if free is not None and needed > 0.8 * free:
        raise TooLarge(f"it needs {needed / 2**30:.1f} GiB on {device.type}, where {free / 2**30:.1f} GiB are free")


def _bytes(step: UnsplitStep) -> int:
    """What both sides need beside parameters: what autograd saves, and the gradients of one side."""
    kept = 0
    for node in step.graph.nodes:
        found = leaf(node) if node.op == "placeholder" else None
        if node.op == "call_function" or (found is not None and found.trainable):
            kept += sum(num_bytes(x) for x in values(node) if isinstance(x, Tensor))
    return kept


def _few(batch: Any, size: int, only: int | None) -> int:
    if only is not None:
        return only
    row = max((x[0].numel() for x in tensors_of(batch) if x.dim() and x.shape[0] == size), default=1)
    return min(size, max(2, ELEMENTS // max(row, 1)))


def _rows(batch: Any, size: int, rows: int, device: torch.device) -> Any:
    def some(x: Tensor) -> Tensor:
        return (x[:rows] if x.dim() and x.shape[0] == size else x).detach().to(device)

    return pytree.tree_map_only(Tensor, some, batch)


@contextlib.contextmanager
def _double(owner: Owner) -> Iterator[None]:
    """The module in float64, in place: hooks and identities stay."""
    with _replaced(owner, lambda x: x.double()):
        yield


@contextlib.contextmanager
def _rounded(owner: Owner) -> Iterator[None]:
    """Every parameter as another rounding would have left it."""
    generator = torch.Generator().manual_seed(0)

    def rounded(x: Tensor) -> Tensor:
        signs = torch.randint(0, 2, x.shape, generator=generator).to(x.device) * 2 - 1
        return x * (1 + signs * torch.finfo(x.dtype).eps).to(x.dtype)

    with _replaced(owner, rounded):
        yield


@contextlib.contextmanager
def _replaced(owner: Owner, change: Any) -> Iterator[None]:
    tensors = {id(x): x for m in owner.modules for x in (*m.parameters(), *m.buffers())}
    tensors |= {id(x): x for x in owner.tensors.values()}
    floating = [x for x in tensors.values() if x.is_floating_point() and not x.is_meta]
    kept = [(x, x.data, x.grad if x.is_leaf else None) for x in floating]
    try:
        for x, data, _ in kept:
            x.grad = None
            x.data = change(data)
        yield
    finally:
        for x, data, grad in kept:
            x.grad = None
            x.data = data
            x.grad = grad
