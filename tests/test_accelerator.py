"""Programs on emulated accelerators: exact whatever time kernels and transfers take, and never waiting forever."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import quintnet
from quintnet_compiler.checkpoint.staging import Staging
from quintnet_compiler.features.fp8.ops.scaled_groups import (
    group_cast,
    group_max,
    scaled_grouped_linear,
    scaled_grouped_weight_grad,
)
from quintnet_compiler.features.fp8.ops.scaled_products import block_max, block_scale, scaled_cast, scaled_matmul
from quintnet_compiler.ops.experts.grouped_rows import (
    group_plan,
    group_rows,
    grouped_bias_grad,
    grouped_linear,
    grouped_weight_grad,
    ungroup_rows,
)
from quintnet_compiler.runtime.transport.host_copies import HostCopies

from .accelerator.build import missing
from .accelerator.device import Emulated, install
from .accelerator.faults import FAULTS
from .accelerator.features import all_update_bytes, resume_all, update_all, update_bytes, updated
from .accelerator.ranks import (
    Job,
    World,
    count_all,
    fail,
    measure_all,
    run,
    sequences,
    train_all,
    train_alone,
    train_with,
)
from .models import CASES, WIDTH, build, reference, worst_error
from .test_experts import Capacity

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"the emulated accelerator: {missing()}")

JOBS = (
    Job("mlp", {"tp": 2}),
    Job("gpt", {"dp": 2}, {"zero": 3, "microbatches": 2}),
    Job("gpt", {"pp": 2}),
    Job("mixture", {"ep": 2}),
    Job("gpt", {"cp": 2}, {"context": "ring"}),
)
SEEDS = 20  # of delays, for each layout
PARTS = 5  # of the layouts, so that a test takes minutes
MORE_JOBS = (
    *JOBS,
    Job("mlp", {"dp": 2}),
    Job("mlp", {"dp": 2}, {"zero": 1, "microbatches": 2}),
    Job("gpt", {"dp": 2}, {"zero": 2}),
    Job("gpt", {"dp": 2}, {"zero": 3, "reshard_after_forward": True}),
    Job("gpt", {"tp": 2}, {"sequence_parallel": True}),
    Job("gpt", {"tp": 2}, {"sequence_parallel": True, "async_tp": True}),
    Job("gpt", {"tp": 2}, {"overlap": False, "microbatches": 2}),
    Job("gpt", {"cp": 2}, {"context": "ulysses"}),
    Job("gpt", {"cp": 2}, {"context": "all_gather"}),
    Job("gpt", {"pp": 2}, {"microbatches": 4}),
    Job("gpt", {"pp": 2}, {"microbatches": 4, "schedule": "gpipe"}),
    Job("gpt", {"pp": 2}, {"microbatches": 4, "schedule": "zb-h1"}),
    Job("cnn", {"pp": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 3}),
    Job("mlp", {"pp": 2}, {"microbatches": 4, "schedule": "zb-v", "virtual_stages": 2}),
    Job("mlp", {"pp": 2}, {"microbatches": 4, "schedule": "dualpipe-v", "virtual_stages": 2}),
    Job("mixture", {"dp": 2}, {"zero": 3, "experts": ("dp",), "microbatches": 2}),
    Job("mixture", {"ep": 2}, {"hot_experts": {"up": [0, 3]}}),
    Job("mixture", {"tp": 2}),
    Job("cnn", {"tp": 2}),
    Job("vit", {"dp": 2}, {"recompute": "full"}),
    Job("encoder", {"tp": 2}, {"recompute": "selective"}),
    Job("gpt", {"tp": 2}, {"loss_chunks": 3}),
    Job("gpt", {"pp": 2}, {"microbatches": 4, "offload": ("activations",)}),
    Job("gpt", {"dp": 2}, {"zero": 3, "offload": ("activations",)}),
)


@pytest.fixture(scope="module")
def device() -> Emulated:
    return install()


# -- the device itself: what a GPU would do wrong shows


def test_a_stream_that_does_not_wait_reads_poison(device: Emulated) -> None:
    device.set_device(0)
    other = torch.Stream(device="emulated:0")
    for waits in (False, True):
        go = threading.Event()
        device.launch(lambda go=go: go.wait(60))  # the default stream stands here until then
        started, x = torch.Event(), torch.zeros(1000, device="emulated:0") + 1
        started.record()
        with other:
            if waits:
                other.wait_event(started)
            y = x + 1
        if waits:
            go.set()
        other.synchronize()
        go.set()
        device.synchronize(0)
        assert bool((y.cpu() == 2).all()) is waits


def test_memory_is_poison_after_it_is_freed(device: Emulated) -> None:
    x = torch.ones(1000, device="emulated:0")
    view = device.host_view(x)  # does not keep it
    device.synchronize(0)
    assert bool((view == 1).all())
    del x
    device.synchronize(0)
    assert bool(view.isnan().all())


def test_devices_do_not_mix(device: Emulated) -> None:
    x, y = torch.ones(2, device="emulated:0"), torch.ones(2, device="emulated:1")
    for other in (y, torch.ones(2)):
        with pytest.raises(RuntimeError, match="same device"):
            torch.mm(x[None], other[:, None])


def test_what_a_host_asks_for_is_counted(device: Emulated) -> None:
    with device.counting() as found:
        x = torch.ones(4).to("emulated:0")
        y = torch.relu(x @ x)
        y.item()
        torch.nonzero(x)
        y.cpu()
    assert (found.to_device, found.to_host) == (1, 1)
    assert found.kernels["aten::relu"] == 1
    assert found.waits == {"aten::_local_scalar_dense": 1, "aten::nonzero": 1, "copy to the host": 1}


# -- all ranks in one process, on one device


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 2], ids=["current device", "another device"])
@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [("gpt", {"dp": 2, "tp": 2}, {"zero": 1}), ("cnn", {"pp": 2}, {"microbatches": 2}), ("mixture", {"ep": 2}, {})],
)
def test_one_process(device: Emulated, name: str, axes: dict[str, int], options: dict[str, int], index: int) -> None:
    """A model and a batch on the CPU are moved; code runs on the device that was asked for."""
    device.set_device(0)
    case = CASES[name]
    batch = case.batch(8)
    where = torch.device("emulated", index)
    program = quintnet.compile(
        build(name),
        quintnet.Mesh(**axes),
        batch,
        loss_fn=case.loss_fn,
        device=where,
        **options,  # type: ignore[arg-type]
    )
    loss = program.step(batch)
    expected, gradients = reference(build(name), batch, case.loss_fn)
    found = {n: p.grad.full_tensor().cpu() for n, p in program.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
    assert loss.device == where
    assert float(loss) == pytest.approx(float(expected), rel=1e-12)
    assert worst_error(found, {n: gradients[n] for n in found})[0] < 1e-10


def test_verify_moves_the_batch_with_the_module(device: Emulated) -> None:
    case = CASES["mlp"]
    options = {"loss_fn": case.loss_fn, "device": "emulated:0"}
    program = quintnet.compile(build("mlp"), quintnet.Mesh(dp=2), case.batch(8), **options)  # type: ignore[arg-type]
    report = program.verify(case.batch(8), steps=1)
    assert report.ok, str(report)


def test_a_checkpoint_makes_the_host_wait_once(device: Emulated, tmp_path: Path) -> None:
    """While it is copied. Both kinds of save write what the accelerator had, whatever it does next."""
    device.set_device(0)
    case, where = CASES["mlp"], torch.device("emulated", 0)
    batch = tuple(x.to(where) for x in case.batch(8))
    program = quintnet.compile(build("mlp"), quintnet.Mesh(dp=2), batch, loss_fn=case.loss_fn, device=where, zero=1)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    for _ in range(2):
        program.step(batch)
        optimizer.step()
    expected = {n: p.detach().full_tensor().cpu() for n, p in program.named_parameters()}  # type: ignore[attr-defined]
    found = program._snapshot(optimizer, None)
    tensors = [box for part in found.parts.values() for box in part.boxes.values() if box.device == where]
    with device.counting() as counted:
        found.copy_to_host(Staging().copies)
    assert counted.to_host == len(tensors) == 3 * len(expected)
    assert (counted.to_device, counted.waits) == (0, {"a stream": 1})
    program.save(tmp_path / "now", step=2, optimizer=optimizer)
    later = program.save_async(tmp_path / "later", step=2, optimizer=optimizer)
    program.step(batch)
    optimizer.step()
    later.result()
    for folder in ("now", "later"):
        program.load(tmp_path / folder, optimizer=optimizer)
        for name, p in program.named_parameters():
            assert torch.equal(p.detach().full_tensor().cpu(), expected[name])  # type: ignore[attr-defined]


OFFLOADS: tuple[tuple[str, ...], ...] = ((), ("activations",), ("parameters",), ("parameters", "activations"))


def _third_step(
    device: Emulated, program: quintnet.CompiledProgram, batch: tuple[torch.Tensor, ...]
) -> tuple[int, Any]:
    """Bytes that the device has given before it, and what it takes; copies are late."""
    device.delay(1, share=0.1)
    for _ in range(3):
        program.zero_grad()
        before = device.extension.requested(0)[0]
        with device.measuring(0) as found:
            program.step(batch)
    device.delay(0, share=0.0)
    return before, found


@pytest.mark.slow
@pytest.mark.parametrize("offload", OFFLOADS, ids=lambda one: "-".join(one) or "plain")
@pytest.mark.parametrize(("name", "microbatches"), [("cnn", 2), ("gpt", 1), ("vit", 1)])
def test_bytes_of_the_device_and_of_its_host_are_those_simulated(
    device: Emulated, name: str, microbatches: int, offload: tuple[str, ...]
) -> None:
    device.set_device(0)
    case, where = CASES[name], torch.device("emulated", 0)
    batch = tuple(x.to(where) for x in case.batch(8))
    gc.collect()
    there, _, before, _ = device.extension.requested(0)
    program = quintnet.compile(
        build(name), quintnet.Mesh(dp=1), batch, loss_fn=case.loss_fn, device=where, microbatches=microbatches,
        offload=offload,  # type: ignore[arg-type]
    )  # fmt: skip
    between, found = _third_step(device, program, batch)
    between -= there
    (row,) = program.simulate().rows
    staying = device.extension.requested(0)[2] - before  # parameters and gradients, between steps
    print(name, microbatches, offload, found, staying)
    assert (between + found.device, found.host + staying) == (row.peak.bytes, row.host_bytes)
    assert bool(found.host) is ("activations" in offload) and bool(staying) is ("parameters" in offload)
    assert bool(row.parameter_bytes or row.gradient_bytes) is not bool(staying)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", pytest.param("vit", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "offload", [pytest.param(OFFLOADS[1], marks=pytest.mark.slow), OFFLOADS[3]], ids=lambda one: "-".join(one)
)
def test_bytes_of_a_device_whose_values_wait_in_files_are_those_simulated(
    device: Emulated, name: str, offload: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the device, of its host, and of files; with the bits of a program in which nothing moves."""
    device.set_device(0)
    case, where = CASES[name], torch.device("emulated", 0)
    batch, sizes, plain = tuple(x.to(where) for x in case.batch(8)), [0], os.posix_fallocate

    def counted(file: int, at: int, size: int) -> None:
        plain(file, at, size)
        sizes.append(sum(path.stat().st_size for path in tmp_path.glob("*/*")))

    def made(**options: Any) -> quintnet.CompiledProgram:
        model, mesh = build(name), quintnet.Mesh(dp=1)
        return quintnet.compile(model, mesh, batch, loss_fn=case.loss_fn, device=where, microbatches=2, **options)

    expected = made()
    expected.step(batch)
    monkeypatch.setattr(os, "posix_fallocate", counted)
    gc.collect()
    there, _, before, _ = device.extension.requested(0)
    program = made(offload=offload, offload_folder=str(tmp_path))
    between, found = _third_step(device, program, batch)
    between -= there
    (row,) = program.simulate().rows
    staying = device.extension.requested(0)[2] - before
    print(name, offload, found, staying, max(sizes))
    assert (between + found.device, found.host + staying, max(sizes)) == (
        row.peak.bytes,
        row.host_bytes,
        row.disk_bytes,
    )
    assert max(sizes) > 0 and found.host == 0 and not list(tmp_path.glob("*/[0-9]*"))
    for ours, theirs in zip(program.parameters(), expected.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad.cpu(), theirs.grad.cpu())


