"""Real processes on gloo give what the local transport gives."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import quintnet
from quintnet_compiler.checkpoint.background import Background
from quintnet_compiler.compat.distributed import timeout_of
from quintnet_compiler.core.sharding import R, S
from quintnet_compiler.ir.distributed_program import StateSpec
from quintnet_compiler.ir.program import Axis
from quintnet_compiler.runtime.state.state import part_of, sharded_dtensor
from quintnet_compiler.runtime.transport.distributed import DistributedTransport, device_mesh, shared_transport
from quintnet_compiler.runtime.transport.local import LocalWorld
from quintnet_compiler.runtime.transport.transport import Transport

from .models import CASES, EVERY, build, reference, worst_error

Outcome = tuple[float, float, float, dict[str, Tensor], dict[str, Tensor]]


def _train(name: str, axes: dict[str, int], microbatches: int, options: dict[str, Any]) -> Outcome:
    """Two optimizer steps with clipping, an evaluation, and a third step of another batch size."""
    torch.set_num_threads(1)
    case = EVERY[name]
    options = {"loss_fn": case.loss_fn, "microbatches": microbatches, **options}
    program = quintnet.compile(build(name), quintnet.Mesh(**axes), case.batch(8), **options)
    program.initialize({"*.bias": quintnet.Normal(0.1)})
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    for _ in range(2):
        program.step(case.batch(8))
        norm = float(program.clip_grad_norm(0.5))
        optimizer.step()
        optimizer.zero_grad()
    evaluated = float(program.evaluate(case.batch(8)))
    loss = float(program.step(case.batch(16)))
    gradients = {n: p.grad.full_tensor() for n, p in program.named_parameters()}  # type: ignore[union-attr]
    weights = {n: p.full_tensor() for n, p in program.named_parameters()}  # type: ignore[attr-defined]
    return loss, evaluated, norm, gradients, weights


def _rows(axes: dict[str, int]) -> tuple[bool, bool]:
    """Whether ``batch_is_local`` and the whole batch give the same loss, and bad input is refused, on every rank."""
    case = CASES["mlp"]
    mesh = quintnet.Mesh(**axes)
    program = quintnet.compile(build("mlp"), mesh, case.batch(8), loss_fn=case.loss_fn)
    whole = program.step(case.batch(8))
    place = mesh.coordinate(torch.distributed.get_rank())["dp"]
    rows = 8 // mesh["dp"]
    mine = tuple(x[place * rows : (place + 1) * rows] for x in case.batch(8))
    same = torch.equal(program.step(mine, batch_is_local=True), whole)
    try:
        program.step((case.batch(8)[0].float(), case.batch(8)[1]))
    except quintnet.CompileError as error:
        return same, error.code == "QN101"
    return same, False


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "axes", "microbatches", "options"),
    [
        pytest.param("gpt", {"pp": 2, "dp": 2, "tp": 2}, 2, {}, marks=pytest.mark.slow),
        pytest.param("vit", {"tp": 2, "pp": 2}, 4, {}, marks=pytest.mark.slow),
        ("cnn", {"dp": 2}, 2, {}),
        ("mixture", {"dp": 2}, 2, {"zero": 3, "experts": ("dp",)}),
        pytest.param("gpt", {"cp": 4}, 1, {"context": "ring"}, marks=pytest.mark.slow),
        ("gpt", {"cp": 2}, 1, {"context": "ring"}),
        ("packed", {"cp": 2}, 2, {"context": "ring"}),
        pytest.param("packed", {"cp": 4}, 1, {"context": "ring"}, marks=pytest.mark.slow),
        ("gpt", {"tp": 2}, 2, {"async_tp": True, "overlap": False}),
        # values go up and down between two ranks, and skip stages
        ("cnn", {"pp": 2}, 4, {"schedule": "interleaved", "virtual_stages": 3}),
        ("mlp", {"pp": 2}, 4, {"schedule": "zb-v", "virtual_stages": 2}),
    ],
)
def test_processes_equal_the_local_transport(
    name: str, axes: dict[str, int], microbatches: int, options: dict[str, Any]
) -> None:
    expected = _train(name, axes, microbatches, options)
    count = quintnet.Mesh(**axes).size
    found = quintnet.launch(_train, count, (name, axes, microbatches, options), timeout=240)
    names = set()
    for loss, evaluated, norm, gradients, weights in found:
        assert [loss, evaluated, norm] == pytest.approx(expected[:3], rel=1e-12)
        assert worst_error(gradients, {n: expected[3][n] for n in gradients})[0] < 1e-10
        assert worst_error(weights, {n: expected[4][n] for n in weights})[0] < 1e-10
        names |= gradients.keys()
    assert names == expected[3].keys()
    assert len({outcome[0] for outcome in found}) == 1  # the same bits on every rank


def _patience() -> set[float]:
    """How long the groups of a program wait over which it has run a step: those of axes, of sums, of stages."""
    case = CASES["gpt"]
    mesh = quintnet.Mesh(pp=2, dp=2)
    program = quintnet.compile(build("gpt"), mesh, case.batch(8), loss_fn=case.loss_fn, microbatches=2, check="off")
    program.step(case.batch(8))
    transport = shared_transport(mesh, "cpu")
    groups = [native.group for native in transport.group.values()] + list(transport.connections.group.values())
    line = Background.make().line.group
    assert len(groups) >= 5 and line is not None
    return {timeout_of(group) for group in (*groups, line)}


@pytest.mark.slow
def test_all_groups_wait_as_long_as_the_world() -> None:
    assert quintnet.launch(_patience, 4, collective_timeout=97, timeout=240) == [{97.0}] * 4


def _collectives(transport: Transport) -> list[Tensor]:
    """What each collective of the graphs makes of each kind of slices on this rank."""
    dice = torch.Generator().manual_seed(transport.rank)
    xs = [torch.randn(shape, generator=dice).double() for shape in ((8, 8), (4, 8, 8), (8,))]
    kinds = [(dim, parts) for dim in range(3) for parts in (1, 2)]
    found = []
    for x in (*xs, xs[1].movedim(0, 2)):
        mine = [kind for kind in kinds if kind[0] < x.dim()]
        for dim, parts in mine:
            found += [
                transport.run("all_gather", x, "tp", dim, parts, 0),
                transport.run("reduce_scatter", x, "tp", dim, parts, 0),
            ]
            found += [transport.run("all_to_all", x, "tp", dim, parts, *to, 0) for to in mine]
    for dims, parts in (((0, 0, 0), (1, 1, 1)), ((1, 2, 0), (2, 1, 2))):
        found += transport.run("gather_together", xs, "tp", dims, parts, 0)
        found += transport.run("scatter_together", xs, "tp", dims, parts, 0)
    return found


def _collectives_here() -> list[Tensor]:
    mesh = quintnet.Mesh(tp=torch.distributed.get_world_size())
    return _collectives(DistributedTransport(mesh, device_mesh(mesh, "cpu")))


def test_collectives_are_those_of_the_local_transport() -> None:
    expected = LocalWorld(quintnet.Mesh(tp=2), [""]).run_ranks(dict.fromkeys(range(2), _collectives))
    for rank, found in enumerate(quintnet.launch(_collectives_here, 2, timeout=60)):
        assert len(found) == len(expected[rank])
        assert all(torch.equal(a, b) for a, b in zip(found, expected[rank], strict=True))


def _disagree(what: str) -> tuple[str, float]:
    """One rank has another plan, model or torch; what every rank hears of it, and when."""
    torch.set_num_threads(1)
    case, odd = CASES["mlp"], torch.distributed.get_rank() == 1
    model = build("mlp")
    if what == "program" and odd:
        model.head.register_forward_hook(lambda module, given, out: out * 1.0 + 1e-3)
    if what == "torch" and odd:
        torch.__version__ = "2.99.0"  # type: ignore[assignment]
    seed = 7 if what == "plan" and odd else 0
    try:
        program = quintnet.compile(model, quintnet.Mesh(dp=3), case.batch(6), loss_fn=case.loss_fn, seed=seed)
        torch.distributed.barrier()
        start = time.time()
        program.step(case.batch(6))
    except quintnet.RunError as error:
        assert what != "program" or time.time() - start < 1
        return str(error), time.time()
    return "agreed", 0.0


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", ["plan", "program", "torch"])
def test_ranks_that_differ_are_refused_within_a_second(what: str) -> None:
    found = quintnet.launch(_disagree, 3, (what,), timeout=120)
    for text, _ in found:
        assert text.startswith("QN403") and f"{what}: rank 1: " in text and "all others: " in text, text
    times = [when for _, when in found]
    assert max(times) - min(times) < 1


def _not_finite() -> tuple[str, bool]:
    """What this rank hears of a NaN that another one made, and whether its parameters are untouched."""
    torch.set_num_threads(1)
    case = CASES["mlp"]
    program = quintnet.compile(build("mlp"), quintnet.Mesh(dp=2, tp=2), case.batch(8), loss_fn=case.loss_fn)
    images, labels = case.batch(8)
    images[7, 0] = float("nan")
    before = [p.full_tensor().clone() for p in program.parameters()]  # type: ignore[attr-defined]
    try:
        program.step((images, labels))
    except quintnet.RunError as error:
        same = [torch.equal(a, p.full_tensor()) for a, p in zip(before, program.parameters(), strict=True)]  # type: ignore[attr-defined]
        return str(error), all(same) and all(p.grad is None for p in program.parameters())
    return "nothing", False


def test_a_nan_on_one_rank_stops_all_with_one_message() -> None:
    found = quintnet.launch(_not_finite, 4, timeout=120)
    assert len({text for text, _ in found}) == 1 and all(untouched for _, untouched in found)
    assert found[0][0].startswith("QN501") and "batch[0] held nan before, on rank 2 (dp=1, tp=0)" in found[0][0]


def test_local_batches_and_bad_input_on_every_rank() -> None:
    assert quintnet.launch(_rows, 2, ({"dp": 2},), timeout=120) == [(True, True)] * 2


def _digest(name: str, axes: dict[str, int]) -> str:
    """SHA-256 of everything in this rank's dump folder."""
    case, found = CASES[name], hashlib.sha256()
    program = quintnet.compile(build(name), quintnet.Mesh(**axes), case.batch(8), loss_fn=case.loss_fn, microbatches=2)
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(program.dump(folder).rglob("*")):
            if path.is_file():
                found.update(path.read_bytes())
    return found.hexdigest()


