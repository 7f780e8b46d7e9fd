"""capture.flex.packed and compat.torch_varlen: what a call of varlen_attn asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quintnet_compiler.capture.flex.packed import varlen_attention_followed
from quintnet_compiler.compat import torch_varlen
from quintnet_compiler.compat.torch_varlen import VarlenCall

varlen: Any = pytest.importorskip("torch.nn.attention.varlen")


@pytest.mark.parametrize("logs", [False, True])
@pytest.mark.parametrize(("window", "sides"), [((-1, -1), (-1, -1)), ((-1, 0), (-1, 0)), ((4, 0), (4, 0))])
def test_what_a_call_asks_for(window: tuple[int, int], sides: tuple[int, int], logs: bool) -> None:
    q, ends, calls = torch.randn(6, 2, 8), torch.tensor([0, 4, 6], dtype=torch.int32), list[VarlenCall]()

    def run(call: VarlenCall, theirs: object) -> tuple[torch.Tensor, torch.Tensor, None]:
        calls.append(call)
        return call.q, call.q[..., 0], None

    more = {"return_aux": varlen.AuxRequest(lse=True)} if logs else {}
    with torch_varlen.varlen_attention_by(run, lambda ours, theirs: ours):
        found = varlen.varlen_attn(q, q, q, ends, ends, 4, 4, scale=0.5, window_size=window, **more)
    assert (found[0] if logs else found) is q
    (call,) = calls
    assert (call.left, call.right) == sides and call.scale == 0.5 and call.q_ends is call.k_ends is ends
    assert call.more == ("return_aux" if logs else None)


def test_outside_of_a_trace_torch_computes_it() -> None:
    q, ends = torch.randn(6, 2, 8), torch.tensor([0, 4, 6], dtype=torch.int32)
    operator = torch.ops.torch_attn._varlen_attn
    with varlen_attention_followed():
        assert torch.ops.torch_attn._varlen_attn.overloads() == operator.overloads()
        with pytest.raises(NotImplementedError, match="_flash_attention_forward"):  # CPUs have no kernel
            varlen.varlen_attn(q, q, q, ends, ends, 4, 4)
    assert torch.ops.torch_attn._varlen_attn is operator
