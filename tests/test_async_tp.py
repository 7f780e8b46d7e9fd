"""Collectives in one with products: the same gradients, nothing kept beside, and what is not so is noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import quintnet
from quintnet import CompileError, Mesh
from quintnet_compiler.core import slices
from quintnet_compiler.core.annotations import num_bytes, value, values
from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts
from quintnet_compiler.features.async_tp.check import check_fused
from quintnet_compiler.features.async_tp.ops import all_gather_matmul, matmul_reduce_scatter
from quintnet_compiler.features.async_tp.ring_matmuls import factors
from quintnet_compiler.features.async_tp.symmetric_memory import SymmetricKernels, fused_kernels, kernels_of
from quintnet_compiler.ir.program import DifferentiatedProgram
from quintnet_compiler.runtime.execute.comm import Comm
from quintnet_compiler.runtime.transport.distributed import DistributedTransport, device_mesh
from quintnet_compiler.runtime.transport.local import LocalWorld
from quintnet_compiler.simulation.program import simulate_program

from .models import CASES, build
from .mutations import copied

pytestmark = pytest.mark.usefixtures("shared_captures")
torch.set_num_threads(1)
aten = torch.ops.aten


class Gated(nn.Module):
    """Blocks whose gathers are read by several products, without biases, as Llama has them."""

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(GatedBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, 32, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class GatedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (f(y).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _compile(name: str, axes: dict[str, int], **options: Any) -> quintnet.CompiledProgram:
    options = {"async_tp": True, **options}
    case = CASES[name if name != "gated" else "gpt"]
    if name != "gated":
        return quintnet.compile(build(name), Mesh(**axes), case.batch(8), loss_fn=case.loss_fn, **options)
    torch.manual_seed(0)
    model = Gated() if "precision" in options else Gated().double()
    return quintnet.compile(model, Mesh(**axes), case.batch(8), **options)


def _source(program: quintnet.CompiledProgram) -> DifferentiatedProgram:
    return program._primary().program.source


def _count(program: quintnet.CompiledProgram) -> Counter[str]:
    found = Counter(str(node.target) for node in _source(program).graph.nodes)
    return Counter({name: found[f"quintnet.{name}.default"] for name in ("all_gather_matmul", "matmul_reduce_scatter")})


LAYOUTS: list[tuple[str, dict[str, int], dict[str, Any], int, int]] = [
    # forward: two of each in a block; what the backward waits for: one gather
    ("gated", {"tp": 2}, {}, 7, 4),
    ("gated", {"tp": 2}, {"overlap": False}, 9, 9),
    ("gated", {"tp": 4}, {"overlap": False, "reshard_after_forward": False}, 9, 9),
    ("gpt", {"tp": 4}, {"overlap": False}, 13, 13),
    ("gpt", {"tp": 2}, {"recompute": "selective"}, 10, 7),
    ("hf_gpt2_double", {"tp": 2}, {}, 9, 6),
    ("gpt", {"dp": 2, "tp": 2}, {"zero": 3, "microbatches": 2}, 10, 7),
    ("gated", {"pp": 2, "tp": 2}, {"microbatches": 4, "schedule": "zb-h1", "recompute": "full"}, 12, 9),
    ("gated", {"tp": 2}, {"precision": "bf16"}, 7, 4),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "axes", "options", "gathers", "scatters"), LAYOUTS, ids=str)
def test_gradients_are_those_of_the_unsplit_model(
    name: str, axes: dict[str, int], options: dict[str, Any], gathers: int, scatters: int
) -> None:
    program = _compile(name, axes, **options)
    assert dict(_count(program)) == {"all_gather_matmul": gathers, "matmul_reduce_scatter": scatters}
    report = program.verify()
    assert report.ok, str(report)


@pytest.mark.slow
def test_what_does_not_divide_or_is_multiplied_stays_apart() -> None:
    """Heads in thirds; and an encoder gathered along the dim that a product sums."""
    for name, axes in (("gpt", {"tp": 3}), ("hf_llama_double", {"tp": 2})):
        program = _compile(name, axes)
        assert program.verify().ok
        for node in _source(program).graph.nodes:
            if node.target in (all_gather_matmul, matmul_reduce_scatter):
                made = values(node)[0]
                assert 0 <= node.args[3] < made.dim() - 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"recompute": "selective"}], ids=str)
def test_nothing_more_is_kept(options: dict[str, Any]) -> None:
    """What a forward leaves for its backward, by name; gathered values stay the slices that they were."""
    found = []
    for fused in (True, False):
        program = _compile("gated", {"tp": 2}, async_tp=fused, microbatches=2, **options)
        nodes = {node.name: node for node in _source(program).graph.nodes}
        found.append(
            {name: num_bytes(value(nodes[name])) for stage in program._primary().program.stages for name in stage.saved}
        )
    assert found[0] == found[1]


# -- a ring by itself


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_ring_is_the_collective_and_the_products(data: st.DataObject) -> None:
    ranks, parts = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    lead = data.draw(st.integers(0, 2))
    sizes = [data.draw(st.integers(1, 3)) for _ in range(lead)] + [2]
    dim = data.draw(st.integers(0, lead - 1)) if lead else 0
    if not lead:
        sizes = [1, 2]
    sizes[dim] *= ranks * parts
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    count, keep = data.draw(st.integers(1, 3)), data.draw(st.booleans())

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    transposed = [data.draw(st.booleans()) for _ in range(count)]
    columns = [data.draw(st.integers(1, 4)) for _ in range(count)]
    biased = [data.draw(st.booleans()) for _ in range(count)]
    world = LocalWorld(Mesh(tp=ranks), ("here",))

    def run(task: Callable[[Comm], Any]) -> dict[int, Any]:
        mesh = Mesh(tp=ranks)
        return world.run_ranks({r: lambda t: task(Comm(t, mesh, {"tp": t.rank})) for r in range(ranks)})

    whole = normal(*sizes)
    weights = [normal(n, 2) if turn else normal(2, n) for n, turn in zip(columns, transposed, strict=True)]
    biases = [normal(n) if has else None for n, has in zip(columns, biased, strict=True)]

    def gathered(comm: Comm) -> Any:
        mine = slices.slice_of_rank(whole, dim, parts, ranks, comm.coordinate["tp"])
        return comm.all_gather_matmul(mine, "tp", dim, parts, weights, biases, transposed, keep, 0)

    expected = [_times(whole, *each) for each in zip(weights, biases, transposed, strict=True)]
    for made in run(gathered).values():
        assert len(made) == count + keep
        for a, b in zip(made, [*expected, whole], strict=False):
            torch.testing.assert_close(a, b)

    xs = [[normal(*sizes) for _ in range(count)] for _ in range(ranks)]
    weights = [normal(3, 2) if turn else normal(2, 3) for turn in transposed]
    biases = [normal(3) if has else None for has in biased]

    def scattered(comm: Comm) -> Any:
        return comm.matmul_reduce_scatter(xs[comm.coordinate["tp"]], "tp", dim, parts, weights, biases, transposed, 0)

    terms = [
        _times(x, *each)
        for row in xs
        for x, each in zip(row, zip(weights, biases, transposed, strict=True), strict=True)
    ]
    total = torch.stack(terms).sum(0)
    for rank, made in run(scattered).items():
        torch.testing.assert_close(made, slices.slice_of_rank(total, dim, parts, ranks, rank))


def _times(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return F.linear(x, weight if transposed else weight.t(), bias)


# -- what is not so is noticed


def _fused(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


def _set(node: fx.Node, **changes: Any) -> None:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    node.args = tuple(changes.get(name, given) for name, given in zip(names, node.args, strict=True))


def _swapped_weights(graph: fx.Graph) -> None:
    node = next(n for n in _fused(graph, all_gather_matmul) if len(n.args[5]) > 1)
    _set(node, weights=[*node.args[5][1:], node.args[5][0]])


def _other_slices(graph: fx.Graph) -> None:
    _set(_fused(graph, all_gather_matmul)[0], parts=2)


def _other_source(graph: fx.Graph) -> None:
    first, second = _fused(graph, all_gather_matmul)[:2]
    _set(second, x=first.args[0])


def _other_result(graph: fx.Graph) -> None:
    node = next(n for n in _fused(graph, all_gather_matmul) if len(n.args[5]) > 1)
    first, second = list(node.users)[:2]
    first.args, second.args = second.args, first.args


def _no_bias(graph: fx.Graph) -> None:
    _set(next(n for n in _fused(graph, matmul_reduce_scatter) if any(n.args[6])), biases=[None])


def _turned(graph: fx.Graph) -> None:
    _set(
        _fused(graph, matmul_reduce_scatter)[0],
        transposed=[not x for x in _fused(graph, matmul_reduce_scatter)[0].args[7]],
    )


def _term_lost(graph: fx.Graph) -> None:
    node = next(n for n in _fused(graph, matmul_reduce_scatter) if len(n.args[0]) > 1)
    xs, *rest = node.args
    lists = [xs[1:], *rest[:4], *(x[1:] for x in rest[4:])]
    node.args = tuple(lists)


def _scattered_elsewhere(graph: fx.Graph) -> None:
    _set(_fused(graph, matmul_reduce_scatter)[0], dim=1)


def _lost(graph: fx.Graph) -> None:
    """A reduce_scatter of something else in its place."""
    node = _fused(graph, matmul_reduce_scatter)[1]
    node.replace_all_uses_with(_fused(graph, matmul_reduce_scatter)[0])
    graph.erase_node(node)


CHANGES = [
    ("gated", _swapped_weights), ("gated", _other_slices), ("gated", _other_source), ("gated", _other_result),
    ("gpt", _no_bias), ("gated", _turned), ("gated", _term_lost), ("gated", _scattered_elsewhere), ("gated", _lost),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_the_pass_is_checked_against_what_it_was_given(name: str, change: Callable[[fx.Graph], None]) -> None:
    before, after = (_source(_compile(name, {"tp": 2}, overlap=False, async_tp=fused)) for fused in (False, True))
    check_fused(before, after)
    mutant, _ = copied(after)
    change(mutant.graph)
    with pytest.raises(CompileError) as caught:
        check_fused(before, mutant)
    assert caught.value.code == "QN209"


@pytest.mark.slow
def test_a_product_in_another_stage_is_noticed() -> None:
    before, after = (
        _source(_compile("gated", {"pp": 2, "tp": 2}, microbatches=2, async_tp=fused)) for fused in (False, True)
    )
    mutant, new = copied(after)
    node = new[_fused(after.graph, matmul_reduce_scatter)[0]]
    mutant.stage[node] = 1 - mutant.stage[node]
    with pytest.raises(CompileError, match="another value"):
        check_fused(before, mutant)


# -- what it is predicted to bring


@pytest.mark.slow
def test_a_slice_travels_while_another_is_multiplied() -> None:
    """At sizes at which products take longer than slices travel, forward gathers and scatters cost nothing."""
    exposed = {}
    for fused in (True, False):
        program = _compile("gated", {"tp": 4}, async_tp=fused)
        for overlaps in (True, False):
            costs = _Slow(Cluster("h100"), overlaps=overlaps)
            exposed[fused, overlaps] = simulate_program(program._primary().program, costs).exposed["tp"]
    names = {
        n.name
        for n in _source(_compile("gated", {"tp": 4})).graph.nodes
        if n.target in (all_gather_matmul, matmul_reduce_scatter)
    }
    assert len(names) == 11
    assert exposed[True, True] < 0.6 * exposed[False, True]
    assert exposed[True, False] > exposed[True, True]


class _Slow(ClusterCosts):
    """Products that take long."""

    def node_seconds(self, node: fx.Node) -> float:
        seconds = super().node_seconds(node)
        return seconds + 1e-3 if node.target in (all_gather_matmul, matmul_reduce_scatter) else seconds


# -- between processes


def _kernels_and_ring(lead: tuple[int, ...], dim: int) -> tuple[list[Tensor], list[Tensor], bool]:
    """What torch's fused kernels make by their own reference, and the ring; whether their shapes agree on no device."""
    from torch.distributed import _symmetric_memory as symmetric

    group = torch.distributed.group.WORLD
    mesh = Mesh(tp=2)
    transport = DistributedTransport(mesh, device_mesh(mesh, "cpu"))
    assert transport.kernels("tp", torch.device("cpu"), kernels_of) is None
    comm = Comm(transport, mesh, mesh.coordinate(transport.rank))
    reference = SymmetricKernels(
        group.group_name, symmetric._fused_all_gather_matmul_fallback, symmetric._fused_matmul_reduce_scatter_fallback
    )
    generator = torch.Generator().manual_seed(transport.rank)
    x = torch.randn(*lead, 6, generator=generator, dtype=torch.float64)
    weights = [torch.ones(6, 4).triu().double(), torch.ones(6, 5).tril().double().t()]
    options: Any = weights, [None, torch.arange(5.0).double()], [False, True]
    given = factors(*options)
    ring = [*comm.all_gather_matmul(x, "tp", dim, 1, *options, True, 0)]
    ring.append(comm.matmul_reduce_scatter([x], "tp", dim, 1, weights[:1], [None], [False], 0))
    found, scattered = (
        (k := reference).all_gather_matmul(x, dim, 1, given, True),
        k.matmul_reduce_scatter([x], dim, 1, given[:1]),
    )
    assert found is not None and scattered is not None
    assert (
        k.matmul_reduce_scatter([x, x], dim, 1, [given[0]] * 2) is None is k.all_gather_matmul(x, dim, 2, given, False)
    )
    real, on_meta = fused_kernels(group), factors([w.to("meta") for w in weights], [None, None], [False, True])
    shapes = [*real.all_gather_matmul(x.to("meta"), dim, 1, on_meta, True)]  # type: ignore[misc]
    shapes.append(real.matmul_reduce_scatter([x.to("meta")], dim, 1, on_meta[:1]))  # type: ignore[arg-type]
    return [*found, scattered], ring, [s.shape for s in shapes] == [r.shape for r in ring]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("lead", "dim"), [((4,), 0), ((2, 4), 1)], ids=str)
def test_fused_kernels_are_asked_for_what_the_ring_makes(lead: tuple[int, ...], dim: int) -> None:
    for found, ring, agree in quintnet.launch(_kernels_and_ring, 2, (lead, dim), timeout=120):
        assert agree and len(found) == len(ring) == 4
        for a, b in zip(found, ring, strict=True):
            torch.testing.assert_close(a, b)
            assert a.is_contiguous()
