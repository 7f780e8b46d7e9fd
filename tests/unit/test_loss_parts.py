"""driver.whole_loss.counts, driver.whole_loss.split, driver.whole_loss.total, ir.loss_parts: a loss as sums and means
over rows, and their totals over batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from quintnet_compiler.capture.capture import capture
from quintnet_compiler.core.errors import CompileError, InputError
from quintnet_compiler.driver.whole_loss.counts import reduction_of
from quintnet_compiler.driver.whole_loss.split import in_parts
from quintnet_compiler.driver.whole_loss.total import PartTotals
from quintnet_compiler.ir.batch_form import FlatBatch
from quintnet_compiler.ir.loss_parts import LossPart, LossParts, depends_on, number_at
from quintnet_compiler.ir.program import Captured, outputs

aten = torch.ops.aten


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.layer(x)
        regular = self.layer.weight.square().sum()
        return F.cross_entropy(logits, y) + logits.square().sum() / x.shape[0] + 0.1 * regular


def _captured() -> tuple[Captured, tuple[Tensor, Tensor]]:
    batch = (torch.randn(6, 3), torch.randint(4, (6,)))
    return capture(Net(), batch, training=False), batch


def test_the_parts_of_a_loss() -> None:
    captured, batch = _captured()
    split = in_parts(captured)
    assert split.parts is not None
    kinds = sorted(part.kind for part in split.parts.parts)
    assert kinds == ["additive size", "fixed", "mean", "sum"]
    by_kind = {part.kind: part for part in split.parts.parts}
    ends = outputs(split.graph)
    assert ends[by_kind["mean"].output or 0].target is aten.cross_entropy_loss.default
    assert ends[by_kind["mean"].count_output or 0].target is aten.sum.default
    assert len(outputs(captured.graph)) == 1  # as it was
    sizes = captured.form.varying_sizes(FlatBatch.flatten(batch))
    assert sizes is not None and number_at(by_kind["additive size"].size, sizes, captured.symbols) == 6
    (symbol,) = (symbol for symbol, name in captured.symbols.items() if name == "rows")
    assert depends_on(by_kind["additive size"].size, symbol) and not depends_on(6, symbol)


def test_what_is_no_sum_is_refused() -> None:
    batch = (torch.randn(6, 3), torch.randint(4, (6,)))
    captured = capture(nn.Linear(3, 4), batch, lambda z, y: z.amax(), training=False)
    with pytest.raises(CompileError, match="takes amax of all rows"):
        in_parts(captured)


def _node(target: Any, *values: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    args = []
    for value in values:
        arg = value
        if isinstance(value, Tensor):
            arg = graph.placeholder("x")
            arg.meta["val"] = value
        args.append(arg)
    node = graph.call_function(target, tuple(args), kwargs)
    node.meta["val"] = target(*values, **kwargs)
    return node


def _never(*_: Any) -> fx.Node:
    raise AssertionError


def test_how_many_items_a_mean_has() -> None:
    x = torch.zeros(4, 6)
    for node, kind, count in (
        (_node(aten.mean.default, x), "mean", 24),
        (_node(aten.mean.dim, x, [0]), "mean", 4),
        (_node(aten.sum.dim_IntList, x, [0]), "sum", None),
        (_node(aten.mse_loss.default, x, torch.zeros(6)), "mean", 24),
        (_node(aten.mse_loss.default, x, x, 2), "sum", None),
        (_node(aten.cross_entropy_loss.default, x, x), "mean", 4),
        (_node(aten.triplet_margin_loss.default, x, x, x), "mean", 4),
        (_node(aten.triplet_margin_loss.default, *3 * [torch.zeros(4, 5, 6)]), "mean", 20),
        (_node(aten.multi_margin_loss.default, x, torch.zeros(4, dtype=torch.long)), "mean", 4),
        (_node(aten.multi_margin_loss.default, x, torch.zeros(4, dtype=torch.long), 1, 1.0, torch.ones(6)), "mean", 4),
        (_node(aten.cosine_embedding_loss.default, x, x, torch.ones(4)), "mean", 4),
    ):
        found = reduction_of(node, _never)
        assert found is not None and (found.kind, found.count) == (kind, count)
    assert reduction_of(_node(aten.amax.default, x), _never) is None


def _parts() -> LossParts:
    graph = fx.Graph()
    mean, total, rows = (graph.placeholder(f"part{index}") for index in range(3))
    ratio = graph.call_function(aten.div.Tensor, (total, rows))
    graph.output(graph.call_function(aten.add.Tensor, (mean, ratio)))
    parts = LossPart("a", "mean", 1, count=2), LossPart("b", "sum", 2), LossPart("c", "additive size", size=4)
    return LossParts(parts, fx.GraphModule({}, graph), {})


def test_totals_of_parts() -> None:
    totals, parts = PartTotals(), _parts()
    with pytest.raises(InputError, match="no batches"):
        totals.loss()
    totals.add(parts, [torch.tensor(3.0), torch.tensor(1.0), torch.tensor(8.0)], {})
    totals.add(parts, [torch.tensor(4.0), torch.tensor(3.0), torch.tensor(4.0)], {})
    assert float(totals.loss()) == (1.0 + 3.0) / 2 + 12 / 8
    with pytest.raises(CompileError, match=r"the parts of a loss give 4.0, and the loss is 5.0"):
        totals.add(parts, [torch.tensor(5.0), torch.tensor(3.0), torch.tensor(4.0)], {})