@pytest.mark.slow
def test_gradients_are_on_the_host_when_a_step_returns(device: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads them asks no device. Nor does what changes parameters, which copies may still read."""
    device.set_device(0)
    case, where = CASES["vit"], torch.device("emulated", 0)
    batch = tuple(x.to(where) for x in case.batch(8))
    program = quintnet.compile(
        build("vit"), quintnet.Mesh(dp=1), batch, loss_fn=case.loss_fn, device=where, check_finite=False,
        offload=("parameters",),
    )  # fmt: skip

    def found(share: float) -> list[torch.Tensor]:
        program.zero_grad()
        device.delay(1, share=share)
        program.step(batch)
        return [p.grad.clone() for p in program.parameters() if p.grad is not None]

    expected = found(0.0)
    assert all(x.device.type == "cpu" for x in expected)
    assert all(torch.equal(a, b) for a, b in zip(found(1.0), expected, strict=True))
    monkeypatch.setattr(HostCopies, "wait_for_copies", lambda self: None)
    for x in (p.grad for p in program.parameters()):
        assert x is not None
        x.zero_()
    assert not all(torch.equal(a, b) for a, b in zip(found(1.0), expected, strict=True)), "nobody had to wait"
    device.delay(0, share=0.0)
    device.synchronize(0)


@pytest.mark.slow
def test_an_optimizer_on_the_host_has_nothing_on_the_device(device: Emulated, tmp_path: Path) -> None:
    """The same bits: the device's kernels are the CPU's. AdamW has two numbers for each element of a parameter."""
    device.set_device(0)
    job = Job("mlp", {"dp": 2}, {"zero": 2, "device": "emulated:0"})
    (found, size), (expected, usual) = (
        updated(job, str(tmp_path / str(offload)), offload=offload) for offload in (True, False)
    )
    assert found.keys() == expected.keys() and all(torch.equal(found[name], x) for name, x in expected.items())
    assert usual - size == 2 * sum(x.nbytes for x in expected.values())


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt", marks=pytest.mark.slow)])
def test_bytes_of_an_optimizer_on_the_host_are_those_simulated(device: Emulated, name: str) -> None:
    device.set_device(0)
    measured, simulated = update_bytes(Job(name, {"dp": 1}), "emulated:0")
    print(name, measured)
    assert measured == simulated and measured.host > measured.kept > measured.device == 0


# -- a process for each rank


def test_the_page_counts_what_there_is() -> None:
    page = " ".join((Path(__file__).parent.parent / "docs" / "emulated_accelerator.md").read_text().split())
    words = {7: "seven"}
    told = f"adds {len(MORE_JOBS)} layouts with {SEEDS} seeds of delays, and puts {words[len(FAULTS)]} faults back"
    assert told in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eager", "jobs"),
    [
        (False, JOBS[2:3]),
        (True, JOBS[:1]),
        pytest.param(True, JOBS[1:3], marks=pytest.mark.slow),
        pytest.param(False, JOBS, marks=pytest.mark.slow),
    ],
    ids=["communicators at first use", "one for each group", "one for each group, more", "all"],
)
def test_a_sample_on_two_devices(eager: bool, jobs: Sequence[Job]) -> None:
    for found in run(train_all, World(2, eager=eager, seed=1), jobs):
        assert found == dict.fromkeys(map(str, jobs), "")


@pytest.mark.slow
def test_optimizers_on_the_hosts_of_two_devices(tmp_path: Path) -> None:
    jobs = [
        Job("mlp", {"dp": 2}, {"zero": 1}),
        Job("gpt", {"dp": 2}, {"zero": 3}),
        Job("gpt", {"tp": 2}),
        Job("gpt", {"pp": 2}, {"microbatches": 2}),
    ]
    there = [Job(one.model, one.axes, {**one.options, "offload": ("parameters",)}) for one in jobs[1:]]
    for found in run(update_all, World(2, seed=1), jobs + there, str(tmp_path)):
        for (expected, usual), (mine, size) in found[: len(jobs)]:
            assert all(torch.equal(mine[name], x) for name, x in expected.items())
            assert size < usual
        for ((expected, _), _), both in zip(found[1 : len(jobs)], found[len(jobs) :], strict=True):
            for mine, size in both:  # of parameters that are there, whatever is asked
                assert all(torch.equal(mine[name], x) for name, x in expected.items())
                assert size == 0


HOST_OPTIMIZERS = (
    Job("mlp", {"dp": 2}, {"zero": 2}),
    Job("gpt", {"dp": 2}),
    Job("gpt", {"dp": 2}, {"zero": 3, "offload": ("activations",)}),
    Job("gpt", {"tp": 2}),
    Job("gpt", {"pp": 2}, {"microbatches": 2}),
    Job("gpt", {"dp": 2}, {"zero": 1}),
)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [HOST_OPTIMIZERS[:1], pytest.param(HOST_OPTIMIZERS[1:], marks=pytest.mark.slow)])
def test_bytes_of_optimizers_on_the_hosts_of_two_devices_are_those_simulated(jobs: Sequence[Job]) -> None:
    """Of the rank that has the most parameters whole."""
    ranks = run(all_update_bytes, World(2, seed=1), list(jobs))
    for job, *found in zip(jobs, *ranks, strict=True):
        places = [found] if "pp" not in job.axes else [[one] for one in found]
        for place in places:
            fullest = max((measured for measured, _ in place), key=lambda one: one.host)
            device = max(measured.device for measured, _ in place)
            assert {simulated for _, simulated in place} == {replace(fullest, device=device)}, job


@pytest.mark.slow
def test_plain_optimizers_compute_on_the_hosts_of_two_devices(tmp_path: Path) -> None:
    """Each its rank's shards, with the bits of those on devices, also from a checkpoint."""
    layouts: list[tuple[dict[str, int], dict[str, Any]]] = [({"dp": 2}, {"zero": 3}), ({"pp": 2}, {"microbatches": 2})]
    jobs = [
        Job("gpt", axes, {**options, "offload": what}) for axes, options in layouts for what in ((), ("parameters",))
    ]
    for found in run(resume_all, World(2, seed=1), jobs, str(tmp_path)):
        for (plain, _, there), (first, again, here) in zip(found[::2], found[1::2], strict=True):
            assert (there, here) == ({"emulated"}, {"cpu"})
            assert all(torch.equal(first[name], x) and torch.equal(again[name], x) for name, x in plain.items())


LEAVES: tuple[tuple[dict[str, int], dict[str, Any], tuple[str, ...]], ...] = (
    ({"tp": 2}, {}, ("activations",)),
    ({"dp": 2}, {"zero": 3}, ("parameters",)),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eager", "layouts"),
    [
        (False, LEAVES[:1]),
        pytest.param(False, LEAVES[1:], marks=pytest.mark.slow),
        pytest.param(True, LEAVES, marks=pytest.mark.slow),
    ],
)
def test_what_leaves_two_devices_comes_back(
    eager: bool, layouts: Sequence[tuple[dict[str, int], dict[str, Any], tuple[str, ...]]]
) -> None:
    """With the bits of a program in which nothing moves."""
    pairs = [
        [Job("gpt", axes, {"microbatches": 2, **options, "offload": what}) for what in ((), offload)]
        for axes, options, offload in layouts
    ]
    for found in run(measure_all, World(2, eager=eager, seed=1), [job for pair in pairs for job in pair]):
        for one in found.values():
            assert one.measured == one.simulated
        for plain, outside in pairs:
            ours, theirs = found[str(outside)].made, found[str(plain)].made
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        if layouts[0] != LEAVES[0]:
            continue
        plain, outside = (found[str(job)] for job in pairs[0])
        state = 2 * sum(x.nbytes for name, x in plain.made.items() if name != "loss")
        assert outside.measured[0] - state < (plain.measured[0] - state) / 3


FOUR_MICROBATCHES: dict[str, Any] = {"microbatches": 4}
TO_THE_BYTE = (
    Job("mixture", {"dp": 2}),  # where each expert's rows end is known on the host
    Job("gpt", {"dp": 2}, {"zero": 3, "offload": ("parameters",)}),
    Job("gpt", {"dp": 2}, {"zero": 3, "microbatches": 2}),
    Job("gpt", {"pp": 2}, {**FOUR_MICROBATCHES, "offload": ("activations",)}),
    Job("gpt", {"pp": 2}, FOUR_MICROBATCHES),
    Job("gpt", {"tp": 2}, {"microbatches": 2, "sequence_parallel": True}),
    Job("gpt", {"dp": 2}, {"zero": 3, "offload": ("activations",)}),
    Job("gpt", {"dp": 2}, {"zero": 3, "offload": OFFLOADS[-1]}),
    Job("gpt", {"dp": 2}, {"zero": 3, "microbatches": 2, "offload": ("parameters",)}),
    Job("gpt", {"pp": 2}, {**FOUR_MICROBATCHES, "offload": OFFLOADS[-1]}),
    Job("gpt", {"pp": 2}, {**FOUR_MICROBATCHES, "schedule": "zb-h1", "offload": ("parameters",)}),
    Job("gpt", {"tp": 2}, {"microbatches": 2, "offload": ("parameters",)}),
    Job("gpt", {"pp": 2}, {**FOUR_MICROBATCHES, "schedule": "zb-h1"}),
    Job("cnn", {"pp": 2}, {**FOUR_MICROBATCHES, "schedule": "interleaved", "virtual_stages": 3}),
    Job("mlp", {"pp": 2}, {**FOUR_MICROBATCHES, "schedule": "dualpipe-v", "virtual_stages": 2}),
    Job("mlp", {"dp": 2}, {"zero": 1, "microbatches": 2}),
    Job("gpt", {"cp": 2}, {"context": "ulysses"}),
    Job("gpt", {"cp": 2}, {"context": "all_gather"}),
    Job("vit", {"dp": 2}, {"recompute": "full"}),
    Job("mixture", {"tp": 2}),
)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [TO_THE_BYTE[:2], pytest.param(TO_THE_BYTE[2:], marks=pytest.mark.slow)])
def test_bytes_of_two_devices_are_those_simulated(jobs: Sequence[Job]) -> None:
    """Messages under way, what a stage received, and gradients of pipelines, which stay from step to step, among
    them."""
    for found in run(measure_all, World(2, seed=1), jobs):
        assert {job: one.measured for job, one in found.items()} == {job: one.simulated for job, one in found.items()}


