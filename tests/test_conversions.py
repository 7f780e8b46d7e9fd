"""Proof that every conversion between two shardings is the identity, in the value and in the gradient.

A value that is made in one sharding is used in another: the passes insert and transpose the conversions, all ranks run
in lockstep, and what they end up with must make up the value again; the gradient that arrives at the leaf must make up
the cotangent.
"""
# ruff: noqa: E501  one line per entry

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

from quintnet_compiler.core import slices
from quintnet_compiler.core.annotations import Leaf
from quintnet_compiler.core.sharding import (
    AxisType,
    I,
    P,
    R,
    S,
    Shard,
    Sharding,
    conversion_path,
    forward_type,
    gradient,
)
from quintnet_compiler.ir.builder import GraphBuilder, aten
from quintnet_compiler.ir.program import Axis, ShardedProgram, Strategy

from .one_operator import (
    AXES,
    MODE,
    as_program,
    lay_out,
    lowered,
    mesh_of,
    noise,
    put_together,
    require_equal,
    run_on_ranks,
)

torch.set_num_threads(1)
SHAPE = (24, 12)


def fits(kinds: Sharding, ranks: tuple[int, ...]) -> bool:
    """Whether a tensor of ``SHAPE`` can have this sharding."""
    left = list(SHAPE)
    for kind, count in zip(kinds, ranks, strict=True):
        if isinstance(kind, Shard):
            if left[kind.dim] % (kind.parts * count):
                return False
            left[kind.dim] //= count
    return True


def program(source: Sharding, target: Sharding, axes: tuple[Axis, ...], *, training: bool) -> ShardedProgram:
    """A value made in sharding ``source`` from a leaf, returned as ``target``; its loss is ``sum(value * cotangent)``."""
    builder = GraphBuilder(MODE)
    with MODE:
        fake = torch.empty(SHAPE, dtype=torch.float64)
    leaf = Leaf("parameter", "x", trainable=True) if training else Leaf("input", "x")
    x = builder.placeholder("x", fake, leaf, needs_grad=training)
    made = builder.call(aten.mul.Scalar, x, 1.0)
    found = {x: tuple(Strategy((), (a,)) for a in source), made: tuple(Strategy((a,), (a,)) for a in source)}
    loss = []
    if training:
        given = builder.placeholder("c", fake, Leaf("input", "c"))
        product = builder.call(aten.mul.Tensor, made, given)
        loss = [builder.call(aten.sum.default, product)]
        cotangents = [forward_type(gradient(b)) for b in target]
        found[given] = tuple(Strategy((), (c,)) for c in cotangents)
        found[product] = tuple(Strategy((b, c), (b,)) for b, c in zip(target, cotangents, strict=True))
        found[loss[0]] = tuple(Strategy((b,), (P,)) for b in target)
    builder.output((*loss, made))
    found[builder.graph.output_node()] = tuple(Strategy((*(P for _ in loss), b), ()) for b in target)
    return ShardedProgram(as_program(builder), axes, found)


def check(source: Sharding, target: Sharding, ranks: tuple[int, ...], *, training: bool) -> None:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=dice, dtype=torch.float64)
    axes = tuple(Axis(name, size, "model") for name, size in zip(AXES, ranks, strict=False))
    made = lowered(program(source, target, axes, training=training), {})
    given = {"x": lay_out(x, source, ranks, dice)}
    cotangent = noise(x, dice)
    if training:
        given["c"] = lay_out(cotangent, tuple(map(gradient, target)), ranks, dice)
    results = run_on_ranks(made.graph, mesh_of(axes), given)
    what = f"{source} -> {target} over {ranks}"
    value = [r[1 if training else 0] for r in results]
    require_equal(put_together(value, target, ranks, x.shape), x, what)
    if training:
        back = put_together([r[2] for r in results], tuple(map(gradient, source)), ranks, x.shape)
        require_equal(back, cotangent, f"the gradient of {what}")


KINDS: tuple[AxisType, ...] = (I, R, P, S(0), S(1), S(0, 2), S(1, 3))


