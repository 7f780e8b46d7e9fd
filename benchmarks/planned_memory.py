"""The planner's ten best plans of eight small models, compiled and run: memory measured beside what was planned.

    python benchmarks/planned_memory.py [--only unet] [--ranks 2] [--plans 10] [--json]

Each plan is compiled in gloo processes, one per rank; each rank runs steps under the profiler, whose peak of the CPU
allocator during a step, gradients of parameters and all else but parameters and the batch, is set beside the simulated
one (``peak.gradients + peak.values`` of ``simulate()``) and the planned one (gradients, saved and working memory of
:func:`quintnet.estimate`). Every program is verified.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

ROWS = 512  # of a batch
STEPS = 3  # the batches of the first two are compared between ranks, which takes a MiB
Made = tuple[nn.Module, Any, Any]  # a module, a batch, a loss


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.inner, self.up = nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.norm, self.leave = nn.GroupNorm(2, 2 * width), nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        top = F.silu(self.enter(x))
        below = F.silu(self.inner(F.silu(self.norm(self.down(top)))))
        return self.leave(torch.cat([top, self.up(below)], 1))


class ViT(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.randn(16, width) * 0.02)
        layer = [nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True, norm_first=True) for _ in range(depth)]
        self.blocks, self.head = nn.ModuleList(layer), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class GNN(nn.Module):
    """Graph convolutions over dense adjacency matrices."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, edges = batch
        for layer in self.layers:
            x = x + F.elu(edges @ layer(x))
        return self.head(x.mean(1))


class Mixture(nn.Module):
    def __init__(self, width: int = 32, experts: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, experts, bias=False) for _ in range(depth))
        shapes = ((experts, 64, width), (experts, width, 64))
        self.ups, self.downs = (
            nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.1) for _ in range(depth)) for shape in shapes
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        for gate, up, down in zip(self.gates, self.ups, self.downs, strict=True):
            score, expert = gate(x).softmax(-1).max(-1)
            inner = F.gelu(quintnet.expert_linear(x, expert, up))
            x = x + score[:, None] * quintnet.expert_linear(inner, expert, down)
        return self.head(x)


def _images() -> Tensor:
    return torch.randn(ROWS, 3, 16, 16)


def _labels(rows: int = ROWS) -> Tensor:
    return torch.randint(0, 8, (rows,))


def _mixture() -> Made:
    return Mixture(), (torch.randn(8192, 32), _labels(8192)), F.cross_entropy


def _leaky() -> Made:
    layers = [(nn.Linear(64, 64), nn.LeakyReLU()) for _ in range(4)]
    return nn.Sequential(*itertools.chain(*layers)), (torch.randn(8192, 64), torch.randn(8192, 64)), F.mse_loss


def _hugging_face(name: str, **sizes: Any) -> Made:
    import transformers

    model_class = getattr(transformers, name)
    ids = torch.randint(0, 64, (ROWS, 16))
    return model_class(model_class.config_class(vocab_size=64, **sizes)), {"input_ids": ids, "labels": ids}, None