@pytest.mark.slow
def test_files_of_two_devices(tmp_path: Path) -> None:
    """With the bytes that are simulated, and the bits of programs in which nothing moves."""
    layouts: list[tuple[dict[str, int], dict[str, Any]]] = [
        ({"dp": 2}, {"zero": 3, "microbatches": 2}), ({"pp": 2}, FOUR_MICROBATCHES), ({"tp": 2}, {}),
    ]  # fmt: skip
    more = {"offload": ("activations",), "offload_folder": str(tmp_path)}
    jobs = [[Job("gpt", axes, {**options, **some}) for some in ({}, more)] for axes, options in layouts]
    for found in run(measure_all, World(2, seed=1), [job for pair in jobs for job in pair]):
        for one in found.values():
            assert one.measured == one.simulated
        for plain, outside in jobs:
            ours, theirs = found[str(outside)].made, found[str(plain)].made
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not list(tmp_path.glob("*/[0-9]*"))


@pytest.mark.slow
def test_layouts_take_what_is_simulated() -> None:
    """What a ring's attention takes while it runs is not simulated, nor how many rows experts get."""
    jobs = [job for job in MORE_JOBS if job.options.get("context") != "ring" and job.model != "mixture"]
    for found in run(measure_all, World(2, seed=1), jobs, limit=900):
        assert {job: one.measured for job, one in found.items()} == {job: one.simulated for job, one in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "rank", "told"),
    [
        ("late", 0, ("QN402", "rank 0 in step 2", "did not come to it in time", "given up after 3 s", "fix:")),
        pytest.param(
            *(
                "gone",
                0,
                ("QN402", "rank 0 in step 2", "another rank ended", "remote process exited", "NCCL: ", "fix:"),
            ),
            marks=pytest.mark.slow,
        ),
        ("system", 1, ("QN407", "rank 1 in step 2", "within NCCL: shared memory", "--shm-size")),
    ],
)
def test_failures_of_communication_are_explained(how: str, rank: int, told: Sequence[str]) -> None:
    found = run(fail, World(2, timeout=3), how, Job("mlp", {"dp": 2}), 3.0, limit=120)[rank]
    assert [text for text in told if text not in found] == [], found


