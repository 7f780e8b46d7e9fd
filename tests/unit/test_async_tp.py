"""What async tensor parallelism gives to the compiler: a pass, two operators, what ranks run for them, and prices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import quintnet
from quintnet import Mesh
from quintnet_compiler.core.annotations import shape
from quintnet_compiler.cost_models.operators import SizeOfProduct, launches_of, product_size
from quintnet_compiler.driver.pipeline import PIPELINE
from quintnet_compiler.features import FEATURES
from quintnet_compiler.features.async_tp import rank_methods
from quintnet_compiler.features.async_tp.check import check_fused
from quintnet_compiler.features.async_tp.feature import ASYNC_TP
from quintnet_compiler.features.async_tp.fuse_collective_matmuls import FuseCollectiveMatmuls
from quintnet_compiler.features.async_tp.matmul_chains import matmul_of
from quintnet_compiler.features.async_tp.ops import all_gather_matmul, matmul_reduce_scatter
from quintnet_compiler.features.async_tp.prices import all_gather_matmul_size, matmul_reduce_scatter_size
from quintnet_compiler.features.async_tp.ring_matmuls import factors
from quintnet_compiler.features.async_tp.symmetric_memory import kernels_of
from quintnet_compiler.features.feature import RewriteSetting
from quintnet_compiler.ir.codegen_allowlist import check_source
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ops.catalog import collective_of, spec_of
from quintnet_compiler.ops.extensions import extension, extension_of_method
from quintnet_compiler.ops.rules.work import work_of
from quintnet_compiler.runtime.execute.comm import Comm
from quintnet_compiler.runtime.execute.extensions import RankMethod
from quintnet_compiler.runtime.transport.local import LocalTransport, LocalWorld

from .graphs import builder, column, leaf


def test_it_is_listed_and_a_plan_turns_it_on() -> None:
    assert ASYNC_TP in FEATURES
    (rewrite,) = ASYNC_TP.rewrites
    asked, plain = (RewriteSetting(plan, lambda node: 0.0, True, None) for plan in (Plan(async_tp=True), Plan()))
    assert isinstance(rewrite.make(asked, None), FuseCollectiveMatmuls) and rewrite.make(plain, None) is None
    names = [spec.name for spec in PIPELINE]
    assert names.index("FuseCollectiveMatmuls") == names.index("Overlap") + 1


def test_a_gather_and_its_matmul_become_one() -> None:
    source = column()
    targets = [str(node.target) for node in source.graph.nodes]
    assert "quintnet.all_gather.default" in targets
    fused = FuseCollectiveMatmuls()(source)
    check_fused(source, fused)
    targets = [str(node.target) for node in fused.graph.nodes]
    assert "quintnet.all_gather_matmul.default" in targets and "quintnet.all_gather.default" not in targets
    (forward,) = (n for n in source.graph.nodes if n.target is torch.ops.aten.linear.default)
    matmul = matmul_of(forward)
    assert matmul is not None and matmul.transposed and matmul.bias is None and shape(matmul.weight) == (2, 6)


def test_its_operators_say_what_passes_ask() -> None:
    for operator, side in ((all_gather_matmul, "input"), (matmul_reduce_scatter, "result")):
        spec = spec_of(operator)
        assert spec.communicates and spec.on_rank and spec.takes_size and spec.slice_at == side
        assert work_of(operator) == "matmul" and extension(operator, SizeOfProduct) is not None
        assert collective_of(operator._opname) is spec.collective is not None
        assert extension_of_method(operator._opname, RankMethod) is extension(operator, RankMethod) is not None
    assert collective_of("all_gather") is not None and collective_of("linear") is None is collective_of("__init__")


def test_a_product_in_slices_is_priced_as_one_for_each_slice() -> None:
    to = builder()
    x, w, v = leaf(to, "input", "x", 3, 6), leaf(to, "parameter", "w", 4, 6), leaf(to, "parameter", "v", 5, 6)
    gathered = to.call(all_gather_matmul, x, "tp", 2, 0, 1, [w, v], [None, None], [True, True], False)
    y = leaf(to, "input", "y", 8, 4)
    scattered = to.call(matmul_reduce_scatter, [y], "tp", 2, 0, 1, [w], [None], [False])
    assert product_size(gathered) == all_gather_matmul_size(gathered) == (2, 3, 9, 6)
    assert product_size(scattered) == matmul_reduce_scatter_size(scattered) == (2, 4, 6, 4)
    assert launches_of(gathered) == launches_of(scattered) == 2


def test_ranks_multiply_slices_that_travel() -> None:
    """As generated code calls it: by name. There are no kernels for CPUs."""
    x, w = torch.randn(4, 3), torch.randn(5, 3)
    mesh = Mesh(tp=2)

    def work(transport: LocalTransport, rank: int) -> tuple[Tensor, Tensor]:
        comm = Comm(transport, mesh, {"tp": rank})
        part = x[2 * rank : 2 * rank + 2]
        (product,) = comm.all_gather_matmul(part, "tp", 0, 1, [w], [None], [True], False, 0)
        own = slice(None, 1) if rank == 0 else slice(1, None)  # of the contracted dim
        options = [w[:, own]], [None], [True]
        return product, rank_methods.matmul_reduce_scatter(comm, [x[:, own]], "tp", 0, 1, *options, 0)

    world = LocalWorld(mesh, ["here"])
    results = world.run_ranks({rank: lambda t, rank=rank: work(t, rank) for rank in range(2)})  # type: ignore[misc]
    for rank, (whole, part) in results.items():
        torch.testing.assert_close(whole, x @ w.T)
        torch.testing.assert_close(part, (x @ w.T)[2 * rank : 2 * rank + 2])
    assert kernels_of(None, torch.device("cpu")) is None  # type: ignore[arg-type]
    assert factors([w], [None], [True])[0].matrix.shape == (3, 5)


def test_a_rank_has_methods_of_operators_alone() -> None:
    comm = Comm(LocalWorld(Mesh(), ["here"]).transport(0), Mesh(), {})
    with pytest.raises(AttributeError, match="Comm has no linear"):
        comm.linear  # noqa: B018
    with pytest.raises(quintnet.CompileError, match=r"may not contain 'comm\.linear'"):
        check_source("def forward(self, args):\n  comm, x, = args\n  args.clear()\n  y = comm.linear(x)\n  return (y,)")
