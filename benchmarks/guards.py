"""What it takes to see that a module is as it was traced: GPT-2 small (meta device). ``python benchmarks/guards.py``"""

from __future__ import annotations

import timeit

import torch
import transformers

from quintnet_compiler.capture.capture import capture

REPEATS, CALLS = 400, 20


def main() -> None:
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        ids = torch.zeros(2, 64, dtype=torch.long)
    guards = capture(model, {"input_ids": ids, "labels": ids}).guards
    assert guards is not None and guards.hold()
    seconds = min(timeit.repeat(guards.hold, number=CALLS, repeat=REPEATS)) / CALLS
    for guard in (guards.plain, guards.same, guards.absent, *guards.fixed, guards.containers):
        part = min(timeit.repeat(guard.hold, number=CALLS, repeat=REPEATS)) / CALLS
        print(f"{part * 1e6:5.1f} us  {type(guard).__name__}")
    print(f"{seconds * 1e6:.0f} us")


if __name__ == "__main__":
    main()
