"""For transformers' Trainer: ``class Trainer(quintnet.hf.TrainerMixin, transformers.Trainer)``."""

from quintnet_compiler.loops.transformers_trainer import TrainerMixin

__all__ = ["TrainerMixin"]
