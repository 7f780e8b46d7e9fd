"""Step time of 1F1B on two stages: quintnet and torch.distributed.pipelining.

python benchmarks/pipeline.py --size tiny|small|medium [--rounds N] [--json]
"""

from __future__ import annotations

from functools import partial

import ours
import torch_pipeline
from harness import Job
from models import SIZES
from report import ROUNDS, choose, main, parser

ROWS = 16

if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--microbatches", type=int, default=8)
    given = options.parse_args()
    builders = {
        "ours": partial(ours.pipeline, microbatches=given.microbatches),
        "torch": partial(torch_pipeline.build, microbatches=given.microbatches),
    }
    job = Job(
        size=SIZES[given.size],
        rows=given.rows or ROWS,
        rounds=given.rounds or ROUNDS[given.size],
        builders=choose(builders, given.peers),
        timeout=given.timeout,
    )
    settings = {"size": given.size, "pp": 2, "microbatches": given.microbatches, "schedule": "1f1b"}
    main("pipeline", job, settings, given.json)
