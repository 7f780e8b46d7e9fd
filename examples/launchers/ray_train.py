"""Ray Train starts the processes, makes their process group, and calls ``work`` in each: ``python ray_train.py 2``."""

from __future__ import annotations

import sys

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from training import train


def work() -> None:
    loss = train()
    ray.train.report({"loss": loss})
    if ray.train.get_context().get_world_rank() == 0:
        print(f"loss {loss:.6f}")


if __name__ == "__main__":
    workers = ScalingConfig(num_workers=int(sys.argv[1]), use_gpu=torch.cuda.is_available())
    TorchTrainer(work, scaling_config=workers).fit()
