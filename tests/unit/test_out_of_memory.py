"""A step without memory says in which operator and line it was, what was alive, and what other options need."""

from __future__ import annotations

import re
from typing import NoReturn

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.api.memory_estimates import LONGEST, with_estimates
from quintnet_compiler.core.errors import RunError
from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts
from quintnet_compiler.runtime.execute.out_of_memory import with_operator

COLUMNS = 2**44  # float32 of so many columns: more than any host has addresses for


class Widened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        wide = hidden[:, :, None].expand(-1, -1, COLUMNS) * 2.0  # the line
        return self.down(wide[:, :, 0]).square().mean()


def _failed() -> tuple[quintnet.CompiledProgram, RunError]:
    batch = (torch.ones(4, 8),)
    program = quintnet.compile(Widened(), quintnet.Mesh(), batch, microbatches=2, check="off")
    with pytest.raises(RunError) as caught:
        program.step(batch)
    return program, caught.value


def test_the_cpus_allocator_fails_in_an_operator() -> None:
    _, error = _failed()
    text = str(error)
    assert error.code == "QN405" and "rank 0 in step 0" in text and "can't allocate memory" in text
    assert "in `mul = torch.mul(expand, 2.0)`, forward of stage 0, microbatch 0, which asked for 8192.00 TiB" in text
    assert error.where is not None and error.where.source.endswith("* 2.0  # the line")
    # 2 weights and 2 biases; of 2 rows, what was computed before: 64 numbers for gelu's backward, 64 for the product
    assert "parameters and buffers 4.28 KiB" in text and "within this function 1.00 KiB" in text
    assert "2.00 KiB: parameter or buffer up.weight, float32[64, 8]" in text
    assert re.search(r"512 B: %linear \(up  \S*test_out_of_memory.py:\d+: hidden.*\), float32\[2, 64\]", text)
    assert isinstance(error.__cause__, RunError) and isinstance(error.__cause__.__cause__, RuntimeError)


def test_options_are_compiled_and_simulated_before_they_are_named() -> None:
    program, error = _failed()
    wide = 2 * 64 * COLUMNS * 4  # of the 2 rows of a microbatch
    assert f"the fullest rank needs {2 * wide / 2**40:.2f} TiB on rank" in error.message  # and its gradient
    assert f"{wide / 2**40:.2f} TiB with microbatches=4\n" in error.message
    assert "TiB with recompute='full'" in error.message and "zero=3" not in error.message  # there is no dp
    bare = RunError("QN405", "no memory")
    costs = ClusterCosts(Cluster("h100", nodes=1), unknown="memory")

    def refuse(option: object) -> NoReturn:
        raise quintnet.CompileError("QN207", str(option))

    known = program._primary().program
    slow = with_estimates(bare, known, program.plan, refuse, costs, LONGEST + 1)
    assert slow.message.startswith("no memory\n  by the program's own estimate") and " with " not in slow.message
    assert with_estimates(bare, known, program.plan, refuse, costs, 0.0).message == slow.message  # none can be compiled


@torch.library.custom_op("quintnet_tests::greedy", mutates_args=())
def greedy(x: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB")


@greedy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Greedy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return greedy(self.head(x))


def test_an_accelerators_error_names_operator_and_size() -> None:
    x, rule = torch.ones(4, 8), quintnet.rule(torch.ops.quintnet_tests.greedy.default, "... -> ...")
    program = quintnet.compile(Greedy(), quintnet.Mesh(), (x,), training=False, check="off", rules=[rule])
    with pytest.raises(RunError) as caught:
        program(x)
    text = str(caught.value)
    assert caught.value.code == "QN405" and "greedy" in text and "which asked for 2.00 GiB" in text
    assert "return greedy(self.head(x))" in text and "own estimate" not in text


def test_without_a_traceback_what_was_alive_is_told() -> None:
    x = torch.ones(4, 8)
    program = quintnet.compile(nn.Linear(8, 8), quintnet.Mesh(), (x,), training=False)
    program(x)
    state = {"weight": torch.ones(8, 8), "tied": torch.ones(1)}
    state["tied"] = state["weight"].view(64)  # the same memory
    executor = next(iter(program._state().worlds.values())).ranks[0].executor  # type: ignore[attr-defined]
    told = with_operator(RuntimeError("std::bad_alloc"), RunError("QN405", "no memory"), executor, state).message
    assert "alive on this rank: parameters and buffers 256 B" in told and "tied" not in told
