"""Parameters that wait in host memory: the same bits, on any layout, whatever trains them; harmful copies are refused.

What the device and its host have at most is asserted on the emulated accelerator, see test_accelerator.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from benchmarks.models import Llama, Size, loss_fn
from quintnet import Mesh
from quintnet_compiler.core.annotations import facts, leaf
from quintnet_compiler.core.errors import CompileError, RunError
from quintnet_compiler.ir.plan import Offloaded
from quintnet_compiler.ir.repeated_blocks import block_of
from quintnet_compiler.ops.collectives import STARTS, gather_together
from quintnet_compiler.ops.copies import COPIES, copy_in

from .test_offload import Options, stepped

pytestmark = pytest.mark.usefixtures("shared_captures")
torch.set_num_threads(1)
PARAMETERS, BOTH = ("parameters",), ("parameters", "activations")
LAYOUTS: list[tuple[str, dict[str, int], Options]] = [
    ("gpt", {"dp": 2}, {"zero": 3, "microbatches": 2}),
    ("gpt", {"dp": 1}, {"microbatches": 2}),
    ("gpt", {"dp": 2, "tp": 2}, {"zero": 3, "microbatches": 2, "recompute": "full"}),
    ("gpt", {"pp": 2, "tp": 2}, {"microbatches": 4, "recompute": "selective"}),
    ("gpt", {"cp": 2}, {"context": "ring"}),
    ("gpt", {"pp": 2}, {"microbatches": 4, "schedule": "zb-h1", "loss_chunks": 3}),
    ("gpt", {"dp": 2}, {"zero": 3, "reshard_after_forward": False, "microbatches": 2}),
    ("gpt", {"dp": 2}, {"zero": 3, "recompute": "auto", "activation_memory_budget": 1e-3}),
    ("cnn", {"pp": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 3}),
    ("mlp", {"pp": 2}, {"microbatches": 4, "schedule": "dualpipe-v", "virtual_stages": 2}),
    ("mixture", {"ep": 2}, {"zero": 3, "zero_axes": ("ep",), "microbatches": 2}),
    ("vit", {"dp": 2}, {"overlap": False, "zero": 3}),
    ("encoder", {"dp": 2}, {"precision": "bf16", "zero": 3, "recompute": "full"}),
    ("gpt", {"dp": 2}, {"precision": "fp16", "zero": 3, "loss_scale": 16.0, "microbatches": 2}),
    ("gpt", {"dp": 2}, {"precision": "fp8", "zero": 3}),
    ("gpt", {"tp": 2}, {"async_tp": True}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "axes", "options"), LAYOUTS, ids=str)
def test_the_bits_are_those_without(name: str, axes: dict[str, int], options: Options) -> None:
    _, expected = stepped(name, axes, options)
    for offload in (PARAMETERS, BOTH):
        program, found = stepped(name, axes, {**options, "offload": offload})
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], x) for key, x in expected.items()), offload
        row = program.simulate().rows[0]
        assert (row.parameter_bytes, row.gradient_bytes) == (0, 0) or any(
            spec.kind == "buffer" for spec in program._primary().program.state.values()
        )


@pytest.mark.slow
def test_parameters_are_on_the_host_once_a_block_and_function() -> None:
    """In a forward, and again in the backward. What a gather needs is there before it starts."""
    program, _ = stepped("gpt", {"dp": 2}, {"zero": 3, "offload": PARAMETERS})
    graph = program._primary().program.source.graph
    copied = Counter(
        (facts(n).phase, n.all_input_nodes[0].name, block_of(n))
        for n in graph.nodes
        if n.target in (copy_in, COPIES[copy_in])
    )
    assert copied and set(copied.values()) == {1}
    read = [n for n in graph.nodes if n.op == "placeholder" and (known := leaf(n)) and known.kind == "parameter"]
    assert all(user.target in (copy_in, COPIES[copy_in]) for n in read for user in n.users)
    gathers = [n for n in graph.nodes if n.target in (gather_together, STARTS[gather_together])]
    assert gathers and any(n.target is STARTS[gather_together] for n in gathers)
    assert any(n.target is COPIES[copy_in] for n in graph.nodes), "no copy runs beside computing"
    kept = program._primary().program.stages[0]
    assert not [name for name in kept.saved if name in {n.name for n in read}]


@pytest.mark.slow
def test_host_memory_is_told() -> None:
    plain, _ = stepped("gpt", {"dp": 2}, {"zero": 3})
    program, _ = stepped("gpt", {"dp": 2}, {"zero": 3, "offload": PARAMETERS})
    before, after = plain.simulate().rows[0], program.simulate().rows[0]
    assert after.host_bytes == before.parameter_bytes + before.gradient_bytes > 0
    assert {"to host", "from host"} <= {event.axis for event in after.events}
    assert program.plan.offload == PARAMETERS and "copy_in(" in program._primary().program.stages[0].forward.code


@pytest.mark.parametrize("zero", [1, 2])
def test_what_is_whole_for_a_step_cannot_be_on_the_host(zero: int) -> None:
    with pytest.raises(CompileError, match="zero=3") as error:
        stepped("mlp", {"dp": 2}, {"zero": zero, "offload": PARAMETERS})
    assert error.value.code == "QN207"
    stepped("mlp", {"dp": 2}, {"zero": 3, "offload": PARAMETERS})


# -- what trains them


class Tied(nn.Module):
    """One weight at both ends, one that is frozen, one that is read through a view, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.middle, self.head = nn.Linear(16, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.table.weight
        self.middle.weight.requires_grad_(False)
        self.scale, self.unread = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.zeros(3))

    def forward(self, ids: Tensor) -> Any:
        x = self.table(ids)
        return self.head(x + self.middle(self.norm(x)) * self.scale.view(16))


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _trained(train: Callable[[quintnet.CompiledProgram, Any], None], offload: tuple[str, ...]) -> list[Tensor]:
    torch.manual_seed(1)
    batch = torch.randint(0, 50, (8, 5)), torch.randint(0, 50, (8, 5))
    program = quintnet.compile(
        Tied(), Mesh(dp=2), batch, loss_fn=_loss, zero=3, microbatches=2, offload=offload,  # type: ignore[arg-type]
    )  # fmt: skip
    train(program, batch)
    return [p.detach().clone() for p in program.parameters()]


