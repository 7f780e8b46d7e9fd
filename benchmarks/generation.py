"""Tokens per second of greedy generation beside transformers' own generate, in one run on the same cores.

python benchmarks/generation.py [--layout one|tp|dp] [--size small|medium|large] [--rows N] [--rounds N] [--json]

``one``: a rank and transformers, a thread each. ``tp`` and ``dp``: two processes of one thread each, and transformers
in one process with two threads (and, for comparison, with one). They take turns, each while the others wait. Tokens
are compared first. ``--prompts N``: more prompts than rows, of unequal lengths, whose texts end at unequal lengths:
transformers takes them batch by batch, padded. ``--device cuda``: both on a GPU, in bf16 with
``--half``, where texts may part ways by rounding. Processor time says what is left where other processes run on these
cores: that of two perfect threads would be half of that of one. ``--plain``: PyTorch's own linear layers instead of
oneDNN's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import quintnet
from quintnet_compiler.runtime.execute import host_linears

SIZES = {"small": (256, 4, 4096), "medium": (512, 8, 32000), "large": (1024, 8, 32000)}  # width, layers, vocabulary
LAYOUTS = {"one": {"dp": 1}, "tp": {"tp": 2}, "dp": {"dp": 2}}
PROMPT = 32


def _model(size: str) -> Any:
    width, layers, vocabulary = SIZES[size]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=8 * width // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(2, width // 256),
        max_position_embeddings=512,
        initializer_range=0.1,  # so that texts are not one token for ever
    )
    return transformers.LlamaForCausalLM(config).eval()


def _prompts(vocabulary: int, count: int, *, equal: bool) -> list[Tensor]:
    dice = torch.Generator().manual_seed(1)
    lengths = torch.randint(PROMPT // 4, PROMPT + 1, (count,), generator=dice).tolist()
    return [torch.randint(3, vocabulary, (PROMPT if equal else n,), generator=dice) for n in lengths]


def _padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    most = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(prompt, (most - len(prompt), 0)) for prompt in prompts])
    return ids, torch.stack([torch.arange(most) >= most - len(prompt) for prompt in prompts]).long()


def _theirs(model: Any, prompts: list[Tensor], rows: int, new: int, ends: list[int] | None) -> list[Tensor]:
    """Return the tokens after each prompt, until its end."""
    texts: list[Tensor] = []
    for start in range(0, len(prompts), rows):
        ids, mask = _padded(prompts[start : start + rows])
        options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": ends}
        with torch.no_grad():
            outputs = model.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), **options)
        texts += [_until(row[ids.shape[1] :], ends) for row in outputs.cpu()]
    return texts


def _until(text: Tensor, ends: list[int] | None) -> Tensor:
    where = torch.isin(text, torch.tensor(ends or [-1])).nonzero()
    return text if not len(where) else text[: int(where[0]) + 1]


def measure(
    layout: str, size: str, rows: int, count: int, rounds: int, new: int, plain: bool, device: str, half: bool
) -> dict[str, Any]:
    """Seconds of each round, of ours and of transformers', by its threads; on every rank."""
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if half else torch.float32
    if plain:
        host_linears.host_linear = None
    distributed, first = dist.is_initialized(), not dist.is_initialized() or dist.get_rank() == 0
    twin = _model(size).to(device, dtype) if first else None
    mesh = quintnet.Mesh(**LAYOUTS[layout])
    model = _model(size).to(dtype)
    program = quintnet.compile(model, mesh, _batch(), training=False, sequence_parallel=False, device=device)
    vocabulary, equal = SIZES[size][2], count <= rows
    prompts, ends = _prompts(vocabulary, count, equal=equal), None if equal else list(range(0, vocabulary, 40))

    def ours() -> list[Tensor]:
        texts = program.generate(prompts, max_new_tokens=new, eos_token_id=ends, pad_token_id=0, rows=rows)
        return [text[len(prompt) :].cpu() for text, prompt in zip(texts, prompts, strict=True)]

    def theirs(threads: int) -> list[Tensor]:
        if twin is None:
            return []
        torch.set_num_threads(threads)
        try:
            return _theirs(twin, prompts, rows, new, ends)
        finally:
            torch.set_num_threads(1)

    def timed(run: Callable[[], list[Tensor]]) -> tuple[float, float]:
        """Seconds of wall time, and of the CPU on the busiest rank."""
        if distributed:
            dist.barrier()
        begun, used = time.perf_counter(), time.process_time()
        run()
        most = torch.tensor(time.process_time() - used)
        if distributed:
            dist.all_reduce(most, dist.ReduceOp.MAX)
        return time.perf_counter() - begun, float(most)

    expected, generated = theirs(1), ours()
    if first:
        same = sum(torch.equal(a, b) for a, b in zip(generated, expected, strict=True))
        assert half or same == len(prompts), f"{len(prompts) - same} of {len(prompts)} texts differ"
        assert len(torch.cat(generated).unique()) > len(prompts)
    runs = {"ours": ours, "one thread": lambda: theirs(1)}
    if distributed:
        runs["two threads"] = lambda: theirs(2)
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for name in [*runs, *list(runs) * rounds]:
        took[name].append(timed(runs[name]))
    tokens = sum(map(len, generated))
    wall, cpu = ({name: [sample[i] for sample in samples[1:]] for name, samples in took.items()} for i in (0, 1))
    return {"tokens": tokens, "equal": same if first else 0, "seconds": wall, "cpu_seconds": cpu}


def _batch() -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(2, 8, dtype=torch.int64)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layout", choices=LAYOUTS, default="one")
    options.add_argument("--size", choices=SIZES, default="medium")
    options.add_argument("--rows", type=int, default=8)
    options.add_argument("--prompts", type=int, help="default: as many as rows, of one length")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--new", type=int, default=64, help="tokens of each text")
    options.add_argument("--plain", action="store_true")
    options.add_argument("--device", default="cpu")
    options.add_argument("--half", action="store_true", help="bfloat16")
    options.add_argument("--json", action="store_true")
    args = options.parse_args()
    arguments = (args.layout, args.size, args.rows, args.prompts or args.rows, args.rounds, args.new, args.plain)
    arguments += (args.device, args.half)
    results = measure(*arguments) if args.layout == "one" else quintnet.launch(measure, 2, arguments, timeout=3000)[0]
    seconds, tokens = results["seconds"], results["tokens"]
    ratios = {
        name: statistics.median(b / a for a, b in zip(seconds["ours"], took, strict=True))
        for name, took in seconds.items()
        if name != "ours"
    }
    cpu, ranks = results["cpu_seconds"], 1 if args.layout == "one" else 2
    shared = [b / ranks / a for a, b in zip(cpu["ours"], cpu["one thread"], strict=True)]
    ratios["processor time"] = statistics.median(shared)
    if args.json:
        print(json.dumps({**results, "ratios": ratios}))
        return
    equal = f"{results['equal']} texts equal"
    print(f"{args.layout}, {args.size}: {arguments[3]} prompts in {args.rows} rows, {tokens} tokens, {equal}")
    for name, took in seconds.items():
        what = "quintnet" if name == "ours" else f"transformers, {name}"
        ratio = "" if name == "ours" else f"; quintnet makes {ratios[name]:.2f} times as many"
        print(f"  {what}: {tokens / statistics.median(took):.1f} tokens per second{ratio}")
    what = "transformers' with a thread" if ranks == 1 else "half of transformers' with a thread"
    print(f"  processor time of the busiest rank: {what} is {ratios['processor time']:.2f} times as much")


if __name__ == "__main__":
    main()
