"""Programs that compute the logits of further tokens, and the caches that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from ...core.errors import CompileError
from ...core.sharding import AxisType
from ...ir.distributed_program import DistributedProgram
from ...ir.program import Captured
from ...runtime.backends.backend import Backend, Caches
from ...runtime.execute.executor import Run
from .capture_call import Shape, cache_shapes, capture_call
from .ops import NOTHING

SAME = {torch.float16: 2e-2, torch.bfloat16: 1e-1}  # how far equal logits are apart, relative to the largest
LEAST, MOST = 8, 512  # tokens of a prompt in one call: a power of two, so that few numbers are ever compiled
Held = Mapping[tuple[str, str], AxisType]  # (cache, axis) -> how it is split


class Compile(Protocol):
    """A program on the parameters of another one, for so many rows."""

    def __call__(self, captured: Captured, size: int, held: Held, /) -> DistributedProgram: ...


@dataclass(frozen=True)
class CallSize:
    """The size of a compiled call: ``rows`` of each pool, ``tokens`` of each row, and tokens of a ``page``."""

    rows: int
    tokens: int
    page: int


@dataclass(frozen=True)
class TextRow:
    """Further tokens of one text: the last of ``ids``, of which the first is at ``place``; its ``pages``."""

    ids: Sequence[int]
    place: int
    pages: Sequence[int]


@dataclass
class Decoding:
    """Computes with the parameters of a compiled program. Data ranks and microbatches have a pool of pages each."""

    model: nn.Module
    backend: Backend
    compile: Compile
    pools: int
    difference: Callable[[Tensor, Tensor], float]
    shapes: tuple[Shape, ...] = ()
    captured: dict[CallSize, Captured] = field(default_factory=dict)
    programs: dict[CallSize, DistributedProgram] = field(default_factory=dict)
    proven: bool = False

    def program(self, call: CallSize) -> DistributedProgram:
        """All programs split caches alike."""
        if call not in self.programs:
            self.shapes = self.shapes or cache_shapes(self.model)
            any_rows = replace(call, rows=0)
            if any_rows not in self.captured:
                self.captured[any_rows] = capture_call(self.model, self.shapes, self.pools, call.page, call.tokens)
            captured, held = self.captured[any_rows], _held(next(iter(self.programs.values()), None))
            self.programs[call] = self.compile(captured, call.rows * self.pools, held)
            self.backend.learn(self.programs[call], captured.tensors)
        return self.programs[call]

    def logits(self, call: CallSize, pools: Sequence[Sequence[TextRow]], caches: Caches) -> Tensor:
        """Return the logits after the last token of each row [pools * rows, vocabulary].

        ``pools``: the rows of each, which may be fewer than the call's.
        """
        ids, table, places = ([] for _ in range(3))
        width = max(len(row.pages) for rows in pools for row in rows)
        for rows in pools:
            nothing = call.rows - len(rows)
            for row in rows:
                padding = call.tokens - len(row.ids)
                ids.append([*[0] * padding, *row.ids])
                places.append([*[-1] * padding, *range(row.place, row.place + len(row.ids))])
                table.append([*row.pages, *[NOTHING] * (width - len(row.pages))])
            ids += [[0] * call.tokens] * nothing
            places += [[-1] * call.tokens] * nothing
            table += [[NOTHING] * width] * nothing
        inputs = [torch.tensor(numbers) for numbers in (ids, table, places)]
        return self.backend.run(self.program(call), inputs, Run(), caches=caches)[0]

    def prove(self, call: CallSize) -> None:
        """Prove that a token alone has the logits that it has within its text: only attention reads earlier tokens.

        Raises:
            CompileError: QN105 if it has others.
        """
        if self.proven:
            return
        call = replace(call, tokens=max(call.tokens, LEAST))
        tokens, count = call.tokens, -(-call.tokens // call.page)
        program = self.program(call)
        caches = self.backend.new_caches(program, NOTHING + 1 + call.rows * count)
        vocabulary = program.results[0].shape[-1]

        def row(pool: int, index: int, last: int) -> TextRow:
            first = NOTHING + 1 + index * count
            start = (pool * call.rows + index) * tokens
            text = [7 * i % vocabulary for i in range(start, start + tokens)]
            return TextRow(text[-last:], tokens - last, range(first, first + count))

        def run(call: CallSize) -> Tensor:
            rows = [[row(pool, index, call.tokens) for index in range(call.rows)] for pool in range(self.pools)]
            return self.logits(call, rows, caches)

        expected, alone = run(call), run(replace(call, tokens=1))
        # rounding may send a row to another expert; what is carried past attention shows in every row
        error = min(self.difference(a, b) for a, b in zip(alone, expected, strict=True))
        if not error <= SAME.get(expected.dtype, 1e-3):
            raise CompileError(
                "QN105",
                f"the model cannot generate with a cache: the logits of a token alone are off by {error:.1e} from "
                "those within its text, so something else than causal attention carries what came before (a "
                "convolution, a recurrence, positions that are counted)",
                fix="take positions from the second argument; generate models with other state on one device",
            )
        self.proven = True


def _held(program: DistributedProgram | None) -> dict[tuple[str, str], AxisType]:
    if program is None:
        return {}
    return {
        (spec.name, axis.name): kind
        for spec in program.state.values()
        if spec.kind == "cache"
        for axis, kind in zip(program.axes, spec.sharding, strict=True)
    }


def rounded(count: int) -> int:
    """As how many tokens of a row ``count`` are computed."""
    return count if count == 1 else min(max(LEAST, power_of_two(count)), MOST)


def power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
