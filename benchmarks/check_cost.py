"""What comparing a program with its module costs. The aim: compiling with the comparison takes at most 1.25 times as
long as without, and two eager steps of the batch. All is CPU time of this process, after a small model was compiled.

python benchmarks/check_cost.py [resnet18] [vit] [gpt2] [llama] [llama405b] [--layers N] [--threads N]

resnet18: 4 images of 224 x 224; vit: ViT-S, the same; gpt2: GPT-2 small, 4 x 128 tokens; llama: 8 layers of 512, the
same; all with random weights in float32, on dp=2. llama405b: the configuration of benchmarks/compile_scale.py (Llama
3.1 405B's, bfloat16, on the meta device) for tp=8 within pp=16.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import quintnet

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from compile_scale import llama as llama405b

from tests.resnets import images, resnet

NAMES = ("resnet18", "vit", "gpt2", "llama")


def workload(name: str) -> tuple[nn.Module, Any, Any]:
    """A model with random weights, a batch, and a loss function where the model has none."""
    torch.manual_seed(0)
    if name == "resnet18":
        return resnet(18), images(224), F.cross_entropy
    import transformers as t

    pixels, labels = images(224)
    ids = torch.randint(0, 32000, (4, 128))
    model: Any
    if name == "vit":
        sizes = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
        model = t.ViTForImageClassification(t.ViTConfig(**sizes, num_labels=1000))
        return model.train(), {"pixel_values": pixels, "labels": labels}, None
    if name == "gpt2":
        model = t.GPT2LMHeadModel(t.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False))
    else:
        sizes = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
        model = t.LlamaForCausalLM(t.LlamaConfig(**sizes, intermediate_size=1376, use_cache=False))
    return model.train(), {"input_ids": ids, "labels": ids}, None


def timed(work: Callable[[], Any]) -> float:
    """CPU seconds of this process: other work on the machine counts less than in wall time."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(name: str) -> None:
    """Compile without the comparison and with it, twice in turn; the faster ones count."""
    model, batch, loss_fn = workload(name)

    def step() -> None:
        loss = loss_fn(model(batch[0]), batch[1]) if loss_fn is not None else model(**batch).loss
        loss.backward()
        model.zero_grad()

    def compile(check: Any) -> None:
        quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=loss_fn, check=check)

    step()
    eager = min(timed(step) for _ in range(3))
    plain, compared = (min(timed(lambda: compile(check)) for _ in range(2)) for check in ("off", "first"))  # noqa: B023
    limit = 1.25 * plain + 2 * eager
    print(
        f"{name}: compiling {plain:.1f} s of CPU time, with the comparison {compared:.1f} s; "
        f"an eager step {eager:.2f} s; limit {limit:.1f} s",
        flush=True,
    )


def measure_meta(layers: int) -> None:
    """Compile for many ranks what has no values, and compare it block by block."""
    ids = torch.zeros(16, 8192, dtype=torch.long, device="meta")
    batch, programs = {"input_ids": ids, "labels": ids}, list[quintnet.CompiledProgram]()
    mesh, model = quintnet.Mesh(pp=16, tp=8), llama405b(layers)

    def compile() -> None:
        programs.append(quintnet.compile(model, mesh, batch, microbatches=16, check="off", device="cpu"))

    seconds = timed(compile)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", quintnet.CheckWarning)
        compared = timed(lambda: programs[0]._programs.difference("train", batch))
    print(
        f"{layers} layers of Llama 405B: compiling {seconds:.1f} s of CPU time, comparing {compared:.1f} s", flush=True
    )
    for text in dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, quintnet.CheckWarning)):
        print(f"  {text}")


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("models", nargs="*", default=list(NAMES))
    options.add_argument("--layers", type=int, default=32)
    options.add_argument("--threads", type=int, default=1)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    small = (torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3]))
    quintnet.compile(resnet(18, 4, 10), quintnet.Mesh(dp=2), small, loss_fn=F.cross_entropy)
    for name in args.models:
        measure_meta(args.layers) if name == "llama405b" else measure(name)


if __name__ == "__main__":
    main()
