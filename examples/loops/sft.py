"""TRL's SFTTrainer on a mesh, with LoRA or without: what differs from a run on one device is marked.

python examples/loops/sft.py --mesh tp=2 --out runs/sft
python examples/loops/sft.py --mesh dp=2 --out runs/sft --adapters 0
"""

from __future__ import annotations

from typing import Any

import datasets
import peft
import torch
import transformers
import trl
from small import VOCABULARY, language_model, main
from tokenizers import Tokenizer, models, pre_tokenizers

import quintnet
import quintnet.hf  # 1


class MeshTrainer(quintnet.hf.TrainerMixin, trl.SFTTrainer):  # type: ignore[misc]  # 2
    """TRL's Trainer on a mesh."""


def tokenizer() -> Any:
    """Words w0, w1, ... are tokens."""
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(VOCABULARY - 2))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def texts() -> Any:
    """Of different lengths."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(VOCABULARY - 2, (6 + i % 7,), generator=generator).tolist() for i in range(22)]
    return datasets.Dataset.from_list([{"text": " ".join(f"w{i}" for i in row)} for row in rows])


def run(mesh: quintnet.Mesh | None, out: str, adapters: int) -> list[float]:
    """The losses that were logged; without a mesh, on one device."""
    rows = 4 if mesh is None else 4 // mesh.data_ways
    options = {"logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False}
    arguments = trl.SFTConfig(
        out, per_device_train_batch_size=rows, num_train_epochs=1, learning_rate=1e-2, disable_tqdm=True,
        gradient_checkpointing=False, **options,
    )  # fmt: skip
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian") if adapters else None
    given = {"train_dataset": texts(), "processing_class": tokenizer(), "peft_config": lora}
    torch.manual_seed(0)
    if mesh is None:
        trainer = trl.SFTTrainer(language_model(), arguments, **given)
    else:
        trainer = MeshTrainer(language_model(), arguments, **given, mesh=mesh)  # 3
    trainer.train()
    trainer.save_model(f"{out}/final")
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    main(__doc__, run, out="runs/sft", adapters=1)
