"""Attention of packed documents on one GPU, in bf16: documents as runs of unequal lengths, in few calls, and in tiles.

python benchmarks/packed_attention.py [--length 16384] [--heads 16] [--features 64] [--window 1024]

Documents have lengths 1 : 2 : ... : n in one row. Median milliseconds of ten calls, forward and backward, after the
first has read the ids, as the layers of a model do once a step. ``tiles``: without the kernel that takes lengths.
Beside them, PyTorch's kernels for one causal row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from packed import lengths
from torch.nn.attention import SDPBackend, sdpa_kernel

from quintnet_compiler.ops.attention import tiles
from quintnet_compiler.ops.attention.blocks import Sight
from quintnet_compiler.ops.attention.kernels import CudaKernel
from quintnet_compiler.ops.attention.tiled import attend_runs, attend_runs_backward
from quintnet_compiler.ops.attention.tiles import AttentionInputs, AttentionTiles, Ids

TILE_BYTES = 2**25
MOST = 8  # documents that are measured tile by tile


def milliseconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(13):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times[3:])


def measure(inputs: AttentionInputs, grad: torch.Tensor, mask: str) -> tuple[float, float]:
    tiles_, runs = AttentionTiles(0.125, Sight.parse(mask), TILE_BYTES), [(0, inputs.q.shape[2])]
    out, lse = attend_runs(tiles_, runs, inputs)
    return (
        milliseconds(lambda: attend_runs(tiles_, runs, inputs)),
        milliseconds(lambda: attend_runs_backward(tiles_, runs, inputs, grad, out, lse)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("length", 16384), ("heads", 16), ("features", 64), ("window", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device")
    shape = 1, args.length, args.heads, args.features
    q, k, v, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    for count in (1, 8, 64, 128):
        documents = torch.repeat_interleave(torch.tensor(lengths(args.length, count)))[None]
        for mask in ("causal", f"causal_window_{args.window}"):
            attention_inputs = AttentionInputs(q, k, v, Ids(segments=documents))
            text = "lengths {:.2f} + {:.2f} ms".format(*measure(attention_inputs, grad, mask))
            if count <= MOST:
                with mock.patch.object(tiles, "kernel_for", lambda *_: CudaKernel(None)):
                    text += ", tiles {:.2f} + {:.2f} ms".format(*measure(attention_inputs, grad, mask))
            print(f"{count} documents, {mask}: {text}", flush=True)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    for name, kernel in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(kernel):
            whole = F.scaled_dot_product_attention(*inputs, is_causal=True)
            forward = milliseconds(lambda: F.scaled_dot_product_attention(*inputs, is_causal=True))
            backward = milliseconds(lambda made=whole: torch.autograd.grad(made, inputs, grad, retain_graph=True))  # type: ignore[misc]
            print(f"PyTorch's {name}, one causal row: {forward:.2f} + {backward:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