@pytest.mark.slow
def test_one_rank_runs_as_one_of_many_does() -> None:
    job = Job("gpt", {"dp": 1}, {"microbatches": 2})
    assert run(train_alone, World(1, eager=True, seed=1), job) == [("", "ProcessBackend")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dense",
    [
        Job("gpt", {"tp": 2}, {"sequence_parallel": True, "microbatches": 2}),
        pytest.param(Job("gpt", {"cp": 2}, {"context": "all_gather"}), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_of_a_dense_model_makes_the_host_wait_once(dense: Job) -> None:
    """For whether all gradients are finite. Nothing is copied to the device."""
    for found in run(count_all, World(2), [dense]):
        for job, counted in found.items():
            assert counted.to_device == 0, job
            assert counted.waits == {"copy to the host": 1}, job


@pytest.mark.slow
def test_a_mixture_makes_the_host_wait_once_where_rows_travel() -> None:
    """For each layer and microbatch: for how many rows go where, or how many each expert has where there is no grouped
    matmul. All products read one plan, forward and backward."""
    half = {"precision": "bf16"}  # in which the device has grouped matmuls
    copies = (
        (1, Job("mixture", {"ep": 2})),
        (1, Job("mixture", {"ep": 2}, {"hot_experts": {"up": [0]}})),
        (2, Job("mixture", {"ep": 2}, {"microbatches": 2, **half}, torch.float32)),
        (1, Job("mixture", {"ep": 2}, {"recompute": "full"})),
        (2, Job("mixture", {"dp": 2}, {"microbatches": 2})),
        (0, Job("mixture", {"dp": 2}, {"microbatches": 2, **half}, torch.float32)),
        (0, Job("mixture", {"tp": 2}, half, torch.float32)),
    )
    wanted = {str(job): {"copy to the host": 1 + n} for n, job in copies}  # one for whether gradients are finite
    for found in run(count_all, World(2), [job for _, job in copies]):
        assert {job: counted.waits for job, counted in found.items()} == wanted
        assert {job: counted.to_device for job, counted in found.items()} == dict.fromkeys(wanted, 0)


@pytest.mark.slow
def test_experts_of_a_given_capacity_make_no_host_wait(device: Emulated) -> None:
    device.set_device(0)
    where = torch.device("emulated", 0)
    batch = torch.randn(8, 12, WIDTH, dtype=torch.float64, device=where), torch.randint(8, (8, 12), device=where)
    plan = {"parameters": {"up": {"ep": "S(0)"}}}
    program = quintnet.compile(Capacity().double(), quintnet.Mesh(ep=2), batch, plan=plan, device=where)
    program.step(batch)
    with device.counting() as counted:
        program.step(batch)
    assert counted.waits == {"copy to the host": 2}  # whether gradients are finite, on each rank
    assert counted.to_device == 0


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"ep": 2}, pytest.param({"tp": 2}, marks=pytest.mark.slow)], ids=str)
def test_a_mixture_in_bfloat16(device: Emulated, axes: dict[str, int]) -> None:
    """Grouped matmuls give what loops on the CPU give, but for rounding. Over ``tp`` rows of others' experts stay."""
    device.set_device(0)
    batch = tuple(x.float() if x.is_floating_point() else x for x in CASES["mixture"].batch(16))
    plan = {"parameters": {"up": {"tp": "S(0)"}, "down": {"tp": "S(0)"}}} if "tp" in axes else None
    found = []
    for where in ("cpu", "emulated:0"):
        program = quintnet.compile(
            build("mixture", torch.float32), quintnet.Mesh(**axes), batch, plan=plan, precision="bf16", device=where
        )
        with device.counting() as counted:
            program.step(batch)
        found.append({n: p.grad.full_tensor().cpu() for n, p in program.named_parameters() if p.grad is not None})
    assert "comm.local_experts(" in program.ranks[0].forward.code
    assert counted.kernels["aten::_grouped_mm"] == 12  # two products, each with two gradients, on two ranks
    assert worst_error(found[1], found[0])[0] < 0.03


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_matmuls_of_experts(device: Emulated, transposed: bool) -> None:
    """As loops over experts on the CPU; with experts that have no rows, and rows that have no expert."""
    device.set_device(0)
    ids = torch.tensor([2, -1, 0, 2, 4, 0, 2])
    rows, grad, weight, bias = (torch.randn(*size).bfloat16() for size in ((7, 8), (7, 16), (4, 16, 8), (4, 16)))
    weight = weight.mT.contiguous() if transposed else weight

    def products(*given: torch.Tensor, on_host: bool) -> tuple[torch.Tensor, ...]:
        ids, rows, grad, weight, bias = given
        order, ends = group_plan(ids, 4, None, on_host)
        rows, grad = group_rows(rows, order, ends), group_rows(grad, order, ends)
        rows[5:] = grad[5:] = torch.nan  # rows of no expert: a kernel may leave anything there
        made = (
            grouped_linear(rows, ends, weight, bias, transposed),
            grouped_linear(grad, ends, weight, None, not transposed),
        )
        gradients = grouped_weight_grad(grad, rows, ends, transposed), grouped_bias_grad(grad, ends)
        return *(ungroup_rows(x, order, ends) for x in made), *gradients

    given = [x.to("emulated:0") for x in (ids, rows, grad, weight, bias)]
    with device.counting() as counted:
        found = products(*given, on_host=False)
    assert counted.waits == {} and counted.to_device == 0 and counted.kernels["aten::_grouped_mm"] == 3
    for mine, theirs in zip(found, products(ids, rows, grad, weight, bias, on_host=True), strict=True):
        assert torch.allclose(mine.cpu().float(), theirs.float(), atol=0.05, rtol=0.02)


