"""A rank of a script without launch, as torchrun or srun start it. After three steps, rank 1 leaves rank 0 alone."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import quintnet


def main(what: str, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = torch.randn(8, 6), torch.randn(8, 3)
    mesh = quintnet.Mesh(dp=2)
    program = quintnet.compile(torch.nn.Linear(6, 3), mesh, batch, loss_fn=F.mse_loss, check="off")
    for _ in range(3):
        program.step(batch)
    if torch.distributed.get_rank() == 1:
        (folder / "when").write_text(str(time.time()))
        match what:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise ValueError("no more rows")
            case "save":
                program.save(folder, step=3)
            case "finish" | "end":
                os._exit(0) if what == "end" else sys.exit()
    if what == "end":  # the process of the other one is gone, and this one needs it no more
        time.sleep(4)
        print("rank 0 has written its report")
        return
    for _ in range(3):
        program.step(batch)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
