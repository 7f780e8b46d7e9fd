"""Parts of how rows that are picked by value become all rows and a mask."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quintnet_compiler.capture.capture import capture
from quintnet_compiler.capture.sizes_by_value import shape_by_value, sizes_of_picks
from quintnet_compiler.core.annotations import shape
from quintnet_compiler.core.errors import Where
from quintnet_compiler.ops.catalog import op_spec, spec_of
from quintnet_compiler.passes.frontend.normalize import Normalize
from quintnet_compiler.passes.frontend.picked_rows import PickedRows
from quintnet_compiler.passes.frontend.picked_values import Picked, PickedValue, Positions

from .graphs import builder, leaf

aten = torch.ops.aten


class _Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        ids = x[:, :2].long()
        row, way = torch.where(ids == 1)
        return torch.zeros_like(x).index_add(0, row, self.expert(x[row]) * (way[:, None] + 1)).mean()


def test_an_expert_computes_each_row_once() -> None:
    captured = capture(_Routed(), (torch.randn(6, 4),))
    (where,) = [node for node in captured.graph.nodes if op_spec(node).finds]
    assert len(sizes_of_picks(where)) == 1
    graph = Normalize(6, torch.device("cpu"))(captured).graph
    (product,) = [node for node in graph.nodes if node.target is aten.linear.default]
    assert shape(product) == (6, 4), "not once for each of two columns of the mask"
    targets = {node.target for node in graph.nodes}
    assert not targets & {aten.index.Tensor, aten.index_add.default}
    assert not any(spec_of(target).finds for target in targets)


def test_what_stands_for_picked_rows() -> None:
    node = torch.fx.Graph().placeholder("mask")
    assert PickedValue(node, Picked(node), 0, (0,)).picked == Picked(node)
    error = shape_by_value(aten.nonzero.default, Where("", "line"), "why")
    assert error.code == "QN101" and "aten.nonzero.default" in str(error) and ": why" in str(error)


def test_positions_of_a_mask_are_told_apart_by_their_axis() -> None:
    to = builder()
    mask = leaf(to, "input", "mask", 3, 2)
    rows = PickedRows(to, lambda *_: None)
    node = torch.fx.Graph().call_function(aten.nonzero.default, (mask,))
    positions = rows(node, [mask], {})
    assert isinstance(positions, Positions) and positions.axis is None and positions.picked.sizes == (3, 2)
    node = torch.fx.Graph().call_function(aten.unbind.int, (mask, 1))
    assert rows(node, [positions, 1], {}) == [Positions(positions.picked, axis) for axis in (0, 1)]
