"""Attention in tiles in compiled programs: the unsplit model's gradients, and no mask of a long sequence anywhere."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import quintnet
from quintnet_compiler.cost_models.hardware import H100
from quintnet_compiler.ops.attention.blocks import Sight
from quintnet_compiler.ops.attention.operator import attention
from quintnet_compiler.ops.attention.tiled import (
    attend_runs,
    attend_runs_backward,
    backward_working_bytes,
    working_bytes,
)
from quintnet_compiler.ops.attention.tiles import AttentionInputs, AttentionTiles, Ids
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.lowering.lower_attention import MIN_TILED_POSITIONS
from quintnet_compiler.runtime.execute.comm import Comm

from . import one_operator
from .models import CASES, build
from .one_operator import call, check
from .operator_samples import bools, f, ints

pytestmark = pytest.mark.usefixtures("shared_captures")

torch.set_num_threads(1)
LENGTH = 16
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 5},
    "documents": {"packed": True},
    "padding": {"padded": True},
    "chunks": {"chunk": 6},
    "groups": {"grouped": True, "window": 3},
    "all": {"window": 5, "packed": True, "padded": True, "grouped": True},
}


class Text(nn.Module):
    """Two layers of attention with groups of heads."""

    def __init__(
        self, window: int = 0, chunk: int = 0, padded: bool = False, packed: bool = False, grouped: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(32, 32), nn.Linear(32, 32)
        self.qkv, self.out = (nn.ModuleList(nn.Linear(32, n) for _ in range(2)) for n in (64, 32))
        self.mask = str(Sight(True, window, chunk))
        self.padded, self.packed, self.grouped = padded, packed, grouped

    def forward(self, ids: Tensor, seen: Tensor, documents: Tensor) -> Tensor:
        x = self.tokens(ids)
        padding, segments = seen if self.padded else None, documents if self.packed else None
        groups = documents // 2 - 1 if self.grouped else None
        for qkv, out in zip(self.qkv, self.out, strict=True):
            rows, length, _ = x.shape
            q, k, v = qkv(x).split([32, 16, 16], -1)
            q, k, v = (y.view(rows, length, -1, 8).transpose(1, 2) for y in (q, k, v))
            y = attention(q, k, v, padding, segments, groups, scale=0.3, mask=self.mask)
            x = x + out(y.transpose(1, 2).reshape(rows, length, -1))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _batch(rows: int = 4, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 32, (rows, length), generator=dice)
    seen = torch.rand(rows, length, generator=dice) < 0.7
    documents = (torch.rand(rows, length, generator=dice) < 0.2).cumsum(1)
    return ids, seen, documents


def _program(mask: str, mesh: quintnet.Mesh, length: int = LENGTH, **options: Any) -> quintnet.CompiledProgram:
    torch.manual_seed(0)
    batch = _batch(length=length)
    return quintnet.compile(Text(**MASKS[mask]).double(), mesh, batch, attention_tile_bytes=100, **options)


# -- numbers


@pytest.mark.sample(1)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("context", ["all_gather", "ring", pytest.param("ulysses", marks=pytest.mark.slow)])
def test_tiles_equal_the_model(mask: str, context: str) -> None:
    program = _program(mask, quintnet.Mesh(cp=2), context=context)
    code = program.ranks[0].forward.code
    tiled = context == "all_gather" or (context == "ulysses" and mask != "causal")  # which has no mask then
    assert ("comm.tiled_attention" in code, "comm.ring_attention" in code) == (tiled, context == "ring")
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


@pytest.mark.sample(1)
@pytest.mark.parametrize("context", ["all_gather", "ring"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_documents_whose_positions_do_not_divide(context: str, ranks: int) -> None:
    """The padding of the last rank's queries has no document."""
    report = _program("all", quintnet.Mesh(cp=ranks), 17, context=context).verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("context", ["all_gather", "ring", "ulysses"])
@pytest.mark.parametrize(
    "options", [{"recompute": "full"}, {"recompute": "selective", "overlap": False}, {"schedule": "gpipe"}], ids=str
)
def test_tiles_equal_the_model_on_other_layouts(mask: str, context: str, options: dict[str, Any]) -> None:
    program = _program(mask, quintnet.Mesh(pp=2, cp=2, tp=2), microbatches=2, context=context, **options)
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