@pytest.mark.parametrize(
    ("of_rows", "of_matrices"),
    [([0, 0], [1, 0, 0]), ([1, 0], [1, 1, 0]), ([1, 8], [1, 1, 8]), ([1, 8], [1, 8, 8]), ([1, 0], [1, 8, 0])],
    ids=str,
)
def test_grouped_products_of_8_bit_numbers_without_a_kernel_for_these(
    device: Emulated, of_rows: list[int], of_matrices: list[int]
) -> None:
    """As loops over experts on the CPU, and the host waits for nothing."""
    device.set_device(0)
    kind, ends = torch.float8_e4m3fn, torch.tensor([2, 2, 5, 5], dtype=torch.int32)
    rows, grad, weight = (torch.randn(*size).bfloat16() for size in ((7, 16), (7, 32), (4, 32, 16)))
    rows[5:] = grad[5:] = torch.nan  # rows of no expert

    def products(ends: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x8, scale_x = _eight(given[0].nan_to_num(), of_rows, kind)
        w8, scale_w = _eight(given[2], of_matrices, kind)
        columns = []
        for x in given[:2]:
            scale = block_scale(group_max(x, ends), kind, False)
            columns.append((group_cast(x, ends, scale, kind), scale))
        (c8, scale_c), (t8, scale_t) = columns
        made = scaled_grouped_linear(x8, ends, w8, scale_x, scale_w, None, False, torch.bfloat16)
        return made[:5], scaled_grouped_weight_grad(t8, c8, ends, scale_t, scale_c, False, torch.bfloat16)

    with device.counting() as counted:
        found = products(*(x.to("emulated:0") for x in (ends, rows, grad, weight)))
    assert counted.waits == {} and counted.kernels["aten::_grouped_mm"] == 2
    for mine, theirs in zip(found, products(ends, rows, grad, weight), strict=True):
        assert torch.allclose(mine.cpu().float(), theirs.float(), atol=0.05, rtol=0.02)


def test_products_of_8_bit_numbers_without_a_kernel_are_of_16_bits(device: Emulated) -> None:
    """Where scales are powers of two: there they are exact."""
    device.set_device(0)
    (x8, scale_x), (w8, scale_w) = (_eight(torch.randn(n, 64), [1, 32], torch.float8_e4m3fn, True) for n in (48, 16))
    given = x8, w8, scale_x, scale_w
    there = [x.to("emulated:0") for x in given]
    made = scaled_matmul(*there, "mk,nk->mn", torch.bfloat16, True).cpu()
    expected = scaled_matmul(*given, "mk,nk->mn", torch.float64)
    assert (made.double() - expected).norm() <= 4e-3 * expected.norm()


def _eight(
    x: torch.Tensor, block: list[int], kind: torch.dtype, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = block_scale(block_max(x, block), kind, power_of_two)
    return scaled_cast(x, scale, kind), scale


@pytest.mark.slow
@pytest.mark.parametrize("begin", [False, True], ids=["waited for at once", "waited for later"])
def test_sequences_are_joined_and_cut_without_a_copy(begin: bool) -> None:
    """Each is a run of memory of its own. In a hundred of them, messages would cost more than a copy."""
    for rows, copies in ((1, 0), (4, 0), (100, 2)):
        for found in run(sequences, World(2), rows, begin):
            assert sum(n for name, n in found.items() if "copy" in name or "clone" in name) == copies, (rows, found)


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True], ids=["communicators at first use", "one for each group"])
@pytest.mark.parametrize("part", range(PARTS))
def test_all_on_two_devices(eager: bool, part: int) -> None:
    """Each job is compiled once for all delays; those of its first run, which connects ranks, are of another seed."""
    jobs, world = MORE_JOBS[part::PARTS], World(2, eager=eager, seed=part + 1, timeout=600)
    for found in run(train_all, world, jobs, range(1, SEEDS + 1), limit=1800):
        assert found == dict.fromkeys(map(str, jobs), "")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    """In at least one of the modes of communicators, by an error or by wrong numbers."""
    interleaved = {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 3}
    outside = {"microbatches": 2, "offload": ("activations",)}
    jobs = (
        Job("gpt", {"tp": 2}),
        Job("gpt", {"pp": 2}),
        Job("gpt", {"pp": 2}, interleaved),
        Job("cnn", {"dp": 2}, outside),
    )
    seen = []
    for job in jobs:
        for eager in (False, True):
            try:
                found = run(train_with, World(2, eager=eager, seed=1, timeout=8), fault, [job], limit=120)
                seen += [text for rank in found for text in rank.values() if text]
            except RuntimeError as error:
                seen.append(str(error))
    assert seen, fault
