"""Everything that one GPU can prove in half an hour, as a report.

python benchmarks/first_gpu.py --out report [--emulated] [--only machine,layouts]
python benchmarks/first_gpu.py --out report --only nccl_ranks --library libnccl.so.2

Writes ``report/report.json`` and ``report/index.html``, after each part anew. Each part runs in a process of its own
with a limit; one that fails leaves its error there, and the others go on. ``--emulated``: on the emulated accelerator
of the tests, without a GPU; what needs CUDA is left out, and the report says so. Exits with 1 if a part failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))  # for the models of the tests
from gpu_report.driver import run_parts
from gpu_report.entries import line_of
from gpu_report.parts import PARTS, Part


def work(part: Part, folder: Path, setting: dict[str, Any]) -> None:
    """A part, in this process: what it finds is written as it comes."""
    faulthandler.dump_traceback_later(max(1, part.seconds - 5))  # where it hangs, if it does
    from gpu_report.setting import Setting

    with (folder / f"{part.name}.jsonl").open("a") as file:
        for entry in part.work()(Setting.here(**setting)):
            file.write(line_of(entry))
            file.flush()
    sys.stdout.flush()
    os._exit(0)  # threads of the emulated accelerator's streams have no orderly end


def accelerator() -> bool:
    import torch  # not at the top: the process that only watches is soon there

    return torch.accelerator.is_available()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the report")
    parser.add_argument("--emulated", action="store_true", help="without a GPU")
    parser.add_argument("--only", help="comma-separated parts (default: all but nccl_ranks)")
    parser.add_argument("--library", type=Path, help="an NCCL of 2.30 or later, for nccl_ranks")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # in this process
    args = parser.parse_args()
    parts = {part.name: part for part in PARTS}
    setting = {"emulated": args.emulated, "library": args.library}
    if args.part:
        work(parts[args.part], args.out, setting)
        return 0
    if not args.emulated and not accelerator():
        parser.error("torch finds no accelerator on this machine: --emulated runs what runs without")
    names = args.only.split(",") if args.only else [part.name for part in PARTS if part.usual]
    for name in names:
        if name not in parts:
            parser.error(f"there is no part {name}: there are {', '.join(parts)}")
    outcomes = run_parts([parts[name] for name in names], args.out, **setting)
    print(args.out / "index.html")
    return 1 if any(outcome.verdict == "failed" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
