"""features.chunked_losses.loss_heads, features.chunked_losses.chunk_losses and its check: which losses are computed
in parts of their rows, and the proof of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import quintnet
from quintnet import CompileError
from quintnet_compiler.core.annotations import shape
from quintnet_compiler.features.chunked_losses.checks.chunk_losses import check_chunked
from quintnet_compiler.features.chunked_losses.chunk_losses import ChunkLosses
from quintnet_compiler.features.chunked_losses.loss_heads import loss_heads
from quintnet_compiler.ir.program import LocalProgram

from ..language import CLASSES, WIDTH, Loss, batch, compiled, products, shifted

pytestmark = pytest.mark.usefixtures("shared_captures")
aten = torch.ops.aten


def test_a_head_is_what_lies_between_rows_and_losses(local: LocalProgram) -> None:
    (head,) = loss_heads(local)
    assert head.product.target is aten.linear.default and shape(head.product)[-1] == CLASSES
    assert [node.target for node in head.leading] == [aten.slice.Tensor, aten.reshape.default]
    ((end, outputs),) = head.ends.items()
    assert end.target is aten.nll_loss_forward.default and outputs == {0: 0}
    assert head.dims[end] == (0, 0) and head.dims[head.product] == (0, None)


STAY: dict[str, Loss] = {
    "rows meet before the loss": lambda logits, labels: F.cross_entropy(logits.mean(1), labels[:, 0]),
    "rows meet in the loss": lambda logits, labels: torch.softmax(logits.flatten(0, 1), 0).square().sum(),
    "all classes are kept": lambda logits, labels: torch.softmax(logits.flatten(0, 1), 1).cumsum(0).mean(),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", STAY)
def test_what_stays_whole(name: str) -> None:
    program = compiled(STAY[name], {"dp": 1}, loss_chunks=4)
    assert products(program) == [] and program.verify().ok


def test_logits_that_are_returned_stay_whole() -> None:
    local = _local()
    products = local.graph.find_nodes(op="call_function", target=aten.linear.default)
    (product,) = (node for node in products if shape(node)[-1] == CLASSES)
    graph = product.graph
    output = graph.output_node()
    output.args = ((*output.args[0], product),)  # type: ignore[misc]
    assert ChunkLosses(4)(local) is local


# -- the proof


def _local() -> LocalProgram:
    """Return a program before its loss is cut."""
    return compiled(shifted, {"dp": 1})._primary().program.source.local


@pytest.fixture(scope="module")
def local() -> LocalProgram:
    """Return that program, for tests that do not change it."""
    return _local()


def _wrong(graph: fx.Graph) -> list[Callable[[], object]]:
    """Ways to break the second part."""
    named = {node.name: node for node in graph.nodes}
    slices = [n for n in graph.nodes if n.target is aten.slice.Tensor and n.name.startswith("chunk") and n.args[1] == 0]
    rows, labels = slices[2], slices[3]
    (cat,) = (node for node in graph.nodes if node.target is aten.cat.default)
    parts = list(cat.args[0])
    first, second = (named[name] for name in ("chunk_linear", "chunk_linear_1"))
    return [
        lambda: rows.update_arg(2, rows.args[2] - 1),
        lambda: labels.update_arg(2, labels.args[2] - 1),
        lambda: labels.update_arg(0, named["batch_ids"]),
        lambda: cat.update_arg(0, [parts[1], parts[0], *parts[2:]]),
        lambda: cat.update_arg(0, [parts[0], parts[0], *parts[2:]]),
        lambda: second.replace_all_uses_with(first),
        lambda: named["sum_1"].update_arg(0, parts[0]),
    ]


@pytest.mark.parametrize("position", range(7))
def test_a_wrong_part_is_found(local: LocalProgram, position: int) -> None:
    after = ChunkLosses(4)(local)
    check_chunked(local, after)
    _wrong(after.graph)[position]()
    with pytest.raises((CompileError, RuntimeError, IndexError), match=r"QN209|must match|size|index"):
        check_chunked(local, after)


def test_a_part_elsewhere_is_found(local: LocalProgram) -> None:
    after = ChunkLosses(4)(local)
    kept = {node: stage for node, stage in after.stage.items() if node.name != "chunk_linear_1"}
    for stray in ({"stage": kept}, {"sharding": {}}, {"once": frozenset(itertools.islice(after.graph.nodes, 3))}):
        with pytest.raises(CompileError, match="QN209"):
            check_chunked(local, replace(after, **stray))


class TwoTables(nn.Module):
    """Logits that are the sum of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.one, self.other = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        rows = self.tokens(ids).flatten(0, 1)
        return F.cross_entropy(self.one(rows) + self.other(rows.tanh()), labels.flatten())


def test_of_two_products_in_one_loss_one_is_cut() -> None:
    torch.manual_seed(0)
    program = quintnet.compile(TwoTables().double(), quintnet.Mesh(dp=2), batch(), loss_chunks=3)
    assert len(products(program)) == 3 and program.verify().ok


class TwoLosses(TwoTables):
    """As models that predict further tokens have them."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        rows = self.tokens(ids).flatten(0, 1)
        one, other = self.one(rows), self.other(rows.tanh())
        labels = labels.flatten() % 7
        return F.cross_entropy(one, labels) + 0.3 * F.cross_entropy(other, labels)


def test_two_losses_are_cut() -> None:
    torch.manual_seed(0)
    program = quintnet.compile(TwoLosses().double(), quintnet.Mesh(dp=2), batch(), loss_chunks=3)
    assert len(products(program)) == 6 and program.verify().ok
