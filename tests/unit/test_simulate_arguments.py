"""Whatever is given to ``simulate`` and is nothing that it can use is refused before anything runs, with a fix."""

from __future__ import annotations

import dataclasses
import functools
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quintnet
from quintnet import CompiledProgram, CompileError, Faults, Mesh, textbook
from quintnet_compiler.core.errors import describe_value
from quintnet_compiler.textbook.given import check_programs

NAN, INF, HUGE = float("nan"), float("inf"), 10**5000
# no number above 0 that a float holds
NO_FACTORS = [
    0, -1, -2.5, NAN, INF, -INF, True, False, None, "2", b"2", 1j, [2.0], (2.0,), {}, object(), float, 10**400, HUGE,
    Decimal(2), np.bool_(True), np.array(2.0), np.float64(NAN), np.float32(-1), np.float16(INF), torch.tensor(2.0),
    torch.tensor([1.0, 2.0]), torch.tensor(NAN),
]  # fmt: skip
FACTORS = [2, 2.0, Fraction(2), np.float64(2), np.float32(2), np.int8(2)]
# no rank of a mesh of four
NO_RANKS = [
    -1, 4, HUGE, True, False, None, 0.0, 1.5, NAN, INF, "1", b"1", 1j, (1,), object(), np.bool_(False), np.float64(1),
    np.int64(4), torch.tensor(1),
]  # fmt: skip
NO_LINKS = [0, "01", b"01", (), (0,), (0, 1, 2), (0, 3), (1, 1), None, NAN, frozenset((0, 1)), torch.tensor([0, 1])]
NO_MAPPINGS = [None, 0, True, "0", [(0, 2.0)], (0, 2.0), {0}, dict, np.array([2.0]), torch.ones(4)]
NO_FAULTS = [0, 1, False, True, "", "slow", (), [], {}, {0: 2.0}, [Faults()], Faults, NAN, np.float64(2), torch.ones(1)]
NO_COSTS = ["h100", "", 0, 1.0, True, False, NAN, (), [], {}, quintnet.Cluster, Mesh(dp=2), Faults(), object(),
            np.float64(1), torch.ones(1), quintnet.Plan]  # fmt: skip


def _name(given: object) -> str:
    """Without addresses: processes that share tests must give them equal names."""
    return re.sub(r" at 0x\w+", "", describe_value(given))


@functools.cache
def _program() -> CompiledProgram:
    batch = torch.randn(8, 4), torch.randn(8, 4)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return quintnet.compile(module, Mesh(pp=2, dp=2), batch, loss_fn=nn.functional.mse_loss, microbatches=2)


def _refused(argument: str, given: Any, **arguments: Any) -> str:
    """The fix of a refusal, which names the argument and what was given."""
    with pytest.raises(CompileError) as caught:
        _program().simulate(**arguments)
    assert caught.value.code == "QN201" and argument in caught.value.message
    assert given is None or given in caught.value.message
    assert caught.value.fix
    return caught.value.fix


@pytest.mark.parametrize("given", NO_FACTORS, ids=_name)
def test_no_factor(given: Any) -> None:
    for faults, name in ((Faults({1: given}), "slow_ranks"), (Faults({}, {(0, 1): given}), "slow_links")):
        assert "such as 1.5" in _refused(name, describe_value(given), faults=faults)


@pytest.mark.parametrize("given", FACTORS, ids=_name)
def test_a_factor_of_any_kind_of_number_is_the_same(given: Any) -> None:
    slow = _program().simulate(faults=Faults({1: given}, {(0, 1): given}))
    assert slow.to_json() == _program().simulate(faults=Faults({1: 2.0}, {(0, 1): 2.0})).to_json()
    assert _program().simulate(faults=Faults({np.int64(1): 2.0})).seconds > _program().simulate().seconds


@pytest.mark.parametrize("given", NO_RANKS, ids=_name)
def test_no_rank(given: Any) -> None:
    for faults, name in (
        (Faults({given: 2.0}), "slow_ranks"),
        (Faults({}, {(given, 0): 2.0}), "slow_links"),
        (Faults({}, {(0, given): 2.0}), "slow_links"),
    ):
        assert _refused(name, None, faults=faults) == "name ranks by ints from 0 to 3"


