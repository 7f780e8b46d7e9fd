"""For Lightning's Trainer: ``Trainer(strategy=quintnet.lightning.MeshStrategy(mesh, batch))``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quintnet_compiler.loops.lightning_strategy import MeshStrategy

__all__ = ["MeshStrategy"]


def __getattr__(name: str) -> object:
    if name in __all__:  # needs lightning
        from quintnet_compiler.loops import lightning_strategy

        return lightning_strategy.MeshStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
