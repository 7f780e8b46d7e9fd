"""What the backward computes again: exact, in fewer bytes, and never more than its kind allows."""

from __future__ import annotations

import pytest
import torch

import quintnet
from quintnet import Mesh
from quintnet_compiler.core.annotations import num_bytes, values
from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts
from quintnet_compiler.cost_models.roofline import Roofline
from quintnet_compiler.ops.collectives import COMMUNICATION, wait
from quintnet_compiler.planner.stage_units import _saved as _saved_by
from quintnet_compiler.schedules.schedule import most_held
from quintnet_compiler.simulation.footprint import Footprints

from .models import CASES, build
from .zoo import ZOO

KINDS = ("none", "selective", "full")
DEAR = ("linear", "mm", "bmm", "attention", "grouped_linear", "convolution")


def _compiled(name: str, recompute: str, mesh: Mesh, **plan: object) -> tuple[quintnet.CompiledProgram, object]:
    torch.manual_seed(0)
    if name in ZOO:
        model, batch, loss_fn = ZOO[name].build(), ZOO[name].batch(4), None
    else:
        model, batch, loss_fn = build(name).double(), CASES[name].batch(8), CASES[name].loss_fn
    given = {"recompute": recompute, **plan}
    return quintnet.compile(model, mesh, batch, loss_fn=loss_fn, **given), batch  # type: ignore[arg-type]


def _products(program: quintnet.CompiledProgram) -> int:
    """Calls in functions of rank 0 that take more than a pass over memory."""
    pieces = [piece for stage in program.ranks[0].stages for piece in stage.pieces.values()]
    names = [str(node.target).split(".")[1] for piece in pieces for node in piece.module.graph.nodes
             if node.op == "call_function" and "." in str(node.target)]  # fmt: skip
    return sum(name in DEAR or "attention" in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "plan"),
    [
        ("gpt", Mesh(tp=2), {}),
        pytest.param("vit", Mesh(dp=2, pp=2), {"microbatches": 2}, marks=pytest.mark.slow),
        ("Llama", Mesh(dp=2, tp=2), {}),
        pytest.param("Mixtral", Mesh(dp=2), {"zero": 3, "microbatches": 2}, marks=pytest.mark.slow),
    ],
)
def test_every_kind_is_exact_and_selective_keeps_less_for_no_product(
    name: str, mesh: Mesh, plan: dict[str, object]
) -> None:
    held, products, gradients = {}, {}, {}
    for kind in KINDS:
        program, batch = _compiled(name, kind, mesh, **plan)
        loss = program.step(batch)
        found = [p.grad.full_tensor() for p in program.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        held[kind] = max(row.peak_held for row in program.simulate().rows)
        products[kind], gradients[kind] = _products(program), [loss, *found]
    for kind in KINDS[1:]:
        for a, b in zip(gradients["none"], gradients[kind], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    assert held["full"] < held["selective"] < held["none"]
    assert products["selective"] == products["none"] <= products["full"]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "plan"), [({"tp": 2}, {}), ({"cp": 2, "tp": 2}, {})], ids=str)
def test_ranks_keep_their_slices_of_what_they_gather(axes: dict[str, int], plan: dict[str, object]) -> None:
    """Exact, and of each gathered value the other ranks' slices less; nothing changes where all is made again."""
    bits, held = {}, {}
    for reshard_after_forward in (True, False):
        program, batch = _compiled("gpt", "none", Mesh(**axes), reshard_after_forward=reshard_after_forward, **plan)
        assert program.verify(batch, steps=1).ok
        loss = program.step(batch)
        bits[reshard_after_forward] = [
            loss,
            *(p.grad.full_tensor() for p in program.parameters() if p.grad is not None),
        ]  # type: ignore[attr-defined]
        held[reshard_after_forward] = {name: _size(program, name) for name in program.ranks[0].stages[0].saved}
    assert all(torch.equal(a, b) for a, b in zip(bits[True], bits[False], strict=True))
    gathers = {name for name in held[False] if "all_gather" in name}
    assert gathers and not gathers & held[True].keys()
    whole, kept = sum(held[False].values()), sum(held[True].values())
    assert whole - kept >= sum(held[False][name] for name in gathers) // 2


def _size(program: quintnet.CompiledProgram, name: str) -> int:
    nodes = {node.name: node for node in program._primary().program.source.graph.nodes}
    return sum(map(num_bytes, values(nodes[name])))


