"""One script for all programs that start processes; without one, it starts them itself.

python start.py 2
torchrun --nproc-per-node 2 start.py 2
srun --ntasks 2 python start.py 2
mpirun -np 2 python start.py 2
accelerate launch --multi_gpu --num_processes 2 start.py 2
"""

from __future__ import annotations

import sys

from training import train

import quintnet

if __name__ == "__main__":
    losses = quintnet.launch(train, int(sys.argv[1]))
    if losses[0] is not None:  # the other processes have their own rank's alone
        print(f"loss {losses[0]:.6f}")
