"""Step time of tensor parallelism over two processes: quintnet, hand-written Megatron style, and DTensor.

python benchmarks/tensor_parallel.py --size tiny|small|medium [--sp] [--rounds N] [--json]
"""

from __future__ import annotations

from functools import partial

import dtensor
import megatron
import ours
from harness import Job
from models import SIZES
from report import ROUNDS, choose, main, parser

ROWS = 4

if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--sp", action="store_true", help="sequence parallelism in every peer")
    given = options.parse_args()
    builders = {
        "ours": partial(ours.tensor_parallel, sequence_parallel=given.sp),
        "megatron": partial(megatron.build, sequence_parallel=given.sp),
        "dtensor": partial(dtensor.build, sequence_parallel=given.sp),
    }
    job = Job(
        size=SIZES[given.size],
        rows=given.rows or ROWS,
        rounds=given.rounds or ROUNDS[given.size],
        builders=choose(builders, given.peers),
        timeout=given.timeout,
    )
    main("tensor_parallel", job, {"size": given.size, "tp": 2, "sequence_parallel": given.sp}, given.json)
