"""A step of LoRA of PEFT beside FSDP2's, in one run on two processes: parameters in slices (ZeRO 3), frozen but for
adapters of every linear layer of the blocks.

python benchmarks/adapters.py [--size tiny|small|medium] [--rounds N] [--json]
"""

from __future__ import annotations

from functools import partial
from typing import Any

import ours
import peft
import torch
import torch_data
from harness import Job
from models import SIZES, Size, build_model
from report import ROUNDS, choose, main, parser
from torch import nn

LAYERS = ["q", "k", "v", "o", "gate", "up", "down"]


def with_adapters(size: Size) -> Any:
    """The model of all benchmarks with LoRA of rank 8, of which no part is zero."""
    model = peft.get_peft_model(build_model(size), peft.LoraConfig(r=8, target_modules=LAYERS))
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.02, generator=generator)
    return model


if __name__ == "__main__":
    given = parser(__doc__).parse_args()
    peers = {"ours": partial(ours.build, mesh={"dp": 2}, zero=3), "fsdp2": torch_data.fsdp}
    job = Job(
        ranks=2,
        size=SIZES[given.size],
        rows=given.rows or 8,
        rounds=given.rounds or ROUNDS[given.size],
        builders=choose(peers, given.peers),
        timeout=given.timeout,
        model=with_adapters,
    )
    main({"LoRA, ZeRO 3": job}, {"size": given.size}, given.json)
