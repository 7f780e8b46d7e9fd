"""A plan for packed rows of a million tokens on 64 H100: made, compiled and simulated, without weights or devices.

python benchmarks/packed_plan.py [--rows 4] [--length 1048576] [--documents 64] [--gpus 64] [--layers 32] [--json]

Llama-3 8B in bf16 with float32 parameters. Rows hold documents of lengths 1 : 2 : ... : n, the first row in that order,
others shuffled; the model finds them by position ids. The plan is compiled for all ranks and simulated. Beside it: the
plan that is best if each row is one document, and what that one takes for these documents. ``other_balance_s``: the
plan with the other ``context_load_balance``. ``uneven``: attention of the rank that has most over the mean, of rows in
order over the plan's ranks of ``cp`` (documents alone, by formula).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import quintnet
from benchmarks.packed import lengths, pairs
from benchmarks.planned_models import LLAMA_8B, made_of


def documents_of(row: int, length: int, count: int) -> list[int]:
    """The lengths of a row's documents."""
    sizes = lengths(length, count)
    if row:
        random.Random(row).shuffle(sizes)
    return sizes


def packed_batch(rows: int, length: int, count: int) -> dict[str, torch.Tensor]:
    """Position ids have values, and tokens none."""
    ids = torch.empty(rows, length, dtype=torch.long, device="meta")
    each = [torch.cat([torch.arange(size) for size in documents_of(row, length, count)]) for row in range(rows)]
    return {"input_ids": ids, "labels": ids, "position_ids": torch.stack(each)}


def llama(layers: int, **smaller: int) -> nn.Module:
    """Llama-3 8B with so many layers, on the meta device, in float32."""
    with torch.device("meta"):
        return made_of("LlamaForCausalLM", **{**LLAMA_8B, "num_hidden_layers": layers, "use_cache": False, **smaller})


def answer(model: nn.Module, cluster: quintnet.Cluster, rows: int, length: int, count: int) -> dict[str, Any]:
    """Plan, compile and simulate."""
    batch, pinned = packed_batch(rows, length, count), {"precision": "bf16"}
    begun = time.perf_counter()
    report = quintnet.plan(model, cluster, batch, plan=pinned, seconds=300)
    took, best, plan = time.perf_counter() - begun, report.found.ranked[0], report.best
    mesh = quintnet.Mesh(**plan.mesh)
    program = quintnet.compile(model, mesh, batch, plan=plan, device="cuda", check="off")
    timeline = program.simulate(cluster)
    whole = {**pinned, "expect": {"documents": [length]}}
    other = quintnet.plan(model, cluster, batch, plan=whole, seconds=300)
    documents = {**other.best.model_dump(mode="json"), "expect": {"documents": plan.expect.documents}}
    balance = {**plan.model_dump(mode="json"), "context_load_balance": not plan.context_load_balance}
    return {
        "plan": str(best.layout), "context_load_balance": plan.context_load_balance,
        "documents": len(plan.expect.documents),
        "planned_s": best.seconds, "planned_gib": best.memory_bytes / 2**30, "utilisation": best.figures.utilisation,
        "waits": best.exposed / best.seconds, "simulated_s": timeline.seconds,
        "simulated_gib": timeline.peak.bytes / 2**30, "notes": list(timeline.notes), "ranks": mesh.size,
        "uneven": uneven_in_order([documents_of(row, length, count) for row in range(rows)], plan.mesh.get("cp", 1)),
        "other_balance_s": quintnet.estimate(model, cluster, batch, balance).seconds,
        "planning_s": took, "one_document": str(other.found.ranked[0].layout),
        "one_document_s": other.found.ranked[0].seconds,
        "one_document_for_these_s": quintnet.estimate(model, cluster, batch, documents).seconds,
    }  # fmt: skip


def uneven_in_order(rows: list[list[int]], ranks: int) -> float:
    """The most work of a rank over the mean, in the mean over rows."""
    ratios = []
    for sizes in rows:
        part = sum(sizes) // ranks
        work = [pairs(rank * part, (rank + 1) * part, sizes) for rank in range(ranks)]
        ratios.append(max(work) / (sum(work) / ranks))
    return sum(ratios) / len(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("rows", 4), ("length", 2**20), ("documents", 64), ("gpus", 64), ("layers", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cluster = quintnet.Cluster("h100", nodes=-(-args.gpus // 8), gpus_per_node=min(8, args.gpus))
    results = answer(llama(args.layers), cluster, args.rows, args.length, args.documents)
    print(
        json.dumps(results, indent=1) if args.json else "\n".join(f"{name}: {value}" for name, value in results.items())
    )


if __name__ == "__main__":
    main()
