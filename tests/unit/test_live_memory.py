"""Memory of messages between processes, on tensors without values; and who counts as having gradients."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import quintnet
from quintnet_compiler.compat.torch import storage_key
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.simulation.live_memory import LiveMemory
from quintnet_compiler.simulation.rehearsal import rehearse
from quintnet_compiler.simulation.silent_transport import SilentTransport

MESH = Mesh(dp=2)


def _numbers(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64)


def test_a_message_holds_what_it_sends_and_what_arrives_until_it_is_waited_for() -> None:
    """Two parts of 3 and 5 numbers go as one message of 8; of both ranks, 16 arrive; results are copies of these."""
    memory, transport = LiveMemory((), ()), SilentTransport(MESH, 0)
    xs = [_numbers(3), _numbers(5)]
    for x in xs:
        memory.use(x)
    memory.note()
    assert memory.fresh == 64
    begun, passed = memory.communicate(
        lambda *xs: transport.start("gather_together", *xs), (xs, "dp", [0, 0], [1, 1], 0)
    )
    assert not passed and memory.fresh == 64 + 64 + 128  # the arguments are the caller's still
    for x in xs:
        memory.drop(storage_key(x))
    del xs, x
    assert memory.fresh == 64 + 128
    made, passed = memory.communicate(begun, ())
    for x in made:
        memory.use(x)
    for where in passed:
        memory.drop(where)
    memory.note()
    assert memory.fresh == 128 + 128 and memory.working == 64 + 64 + 128
    del begun
    assert memory.fresh == 128 and [len(x) for x in made] == [6, 10]


@pytest.mark.slow
def test_what_a_message_reads_lives_as_long_as_it() -> None:
    """An argument that the caller lets go: dynamic ones are counted as freed when the message ends."""
    memory, transport, x = LiveMemory((), ()), SilentTransport(MESH, 1), _numbers(4)
    own = LiveMemory((storage_key(x),), (storage_key(x),))
    for one in (memory, own):
        one.use(x)
        begun, _ = one.communicate(lambda *xs: transport.start("all_gather", *xs), (x, "dp", 0, 1, 0))
        one.drop(storage_key(x))
        assert one.fresh == (64 if one is own else 32 + 64) and one.released == 0
        made, passed = one.communicate(begun, ())
        del begun
        one.use(made)
        for where in passed:
            one.drop(where)
        assert one.fresh == 64 and one.released == (32 if one is own else 0)
        del made
        gc.collect()


def test_sums_in_place_take_nothing_and_others_a_copy() -> None:
    for name, more in (("all_reduce_", 0), ("all_reduce", 32)):
        memory, transport, x = LiveMemory((), ()), SilentTransport(MESH, 0), _numbers(4)
        memory.use(x)
        made, passed = memory.communicate(lambda *xs, n=name, t=transport: t.run(n, *xs), (x, "dp", 0))
        assert memory.fresh == 32 + more and passed == [storage_key(made)]
        memory.note(inside=100)
        assert memory.working == 32 + more + 100


def test_a_pipeline_keeps_the_memory_of_gradients() -> None:
    """Whoever has a gradient of the step before is told from references: nobody has one of a new executor."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        batch = torch.randn(4, 8), torch.randn(4, 8)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        program = quintnet.compile(model, Mesh(pp=2), batch, loss_fn=F.mse_loss, check="off")
        made = program._state()._new_process(program._primary().program, True)  # type: ignore[attr-defined]
        assert made.handover.gradients and not made.handover.kept
        one = made.handover.gradients[-1]
        assert made.handover.kept
        del one
        assert not made.handover.kept
    finally:
        dist.destroy_process_group()


def test_no_variable_keeps_what_a_message_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's gradients are scattered when those of the block behind it are added up, and gone."""
    held: list[int] = []
    communicate = LiveMemory.communicate

    def noted(memory: LiveMemory, call: Any, args: Any, **how: Any) -> Any:
        if "scatter_together" in str(call) and args:  # at its start
            held.append(sum(memory.held.values()))
        return communicate(memory, call, args, **how)

    monkeypatch.setattr(LiveMemory, "communicate", noted)
    batch = torch.randn(4, 8), torch.randn(4, 8)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    program = quintnet.compile(model, MESH, batch, loss_fn=F.mse_loss, zero=2, check="off")
    rehearse(program._primary().program)
    assert held and not any(held)
