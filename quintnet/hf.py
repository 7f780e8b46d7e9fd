"""For transformers' Trainer: ``class Trainer(quintnet.hf.TrainerMixin, transformers.Trainer)``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quintnet_compiler.loops.transformers_trainer import TrainerMixin

__all__ = ["TrainerMixin"]


def __getattr__(name: str) -> object:
    if name in __all__:  # needs transformers and accelerate
        from quintnet_compiler.loops import transformers_trainer

        return transformers_trainer.TrainerMixin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
