"""Prices of a machine on which every kind of operator was measured (:mod:`..reports.calibrate`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ..core.annotations import copies, is_getitem, num_bytes, shape, tensor_inputs, value, values
from ..core.errors import CompileError
from ..core.mesh import Mesh
from ..ops.catalog import op_spec
from ..ops.collectives import shard_pad, shard_slice, share
from ..ops.cross_entropy import nll_terms, nll_terms_backward
from ..ops.op_spec import Product
from ..ops.rank_local import embedding_rows, embedding_rows_backward, loss_scale, padding_of, rows_of
from ..ops.rules.work import work_of
from .calibration import Calibration, Point, interpolated, matmul_seconds
from .hardware import CPU
from .operators import aten, attention_flops, traffic

# Families of operators that take alike for each byte, by the one that is measured.
_SIMPLE = [
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.mul.Tensor, aten.mul.Scalar,
    aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.rsqrt.default, aten.pow.Tensor_Scalar,
    aten.where.self, aten.masked_fill.Scalar, aten._to_copy.default, aten.ones.default, aten.zeros.default,
    aten.full.default, aten.arange.default, aten.cat.default, aten.slice_backward.default,
    aten.select_backward.default, aten.ne.Scalar, aten.eq.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.eq.Tensor,
    aten.ge.Tensor, aten.bitwise_and.Tensor,
    aten.relu.default, aten.threshold_backward.default, aten.clone.default, aten.constant_pad_nd.default,
    aten.logical_and.default, aten.logical_or.default, aten.logical_not.default, aten.bitwise_not.default,
    aten.nll_loss_forward.default, aten.nll_loss_backward.default, aten.stack.default, aten.scalar_tensor.default,
    aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.index_select.default,
    aten.repeat_interleave.self_int, share, shard_pad, rows_of, padding_of, loss_scale,
]  # fmt: skip
FAMILIES: Mapping[Any, str] = MappingProxyType(
    {
        **dict.fromkeys(_SIMPLE, "add"),
        **dict.fromkeys([aten.sum.default, aten.sum.dim_IntList, aten.mean.dim, aten.mean.default], "sum"),
        **dict.fromkeys([aten.amax.default, aten.max.default], "sum"),
        **dict.fromkeys([aten.gelu.default, aten.silu.default], "gelu"),
        **dict.fromkeys([aten.gelu_backward.default, aten.silu_backward.default], "gelu_backward"),
        **dict.fromkeys([aten.tanh.default, aten.exp.default, aten.sigmoid.default, aten.log.default], "tanh"),
        **dict.fromkeys([aten.cos.default, aten.sin.default, aten.erf.default], "tanh"),
        **dict.fromkeys([aten.tanh_backward.default, aten.sigmoid_backward.default], "add"),
        aten.native_layer_norm.default: "layer_norm",
        aten.native_layer_norm_backward.default: "layer_norm_backward",
        **dict.fromkeys([aten._log_softmax.default, aten._softmax.default], "softmax"),
        **dict.fromkeys(
            [aten._log_softmax_backward_data.default, aten._softmax_backward_data.default], "softmax_backward"
        ),
        nll_terms: "softmax",
        nll_terms_backward: "softmax_backward",
        **dict.fromkeys([aten.embedding.default, embedding_rows], "embedding"),
        **dict.fromkeys([aten.embedding_dense_backward.default, embedding_rows_backward], "embedding_backward"),
    }
)


@dataclass(frozen=True)
class CalibratedCosts:
    """:class:`..ir.cost_protocol.RankCosts` from measurements of this machine."""

    calibration: Calibration
    _memo: dict[Any, float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def source(self) -> str:
        return f"{self.calibration.machine}, measured"

    @property
    def overlaps(self) -> bool:
        return self.calibration.overlaps

    @property
    def cores(self) -> int | None:
        return self.calibration.cores or None

    @property
    def action_seconds(self) -> float:
        return self.calibration.action_seconds

    def at(self, mesh: Mesh, place: int) -> CalibratedCosts:
        return self  # all ranks are on the machine that was measured

    def node_seconds(self, node: fx.Node) -> float:
        if node.op != "call_function" or is_getitem(node):
            return 0.0
        if work_of(node.target) == "view" or node.target in (shard_slice, aten.contiguous.default):
            return self.calibration.view_seconds + (
                self._curve("copy", 2 * num_bytes(value(node))) if copies(node) else 0
            )
        product = op_spec(node).product
        if product is not None:
            return self._matmul(node, product)
        if work_of(node.target) == "attention":
            name = "attention_backward" if "backward" in str(node.target) else "attention"
            return self._curve(name, attention_flops(node))
        family = FAMILIES.get(node.target)
        if family is None:
            raise CompileError(
                "QN210",
                f"{node.target} was not measured",
                fix=f"add it to FAMILIES in cost_models/calibrated.py: one of {', '.join(self.calibration.operators)}",
            )
        return self._curve(family, self._moved(node, family))

    def host_seconds(self, node: fx.Node | None) -> float:
        return 0.0  # what was measured has it

    def guessed(self, node: fx.Node) -> bool:
        return False  # what was not measured has no price

    def _moved(self, node: fx.Node, family: str) -> float:
        if family == "embedding":  # the table is not read, but a few rows of it
            return 2.0 * num_bytes(value(node))
        if family == "embedding_backward":
            return float(num_bytes(values(tensor_inputs(node)[0])[0]) + num_bytes(value(node)))
        return float(traffic(node))

    def _check_dtype(self, dtype: torch.dtype) -> None:
        """Require the dtype that was measured: matmuls in 16 bits run on other units than those in 32 bits."""
        name, measured = str(dtype).removeprefix("torch."), self.calibration.dtype
        if name != measured and {name, measured} & {"bfloat16", "float16"}:
            raise CompileError(
                "QN210", f"matmuls were measured in {measured}, not in {name}",
                fix=f"quintnet calibrate --dtype {name}",
            )  # fmt: skip

    def _matmul(self, node: fx.Node, product: Product) -> float:
        self._check_dtype(value(node).dtype)
        inputs = tensor_inputs(node)
        rows, weight = inputs[product.rows], inputs[product.weight]
        left, right = shape(rows), shape(weight)
        count = 1
        if product.transposed:
            m, k, n, order = math.prod(left[:-1]), left[-1], right[0], "nt"
        else:
            if len(right) > 2:
                count = math.prod(shape(node)[:-2])
                m, k, n = left[-2], left[-1], right[-1]
            else:
                m, k, n = math.prod(left[:-1]), left[-1], right[-1]
            order = "tn" if _transposed(rows) else "nt" if _transposed(weight) else "nn"
        return count * matmul_seconds(self.calibration.products, order, m, k, n)

    def _curve(self, name: str, amount: float) -> float:
        key = name, amount
        if key not in self._memo:
            self._memo[key] = interpolated(self.calibration.operators[name], amount)
        return self._memo[key]

    def accumulate_seconds(self, num_bytes: float) -> float:
        return self._curve("add", 3 * num_bytes)

    # -- between ranks

    @cached_property
    def _collectives(self) -> Mapping[tuple[str, int], tuple[Point, ...]]:
        return {(collective.name, collective.ranks): collective.points for collective in self.calibration.collectives}

    def copy_seconds(self, num_bytes: float) -> float:
        return self._curve("copy", 2 * num_bytes)

    def write_seconds(self, num_bytes: float) -> float:
        return self.copy_seconds(num_bytes) + num_bytes / CPU.disk_write_bytes_per_second  # disks are not measured

    def read_seconds(self, num_bytes: float) -> float:
        return self.copy_seconds(num_bytes) + num_bytes / CPU.disk_read_bytes_per_second

    def optimizer_seconds(self, num_bytes: float) -> float:
        return 2 * self.accumulate_seconds(num_bytes)  # it reads and writes about twice as much

    def host_update_seconds(self, num_bytes: float) -> float:
        return self.optimizer_seconds(num_bytes)  # the host is the device

    def group_seconds(self, name: str, num_bytes: float, ranks: tuple[int, ...]) -> float:
        """Return a rank's share of a core's time, where ranks share cores: they all take part at once."""
        name = "all_reduce" if name == "broadcast" else name
        points = self._collectives.get((name, len(ranks)))
        if points is None:
            raise CompileError(
                "QN210", f"{name} over {len(ranks)} ranks was not measured", fix="quintnet calibrate --ranks"
            )
        crowd = len(ranks) / self.cores if self.cores else 1.0
        return interpolated(points, max(1.0, num_bytes)) / max(1.0, crowd)

    def lost_seconds(self, hidden: float, ranks: tuple[int, ...]) -> float:
        return 0.0  # what runs beside each other was not measured

    def send_seconds(self, num_bytes: float, source: int, target: int) -> float:
        return interpolated(self._collectives["send", 2], max(1.0, num_bytes))


def _transposed(node: fx.Node) -> bool:
    return node.op == "call_function" and op_spec(node).permutes == "two"
