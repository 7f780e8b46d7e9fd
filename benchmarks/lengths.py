"""Fine-tuning on batches of many lengths: what share of the time is spent compiling, with and without buckets.

python benchmarks/lengths.py [--steps N] [--lengths N] [--layers N] [--width N] [--json]

A Llama trains with two data ranks on batches that are padded to their longest text, beside the unsplit model on rank 0,
whose losses are compared; its time is not counted. Every length comes twice or more often, in random order. Compiling:
the first compilation, and how much longer the first step of each length takes than the median of that length's others.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import quintnet

ROWS, VOCABULARY = 8, 1024


def _model(layers: int, width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    heads = width // 32
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": heads}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, vocab_size=VOCABULARY, num_hidden_layers=layers, num_key_value_heads=heads)
    )


def _batch(length: int, step: int) -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (ROWS, length), generator=dice)
    ends = torch.randint(length // 2, length + 1, (ROWS,), generator=dice)
    ends[0] = length
    mask = (torch.arange(length) < ends[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(steps: int, lengths: int, layers: int, width: int, buckets: int | None) -> dict[str, Any]:
    """One rank's run."""
    first = torch.distributed.get_rank() == 0
    model = _model(layers, width)
    unsplit = copy.deepcopy(model) if first else None
    dice = torch.Generator().manual_seed(0)
    sizes = (20 + 4 * torch.randperm(lengths, generator=dice)).tolist()
    drawn = torch.randint(lengths, (steps - 2 * lengths,), generator=dice).tolist()
    every = [*range(lengths), *range(lengths), *drawn]
    order = [sizes[every[i]] for i in torch.randperm(steps, generator=dice)]

    def batch(step: int) -> dict[str, torch.Tensor]:
        made = _batch(order[step], step)
        return made if buckets is None else quintnet.pad_to_bucket(made, buckets)  # type: ignore[return-value]

    begun = time.perf_counter()
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch(0))
    once = time.perf_counter() - begun
    optimizer = torch.optim.SGD(program.parameters(), 1e-2)
    twin = torch.optim.SGD(unsplit.parameters(), 1e-2) if unsplit is not None else None
    took: dict[int, list[float]] = {}
    total, worst = once, 0.0
    for step in range(steps):
        given = batch(step)
        torch.distributed.barrier()
        start = time.perf_counter()
        loss = program.step(given)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        total += seconds
        took.setdefault(given["input_ids"].shape[1], []).append(seconds)
        if unsplit is not None and twin is not None:
            expected = unsplit(**_batch(order[step], step)).loss
            expected.backward()
            twin.step()
            twin.zero_grad()
            worst = max(worst, abs(float(loss.detach()) - float(expected.detach())) / float(expected.detach()))
    further = [found[0] - statistics.median(found[1:]) for found in took.values()]
    compiling = once + sum(max(0.0, seconds) for seconds in further)
    step_s = (total - compiling) / steps
    return {
        "forms": len(took),
        "first_compile_s": once,
        "further_compile_s": sum(further[2:]) / max(1, len(further) - 2),
        "compiling_s": compiling,
        "total_s": total,
        "step_s": step_s,
        "share": compiling / total,
        "steps_for_a_tenth": round(9 * compiling / step_s),
        "loss_error": worst,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--lengths", type=int, default=50)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--json", action="store_true", help="one line of JSON for each run")
    args = options.parse_args()
    if args.steps < 2 * args.lengths:
        options.error(f"{args.lengths} lengths need {2 * args.lengths} steps or more")
    for buckets in (None, 64):
        sizes = (args.steps, args.lengths, args.layers, args.width, buckets)
        found = quintnet.launch(train, 2, sizes, timeout=3600)[0]
        if args.json:
            print(json.dumps({"buckets": buckets, **found}))
            continue
        first, further = found["first_compile_s"], found["further_compile_s"]
        print(f"{args.lengths} lengths, {'as they are' if buckets is None else f'padded to multiples of {buckets}'}:")
        print(f"  {found['forms']} programs; the first was compiled in {first:.2f} s,")
        print(f"  the third and all further ones in {further:.2f} s each ({further / first:.0%})")
        print(f"  {args.steps} steps took {found['total_s']:.0f} s ({found['step_s']:.3f} s each), ", end="")
        print(f"{found['share']:.1%} of it compiling; 10 % in {found['steps_for_a_tenth']} steps")
        print(f"  largest relative difference of a loss from the unsplit model's: {found['loss_error']:.1e}")


if __name__ == "__main__":
    main()
