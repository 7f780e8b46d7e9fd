"""Cross entropy of rows whose classes ranks may split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ...core.annotations import value, values
from ...core.errors import CompileError
from ...core.sharding import Shard, Sharding
from ...ir.builder import GraphBuilder
from ...ops.collectives import convert
from ...ops.cross_entropy import nll_terms
from ...strategies.padding_fills import padded_dims
from .padding import Padding

aten = torch.ops.aten


@dataclass(frozen=True)
class LowerCrossEntropy:
    """Emit log(sum(exp(logits))) minus the label's logit, for each row.

    Where ranks hold slices of the classes, they exchange three numbers per row instead of logits (as Shoeybi et al.
    2019, who do so in three steps). ``sharding``: of the logits.
    """

    builder: GraphBuilder
    padding: Padding
    sharding: Sharding

    def __call__(self, whole: Sequence[int], logits: fx.Node, labels: fx.Node, ignore: int) -> fx.Node:
        """Return the losses of rows, [rows], of ``logits`` whose global shape is ``whole``.

        Raises:
            CompileError: if classes are split over microbatches.
        """
        call = self.builder.call
        axes = [
            axis
            for axis, kind in zip(self.padding.axes, self.sharding, strict=True)
            if isinstance(kind, Shard) and kind.dim == 1
        ]
        if any(axis.role == "time" for axis in axes):
            raise CompileError("QN104", "classes cannot be split over microbatches", where=self.builder.where)
        if not axes:
            scores = call(aten._log_softmax.default, logits, 1, False)
            return self.builder.getitem(call(aten.nll_loss_forward.default, scores, labels, None, 0, ignore), 0)
        names, sizes = [axis.name for axis in axes], [axis.size for axis in axes]
        if 1 in padded_dims(whole, self.sharding, self.padding.axes):  # padding is no class: give it the smallest logit
            smallest = torch.finfo(value(logits).dtype).min
            logits = self.padding.filled(logits, whole, self.sharding, frozenset({1}), smallest)
        terms = call(nll_terms, logits, labels, names, sizes)
        for axis in reversed(axes):
            terms = self._combined_terms(call(convert, terms, axis.name, axis.size, "S(0)", "I"))
        top, total, picked = (call(aten.select.int, call(aten.select.int, terms, 0, 0), 0, i) for i in range(3))
        gap = call(aten.sub.Tensor, top, picked)
        losses = self._cast(call(aten.add.Tensor, call(aten.log.default, total), gap), logits)
        return call(aten.masked_fill.Scalar, losses, call(aten.eq.Scalar, labels, ignore), 0.0)

    def _combined_terms(self, terms: fx.Node) -> fx.Node:
        """Combine the gathered terms of ranks, [ranks, 3, rows], into those of all their classes."""
        call = self.builder.call
        tops, totals, picked = (call(aten.slice.Tensor, terms, 1, i, i + 1) for i in range(3))
        tops = call(aten.detach.default, tops)
        top = call(aten.amax.default, tops, [0], True)
        totals = call(aten.mul.Tensor, totals, call(aten.exp.default, call(aten.sub.Tensor, tops, top)))
        sums = [call(aten.sum.dim_IntList, x, [0], True) for x in (totals, picked)]
        return call(aten.cat.default, [top, *sums], 1)

    def _cast(self, x: fx.Node, like: fx.Node) -> fx.Node:
        dtype = values(like)[0].dtype
        return x if values(x)[0].dtype == dtype else self.builder.call(aten._to_copy.default, x, dtype=dtype)