PACKED: list[tuple[quintnet.Mesh, dict[str, Any]]] = [
    (quintnet.Mesh(dp=2, cp=2), {"context": "all_gather", "zero": 1, "microbatches": 2}),
    (quintnet.Mesh(dp=2, cp=2), {"context": "ring", "zero": 3}),
    (quintnet.Mesh(dp=2, cp=2), {"context": "ring", "zero": 2, "microbatches": 4}),
    (quintnet.Mesh(pp=2, cp=2, tp=2), {"context": "ring", "microbatches": 3}),
    (quintnet.Mesh(pp=2, cp=2), {"context": "ulysses", "microbatches": 4}),
    (quintnet.Mesh(dp=2, tp=2), {"zero": 2, "microbatches": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{"packed": True}, {"packed": True, "grouped": True, "window": 200}, {"padded": True, "chunk": 96}],
    ids=["documents", "groups", "chunks"],
)
@pytest.mark.parametrize(("mesh", "options"), PACKED, ids=str)
def test_documents_of_unequal_length_equal_the_model(
    mesh: quintnet.Mesh, options: dict[str, Any], how: dict[str, Any]
) -> None:
    """Longer and shorter than runs of positions are; each row has documents of its own."""
    ids, seen, _ = _batch(12 if options.get("microbatches") == 3 else 8, 256)
    documents = torch.repeat_interleave(torch.tensor([100, 3, 1, 70, 64, 18])).repeat(len(ids), 1)
    documents[0], documents[1] = torch.arange(256) // 5, torch.arange(256) // 90
    torch.manual_seed(0)
    model = Text(**how).double()
    program = quintnet.compile(model, mesh, (ids, seen, documents), attention_tile_bytes=2**14, **options)
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "sample",
    [
        call(attention, f(1, 4, 16, 4), f(1, 2, 16, 4), f(1, 2, 16, 2), scale=0.5, mask="causal"),
        call(attention, *[f(2, 2, 16, 4)] * 3, bools(2, 16), ints(2, 2, 16), scale=0.5, mask="causal_window_3"),
        call(attention, *[f(2, 2, 16, 4)] * 3, None, ints(2, 2, 16), scale=0.5, mask="all"),
    ],
    ids=["grouped", "all", "documents"],
)
@pytest.mark.parametrize("ranks", [(4,), (2, 2)], ids=str)
def test_every_way_to_split_it(monkeypatch: pytest.MonkeyPatch, sample: Any, ranks: tuple[int, ...]) -> None:
    """Strategies of all axes, with queries over one axis or over two."""
    lowering = partial(one_operator._CommunicationLowering, tile_bytes=64)
    monkeypatch.setattr(one_operator, "_CommunicationLowering", lowering)
    places: list[Any] = []
    runs = Comm._runs

    def seen(self: Comm, *how: Any) -> Any:
        places.append(tuple(how[6]))  # sizes
        return runs(self, *how)

    monkeypatch.setattr(Comm, "_runs", seen)
    check(sample, RULES, ranks)
    assert ranks in places


def _ranks_agree(mask: str, context: str) -> tuple[float, bool]:
    program = _program(mask, quintnet.Mesh(cp=2), context=context)
    report = program.verify()
    return report.worst.error, report.ok


def _two_processes() -> list[tuple[float, bool]]:
    return [_ranks_agree(mask, context) for mask in ("window", "all") for context in ("all_gather", "ring")]


@pytest.mark.slow
def test_tiles_in_two_processes() -> None:
    for found in quintnet.launch(_two_processes, 2, timeout=300):
        assert all(ok and error < 1e-12 for error, ok in found), found


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [quintnet.Mesh(dp=1), quintnet.Mesh(dp=2, tp=2)], ids=str)
def test_long_packed_rows_are_tiles_without_context_parallelism_too(mesh: quintnet.Mesh) -> None:
    """So they are where the module and the unsplit program are compared."""
    torch.manual_seed(0)
    batch = _batch(2, MIN_TILED_POSITIONS)
    program = quintnet.compile(Text(packed=True).double(), mesh, batch)
    assert "comm.tiled_attention" in program.ranks[0].forward.code
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


def test_short_sequences_keep_their_masks() -> None:
    program = quintnet.compile(build("gpt"), quintnet.Mesh(cp=2), CASES["gpt"].batch(4))
    code = program.ranks[0].forward.code
    assert "tiled_attention" not in code and "scaled_dot_product" in code
    assert program.plan.attention_tile_bytes == 32 * 2**20


@pytest.mark.parametrize("size", [0, -1, 2**41])
def test_sizes_that_no_tile_has(size: int) -> None:
    with pytest.raises(quintnet.CompileError, match=r"QN207[^!]*attention_tile_bytes"):
        quintnet.compile(build("gpt"), quintnet.Mesh(cp=2), CASES["gpt"].batch(4), attention_tile_bytes=size)


# -- memory


