"""Time and memory of compiling Llama 3.1 405B's configuration for 128 ranks: tp=8 within 16 pipeline stages.

python benchmarks/compile_scale.py [--model NAME] [--layers N] [--rank R] [--limit-seconds S] [--limit-gib G]
    [--cache DIR] [--json]

The model is on the meta device: it has shapes and no data. ``--model qwen3-next``: a narrow Qwen3-Next for tp=2, with a
layer of linear attention and one of attention, each with experts; it has data, so it is compared with the module too.
Exits with 1 if compiling took more processor seconds, or the process more memory, than the limits say. Two cores by
default, whatever the machine has. ``--cache DIR``: programs are kept in that folder; the second run reads its program.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import quintnet

SEQUENCE = 8192
VOCABULARY = 128256


def llama(layers: int) -> nn.Module:
    """Llama 3.1 405B in bfloat16, with this many layers, on the meta device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=SEQUENCE,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def qwen3_next(layers: int) -> nn.Module:
    """A narrow Qwen3-Next in float32: layers of linear attention, and one of attention last."""
    from transformers import AutoModelForCausalLM, Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=layers,
        layer_types=[*["linear_attention"] * (layers - 1), "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@dataclass(frozen=True)
class Case:
    """``build(layers)`` is compiled for a mesh and ``tokens`` (rows, positions) on a device, in so many processor
    seconds at most."""

    build: Callable[[int], nn.Module]
    layers: int
    mesh: Mapping[str, int]
    tokens: tuple[int, int]
    microbatches: int
    device: str
    seconds: float


CASES: Mapping[str, Case] = {
    "llama-405b": Case(llama, 126, {"pp": 16, "tp": 8}, (16, SEQUENCE), 16, "meta", 45.0),
    "qwen3-next": Case(qwen3_next, 2, {"tp": 2}, (4, 32), 1, "cpu", 15.0),
}


class Watch:
    """Wall and processor seconds of phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.seconds[name] = time.perf_counter() - wall
        self.cpu_seconds[name] = time.process_time() - cpu


def measure(case: Case, layers: int, rank: int, cache: str | None) -> dict[str, Any]:
    """Build, compile, and generate one rank's program."""
    watch = Watch()
    with watch.phase("model"):
        model = case.build(layers)
    tokens = torch.zeros(case.tokens, dtype=torch.long, device=case.device)
    mesh, batch = quintnet.Mesh(**case.mesh), {"input_ids": tokens, "labels": tokens}
    with watch.phase("compile"):
        program = quintnet.compile(model, mesh, batch, microbatches=case.microbatches, device="cpu", cache=cache)
    with watch.phase("rank program"):
        part = program.ranks[rank]
        pieces = [piece for stage in part.stages for piece in (stage.once, stage.forward, stage.backward)]
        assert all(callable(piece.module.forward) for piece in pieces)  # read from a cache, it is made when it is used
        code = "\n".join(piece.code for piece in pieces)
    calls = Counter(name for name in re.findall(r"= comm\.(\w+)\(", code) if name != "accumulate")
    passes = dict(program.compile_seconds)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": layers,
        "mesh": dict(mesh.axes),
        "seconds": watch.seconds,
        "cpu_seconds": watch.cpu_seconds,
        "compile_seconds": {"capture, comparison": watch.seconds["compile"] - sum(passes.values()), **passes},
        "total_seconds": sum(watch.seconds.values()),
        "total_cpu_seconds": sum(watch.cpu_seconds.values()),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "rank": rank,
        "stages": [stage.index for stage in part.stages],
        "code_lines": code.count("\n"),
        "code_characters": len(code),
        "communication_calls": dict(sorted(calls.items())),
        "actions": len(part.actions),
        "torch": torch.__version__,
    }


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    axes = " x ".join(f"{axis}={size}" for axis, size in report["mesh"].items())
    lines = [
        f"{report['parameters'] / 1e9:.3g} billion parameters, {report['layers']} layers, {axes}",
        f"{'':24}{'seconds':>10}{'CPU seconds':>14}",
    ]
    for name, seconds in report["seconds"].items():
        lines.append(f"{name:24}{seconds:10.1f}{report['cpu_seconds'][name]:14.1f}")
        if name == "compile":
            lines += [f"  {step:22}{part:10.1f}" for step, part in report["compile_seconds"].items()]
    lines.append(f"{'total':24}{report['total_seconds']:10.1f}{report['total_cpu_seconds']:14.1f}")
    calls = ", ".join(f"{count} {name}" for name, count in report["communication_calls"].items())
    lines += [
        f"peak memory {report['peak_gib']:.2f} GiB",
        f"rank {report['rank']} (stage {', '.join(map(str, report['stages']))}): {report['code_lines']} lines of code, "
        f"{report['code_characters']} characters, {report['actions']} actions per step",
        f"communication calls: {sum(report['communication_calls'].values())} ({calls})",
    ]
    return "\n".join(lines)


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--model", choices=CASES, default="llama-405b")
    options.add_argument("--layers", type=int, help="as many as the model has by default; at least one per stage")
    options.add_argument("--rank", type=int, default=0)
    options.add_argument("--cores", type=int, default=2, help="how many of this machine's cores to use")
    options.add_argument("--limit-seconds", type=float, help="of processor time; 45, or 15 for qwen3-next, by default")
    options.add_argument("--limit-gib", type=float, default=0.85)
    options.add_argument("--cache", help="a folder in which programs are kept")
    options.add_argument("--json", action="store_true", help="print JSON and nothing else")
    args = options.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    torch.set_num_threads(args.cores)
    warnings.simplefilter("ignore")
    case = CASES[args.model]
    report = measure(case, args.layers or case.layers, args.rank, args.cache)
    seconds = case.seconds if args.limit_seconds is None else args.limit_seconds
    took = report["total_cpu_seconds"] - report["cpu_seconds"]["model"]
    within = took <= seconds and report["peak_gib"] <= args.limit_gib
    report |= {"limit_seconds": seconds, "limit_gib": args.limit_gib, "within_limits": within}
    print(json.dumps(report, indent=2) if args.json else table(report))
    if not within:
        limits = f"{seconds:g} s of processor time or {args.limit_gib:g} GiB"
        print(f"over the limit of {limits}", file=sys.stderr)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
