"""The parts of a tensor and their ranks: as text and as a picture."""

from __future__ import annotations

import colorsys
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ..core.axes import SHARDED_AXES
from ..core.errors import CompileError
from ..core.html import environment
from ..core.mesh import Mesh
from ..core.sharding import AxisType, P, Shard, Sharding, parse_type
from ..core.slices import positions
from ..runtime.state.dtensor_parts import dtensor_parts

MAX_LINES = 64
MAX_BOXES = 4096
Ranges = tuple[tuple[int, int], ...]  # (start, stop) of each run of indices


@dataclass(frozen=True)
class TensorPart:
    """The indices along each dim that all of ``ranks`` hold."""

    ranges: tuple[Ranges, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class TensorPicture:
    """The parts of a tensor and their ranks.

    ``types``: by axis; ``note``: a further remark. ``str()`` for people, ``to_json()`` for programs, ``svg()`` for a
    picture (of the first two dims that are split).
    """

    name: str
    shape: tuple[int, ...]
    types: Mapping[str, str]
    parts: tuple[TensorPart, ...]
    note: str = ""

    @property
    def _title(self) -> str:
        kinds = ", ".join(f"{axis}: {kind}" for axis, kind in self.types.items()) or self._whole
        terms = [axis for axis, kind in self.types.items() if kind == str(P)]
        each = f"; ranks along {', '.join(terms)} hold terms of a sum" if terms else ""
        return f"{self.name} {list(self.shape)}: {kinds}{each}"

    @property
    def _whole(self) -> str:
        return "one rank" if sum(len(part.ranks) for part in self.parts) == 1 else "the same on all of its ranks"

    def to_json(self) -> str:
        """Return the types, and each part with its ranks."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        shown = [f"[{', '.join(map(_slice, part.ranges, self.shape))}]" for part in self.parts[:MAX_LINES]]
        width = max(map(len, shown), default=0)
        lines = [f"  {text:<{width}}  {_ranks(part.ranks)}" for text, part in zip(shown, self.parts, strict=False)]
        hidden = len(self.parts) - len(shown)
        more = [f"  and {hidden} more parts"] if hidden else []
        return "\n".join([self._title, *lines, *more, *([f"  {self.note}"] if self.note else [])])

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto">{self.svg()}</div>'

    def svg(self) -> str:
        """Return a rectangle: down the first dim, across the second (the first two split ones, if more)."""
        every = range(len(self.shape))
        split = [d for d in every if any(part.ranges[d] != ((0, self.shape[d]),) for part in self.parts)]
        dims = sorted([*split, *(d for d in every if d not in split)][:2])
        down, across = (dims[0] if len(dims) == 2 else None), (dims[-1] if dims else None)
        sizes = tuple(1 if d is None else max(1, self.shape[d]) for d in (down, across))
        width, height = 520.0, min(360.0, max(64.0, 520.0 * sizes[0] / sizes[1]))
        drawn = _drawn(self._boxes(down, across), sizes, width, height)
        notes = [f"dims {split} are split; this shows {dims}"] if len(split) > 2 else []
        more = "; ".join([*notes, *([self.note] if self.note else [])])
        names = ["" if d is None else f"dim {d}: {self.shape[d]}" for d in (down, across)]
        template = environment("quintnet_compiler.reports").get_template("tensor.svg.jinja")
        return template.render(title=self._title, boxes=drawn, width=width, height=height, names=names, more=more)

    def _boxes(self, down: int | None, across: int | None) -> dict[_Box, tuple[int, ...]]:
        """Return the ranks of each box of two dims."""
        boxes: dict[_Box, set[int]] = {}
        for part in self.parts:
            for vertical, horizontal in itertools.product(_of(part, down), _of(part, across)):
                boxes.setdefault((*vertical, *horizontal), set()).update(part.ranks)
        return {box: tuple(sorted(ranks)) for box, ranks in boxes.items()}


_Box = tuple[int, int, int, int]  # top, bottom, left, right


def _pale_colour(index: int) -> str:
    """Return a colour as ``#rrggbb``; those of neighbouring indices differ by the golden angle."""
    rgb = colorsys.hls_to_rgb(index * 137.5 % 360 / 360, 0.82, 0.65)
    return "#" + "".join(f"{round(255 * x):02x}" for x in rgb)


def _drawn(
    boxes: Mapping[_Box, tuple[int, ...]], sizes: tuple[int, ...], width: float, height: float
) -> list[dict[str, object]]:
    """Return boxes in pixels, with a colour for each group of ranks."""
    high, wide = sizes
    colours = {ranks: index for index, ranks in enumerate(dict.fromkeys(boxes.values()))}
    return [
        {
            "x": 64 + width * left / wide, "y": 56 + height * top / high, "width": width * (right - left) / wide,
            "height": height * (bottom - top) / high, "text": _ranks(ranks),
            "fill": _pale_colour(colours[ranks]),
        }
        for (top, bottom, left, right), ranks in list(boxes.items())[:MAX_BOXES]
    ]  # fmt: skip


def picture_of_types(mesh: Mesh, types: Mapping[str, str], shape: Sequence[int]) -> TensorPicture:
    """Return the parts of a tensor of global ``shape`` with ``types`` by axis.

    Raises:
        CompileError: QN201 for an axis that the mesh does not have, QN203 for a size that does not divide, QN207 for a
            type that is none.
    """
    for axis in types:
        if axis not in mesh.names or axis not in SHARDED_AXES:
            raise CompileError("QN201", f"{mesh} does not split tensors over {axis!r}", fix=f"use some of {mesh.names}")
    try:
        kinds = {name: parse_type(types.get(name, "I")) for name in SHARDED_AXES if name in mesh.names}
    except ValueError as error:
        raise CompileError("QN207", str(error)) from None
    _check(shape, list(kinds), [mesh[axis] for axis in kinds], tuple(kinds.values()))
    return picture("tensor", tuple(shape), mesh, kinds, range(mesh.size))


def picture_of_dtensor(x: Tensor, name: str = "tensor") -> TensorPicture | None:
    """Return the parts of a DTensor; None for what is none."""
    layout = dtensor_parts(x)
    if layout is None:
        return None
    parts = tuple(TensorPart(tuple(map(_runs, indices)), ranks) for indices, ranks in layout.parts)
    return TensorPicture(name, tuple(x.shape), layout.types, parts)


def picture(
    name: str, shape: tuple[int, ...], mesh: Mesh, types: Mapping[str, AxisType], ranks: Sequence[int], *,
    times: Mapping[str, int] | None = None, note: str = "",
) -> TensorPicture:  # fmt: skip
    """Return the parts of a tensor that ``ranks`` hold.

    ``types`` nest, outermost first. Axes in ``times`` are none over ranks: a rank holds all of their parts, one after
    the other.
    """
    over = dict(times or {})
    axes, sharding = list(types), tuple(types.values())
    sizes = [over.get(axis, mesh[axis]) for axis in axes]
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        place = mesh.coordinate(rank)
        key = tuple(place.get(a, 0) if isinstance(k, Shard) else 0 for a, k in zip(axes, sharding, strict=True))
        holders.setdefault(key, []).append(rank)
    moments = [range(over.get(a, 1) if isinstance(k, Shard) else 1) for a, k in zip(axes, sharding, strict=True)]

    def held(key: tuple[int, ...]) -> Iterator[Ranges]:
        every = [
            positions(shape, sharding, sizes, [k + m for k, m in zip(key, moment, strict=True)])
            for moment in itertools.product(*moments)
        ]
        for dim in range(len(shape)):
            yield _runs(torch.unique(torch.cat([indices[dim] for indices in every])))

    parts = (TensorPart(tuple(held(key)), tuple(holding)) for key, holding in sorted(holders.items()))
    kinds = {axis: str(kind) for axis, kind in zip(axes, sharding, strict=True) if axis not in over}
    return TensorPicture(name, shape, kinds, tuple(parts), note)


def _check(shape: Sequence[int], axes: Sequence[str], sizes: Sequence[int], sharding: Sharding) -> None:
    remaining = list(shape)
    for axis, ways, kind in zip(axes, sizes, sharding, strict=True):
        if not isinstance(kind, Shard):
            continue
        if kind.dim >= len(remaining) or remaining[kind.dim] % (ways * kind.parts):
            size = remaining[kind.dim] if kind.dim < len(remaining) else "no"
            raise CompileError(
                "QN203", f"dim {kind.dim} of {list(shape)} has {size} places for {axis}={ways} and {kind}",
                fix=f"use a size that {ways * kind.parts} divides",
            )  # fmt: skip
        remaining[kind.dim] //= ways


def _runs(indices: Tensor) -> Ranges:
    """Return the runs of consecutive numbers, without those that stand for padding."""
    indices = indices[indices >= 0]
    if not len(indices):
        return ((0, 0),)
    breaks = ((indices[1:] - indices[:-1]) != 1).nonzero().flatten() + 1
    starts, stops = [0, *breaks.tolist()], [*breaks.tolist(), len(indices)]
    return tuple((int(indices[a]), int(indices[b - 1]) + 1) for a, b in zip(starts, stops, strict=True))


def _of(part: TensorPart, dim: int | None) -> Ranges:
    return ((0, 1),) if dim is None else part.ranges[dim]


def _slice(ranges: Ranges, size: int) -> str:
    return ":" if ranges == ((0, size),) else "+".join(f"{a}:{b}" for a, b in ranges)


def _ranks(ranks: Sequence[int]) -> str:
    """Return text such as ``ranks 0-3, 8-11``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:6]) + (", ..." if len(runs) > 6 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
