"""Step time of quintnet beside what one would otherwise pick, in one run on processes of this machine.

python benchmarks/compare.py [--only tensor,pipeline] [--size tiny|small|medium] [--rounds N] [--json]

Comparisons: single, data, zero-3, tensor, sequence, async-tensor, pipeline, interleaved, zero-bubble, tensor-pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import dtensor
import megatron
import ours
import torch_data
import torch_pipeline
from harness import Builder, Job
from models import SIZES
from report import ROUNDS, choose, main, parser

MICROBATCHES = 8


@dataclass(frozen=True)
class Comparison:
    """Peers on so many processes, with ``rows`` sequences in the global batch."""

    ranks: int
    rows: int
    peers: Mapping[str, Builder]


def _tensor(sequence_parallel: bool) -> Comparison:
    how = {"sequence_parallel": sequence_parallel}
    return Comparison(
        2,
        4,
        {
            "ours": partial(ours.build, mesh={"tp": 2}, **how),
            "megatron": partial(megatron.build, **how),
            "dtensor": partial(dtensor.build, **how),
        },
    )


def _pipeline(schedule: str, tp: int = 1) -> Comparison:
    virtual = 1 if schedule == "1f1b" else 2
    plan = {"microbatches": MICROBATCHES, "schedule": schedule, "virtual_stages": virtual, "sequence_parallel": False}
    return Comparison(
        2 * tp,
        16,
        {
            "ours": partial(ours.build, mesh={"pp": 2, "tp": tp}, **plan),
            "torch": partial(torch_pipeline.build, microbatches=MICROBATCHES, schedule=schedule, tp=tp),
        },
    )


COMPARISONS = {
    "single": Comparison(1, 4, {"ours": partial(ours.build, mesh={"dp": 1}), "eager": torch_data.single}),
    "data": Comparison(2, 8, {"ours": partial(ours.build, mesh={"dp": 2}), "ddp": torch_data.ddp}),
    "zero-3": Comparison(2, 8, {"ours": partial(ours.build, mesh={"dp": 2}, zero=3), "fsdp2": torch_data.fsdp}),
    "tensor": _tensor(sequence_parallel=False),
    "sequence": _tensor(sequence_parallel=True),
    "async-tensor": Comparison(
        2,
        4,
        {"async": partial(ours.build, mesh={"tp": 2}, async_tp=True), "apart": partial(ours.build, mesh={"tp": 2})},
    ),
    "pipeline": _pipeline("1f1b"),
    "interleaved": _pipeline("interleaved"),
    "zero-bubble": _pipeline("zb-v"),
    "tensor-pipeline": _pipeline("1f1b", tp=2),
}

if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--only", default="", help="comma-separated comparisons (default: all)")
    given = options.parse_args()
    names = given.only.split(",") if given.only else list(COMPARISONS)
    jobs = {}
    for name in names:
        if name not in COMPARISONS:
            options.error(f"unknown comparison {name}: there are {', '.join(COMPARISONS)}")
        found = COMPARISONS[name]
        jobs[name] = Job(
            ranks=found.ranks,
            size=SIZES[given.size],
            rows=given.rows or found.rows,
            rounds=given.rounds or ROUNDS[given.size],
            builders=choose(found.peers, given.peers),
            timeout=given.timeout,
        )
    main(jobs, {"size": given.size}, given.json)
