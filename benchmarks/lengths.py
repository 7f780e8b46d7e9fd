"""Fine-tuning on batches of many lengths: what share of the time is spent compiling, with and without buckets.

python benchmarks/lengths.py [--steps N] [--lengths N] [--layers N] [--width N] [--json | --profile]

A Llama trains with two data ranks on batches that are padded to their longest text, beside the unsplit model on rank 0,
whose losses are compared; its time is not counted. Every length comes twice or more often, in random order. Compiling:
the first compilation, and how much longer the first step of each length takes than the median of that length's others.
Of seconds that pass, and of seconds of the CPU that rank 0 uses, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import json
import pstats
import statistics
import time
from typing import Any, NamedTuple

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


class Clocks(NamedTuple):
    """Seconds that passed, and seconds of the CPU that this process used."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Clocks:
        return cls(time.perf_counter(), time.process_time())

    def since(self, start: Clocks) -> Clocks:
        return Clocks(self.wall - start.wall, self.cpu - start.cpu)


def _shares(once: float, took: list[list[float]]) -> dict[str, float]:
    """Return the figures of one clock.

    ``once``: seconds of the first compilation. ``took``: seconds of the steps of each length, in order.
    """
    further = [seconds_of_length[0] - statistics.median(seconds_of_length[1:]) for seconds_of_length in took]
    compiling = once + sum(max(0.0, seconds) for seconds in further)
    total, steps = once + sum(map(sum, took)), sum(map(len, took))
    step_s = (total - compiling) / steps
    return {
        "first_compile_s": once,
        "further_compile_s": sum(further[2:]) / max(1, len(further) - 2),
        "compiling_s": compiling,
        "total_s": total,
        "step_s": step_s,
        "share": compiling / total,
        "steps_for_a_tenth": round(9 * compiling / step_s),
    }


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
        padded_rows = _batch(order[step], step)
        return padded_rows if buckets is None else quintnet.pad_to_bucket(padded_rows, buckets)  # type: ignore[return-value]

    begun = Clocks.now()
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch(0))
    once = Clocks.now().since(begun)
    optimizer = torch.optim.SGD(program.parameters(), 1e-2)
    twin = torch.optim.SGD(unsplit.parameters(), 1e-2) if unsplit is not None else None
    took: dict[int, list[Clocks]] = {}
    worst = 0.0
    for step in range(steps):
        rows = batch(step)
        torch.distributed.barrier()
        start = Clocks.now()
        loss = program.step(rows)
        optimizer.step()
        optimizer.zero_grad()
        took.setdefault(rows["input_ids"].shape[1], []).append(Clocks.now().since(start))
        if unsplit is not None and twin is not None:
            expected = unsplit(**_batch(order[step], step)).loss
            expected.backward()
            twin.step()
            twin.zero_grad()
            worst = max(worst, abs(float(loss.detach()) - float(expected.detach())) / float(expected.detach()))
    shares = {
        clock: _shares(getattr(once, clock), [[getattr(clocks, clock) for clocks in each] for each in took.values()])
        for clock in Clocks._fields
    }
    return {"forms": len(took), **shares, "loss_error": worst}


def profile(layers: int, width: int) -> None:
    """Print what the compilation of a fourth length consists of, in one process."""
    program = quintnet.compile(_model(layers, width), quintnet.Mesh(dp=2), _batch(100, 0))
    for length in (60, 140):
        program.prepare(_batch(length, 0))
    recorded = cProfile.Profile()
    recorded.runcall(program.prepare, _batch(120, 0))
    pstats.Stats(recorded).sort_stats("cumulative").print_stats(r"passes|driver|\(__torch_dispatch__\)", 40)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--lengths", type=int, default=50)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--json", action="store_true", help="one line of JSON for each run")
    options.add_argument("--profile", action="store_true", help="of compiling alone, by function")
    args = options.parse_args()
    if args.profile:
        return profile(args.layers, args.width)
    if args.steps < 2 * args.lengths:
        options.error(f"{args.lengths} lengths need {2 * args.lengths} steps or more")
    for buckets in (None, 64):
        sizes = (args.steps, args.lengths, args.layers, args.width, buckets)
        results = quintnet.launch(train, 2, sizes, timeout=3600)[0]
        if args.json:
            print(json.dumps({"buckets": buckets, **results}))
            continue
        print(f"{args.lengths} lengths, {'as they are' if buckets is None else f'padded to multiples of {buckets}'}:")
        print(f"  {results['forms']} programs")
        for clock, what in (("wall", "seconds"), ("cpu", "seconds of the CPU")):
            clock_results = results[clock]
            first, further = clock_results["first_compile_s"], clock_results["further_compile_s"]
            print(f"  {what}: the first was compiled in {first:.2f},", end="")
            print(f" the third and all further ones in {further:.2f} each ({further / first:.0%});")
            print(
                f"    {args.steps} steps took {clock_results['total_s']:.0f} ({clock_results['step_s']:.3f} each), ",
                end="",
            )
            print(f"{clock_results['share']:.1%} of it compiling; 10 % in {clock_results['steps_for_a_tenth']} steps")
        print(f"  largest relative difference of a loss from the unsplit model's: {results['loss_error']:.1e}")


if __name__ == "__main__":
    main()