@pytest.mark.parametrize("training", [True, False], ids=["with gradients", "without gradients"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_pair_of_types(ranks: int, training: bool) -> None:
    """All moves on one axis, S(0) -> S(1) and S(0) -> S(0,2) among them."""
    for source, target in itertools.product(KINDS, KINDS):
        if fits((source,), (ranks,)) and fits((target,), (ranks,)):
            check((source,), (target,), (ranks,), training=training)


UNEVEN: tuple[AxisType, ...] = (I, R, P, S(0), S(0, 2), S(0, 1, 5), S(0, 1, 2), S(1), S(1, 3), S(1, 1, 3))


def holds(kind: AxisType, ranks: int) -> bool:
    """Whether a tensor of ``SHAPE`` can have this type: in units that do not divide, or in single indices."""
    if not isinstance(kind, Shard):
        return True
    units, rest = divmod(SHAPE[kind.dim], kind.parts * kind.unit)
    return not rest and units > 1 and (kind.unit == 1 or units % ranks != 0)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["with gradients", "without gradients"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_pair_of_types_of_sizes_that_do_not_divide(
    ranks: int, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 and 9 indices in parts and units, with NaN in the padding of what is converted."""
    monkeypatch.setattr(sys.modules[__name__], "SHAPE", (10, 9))
    kinds = [kind for kind in UNEVEN if holds(kind, ranks)]
    for source, target in itertools.product(kinds, kinds):
        check((source,), (target,), (ranks,), training=training)


def pairs(kinds: Sequence[AxisType], ranks: tuple[int, ...]) -> list[tuple[Sharding, Sharding]]:
    all_of = [k for k in itertools.product(kinds, repeat=len(ranks)) if fits(k, ranks)]
    return list(itertools.product(all_of, all_of))


@pytest.mark.slow
def test_two_axes_of_which_several_split_one_dim() -> None:
    """Nested slices of one dim: neither axis may disturb the other's slices."""
    for source, target in pairs((R, P, S(0), S(0, 2), S(1)), (2, 2)):
        check(source, target, (2, 2), training=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("training", [True, False], ids=["with gradients", "without gradients"])
@pytest.mark.parametrize("ranks", [(2, 2), (2, 3), (3, 2), (2, 2, 2)], ids=str)
def test_random_pairs(ranks: tuple[int, ...], training: bool) -> None:
    dice = random.Random(0)
    for source, target in dice.sample(pairs(KINDS, ranks), 60):
        check(source, target, ranks, training=training)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["with gradients", "without gradients"])
@pytest.mark.parametrize("ranks", [(2, 2), (2, 3), (3, 2)], ids=str)
def test_every_pair_on_two_axes(ranks: tuple[int, ...], training: bool) -> None:
    for source, target in pairs(KINDS, ranks):
        check(source, target, ranks, training=training)


@pytest.mark.slow
def test_many_pairs_on_three_axes() -> None:
    for source, target in random.Random(1).sample(pairs(KINDS, (2, 2, 2)), 3000):
        check(source, target, (2, 2, 2), training=True)


def test_paths_touch_one_axis_at_a_time_and_arrive() -> None:
    """Each step changes one axis, and every state on the way divides."""
    ranks = (2, 2)
    for source, target in pairs(KINDS, ranks):
        state = list(source)
        for axis, kind in conversion_path(source, target, R):
            assert state[axis] != kind
            state[axis] = kind
            assert fits(tuple(state), ranks), (source, target, state)
        assert tuple(state) == target


@drawn(
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.integers(0, 2),
    st.integers(1, 3),
    st.integers(1, 4),
    st.booleans(),
)
def test_a_stack_holds_every_ranks_slice(shape: list[int], dim: int, parts: int, ranks: int, transposed: bool) -> None:
    dim %= len(shape)
    shape[dim] *= parts * ranks
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    if transposed:  # no longer contiguous
        x, dim = x.permute(*reversed(range(x.dim()))), x.dim() - 1 - dim
    stacked = slices.stack(x, dim, parts, ranks)
    taken = [slices.slice_of_rank(x, dim, parts, ranks, index) for index in range(ranks)]
    assert torch.equal(stacked, torch.stack(taken))
    assert torch.equal(slices.unstack(stacked, dim, parts), x) and torch.equal(slices.join(taken, dim, parts), x)
