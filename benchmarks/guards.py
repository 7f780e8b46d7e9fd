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
    print(
        f"{len(guards.names)} attributes, {len(guards.flag_keys)} parameters, "
        f"{len(guards.part_spaces)} modules with parts, {len(guards.hooks.empty)} places for hooks"
    )
    print(f"{seconds * 1e6:.0f} us")


if __name__ == "__main__":
    main()