def _bert() -> Made:
    return _hugging_face(
        "BertForMaskedLM", hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def _gpt2() -> Made:
    return _hugging_face(
        "GPT2LMHeadModel", n_layer=3, n_embd=32, n_head=4, n_positions=16, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0,
    )  # fmt: skip


def _llama() -> Made:
    return _hugging_face(
        "LlamaForCausalLM", hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=16,
    )  # fmt: skip


MODELS: Mapping[str, Callable[[], Made]] = MappingProxyType(
    {
        "unet": lambda: (UNet(), (_images(), _images()), F.mse_loss),
        "vit": lambda: (ViT(), (_images(), _labels()), F.cross_entropy),
        "bert": _bert,
        "mixture": _mixture,
        "gnn": lambda: (GNN(), ((torch.randn(ROWS, 12, 32), torch.rand(ROWS, 12, 12)), _labels()), F.cross_entropy),
        "leaky": _leaky,
        "gpt2": _gpt2,
        "llama": _llama,
    }
)


def made(name: str) -> Made:
    torch.manual_seed(0)
    return MODELS[name]()


def allocated(program: quintnet.CompiledProgram, module: nn.Module, batch: Any) -> tuple[int, int]:
    """Bytes by the CPU allocator, at most during a step and after it, beyond what there was before: state, the batch,
    and the gradients of the step before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(STEPS):  # a block that was allocated before is unknown to the profiler, and so is its end
            module.zero_grad()
            with torch.profiler.record_function("a step"):
                program.step(batch)
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begin = [event.start_ns() for event in events if event.name() == "a step"][-1]
    sizes = [(event.start_ns() >= begin, event.nbytes()) for event in events if event.name() == "[memory]"]
    baseline = sum(size for inside, size in sizes if not inside)
    during = [now - baseline for now in itertools.accumulate(size for _, size in sizes)]
    return max(now for now, (inside, _) in zip(during, sizes, strict=True) if inside), during[-1]


def run(name: str, plans: list[dict[str, Any]]) -> list[tuple[bool, int]]:
    """On each rank: whether each plan's program is verified, and its peak."""
    torch.set_num_threads(1)
    results = []
    for plan in plans:
        module, batch, loss = made(name)
        mesh = quintnet.Mesh(**plan["mesh"])
        program = quintnet.compile(module, mesh, batch, loss_fn=loss, plan=plan, check="off")
        peak, _ = allocated(program, module, batch)
        module.zero_grad()
        results.append((bool(program.verify().ok), peak))
    return results


def compare(name: str, ranks: int, count: int, work: float) -> list[dict[str, Any]]:
    """One row for each of the best plans."""
    module, batch, loss = made(name)
    cluster = quintnet.Cluster("cpu", 1, ranks)
    report = quintnet.plan(module, cluster, batch, loss_fn=loss, top_k=count, work=work, progress=False)
    plans = [json.loads(plan.to_json()) for plan in report.plans]
    results = list(zip(*quintnet.launch(run, ranks, (name, plans)), strict=True))
    rows = []
    for plan, of_ranks in zip(plans, results, strict=True):
        module, batch, loss = made(name)
        mesh = quintnet.Mesh(**plan["mesh"])
        program = quintnet.compile(module, mesh, batch, loss_fn=loss, plan=plan, check="off")
        estimate = quintnet.estimate(module, cluster, batch, plan, loss_fn=loss)
        places = [mesh.coordinate(rank).get("pp", 0) for rank in range(ranks)]
        simulations = sorted(program.simulate(cluster).rows, key=lambda row: row.rank)
        simulated = [row.peak.gradients + row.peak.values for row in simulations]
        planned = [
            stage_memory.gradients + stage_memory.saved + stage_memory.working for stage_memory in estimate.memory
        ]
        placed = list(zip(places, (peak for _, peak in of_ranks), strict=True))
        peaks = [
            row.gradient_bytes + max(peak for place, peak in placed if place == at)
            for at, row in enumerate(simulations)
        ]
        rows.append(
            {
                "model": name, "plan": str(estimate.layout), "verified": all(ok for ok, _ in of_ranks),
                "measured": peaks, "simulated": simulated, "planned": planned,
            }
        )  # fmt: skip
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of verified plans, and ratios of measured to simulated and planned bytes.

    The ratios are the median and the largest over each plan's places in the pipeline.
    """
    verified = sum(row["verified"] for row in rows)
    shares = []
    for title in ("simulated", "planned"):
        ratios = [a / b for row in rows for a, b in zip(row["measured"], row[title], strict=True)]
        shares.append(f"measured / {title} {statistics.median(ratios):.3f}, at most {max(ratios):.3f}")
    return f"{rows[0]['model']}: {verified} of {len(rows)} verified; {'; '.join(shares)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plans", type=int, default=10)
    parser.add_argument("--work", type=float, default=6_500.0, help="of the search for plans")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in (name for name in MODELS if options.only in name):
        rows = compare(name, options.ranks, options.plans, options.work)
        for row in rows:
            if options.json:
                print(json.dumps(row), flush=True)
                continue
            worst = max(zip(row["measured"], row["simulated"], row["planned"], strict=True))
            sizes = "  ".join(f"{title} {size / 1024:8.1f}" for title, size in
                              zip(("measured", "simulated", "planned"), worst, strict=True))  # fmt: skip
            verified = "verified" if row["verified"] else "WRONG"
            print(f"{name:8s} {row['plan']:55s} {verified}  KiB: {sizes}", flush=True)
        if not options.json:
            print(summary(rows), flush=True)


if __name__ == "__main__":
    main()
