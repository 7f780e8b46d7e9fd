"""Random numbers for DTensors are this rank's part of those for the whole tensor; what gradients of stages may give."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from quintnet_compiler.compat.distributed import interleaved_shard
from quintnet_compiler.core.errors import RunError
from quintnet_compiler.dtensors.local_values import mark_stage_gradients, read_and_draw_whole_dtensors

DRAWS: list[Callable[[Tensor], Tensor]] = [
    torch.randn_like,
    torch.rand_like,
    lambda x: torch.randint_like(x, 2, 9),
    lambda x: x.normal_(1.0, 2.0),
    lambda x: nn.init.uniform_(x, -1.0, 3.0),
    lambda x: x.bernoulli_(0.3),
    lambda x: x.exponential_(generator=torch.Generator().manual_seed(3)),
]


@pytest.fixture(params=[0, 1])
def mesh(request: pytest.FixtureRequest) -> Iterator[tuple[int, DeviceMesh]]:
    """Yield a rank of two, and their mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    yield request.param, init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "kind, parts",
    [
        (Shard(0), [[0, 1, 2], [3, 4]]),
        (Replicate(), [[0, 1, 2, 3, 4]] * 2),
        (interleaved_shard(0, 2), [[0, 2], [1, 3]]),
    ],
    ids=["rows", "whole", "two parts"],
)
def test_numbers_are_those_of_the_whole_tensor(kind: Any, parts: list[list[int]], mesh: tuple[int, DeviceMesh]) -> None:
    read_and_draw_whole_dtensors()
    rank, devices = mesh
    rows = parts[rank]
    whole = torch.zeros(len({*parts[0], *parts[1]}), 3)
    for draw in DRAWS:
        x = DTensor.from_local(whole[rows], devices, [kind], run_check=False, shape=whole.shape, stride=whole.stride())
        torch.manual_seed(0)
        expected, state = draw(whole.clone()), torch.get_rng_state()
        torch.manual_seed(0)
        drawn = draw(x)
        assert isinstance(drawn, DTensor) and torch.equal(drawn.to_local(), expected[rows])
        assert torch.equal(torch.get_rng_state(), state)


def _stage_gradients(devices: DeviceMesh, *shapes: tuple[int, ...]) -> list[DTensor]:
    random = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=random) for shape in shapes]
    gradients = [DTensor.from_local(part, devices, [Replicate()], run_check=False) for part in parts]
    mark_stage_gradients({f"parameter {number}": x for number, x in enumerate(gradients)})
    return gradients


def test_random_numbers_for_a_tensor_of_some_ranks_are_refused() -> None:
    read_and_draw_whole_dtensors()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    stages = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))
    weight = DTensor.from_local(torch.zeros(2, 3), stages["tp"], [Replicate()], run_check=False)
    with pytest.raises(RunError, match=r"QN113(.|\n)*would draw those of all stages"):
        nn.init.uniform_(weight)
    dist.destroy_process_group()


def _added(gradients: list[Any]) -> Any:
    total = 0.0
    for gradient in gradients:
        total = total + (gradient.detach() ** 2).sum()
    return total


def _added_in_place(gradients: list[Any]) -> Any:
    total = torch.zeros_like(gradients[0].sum())
    for gradient in gradients:
        total.add_(gradient.data.abs().max())
    return total


def _plain_total(gradients: list[Any]) -> Any:
    return torch.zeros_like(DTensor.from_local(torch.zeros(()), gradients[0].device_mesh, [Replicate()]))


def _added_to_a_plain_total(gradients: list[Any]) -> Any:
    total = _plain_total(gradients)
    for gradient in gradients:
        total += gradient.norm() ** 2
    return float(total)


def _added_as_lists(gradients: list[Any]) -> Any:
    total = _plain_total(gradients)
    for gradient in gradients:
        torch._foreach_add_([total], [gradient.norm()])
    return float(total)


def _written_to_a_plain_vector(gradients: list[Any]) -> Any:
    norms = torch.stack([_plain_total(gradients)] * len(gradients))
    for number, gradient in enumerate(gradients):
        norms[number] = gradient.norm()
    return float(norms.norm())


OF_ALL: dict[str, Callable[[list[Any]], Any]] = {
    "stacked norms": lambda gradients: torch.stack([x.norm() for x in gradients]).norm(),
    "norms of a list": lambda gradients: torch.stack(torch._foreach_norm(gradients)).max(),
    "flat": lambda gradients: torch.cat([x.reshape(-1) for x in gradients]).clone().mean(),
    "added": _added,
    "added in place": _added_in_place,
    "added to a plain total": _added_to_a_plain_total,
    "added as lists": _added_as_lists,
    "written to a plain vector": _written_to_a_plain_vector,
    "largest": lambda gradients: max(x.abs().max() for x in gradients),
    "finite": lambda gradients: all(torch.isfinite(x).all() for x in gradients),
    "equal": lambda gradients: all(torch.equal(x, 0 * x) for x in gradients),
    "allclose": lambda gradients: all(x.allclose(0 * x) for x in gradients),
    "list": lambda gradients: sum(sum(x.flatten().tolist()) for x in gradients),
    "numbers": lambda gradients: sum(x.norm().item() ** 2 for x in gradients),
    "whole numbers": lambda gradients: sum(x.norm().full_tensor() for x in gradients),
    "get_total_norm": nn.utils.get_total_norm,
}


@pytest.mark.parametrize("shapes", [((2, 3), (4,)), ((2, 3),)], ids=["two", "one"])
@pytest.mark.parametrize("combine", OF_ALL.values(), ids=OF_ALL)
def test_a_number_of_all_gradients_of_a_stage_is_refused(
    combine: Callable[[list[Any]], Any], shapes: tuple[tuple[int, ...], ...], mesh: tuple[int, DeviceMesh]
) -> None:
    read_and_draw_whole_dtensors()
    with pytest.raises(RunError, match=r"QN113(.|\n)*program\.grad_norm"):
        combine(_stage_gradients(mesh[1], *shapes))


def test_what_is_done_with_each_gradient_of_a_stage_is_allowed(mesh: tuple[int, DeviceMesh]) -> None:
    read_and_draw_whole_dtensors()
    shapes = (2, 3), (4,), (1,)
    gradients = _stage_gradients(mesh[1], *shapes)
    plain = [x.to_local().clone() for x in gradients]
    state = [torch.zeros_like(x) for x in gradients]
    for tensors, averages in ((gradients, state), (plain, [torch.zeros_like(x) for x in plain])):
        for x, average in zip(tensors, averages, strict=True):
            x.mul_(2 / (1 + x.norm())).sub_(x.mean(dim=0, keepdim=True))
            average.lerp_(x, 0.5)
        torch._foreach_mul_(tensors, 3.0)
        flat = torch.cat([x.reshape(-1) for x in tensors]).sign()
        for x, sign in zip(tensors, flat.split([6, 4, 1]), strict=True):
            x.add_(sign.view_as(x))
    for x, expected in zip(gradients, plain, strict=True):
        assert torch.equal(x.full_tensor(), expected) and torch.equal(
            pickle.loads(pickle.dumps(x)).to_local(), expected
        )
    assert gradients[2].item() == plain[2].item()


def test_a_stored_gradient_of_a_stage_is_a_dtensor(mesh: tuple[int, DeviceMesh]) -> None:
    (gradient,) = _stage_gradients(mesh[1], (2, 3))
    assert type(pickle.loads(pickle.dumps(gradient.clone()))) is DTensor
