"""The record of all that this feature gives to the compiler."""

from __future__ import annotations

from ...cost_models.operators import SizeOfProduct
from ...ir.program import DifferentiatedProgram
from ...passes.overlap.overlap import Overlap
from ...runtime.execute.extensions import RankMethod
from ..feature import Feature, Rewrite, RewriteSetting
from . import rank_methods
from .check import check_fused
from .fuse_collective_matmuls import FuseCollectiveMatmuls
from .ops import all_gather_matmul, matmul_reduce_scatter
from .prices import all_gather_matmul_size, matmul_reduce_scatter_size


def _fuse(setting: RewriteSetting, program: DifferentiatedProgram) -> FuseCollectiveMatmuls | None:
    return FuseCollectiveMatmuls() if setting.plan.async_tp else None


ASYNC_TP = Feature(
    "async_tp",
    operators={
        all_gather_matmul: (RankMethod(rank_methods.all_gather_matmul), SizeOfProduct(all_gather_matmul_size)),
        matmul_reduce_scatter: (
            RankMethod(rank_methods.matmul_reduce_scatter),
            SizeOfProduct(matmul_reduce_scatter_size),
        ),
    },
    rewrites=(
        Rewrite(
            FuseCollectiveMatmuls,
            "which collectives run slice by slice with matmuls (async TP)",
            Overlap,  # which hides collectives behind other work, at no cost
            _fuse,
            check_fused,
        ),
    ),
    plan_fields=("async_tp",),
)
