"""What was measured on a machine: a small document, from which a cost model interpolates."""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..core.errors import CompileError
from ..core.files import path_of, save_text


class _CalibrationDocument(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MeasuredMatmul(_CalibrationDocument):
    """A matrix product [m, k] x [k, n]. ``order``: which operands are transposed in memory (n: no, t: yes)."""

    order: Literal["nn", "nt", "tn"]
    m: int = Field(gt=0)
    k: int = Field(gt=0)
    n: int = Field(gt=0)
    seconds: float = Field(gt=0)


class Point(_CalibrationDocument):
    """``size``: bytes that an operator reads and writes, of a collective's full tensor, or that are sent; floating
    point operations of attention."""

    size: float = Field(gt=0)
    seconds: float = Field(gt=0)


class MeasuredCollective(_CalibrationDocument):
    """Times of one collective over so many ranks; ``send`` is between two."""

    name: str
    ranks: int = Field(gt=1)
    points: tuple[Point, ...] = Field(min_length=1)


class Calibration(_CalibrationDocument):
    """One machine, one dtype, one thread per rank.

    ``cores``: how many ranks compute at once; beyond that they share (0: each has a device of its own). ``overlaps``:
    whether communication runs beside computing.
    """

    version: Literal[1] = 1
    machine: str
    torch: str
    device: str
    dtype: str
    cores: int = Field(ge=0)
    overlaps: bool
    action_seconds: float = Field(ge=0)
    view_seconds: float = Field(gt=0)
    products: tuple[MeasuredMatmul, ...] = Field(min_length=1)
    operators: dict[str, tuple[Point, ...]]
    collectives: tuple[MeasuredCollective, ...] = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        save_text(path_of(path, "QN211"), self.model_dump_json(indent=1) + "\n")

    def summary(self) -> str:
        """A few lines for people."""
        best = max(self.products, key=lambda row: row.m * row.k * row.n / row.seconds)
        rate = 2e-9 * best.m * best.k * best.n / best.seconds
        wide = self.operators["add"][-1]
        lines = [
            f"{self.machine}: torch {self.torch}, {self.dtype} on {self.device}",
            f"  products up to {rate:.1f} GFLOP/s, [{best.m}, {best.k}] x [{best.k}, {best.n}]",
            f"  additions {wide.size / wide.seconds / 1e9:.2f} GB/s; a view {self.view_seconds * 1e6:.1f} µs",
        ]
        for row in self.collectives:
            first, last = row.points[0], row.points[-1]
            rate = last.size / last.seconds / 1e9
            lines.append(f"  {row.name} over {row.ranks}: {first.seconds * 1e6:.0f} µs, {rate:.2f} GB/s")
        return "\n".join(lines)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Raises: CompileError QN211 if the file is not a calibration, of this version and without unknown keys."""
        file = path_of(path, "QN211")
        try:
            return cls.model_validate(json.loads(file.read_text()))
        except (ValidationError, ValueError, OSError) as error:
            text = str(error).splitlines()
            raise CompileError(
                "QN211", f"{file} is no calibration: {' '.join(text[:3])}", fix="make one with quintnet calibrate"
            ) from error


def interpolated(points: tuple[Point, ...], size: float) -> float:
    """Seconds at ``size``: straight lines between logarithms; beyond the ends, constant below and in proportion above.

    >>> interpolated((Point(size=1, seconds=1), Point(size=100, seconds=10)), 10)
    3.1622776601683795
    """
    first, last = points[0], points[-1]
    if size <= first.size:
        return first.seconds
    if size >= last.size:
        return last.seconds * size / last.size
    for low, high in pairwise(points):
        if size <= high.size:
            share = math.log(size / low.size) / math.log(high.size / low.size)
            return float(low.seconds * (high.seconds / low.seconds) ** share)
    raise AssertionError("between the ends")


def matmul_seconds(products: tuple[MeasuredMatmul, ...], order: str, m: int, k: int, n: int) -> float:
    """By the rates of the nearest measured products, in logarithms of their sizes."""
    measured = [product for product in products if product.order == order] or list(products)
    weighted = []
    for product in measured:
        distance = sum(math.log(a / b) ** 2 for a, b in ((m, product.m), (k, product.k), (n, product.n)))
        weighted.append((distance, product))
    weighted.sort(key=lambda pair: pair[0])
    if weighted[0][0] < 1e-9:
        return weighted[0][1].seconds
    near = weighted[:4]
    total = sum(1 / distance for distance, _ in near)
    rate = sum(product.m * product.k * product.n / product.seconds / distance for distance, product in near) / total
    return max(m * k * n / rate, min(product.seconds for product in measured))
