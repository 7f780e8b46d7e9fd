"""Models that are wrapped already: by torch.compile they train as plain; other wrappers are named, with what to use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import quintnet
from quintnet import Mesh

from .each_layout import LAYOUTS, train_as_plain

torch.set_num_threads(1)
X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 3, 2, 4, 1, 1, 0, 4])


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def _part_compiled(model: nn.Sequential) -> nn.Module:
    model[0] = torch.compile(model[0])  # type: ignore[assignment]
    return model


def _in_place(model: nn.Sequential) -> nn.Module:
    model.compile()
    return model


COMPILED: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "whole": lambda model: torch.compile(model),  # type: ignore[return-value]
    "part": _part_compiled,
    "in place": _in_place,
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", COMPILED)
def test_models_of_torch_compile_train_as_plain(how: str, layout: str) -> None:
    sizes, options = LAYOUTS[layout]
    program = quintnet.compile(COMPILED[how](_model()), Mesh(**sizes), (X, Y), loss_fn=F.cross_entropy, **options)
    plain = _model()
    expected = F.cross_entropy(plain(X), Y)
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(program.step((X, Y)), expected.detach(), rtol=1e-9, atol=1e-9)
    for (name, mine), theirs in zip(program.named_parameters(), plain.parameters(), strict=True):
        whole = mine.grad.full_tensor()  # type: ignore[union-attr]
        torch.testing.assert_close(whole, theirs.grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.fixture
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _sharded(model: nn.Sequential) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


WRAPPED: dict[str, tuple[Callable[[nn.Sequential], nn.Module], str]] = {
    "DataParallel": (nn.DataParallel, r"the model is wrapped by DataParallel.*its \.module: Mesh\(dp=\.\.\.\)"),
    "DDP": (DistributedDataParallel, r"model is wrapped by DistributedDataParallel.*its \.module: Mesh\(dp=\.\.\.\)"),
    "part": (lambda m: nn.Sequential(m[0], DistributedDataParallel(m[2])), "1 is wrapped by DistributedDataParallel"),
    "FSDP": (_sharded, r"wrapped by FullyShardedDataParallel.*was before: Mesh\(dp=\.\.\.\) with zero=3"),
    "fully_shard": (
        lambda m: fully_shard(m, mesh=init_device_mesh("cpu", (1,))),
        r"wrapped by fully_shard.*was before: Mesh\(dp=\.\.\.\) with zero=3",
    ),
    "tensor parallel": (
        lambda m: parallelize_module(m, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()}),
        r"0\.weight is a DTensor, as parallelize_module.*was before: Mesh\(tp=\.\.\.\).*parameters=",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_other_wrappers_are_named(wrapper: str) -> None:
    wrap, text = WRAPPED[wrapper]
    model = wrap(_model())
    with pytest.raises(quintnet.QuintNetError, match=f"(?s)QN105.*{text}"):
        quintnet.compile(model, Mesh(dp=2), (X, Y), loss_fn=F.cross_entropy)
    with pytest.raises(quintnet.QuintNetError, match=f"(?s)QN105.*{text}"):
        quintnet.plan(model, quintnet.Cluster("h100", nodes=1), (X, Y), loss_fn=F.cross_entropy)


def test_what_the_errors_say_works() -> None:
    module = nn.DataParallel(_model()).module
    assert isinstance(module, nn.Module)
    train_as_plain(module, "dp2", [(X, Y)], F.cross_entropy)
    train_as_plain(_model(), "dp2", [(X, Y)], F.cross_entropy, zero=3)
    train_as_plain(_model(), "tp2", [(X, Y)], F.cross_entropy, parameters={"0.weight": {"tp": "S(0)"}})
