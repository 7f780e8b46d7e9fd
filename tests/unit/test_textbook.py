"""Textbook programs take the time that textbooks say."""

from __future__ import annotations

import pytest

import quintnet
from quintnet_compiler.schedules.kinds import SCHEDULES
from quintnet_compiler.textbook import (
    Collective,
    Compute,
    Hold,
    Link,
    Machine,
    Receive,
    Send,
    Wait,
    data_parallel,
    expert_parallel,
    one_device,
    pipeline,
    ring_all_reduce,
    ring_attention,
    simulate,
    tensor_parallel,
)

FAST = Link(1e-12, 1e18)


def test_one_device_computes_one_thing_after_another() -> None:
    found = simulate(one_device(4, 1e9, activation=100.0), Machine(1, 1e12))
    assert found.seconds == pytest.approx(3 * 4e-3)
    assert found.bubble == pytest.approx(0.0)
    assert found.peak.bytes == 400  # at the end of the forward


@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_an_all_reduce_is_two_times_around_the_ring(ranks: int) -> None:
    machine = Machine(ranks, link=Link(2e-6, 1e9), topology="ring")
    by_hand = 2 * (ranks - 1) * (2e-6 + 1e6 / ranks / 1e9)
    assert simulate(ring_all_reduce(ranks, 1e6), machine).seconds == pytest.approx(by_hand)
    whole = [[Collective("all_reduce", tuple(range(ranks)), 1e6)]] * ranks
    assert simulate(whole, machine).seconds == pytest.approx(by_hand)


def test_data_parallel_sums_hide_behind_the_backward() -> None:
    machine = Machine(4, 1e12, Link(1e-6, 1e9))
    apart = simulate(data_parallel(4, 8, 4e9, 2e5, overlap=False), machine)
    beside = simulate(data_parallel(4, 8, 4e9, 2e5), machine)
    sums = 8 * machine.collective_seconds("all_reduce", 2e5, range(4))
    assert apart.seconds == pytest.approx(8 * 3e-3 + sums)
    assert beside.seconds == pytest.approx(8 * 3e-3 + sums / 8)  # the last one has nothing left to hide behind
    assert apart.exposed["dp"] == pytest.approx(sums)


def test_tensor_parallel_waits_for_every_sum() -> None:
    machine = Machine(2, 1e12, Link(1e-6, 1e9))
    found = simulate(tensor_parallel(2, 3, 1e9, 1e4), machine)
    sums = 12 * machine.collective_seconds("all_reduce", 1e4, (0, 1))
    assert found.seconds == pytest.approx(3 * 3 * 1e-3 / 2 + sums)
    assert found.exposed["tp"] == pytest.approx(sums)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubbles_and_memory_of_pipelines(name: str) -> None:
    p, m = 4, 8
    found = simulate(pipeline(SCHEDULES[name](p, m, 1), 1.0, 2.0, 10.0), Machine(p, link=FAST))
    assert found.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert found.rows[0].peak_held == 10 * (m if name == "gpipe" else p)


def test_zero_bubble_is_a_third() -> None:
    found = simulate(pipeline(SCHEDULES["zb-h1"](4, 8, 1), 1.0, 2.0, 1.0), Machine(4, link=FAST))
    assert found.bubble == pytest.approx(3 / (3 * 8 + 3))


def test_a_ring_of_keys_hides_behind_attention_or_not() -> None:
    slow, fast = Link(0.0, 1e9), Link(0.0, 1e12)
    attention = simulate(ring_attention(4, 16e9, 1e5), Machine(4, 1e12, fast)).seconds
    assert attention == pytest.approx(4e-3)  # 1/16 of it at a time
    assert simulate(ring_attention(4, 16e9, 1e7), Machine(4, 1e12, slow)).seconds > 3 * 1e-2


def test_the_most_popular_expert_decides() -> None:
    machine = Machine(2, 1e12, FAST)
    even = simulate(expert_parallel([[50, 50], [50, 50]], 1e7, 100.0), machine)
    uneven = simulate(expert_parallel([[90, 10], [90, 10]], 1e7, 100.0), machine)
    assert uneven.seconds / even.seconds == pytest.approx(1.8, rel=1e-3)
    assert uneven.rows[1].busy_seconds == pytest.approx(20 * 1e-5)


def test_nodes_are_joined_by_slower_links() -> None:
    machine = Machine(4, link=Link(1e-6, 1e11), between=Link(5e-6, 1e9), node=2)
    assert machine.joins(0, 1).bytes_per_second == 1e11
    assert machine.joins(1, 2).seconds == 5e-6
    inside = machine.collective_seconds("all_gather", 1e6, (0, 1))
    assert machine.collective_seconds("all_gather", 1e6, (0, 2)) > 50 * inside


def test_mistakes_are_explained() -> None:
    machine = Machine(2, memory_bytes=100.0)
    with pytest.raises(quintnet.CompileError, match=r"rank 0 waits in Receive\(source=1"):
        simulate([[Receive(1)], [Receive(0)]], machine)
    with pytest.raises(quintnet.CompileError, match=r"rank 1 is in Collective\(kind='all_gather'"):
        simulate([[Collective("all_reduce", (0, 1), 8.0)], [Collective("all_gather", (0, 1), 8.0)]], machine)
    with pytest.raises(quintnet.CompileError, match="rank 0 needs 150 B for a, b, and its device has 100 B"):
        simulate([[Hold("a", 90.0), Hold("b", 60.0)], []], machine)
    with pytest.raises(quintnet.CompileError, match="no price for the collective 'gossip'"):
        simulate([[Collective("gossip", (0, 1), 8.0)]] * 2, machine)
    with pytest.raises(quintnet.CompileError, match="1 programs for 2 ranks"):
        simulate([[]], machine)


def test_a_program_by_hand_and_its_picture() -> None:
    everyone = (0, 1)
    first = [
        Collective("all_reduce", everyone, 1e9, "big", background=True),
        Compute("meanwhile", seconds=0.5),
        Wait("big"),
        Send(1, 1e6),
    ]
    second = [Collective("all_reduce", everyone, 1e9, "big", background=True), Receive(0), Wait("big")]
    found = quintnet.simulate([first, second], Machine(2, link=Link(0.0, 1e9)))
    assert found.seconds == pytest.approx(1.0 + 1e-3)
    assert "meanwhile" in found.svg()
    assert found.rows[0].busy_seconds == pytest.approx(0.5)
