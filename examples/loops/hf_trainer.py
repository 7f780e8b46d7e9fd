"""transformers' Trainer on a mesh: what differs from a run on one device is marked.

python examples/loops/hf_trainer.py --mesh tp=2 --out runs/trainer              # two processes
python examples/loops/hf_trainer.py --mesh dp=2 --out runs/trainer --resume 4   # from checkpoint-4, on another layout
torchrun --nproc-per-node 2 examples/loops/hf_trainer.py --mesh pp=2 --out runs/trainer
"""

from __future__ import annotations

from typing import Any

from small import Texts, language_model, main
from transformers import Trainer, TrainingArguments

import quintnet
import quintnet.hf  # 1


class MeshTrainer(quintnet.hf.TrainerMixin, Trainer):  # type: ignore[misc]  # 2
    """The Trainer on a mesh."""


def arguments(out: str, rows: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=out,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=2,
        eval_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )


def losses_of(trainer: Trainer) -> list[tuple[int, str, float]]:
    """What was logged: step, name, value."""
    return [
        (line["step"], key, line[key])
        for line in trainer.state.log_history
        for key in ("loss", "eval_loss", "grad_norm")
        if key in line
    ]


def run(mesh: quintnet.Mesh, out: str, resume: int) -> Any:
    """Train, or go on. A global batch has 4 rows, as in :func:`plain`."""
    data = {"train_dataset": Texts(22), "eval_dataset": Texts(10, seed=1)}
    trainer = MeshTrainer(language_model(), arguments(out, 4 // mesh.data_ways), **data, mesh=mesh)  # 3
    trainer.train(resume_from_checkpoint=f"{out}/checkpoint-{resume}" if resume else None)
    trainer.save_model(f"{out}/final")
    return losses_of(trainer)


def plain(out: str) -> list[tuple[int, str, float]]:
    """The same run on one device, without a mesh."""
    trainer = Trainer(language_model(), arguments(out, 4), train_dataset=Texts(22), eval_dataset=Texts(10, seed=1))
    trainer.train()
    return losses_of(trainer)


if __name__ == "__main__":
    main(__doc__, run, out="runs/trainer", resume=0)
