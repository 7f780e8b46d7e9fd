"""Checkpoints of others: what torch.distributed.checkpoint, fully_shard and transformers write and read, bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import quintnet
from quintnet_compiler.api.compiled_program import CompiledProgram
from quintnet_compiler.checkpoint.formats.convert import Choices, convert
from quintnet_compiler.checkpoint.formats.format import Format

from .models import CASES, GPT, Case

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # over pp, a rank has the groups of its stages alone
Layout = tuple[str, dict[str, int], dict[str, Any]]
PACKED: Layout = ("one block", {"tp": 2}, {})  # interleaved slices of query, key and value; a tied embedding
TWO: tuple[Layout, ...] = (PACKED, ("gpt", {"pp": 2}, {"microbatches": 2}))
TWENTY: tuple[Layout, ...] = (
    ("gpt", {"tp": 4}, {}),
    ("gpt", {"tp": 2, "dp": 2}, {"zero": 1}),
    ("gpt", {"dp": 2, "tp": 2}, {"zero": 3}),
    ("gpt", {"dp": 4}, {"zero": 3}),
    ("gpt", {"dp": 4}, {"zero": 2}),
    ("gpt", {"dp": 4}, {}),
    ("gpt", {"pp": 4}, {"microbatches": 4, "schedule": "zb-h1"}),
    ("gpt", {"pp": 2, "dp": 2}, {"microbatches": 2, "zero": 3}),
    ("gpt", {"pp": 2, "tp": 2}, {"microbatches": 2, "schedule": "interleaved", "virtual_stages": 2}),
    ("gpt", {"cp": 2, "dp": 2}, {"context": "ring", "zero": 2}),
    ("gpt", {"pp": 2, "cp": 2}, {"microbatches": 2}),
    ("mixture", {"dp": 4}, {"experts": ("dp",)}),
    ("mixture", {"ep": 4}, {}),
    ("mixture", {"ep": 2, "dp": 2}, {"zero": 3}),
    ("mlp", {"tp": 4}, {}),
    ("mlp", {"pp": 2, "dp": 2}, {"microbatches": 2}),
    ("mlp", {"dp": 2, "tp": 2}, {"zero": 3}),
    ("hf_gpt2", {"tp": 2, "dp": 2}, {"zero": 3}),
    ("hf_llama", {"tp": 2, "dp": 2}, {"zero": 3}),
    ("hf_llama", {"pp": 2, "tp": 2}, {"microbatches": 2}),
)


def case(name: str) -> Case:
    if name == "one block":
        return Case(lambda: GPT(depth=1), CASES["gpt"].batch)
    return CASES[name]


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return case(name).build().double()


def made(layout: Layout) -> tuple[nn.Module, CompiledProgram, torch.optim.Optimizer]:
    name, axes, options = layout
    model, of = build(name), case(name)
    program = quintnet.compile(model, quintnet.Mesh(**axes), of.batch(8), loss_fn=of.loss_fn, **options)
    return model, program, torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.95))


def digest(x: Any) -> str:
    whole = x.full_tensor() if isinstance(x, DTensor) else x
    return (
        hashlib.sha256(whole.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        if (whole.dim())
        else str(whole.item())
    )


def digests(state: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest(x) for name, x in state.items() if isinstance(x, Tensor)}


def changed(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Other values, and other states of the optimizer, without a forward."""
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.rand_like(p)
    optimizer.step()
    optimizer.zero_grad()


def trained(program: CompiledProgram, optimizer: torch.optim.Optimizer, name: str) -> float:
    loss = float(program.step(case(name).batch(8)))
    optimizer.step()
    optimizer.zero_grad()
    return loss


def exchanged(folder: str, layouts: tuple[Layout, ...]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [exchange(f"{folder}/{number}", layout) for number, layout in enumerate(layouts)]


def exchange(folder: str, layout: Layout) -> dict[str, Any]:
    """What this rank has, and what fully_shard has after reading it; what that writes, and what this rank reads."""
    model, program, optimizer = made(layout)
    for _ in range(2):
        trained(program, optimizer, layout[0])
    found: dict[str, Any] = {"ours": digests(program.state_dict())}
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    found["our optimizer"] = digests(state)
    dcp.save({"model": program, "optimizer": state}, checkpoint_id=f"{folder}/ours")
    program.save(f"{folder}/own", step=2, optimizer=optimizer)

    other = build(layout[0])
    fully_shard(other, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    theirs = torch.optim.AdamW(other.parameters(), lr=0.5)
    changed(other, theirs, 1)
    read = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, theirs, options=FLAT)}
    dcp.load(read, checkpoint_id=f"{folder}/ours")
    set_model_state_dict(other, read["model"])
    set_optimizer_state_dict(other, theirs, read["optimizer"], options=FLAT)
    found["read by fully_shard"] = digests(other.state_dict())
    found["its optimizer"] = digests(get_optimizer_state_dict(other, theirs, options=FLAT))
    found["options"] = theirs.param_groups[0]["lr"], tuple(theirs.param_groups[0]["betas"])

    changed(other, theirs, 2)
    found["theirs"] = digests(other.state_dict())
    state = get_optimizer_state_dict(other, theirs, options=FLAT)
    found["their optimizer"] = digests(state)
    dcp.save({"model": other.state_dict(), "optimizer": state}, checkpoint_id=f"{folder}/theirs")
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    dcp.load({"model": program, "optimizer": state}, checkpoint_id=f"{folder}/theirs")
    set_optimizer_state_dict(model, optimizer, state, options=FLAT)
    found["read by us"] = digests(program.state_dict())
    found["our optimizer then"] = digests(get_optimizer_state_dict(model, optimizer, options=FLAT))
    found["next loss"] = trained(program, optimizer, layout[0])
    program.close()
    return found