@pytest.mark.slow
def test_dumps_are_the_same_bytes_on_every_rank_and_run() -> None:
    axes = {"pp": 2, "tp": 2}
    ranks = quintnet.launch(_digest, 4, ("gpt", axes), timeout=120)
    # another process hashes strings in another order
    code = f"from tests.test_processes import _digest; print(_digest('gpt', {axes}))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    again = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert {*ranks, again.stdout.strip()} == {ranks[0]}


def _fail(code: int) -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError(f"told to fail with {code}")
    torch.distributed.barrier()


def test_launch_names_the_rank_that_failed() -> None:
    with pytest.raises(quintnet.RunError, match=r"(?s)rank 1 raised .*told to fail with 7"):
        quintnet.launch(_fail, 2, (7,), timeout=60)


def _joined(sizes: dict[str, int]) -> list[str]:
    """The shardings of a tensor that DTensors do not join to the whole."""
    mesh = quintnet.Mesh(**sizes)
    devices, here = device_mesh(mesh, "cpu"), mesh.coordinate(torch.distributed.get_rank())
    axes = [Axis(name, size, "model") for name, size in sizes.items()]
    whole = torch.arange(144 * 8.0).view(144, 8)
    wrong = []
    for kinds in itertools.product((R, S(0), S(0, 2), S(0, 3), S(1, 2)), repeat=2):
        spec = StateSpec("x", "parameter", (144, 8), whole.dtype, True, kinds, (0,), kinds, kinds, *3 * [whole.dtype])
        x = sharded_dtensor(part_of(whole, kinds, axes, here), spec, axes, devices)
        wrong += [] if torch.equal(x.full_tensor(), whole) else [f"{kinds}"]
        wrong += [] if torch.equal((x + x).full_tensor(), whole + whole) else [f"the sum of two {kinds}"]
    return wrong