def _elementwise(program: quintnet.CompiledProgram, batch: Any) -> None:
    optimizer = torch.optim.AdamW([p for p in program.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        program.step(batch)
        program.step(batch)  # gradients of two steps
        program.clip_grad_norm(0.1)
        optimizer.step()
        optimizer.zero_grad()


def _whole(program: quintnet.CompiledProgram, batch: Any) -> None:
    optimizer = program.optimizer(lambda p: torch.optim.AdamW(p, lr=1e-2))
    for _ in range(3):
        program.step(batch)
        optimizer.step()
        optimizer.zero_grad()


def _kept(program: quintnet.CompiledProgram, batch: Any) -> None:
    program.step(batch)
    gradients = [p.grad for p in program.parameters() if p.grad is not None]
    before = [x.clone() for x in gradients]
    program.zero_grad()
    program.step((batch[0].flip(0), batch[1]))
    assert all(torch.equal(a, b) for a, b in zip(gradients, before, strict=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize("train", [_elementwise, _whole, _kept])
def test_training_gives_the_same_parameters(train: Callable[[quintnet.CompiledProgram, Any], None]) -> None:
    plain, ours = _trained(train, ()), _trained(train, PARAMETERS)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_it_is_equal_to_the_module_and_checkpoints_fit_any_layout(tmp_path: Path) -> None:
    made: dict[tuple[str, ...], list[Tensor]] = {}

    def saved(program: quintnet.CompiledProgram, batch: Any) -> None:
        assert program.verify(batch).ok
        optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
        program.step(batch)
        optimizer.step()
        program.save(tmp_path, step=1, optimizer=optimizer)

    def loaded(program: quintnet.CompiledProgram, batch: Any) -> None:
        optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
        program.load(tmp_path, optimizer=optimizer)
        program.step(batch)
        optimizer.step()

    _trained(saved, PARAMETERS)
    for offload in ((), PARAMETERS):
        made[offload] = _trained(loaded, offload)
    assert all(torch.equal(a, b) for a, b in zip(*made.values(), strict=True))


def test_what_is_not_finite_is_found() -> None:
    def train(program: quintnet.CompiledProgram, batch: Any) -> None:
        with torch.no_grad():
            dict(program.named_parameters())["middle.bias"].fill_(float("nan"))
        with pytest.raises(RunError, match="held nan before"):
            program.step(batch)

    _trained(train, PARAMETERS)


def test_programs_without_training_copy_too() -> None:
    (x,) = (torch.randn(4, 16),)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    program = quintnet.compile(model, Mesh(dp=1), (x,), training=False, offload=PARAMETERS)
    assert torch.equal(program(x), model(x))
    assert program._primary().program.stages[0].forward.code.count("copy_in(") == 4


@pytest.mark.slow
def test_copies_start_a_block_before_the_gather_does() -> None:
    """By prices of six blocks over four GPUs, a step takes little more than without offload: a block's slices have
    left the host when they are gathered, which is while the block before it is computed."""
    size = Size(dim=2048, layers=6, heads=16, kv_heads=16, hidden=8192, vocab=512, sequence=1024)
    mesh, cluster = quintnet.Mesh(dp=4), quintnet.Cluster("h100", gpus_per_node=4)
    with torch.device("meta"):
        model, ids = Llama(size), torch.empty(16, size.sequence, dtype=torch.int64)

    def seconds(*offload: Offloaded) -> float:
        program = quintnet.compile(
            model, mesh, (ids, ids), loss_fn=loss_fn, device="cuda", precision="bf16", zero=3, offload=offload,
            check="off",
        )  # fmt: skip
        return program.simulate(cluster).seconds

    assert seconds("parameters") < 1.25 * seconds()