MODELS = [
    ("gpt", Mesh(tp=2), {}),
    ("vit", Mesh(dp=2, pp=2), {"microbatches": 2}),
    ("Llama", Mesh(dp=2, tp=2), {}),
    ("Mixtral", Mesh(dp=2), {"zero": 3, "microbatches": 2}),
    ("BERT", Mesh(pp=2, tp=2), {"microbatches": 4, "schedule": "zb-h1"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "plan"),
    [pytest.param(*one, id=one[0], marks=[] if one[0] == "gpt" else [pytest.mark.slow]) for one in MODELS],
)
def test_a_budget_is_kept_and_nothing_cheaper_of_the_fixed_kinds_keeps_it(
    name: str, mesh: Mesh, plan: dict[str, object]
) -> None:
    kinds = {kind: _compiled(name, kind, mesh, **plan)[0] for kind in KINDS}
    held = {kind: _saved(program) for kind, program in kinds.items()}
    assert held["full"] < held["none"]
    for share in (0.0, 0.3, 0.6, 1.0):
        budget = held["full"] + share * (held["none"] - held["full"])
        program, batch = _compiled(name, "auto", mesh, **plan, plan={"activation_memory_budget": budget / 2**30})
        assert _saved(program) <= budget
        fitting = [_again(kinds[kind]) for kind in KINDS if held[kind] <= budget]
        assert _again(program) <= min(fitting) * (1 + 1e-9)
    assert program.verify(batch).ok


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(pp=3)], ids=str)  # one stage, and three that need different budgets
def test_a_budget_that_cannot_be_kept_is_refused_with_one_that_can(mesh: Mesh) -> None:
    with pytest.raises(quintnet.CompileError) as caught:
        _compiled("gpt", "auto", mesh, plan={"activation_memory_budget": 1e-6})
    assert caught.value.code == "QN213"
    _compiled("gpt", "auto", mesh, plan={"activation_memory_budget": float(str(caught.value.fix).split()[1])})
    with pytest.raises(quintnet.CompileError, match="activation_memory_budget together"):
        _compiled("gpt", "auto", Mesh(tp=2))


@pytest.mark.slow
def test_a_budget_counts_no_parts_of_losses_and_keeps_no_gradients_for_them() -> None:
    least = {}
    for chunks in (1, 3):
        with pytest.raises(quintnet.CompileError) as caught:
            _compiled("gpt", "auto", Mesh(dp=2), plan={"activation_memory_budget": 1e-6}, loss_chunks=chunks)
        least[chunks] = float(str(caught.value.fix).split()[1])
        plan = {"activation_memory_budget": least[chunks]}
        program, batch = _compiled("gpt", "auto", Mesh(dp=2), plan=plan, loss_chunks=chunks)
        assert _saved(program) <= least[chunks] * 2**30 and program.verify(batch).ok
    assert least[3] < least[1]


def _saved(program: quintnet.CompiledProgram) -> int:
    """Bytes that the fullest rank's forwards leave for its backwards, as the planner's units count them."""
    found = program._primary().program
    memory = Footprints(found)
    size = {name: torch.Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in found.values.items()}

    def of(stage: int) -> int:
        came = {name: size[name] for t in found.transfers if t.target == stage for name in t.forward}
        return _saved_by(found.stages[stage], memory, came, frozenset())[0]

    return max(most_held(found.schedule, of))


def _again(program: quintnet.CompiledProgram) -> float:
    """Seconds of all copies in the backward, on the hardware that the budget is priced for."""
    source, costs = program._primary().program.source, ClusterCosts(Cluster("h100"))
    local = {axis.name: axis.size for axis in program._primary().program.axes}
    total = 0.0
    for copy in (node.args[0] if node.target is wait else node for node in source.copies):
        if copy.target in COMMUNICATION:
            most = max(num_bytes(x) for n in (copy, *copy.all_input_nodes) for x in values(n))
            total += Roofline().collective_seconds("all_gather", most, local[str(copy.args[1])])
        elif copy.op == "call_function":
            total += costs.node_seconds(copy)
    return total


def test_masks_are_drawn_again_as_they_were() -> None:
    curves = []
    for kind in KINDS:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Dropout(0.5)) for _ in range(3))
        ).double()
        batch = (torch.randn(8, 16, dtype=torch.float64), torch.randn(8, 16, dtype=torch.float64))
        program = quintnet.compile(model, Mesh(dp=2), batch, loss_fn=torch.nn.functional.mse_loss, recompute=kind)
        optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
        for _ in range(3):
            curves.append(float(program.step(batch)))
            optimizer.step()
    assert curves[:3] == curves[3:6] == curves[6:] and len(set(curves[:3])) == 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [{"dp": 1}, {"pp": 2}], ids=str)
def test_compiled_losses_save_logits_and_no_log_probabilities(axes: dict[str, int]) -> None:
    """Log-probabilities have 32 bits, logits 16: they are the largest values of language models."""
    saved = {}
    for backend in ("eager", "inductor"):
        program = quintnet.compile(
            build("hf_llama").float(), Mesh(**axes), CASES["hf_llama"].batch(8), loss_fn=CASES["hf_llama"].loss_fn,
            precision="bf16", backend=backend,
        )  # fmt: skip
        saved[backend] = set(program._primary().program.stages[-1].saved)
    assert any("log_softmax" in name for name in saved["eager"])
    assert not any("log_softmax" in name for name in saved["inductor"])
