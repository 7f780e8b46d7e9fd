"""For Lightning's Trainer: ``Trainer(strategy=quintnet.lightning.MeshStrategy(mesh, batch))``."""

from quintnet_compiler.loops.lightning_strategy import MeshStrategy

__all__ = ["MeshStrategy"]
