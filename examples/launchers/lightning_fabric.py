"""Lightning Fabric starts the processes and makes their process group: ``python lightning_fabric.py 2``.

``fabric.setup`` would wrap the model in DDP a second time: it stays out.
"""

from __future__ import annotations

import sys

from lightning.fabric import Fabric
from training import train

if __name__ == "__main__":
    fabric = Fabric(accelerator="auto", devices=int(sys.argv[1]), strategy="ddp")
    fabric.launch()
    fabric.print(f"loss {train():.6f}")