class _LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside took at once; those that were there before do not count."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.given = {x.untyped_storage()._cdata for x in given}
        self.live: dict[int, tuple[Any, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, Tensor):
                store = x.untyped_storage()
                if store._cdata not in self.given:
                    self.live[store._cdata] = StorageWeakRef(store), store.nbytes()
        self.live = {key: pair for key, pair in self.live.items() if not pair[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.live.values()))
        return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_memory_of_tiles_is_what_the_simulation_says(dtype: torch.dtype, packed: bool) -> None:
    """At most, and at least half of it, with what is returned."""
    q, k = (torch.randn(1, 4, n, 64).to(dtype) for n in (512, 1024))
    segments = torch.zeros(1, 1024, dtype=torch.int64) if packed else None
    tiles, given = AttentionTiles(0.1, Sight(True, 0), 2**16), AttentionInputs(q, k, k, Ids(None, segments))
    rest = (None, segments, None, 0.1, "causal", 2**16)
    with torch.no_grad():
        with _LiveBytes(q, k) as forward:
            out, lse = attend_runs(tiles, [(512, 512)], given)
        with _LiveBytes(q, k, out, lse) as backward:
            found = attend_runs_backward(tiles, [(512, 512)], given, out, out, lse)
    for seen, inside, made in (
        (forward, working_bytes(q, k, k, *rest), (out, lse)),
        (backward, backward_working_bytes(out, q, k, k, out, lse, *rest), found),
    ):
        said = inside + sum(x.numel() * x.element_size() for x in made)
        assert said / 2 <= seen.most <= 1.05 * said, (seen.most, said)


def _long(mask: str, length: int, ranks: int, context: str) -> quintnet.CompiledProgram:
    options: dict[str, Any] = {"precision": "bf16", "device": "cuda", "check": "off"}
    batch = tuple(x[:, :1].expand(1, length) for x in _batch(1))
    return quintnet.compile(Text(**MASKS[mask]), quintnet.Mesh(cp=ranks), batch, context=context, **options)


def _largest(folder: Path) -> int:
    """The most elements of a value in a dump."""
    text = "".join(file.read_text() for file in folder.rglob("*") if file.is_file())
    shapes = re.findall(r"\b(?:bool|int\d+|b?float\d+)\[([\d, ]+)\]", text)
    assert len(shapes) > 100
    return max(math.prod(map(int, one.split(","))) for one in set(shapes))


MILLION = [("causal", "all_gather"), ("documents", "all_gather"), ("window", "all_gather"), ("documents", "ring")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
@pytest.mark.parametrize(
    ("mask", "context"), [one if one == MILLION[1] else pytest.param(*one, marks=pytest.mark.slow) for one in MILLION]
)
def test_a_million_tokens_have_no_mask(tmp_path: Path, mask: str, context: str) -> None:
    """On 16 ranks: nothing in any pass is as large as a sixteenth of length x length; memory is that of activations."""
    length, ranks = 2**20, 16
    program = _long(mask, length, ranks, context)
    program.dump(tmp_path)
    largest = _largest(tmp_path)
    assert length * 32 <= largest <= length * 64 < length * length // ranks  # activations before they are split
    report = program.simulate(quintnet.Cluster("h100", nodes=2))
    assert report.peak.bytes < 2**30


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
@pytest.mark.parametrize("kind", ["packed", "window"])
def test_a_million_tokens_of_models_from_transformers(tmp_path: Path, kind: str) -> None:
    """Position ids that begin again are documents."""
    transformers: Any = pytest.importorskip("transformers")
    length = 2**20
    sizes = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": length, "use_cache": False,
    }  # fmt: skip
    if kind == "window":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=4096))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    ids = torch.zeros(1, length, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    if kind == "packed":
        batch["position_ids"] = (torch.arange(length) % 4096).unsqueeze(0)
    options: dict[str, Any] = {"precision": "bf16", "device": "cuda", "check": "off"}
    program = quintnet.compile(model, quintnet.Mesh(cp=16), batch, **options)
    assert "comm.tiled_attention" in program.ranks[0].forward.code
    program.dump(tmp_path)
    assert _largest(tmp_path) <= length * 64


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_tiles_are_priced_by_what_is_seen() -> None:
    """The last rank, for which others wait, sees almost twice as much as ranks do on average; a window, little."""
    found: dict[str, float] = {}
    make: Callable[[str, str], quintnet.CompiledProgram] = lambda mask, context: _long(mask, 2**17, 4, context)  # noqa: E731
    # a window leaves so little that the step would be the host's
    device = replace(H100, efficiency=replace(H100.efficiency, host_seconds=0.0))
    for mask, context in (("causal", "all_gather"), ("causal", "ring"), ("window", "all_gather")):
        found[f"{mask} {context}"] = make(mask, context).simulate(quintnet.Cluster(device, gpus_per_node=4)).seconds
    assert 1.5 < found["causal all_gather"] / found["causal ring"] < 1.85
    assert found["window all_gather"] < found["causal all_gather"] / 5