@pytest.mark.parametrize("given", NO_LINKS, ids=_name)
def test_no_link(given: Any) -> None:
    fix = _refused("slow_links", None, faults=Faults({}, {given: 2.0}))
    found = re.search(r"\((\d), (\d)\)", fix)
    assert found is not None
    _program().simulate(faults=Faults({}, {(int(found[1]), int(found[2])): 2.0}))


def test_a_mesh_of_one_rank_has_no_links() -> None:
    with pytest.raises(CompileError, match="leave slow_links out"):
        Faults({}, {(0, 0): 2.0}).checked(Mesh(dp=1))


@pytest.mark.parametrize("given", NO_MAPPINGS, ids=_name)
def test_no_mapping(given: Any) -> None:
    assert "slow_ranks={0: 1.5}" in _refused("slow_ranks", describe_value(given), faults=Faults(given))
    assert "slow_links={(0, 1): 1.5}" in _refused("slow_links", describe_value(given), faults=Faults({}, given))


@pytest.mark.parametrize("given", NO_FAULTS, ids=_name)
def test_no_faults(given: Any) -> None:
    """What is false in Python is not taken for none."""
    assert "quintnet.Faults(slow_ranks={0: 1.5})" in _refused("faults", describe_value(given), faults=given)


@pytest.mark.parametrize("given", NO_COSTS, ids=_name)
def test_no_costs(given: Any) -> None:
    assert 'quintnet.Cluster("h100")' in _refused("costs", describe_value(given), costs=given)


def test_a_cluster_with_too_few_devices() -> None:
    with pytest.raises(CompileError, match=r"(?s)QN301.*1 devices.*Mesh\(pp=2, dp=2\) has 4 ranks") as caught:
        _program().simulate(quintnet.Cluster("h100", 1, 1))
    assert caught.value.fix == "use a cluster of 4 nodes or more"
    assert _program().simulate(quintnet.Cluster("h100", 4, 1)).seconds > 0


# -- the textbook's

STEPS = [textbook.Compute("work", 1e9, 0.0, "F", 0), textbook.Send(0, 1e6), textbook.Receive(0),
         textbook.Collective("all_reduce", (0,), 1e6, background=True), textbook.Wait(""), textbook.Hold("x", 1.0),
         textbook.Release("x")]  # fmt: skip
ODD = [-1, NAN, INF, "1", None, True, 1j, [], (), (0, 0), (True,), ("0",), HUGE, torch.tensor(1.0), np.array([1, 2]),
       np.float64(NAN), object()]  # fmt: skip
FITTING: dict[str, tuple[Any, ...]] = {
    "background": (True,), "memory_bytes": (INF,), "between": (None,), "microbatch": (-1, HUGE),
    **dict.fromkeys(("name", "kind", "axis"), ("1",)),
}  # fmt: skip


@pytest.mark.parametrize("given", ODD, ids=_name)
def test_no_field_of_a_step_or_a_machine_takes_anything(given: Any) -> None:
    for whole in (*STEPS, textbook.Machine(1), textbook.Link(0.0, 1.0)):
        for field in dataclasses.fields(whole):
            if not any(given is one for one in FITTING.get(field.name, ())):
                with pytest.raises(CompileError) as caught:
                    step = dataclasses.replace(whole, **{field.name: given})
                    quintnet.simulate([[step]], step if isinstance(step, textbook.Machine) else textbook.Machine(1))
                assert caught.value.code == "QN201" and field.name in caught.value.message and caught.value.fix


@pytest.mark.parametrize("given", [None, 0, True, "a", b"a", {}, NAN, textbook.Machine, torch.ones(1)], ids=_name)
def test_no_program_and_no_machine(given: Any) -> None:
    machine = textbook.Machine(1)
    calls = [(given, machine, "x"), ([given], machine, "x"), ([[given]], machine, "x"), ([[]], given, "x")]
    calls += [] if isinstance(given, str) else [([[]], machine, given)]
    for arguments in calls:
        with pytest.raises(CompileError) as caught:
            quintnet.simulate(*arguments)
        assert caught.value.code == "QN201" and caught.value.fix
    check_programs([STEPS], machine, "good")