def test_interleaved_slices_are_joined() -> None:
    """Also where two axes split one dim: torch's DTensor alone raises there, or gives other numbers."""
    assert quintnet.launch(_joined, 4, ({"dp": 2, "tp": 2},), timeout=120) == [[]] * 4


def _planned() -> dict[str, float]:
    """How far packed weights and their gradients are from the module's, where a plan stores them interleaved."""
    torch.set_num_threads(1)
    case, name = CASES["gpt"], "blocks.0.qkv.weight"
    plan = {"parameters": {name: {"dp": "S(0,3)"}}}
    program = quintnet.compile(
        build("gpt"), quintnet.Mesh(dp=2, tp=2), case.batch(8), loss_fn=case.loss_fn, zero=3, plan=plan
    )
    program.step(case.batch(8))
    mine, whole = dict(program.named_parameters())[name], build("gpt")
    _, gradients = reference(whole, case.batch(8), case.loss_fn)
    pairs = {"weight": (mine, whole.get_parameter(name)), "gradient": (mine.grad, gradients[name])}
    return {key: float((found.full_tensor() - exact).abs().max()) for key, (found, exact) in pairs.items()}  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_plan_that_stores_a_packed_weight_interleaved() -> None:
    for found in quintnet.launch(_planned, 4, timeout=120):
        assert found["weight"] == 0 and found["gradient"] < 1e-14, found
