"""Pictures of DTensors, and what notebooks show, without processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import quintnet
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.dump.notebook import MOST_ROWS, program_figure, state_rows, waiting_figure
from quintnet_compiler.runtime.state.dtensor_parts import dtensor_parts


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=6)
    yield init_device_mesh("cpu", (3, 2), mesh_dim_names=("rows", "columns"))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("placements", "types"),
    [
        ((Shard(0), Shard(1)), {"rows": "S(0)", "columns": "S(1)"}),
        ((Shard(0), Shard(0)), {"rows": "S(0)", "columns": "S(0)"}),
        ((Replicate(), Shard(1)), {"rows": "R", "columns": "S(1)"}),
        ((Partial(), Replicate()), {"rows": "P", "columns": "R"}),
        ((Replicate(), _StridedShard(0, split_factor=2)), {"rows": "R", "columns": "S(0,2)"}),
    ],
)
def test_parts_of_a_dtensor_are_what_it_is_made_of(
    mesh: DeviceMesh, placements: tuple[Placement, ...], types: dict[str, str]
) -> None:
    """Sizes that do not divide, too: 7 rows on three ranks."""
    rows = 8 if isinstance(placements[1], _StridedShard) else 7
    whole = torch.arange(rows * 4).reshape(rows, 4)
    x = DTensor.from_local(whole[:1], mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    found = dtensor_parts(x)
    assert found is not None and found.types == types
    assert sorted(rank for _, ranks in found.parts for rank in ranks) == list(range(6))
    for indices, ranks in found.parts:
        for rank in ranks:
            held = whole  # cut by hand, as torch.chunk does
            for place, count, kind in zip(divmod(rank, 2), (3, 2), placements, strict=True):
                if isinstance(kind, _StridedShard):
                    held = torch.cat([half.chunk(count)[place] for half in held.chunk(kind.split_factor)])
                elif isinstance(kind, Shard):
                    chunks = held.chunk(count, kind.dim)
                    held = chunks[place] if place < len(chunks) else held.narrow(kind.dim, 0, 0)
            assert torch.equal(whole[torch.meshgrid(*indices, indexing="ij")], held)
    assert quintnet.visualize(x).types == types
    with pytest.raises(quintnet.CompileError, match=r"QN204(?s:.*)visualize\(dtensor\)"):
        quintnet.visualize(whole)


@pytest.mark.slow
def test_names_that_differ_in_numbers_are_one_row_and_rows_are_bounded() -> None:
    def compiled(names: list[str]) -> quintnet.CompiledProgram:
        model = nn.Sequential(nn.ModuleDict({name: nn.Linear(4, 4) for name in names}))
        model.forward = lambda x: sum(part(x) for part in model[0].values())  # type: ignore[method-assign]
        batch = torch.randn(2, 4), torch.randn(2, 4)
        return quintnet.compile(model, Mesh(tp=2), batch, loss_fn=F.mse_loss, check="off")

    numbered = compiled([str(n) for n in range(5)])._primary().program
    assert [row["name"] for row in state_rows(numbered)] == ["0.{0..4}.weight", "0.{0..4}.bias"]
    first = state_rows(numbered)[0]
    assert first["shape"] == "[4, 4]" and first["here"] != "[4, 4]" and first["held"] == "32 B"
    letters = ["".join(pair) for pair in itertools.islice(itertools.product("abcdefgh", repeat=2), 60)]
    named = compiled(letters)
    shown = program_figure(named._primary().program, named.plan, None, "no prices")
    assert shown.count(">parameter</td>") == MOST_ROWS and "and 20 more rows" in shown and "no prices" in shown


def test_a_module_without_parts_is_one_row() -> None:
    shown = waiting_figure(nn.Linear(3, 2), Mesh(dp=2), quintnet.Plan())
    assert "itself" in shown and ">8<" in shown and "not compiled yet" in shown


def test_a_program_from_the_cache_is_not_compiled_to_be_shown(tmp_path: Path) -> None:
    def compiled() -> quintnet.CompiledProgram:
        torch.manual_seed(0)
        batch = torch.randn(4, 8), torch.randn(4, 8)
        return quintnet.compile(nn.Linear(8, 8), Mesh(tp=2), batch, loss_fn=F.mse_loss, cache=tmp_path)

    assert "aten.linear" in compiled()._repr_html_()
    again = compiled()
    program = again._primary().program
    assert not program.has_source
    shown = again._repr_html_()
    assert not program.has_source and "was read from the cache" in shown and "[8, 8]" in shown
    again.simulate()
    assert "aten.linear" in again._repr_html_()