def joined(ranks: list[dict[str, Any]], key: str) -> dict[str, str]:
    """Of all ranks: with pp, each has its stages' tensors."""
    found: dict[str, str] = {}
    for rank in ranks:
        assert all(found.get(name, x) == x for name, x in rank[key].items())
        found |= rank[key]
    return found


def plain_from(folder: Path, name: str) -> dict[str, str]:
    """What a plain module reads from a folder of torch.distributed.checkpoint."""
    state = {"model": {key: torch.zeros_like(x) for key, x in build(name).state_dict().items()}}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return digests(state["model"])


def read_by_transformers(model: Any, source: Path, folder: Path) -> dict[str, Tensor]:
    """The state dict of what ``from_pretrained`` makes of a converted checkpoint."""
    model.config.save_pretrained(folder.with_suffix(".config"))
    convert(source, folder, Format.SAFETENSORS, Choices(config=folder.with_suffix(".config")))
    made: Any = type(model).from_pretrained(folder, dtype=torch.float64)
    return made.state_dict()  # type: ignore[no-any-return]


def require_round_trips(ranks: list[dict[str, Any]], folder: Path, layout: Layout) -> None:
    name = layout[0]
    ours, theirs = joined(ranks, "ours"), joined(ranks, "theirs")
    assert ours.keys() == build(name).state_dict().keys()
    assert plain_from(folder / "ours", name) == ours
    assert joined(ranks, "read by fully_shard") == ours != theirs
    assert joined(ranks, "its optimizer") == joined(ranks, "our optimizer")
    assert all(rank["options"] == (0.01, (0.8, 0.95)) for rank in ranks)
    assert joined(ranks, "read by us") == theirs
    assert joined(ranks, "our optimizer then") == joined(ranks, "their optimizer")
    # converted, in a process of its own
    convert(folder / "own", folder / "own_dcp", Format.DCP)
    assert plain_from(folder / "own_dcp", name) == ours
    model, program, optimizer = made((name, {"dp": 1}, {}))
    for source, expected in (("own_dcp", ours), ("ours", ours), ("theirs", theirs)):
        convert(folder / source, folder / f"{source}_safetensors", Format.SAFETENSORS)
        if name.startswith("hf_"):
            again = read_by_transformers(model, folder / source, folder / f"{source}_transformers")
            assert {key: digest(x) for key, x in again.items()} == expected
        changed(model, optimizer, 3)
        program.load_pretrained(folder / f"{source}_safetensors")
        assert digests(program.state_dict()) == expected
        convert(folder / source, folder / f"{source}_converted", Format.QUINTNET)
        changed(model, optimizer, 4)
        program.load(folder / f"{source}_converted", optimizer=optimizer)
        assert digests(program.state_dict()) == expected
        state = digests(get_optimizer_state_dict(model, optimizer, options=FLAT))
        assert state == joined(ranks, "their optimizer" if source == "theirs" else "our optimizer")
    assert abs(trained(program, optimizer, name) - ranks[0]["next loss"]) < 1e-6


@pytest.mark.parametrize(
    "layout", [pytest.param(PACKED, id="tp2"), pytest.param(TWO[1], id="pp2", marks=pytest.mark.slow)]
)
def test_fully_shard_reads_ours_and_we_read_its(layout: Layout, tmp_path: Path) -> None:
    ranks = quintnet.launch(exchanged, 2, (str(tmp_path), (layout,)), timeout=240)
    require_round_trips([found[0] for found in ranks], tmp_path / "0", layout)


def _saved_meanwhile(folder: str, zero: int) -> list[dict[str, str]]:
    """What a program has before ``dcp.async_save`` of it, and what it reads after another step."""
    model, program, optimizer = made(("gpt", {"dp": 2}, {"zero": zero}))
    before = digests(program.state_dict())
    saving = dcp.async_save({"model": program}, checkpoint_id=folder)
    saving.result()  # type: ignore[union-attr]
    changed(model, optimizer, 1)
    other = digests(program.state_dict())
    dcp.load({"model": program}, checkpoint_id=folder)
    return [before, other, digests(program.state_dict())]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2])
def test_slices_within_a_larger_memory_are_saved_meanwhile(zero: int, tmp_path: Path) -> None:
    for before, other, read in quintnet.launch(_saved_meanwhile, 2, (str(tmp_path), zero), timeout=300):
        assert before == read and before.keys() == other.keys() and all(other[name] != x for name, x in before.items())


@pytest.mark.slow
def test_twenty_layouts(tmp_path: Path) -> None:
    ranks = quintnet.launch(exchanged, 4, (str(tmp_path), TWENTY), timeout=1800)
    for number, layout in enumerate(TWENTY):
        require_round_trips([found[number] for found in ranks], tmp_path / str(number), layout)
