"""Plans for well-known models beside the layouts that were published for them; time and memory of planning.

    python benchmarks/plan_large.py                 # every model, a table
    python benchmarks/plan_large.py --only 405B --json
    python benchmarks/plan_large.py --scaling docs/planning_time.svg   # Llama-3 405B on 512 to 16,384 GPUs

Every plan is made from the real module on the meta device, in a process of its own with one thread. Both step times
are predictions of the same cost model; what was measured stands beside them where it was published.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import quintnet


@dataclass(frozen=True)
class Case:
    """A transformers architecture with its configuration, a batch of ``rows`` x ``length`` tokens on ``gpus`` devices,
    and the plan that was ``published`` (with its measured seconds, where known)."""

    architecture: str
    config: Mapping[str, Any]
    device: str
    gpus: int
    rows: int
    length: int
    published: Mapping[str, Any]
    measured: float | None = None
    source: str = ""

    def model(self) -> nn.Module:
        import transformers

        found = getattr(transformers, self.architecture)
        with torch.device("meta"):
            made: nn.Module = found(found.config_class(**self.config)).to(torch.bfloat16)
        return made


def _gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 2048, "vocab_size": 51200,
            "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}  # fmt: skip


def _llama(layers: int, hidden: int, heads: int, inner: int) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": 8,
            "intermediate_size": inner, "vocab_size": 128256, "max_position_embeddings": 8192,
            "tie_word_embeddings": False}  # fmt: skip


KORTH, DGXC = "Korthikanti et al. 2022, table 5", "NVIDIA DGX Cloud recipes 24.11"
CASES: Mapping[str, Case] = {
    "GPT-3 175B": Case(
        "GPT2LMHeadModel", _gpt(96, 12288, 96), "a100-80", 64, 64, 2048,
        {"mesh": {"tp": 8, "pp": 8}, "microbatches": 64, "schedule": "interleaved", "virtual_stages": 3,
         "recompute": "selective"}, 13.75, KORTH,
    ),
    "GPT 530B": Case(
        "GPT2LMHeadModel", _gpt(105, 20480, 128), "a100-80", 280, 280, 2048,
        {"mesh": {"tp": 8, "pp": 35}, "microbatches": 280, "schedule": "interleaved", "virtual_stages": 3,
         "recompute": "selective"}, 37.83, KORTH,
    ),
    "GPT 1T": Case(
        "GPT2LMHeadModel", _gpt(128, 25600, 160), "a100-80", 512, 512, 2048,
        {"mesh": {"tp": 8, "pp": 64}, "microbatches": 512, "recompute": "selective"}, 71.49, KORTH,
    ),
    "Llama-3 70B": Case(
        "LlamaForCausalLM", _llama(80, 8192, 64, 28672), "h100", 64, 128, 8192,
        {"mesh": {"dp": 2, "cp": 2, "tp": 4, "pp": 4}, "microbatches": 64, "schedule": "interleaved",
         "virtual_stages": 5, "zero": 1}, 14.72, DGXC,
    ),
    "Llama-3 405B": Case(
        "LlamaForCausalLM", _llama(126, 16384, 128, 53248), "h100", 16384, 2048, 8192,
        {"mesh": {"dp": 128, "tp": 8, "pp": 16}, "microbatches": 16, "schedule": "interleaved", "virtual_stages": 8,
         "zero": 1}, None, "Llama team 2024, table 4",
    ),
    "Mixtral 8x7B": Case(
        "MixtralForCausalLM",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
         "output_router_logits": False}, "h100", 64, 256, 4096,
        {"mesh": {"ep": 8, "tp": 2, "pp": 4}, "microbatches": 32, "schedule": "interleaved", "virtual_stages": 8,
         "zero": 1, "zero_axes": ["dp", "ep"]}, 3.26, "Megatron-LM's performance tests",
    ),
    "DeepSeek-V3": Case(
        "DeepseekV3ForCausalLM", {}, "h100", 2048, 15360, 4096,
        {"mesh": {"dp": 2, "ep": 64, "pp": 16}, "microbatches": 120, "schedule": "zb-v", "virtual_stages": 2, "zero": 1,
         "zero_axes": ["dp", "ep"], "recompute": "selective"}, None, "DeepSeek-AI 2024, section 3.2",
    ),
}  # fmt: skip


def plan_one(name: str, gpus: int | None, seconds: float) -> dict[str, Any]:
    """Plan one case in this process."""
    torch.set_num_threads(1)
    case = CASES[name]
    devices = gpus or case.gpus
    cluster = quintnet.Cluster(case.device, nodes=-(-devices // 8), gpus_per_node=min(8, devices))
    ids = torch.empty(case.rows, case.length, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    started = time.monotonic()
    model = case.model()
    report = quintnet.plan(model, cluster, batch, seconds=seconds)
    took, peak = time.monotonic() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    best = report.found.ranked[0]
    found: dict[str, Any] = {
        "model": name, "gpus": devices, "seconds": took, "gib": peak, "ended": report.found.ended,
        "planned": str(best.layout), "planned_s": best.seconds, "planned_gib": best.memory_bytes / 2**30,
        "measured_s": case.measured, "source": case.source,
    }  # fmt: skip
    if gpus is None:
        try:
            other = quintnet.estimate(model, cluster, batch, dict(case.published))
            found |= {"published": str(other.layout), "published_s": other.seconds,
                      "published_gib": other.memory_bytes / 2**30}  # fmt: skip
        except quintnet.CompileError as error:
            found |= {"published": str(error), "published_s": None, "published_gib": None}
    return found


def _run(name: str, gpus: int | None, seconds: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name, "--seconds", str(seconds)]
    command += ["--gpus", str(gpus)] if gpus else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def scaling(path: Path, seconds: float) -> list[dict[str, Any]]:
    """Planning time of Llama-3 405B over the number of GPUs, and a picture of it."""
    found = [_run("Llama-3 405B", gpus, seconds) for gpus in (512, 1024, 2048, 4096, 8192, 16384)]
    points = [(60 + 84 * i, 220 - 180 * one["seconds"] / 60) for i, one in enumerate(found)]
    line = " ".join(f"{x:.0f},{y:.1f}" for x, y in points)
    marks = "".join(
        f'<circle cx="{x:.0f}" cy="{y:.1f}" r="4" fill="#1f77b4"/>'
        f'<text x="{x:.0f}" y="{y - 10:.1f}" text-anchor="middle">{one["seconds"]:.0f} s</text>'
        f'<text x="{x:.0f}" y="240" text-anchor="middle">{one["gpus"]}</text>'
        for (x, y), one in zip(points, found, strict=True)
    )
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 540 275" font-family="sans-serif" font-size="12">'
        '<rect width="540" height="275" fill="white"/>'
        '<path d="M40 40 V220 H520" fill="none" stroke="#888"/><path d="M40 40 H520" stroke="#ccc"/>'
        f'<text x="36" y="44" text-anchor="end">60 s</text><polyline points="{line}" fill="none" stroke="#1f77b4"/>'
        f'{marks}<text x="280" y="265" text-anchor="middle">GPUs (Llama-3 405B, H100)</text></svg>\n'
    )
    return found


def show(results: list[dict[str, Any]]) -> None:
    for one in results:
        took = f"planned in {one['seconds']:.0f} s, {one['gib']:.1f} GiB; ended by {one['ended']}"
        print(f"{one['model']} on {one['gpus']} GPUs: {took}")
        print(f"  planned   {one['planned_s']:8.2f} s {one['planned_gib']:7.1f} GiB  {one['planned']}")
        if one.get("published_s"):
            measured = f"measured {one['measured_s']:.2f} s; " if one["measured_s"] else ""
            print(f"  published {one['published_s']:8.2f} s {one['published_gib']:7.1f} GiB  {one['published']}")
            print(f"            {measured}{one['source']}")
        elif "published" in one:
            print(f"  published: {one['published']}")


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--only", default="", help="models whose name has this in it")
    options.add_argument("--json", action="store_true", help="print JSON and nothing else")
    options.add_argument("--seconds", type=float, default=45.0, help="how long to search at most")
    options.add_argument("--scaling", type=Path, help="write a picture of the planning time over the number of GPUs")
    options.add_argument("--one", help=argparse.SUPPRESS)
    options.add_argument("--gpus", type=int, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.one:
        print(json.dumps(plan_one(given.one, given.gpus, given.seconds)))
        return
    if given.scaling:
        results = scaling(given.scaling, given.seconds)
    else:
        results = []
        for name in CASES:
            if given.only in name:
                results.append(_run(name, None, given.seconds))
                print(json.dumps(results[-1]), file=sys.stderr)
    if given.json:
        print(json.dumps(results, indent=1))
    else:
        show(results)


if __name__ == "__main__":
    main()
