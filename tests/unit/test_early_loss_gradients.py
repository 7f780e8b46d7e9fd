"""features.chunked_losses.early_loss_gradients and its check: what the backward makes of logits is made in the forward
where that is known there, and the proof that it is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from quintnet import CompileError
from quintnet_compiler.checks.rewrites.results import check_results
from quintnet_compiler.core.annotations import annotate, facts, shape
from quintnet_compiler.features.chunked_losses import feature
from quintnet_compiler.features.chunked_losses.checks.early_loss_gradients import check_early_loss_gradients
from quintnet_compiler.features.chunked_losses.early_loss_gradients import EarlyLossGradients
from quintnet_compiler.ir.program import DifferentiatedProgram

from ..language import CLASSES, LOSSES, Loss, compiled, flat, shifted

pytestmark = pytest.mark.usefixtures("shared_captures")
aten = torch.ops.aten
CHUNKS = 3


def _products(program: DifferentiatedProgram) -> list[str]:
    """The phase of each product with the table of classes."""
    made = program.graph.find_nodes(op="call_function", target=aten.linear.default)
    return [facts(node).phase for node in made if shape(node)[-1] == CLASSES]


def _before(loss: Loss = shifted, **options: Any) -> DifferentiatedProgram:
    """A program whose backward computes parts of logits again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature, "most_microbatches", lambda schedule, stage: 2)
        program = compiled(loss, options.pop("axes", {"dp": 1}), loss_chunks=CHUNKS, **options)
        return program._primary().program.source


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("axes", "options", "early"),
    [
        ({"dp": 2}, {"microbatches": 2}, True),
        ({"pp": 2}, {"microbatches": 4}, True),
        ({"pp": 2}, {"microbatches": 4, "schedule": "zb-h1"}, True),
        ({"pp": 2}, {"microbatches": 4, "schedule": "gpipe"}, False),  # gradients of four tables would be held
        ({"tp": 2}, {}, False),  # a gradient depends on all classes of all parts
    ],
    ids=str,
)
def test_where_nothing_is_computed_twice(axes: dict[str, int], options: dict[str, Any], early: bool) -> None:
    program = compiled(flat, axes, loss_chunks=CHUNKS, **options)
    source = program._primary().program.source
    found = [facts(n).phase for n in source.graph.nodes if n.target is aten.linear.default and n in _logits(source)]
    assert found.count("forward") == CHUNKS and found.count("backward") == (0 if early else CHUNKS)
    assert program.verify().ok


def _logits(program: DifferentiatedProgram) -> set[fx.Node]:
    return {*program.again, *(copy for copy, made in program.copies.items() if made in program.again)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["shifted", "capped", "classes second", "smoothed", "weighted", "sum"])
def test_losses_whose_gradient_is_known_before(name: str) -> None:
    before = _before(LOSSES[name])
    after = EarlyLossGradients()(before)
    assert _products(before) == ["forward"] * CHUNKS + ["backward"] * CHUNKS
    assert _products(after) == ["forward"] * CHUNKS and not after.copies
    check_early_loss_gradients(before, after)


def test_a_gradient_that_all_parts_decide_stays() -> None:
    """That of the square of logsumexp: an operator of all rows makes it."""
    before = _before(LOSSES["z-loss"])
    assert EarlyLossGradients()(before) is before


def test_order_is_the_same_each_time() -> None:
    first, second = (str(EarlyLossGradients()(_before()).graph) for _ in range(2))
    assert first == second


def _later(graph: fx.Graph) -> None:
    node = next(n for n in graph.nodes if n.target is aten.nll_loss_backward.default)
    annotate(node, replace(facts(node), phase="backward"))


def _of_another(graph: fx.Graph) -> None:
    first, second, *_ = (n for n in graph.nodes if n.target is aten._log_softmax_backward_data.default)
    second.update_arg(1, first.args[1])


def _twice(graph: fx.Graph) -> None:
    total = next(n for n in graph.nodes if n.target is aten.add.Tensor and len(n.all_input_nodes) == 2)
    total.update_arg(1, total.args[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrong", [_later, _of_another, _twice])
def test_wrong_gradients_are_found(wrong: Callable[[fx.Graph], None]) -> None:
    before = _before()
    after = EarlyLossGradients()(before)
    wrong(after.graph)
    with pytest.raises(CompileError, match="QN209"):
        check_early_loss_gradients(before, after)


def test_gradients_are_handed_over_in_the_backward() -> None:
    before = _before(tied=False)
    after = EarlyLossGradients()(before)
    early = {key: node.args[0] if node.target is aten.alias.default else node for key, node in after.gradients.items()}
    assert early != after.gradients
    with pytest.raises(CompileError, match="QN209"):
        check_early_loss_gradients(before, replace(after, gradients=early))
    with pytest.raises(CompileError, match="QN209"):
        check_early_loss_gradients(before, replace(after, stage={}))


def test_what_a_program_hands_on_is_compared() -> None:
    before = _before()
    after = EarlyLossGradients()(before)
    same = dict.fromkeys((*before.graph.nodes, *after.graph.nodes), 0)

    def fail(what: str, node: fx.Node | None) -> Exception:
        return ValueError(what)

    check_results(before, after, same, same, fail)
    with pytest.raises(ValueError, match="another gradient than before"):
        check_results(before, replace(after, gradients={}), same, same, fail)
    with pytest.raises(ValueError, match="is not the output that"):
        check_results(before, after, same, {**same, after.outputs[0]: 1}, fail)
    after.graph.placeholder("more")
    with pytest.raises(ValueError, match="other leaves"):
        check_results(before, after, same, same, fail)
