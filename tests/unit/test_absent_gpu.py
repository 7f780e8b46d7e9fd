"""core.absent_gpu, ops.attention.cuda, checks.derivatives.device_kernels, runtime.backends.absent and
whole_state: programs for a GPU that is not here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quintnet_compiler.checks.derivatives.calls import OperatorCall
from quintnet_compiler.checks.derivatives.device_kernels import on_cpu
from quintnet_compiler.checks.derivatives.proven import Derivatives
from quintnet_compiler.compat.torch import FakeTensorMode
from quintnet_compiler.core.absent_gpu import CPU, CUDA, AbsentGpu, call_fake, compute_device, on_device
from quintnet_compiler.core.annotations import value
from quintnet_compiler.core.errors import CompileError, RunError
from quintnet_compiler.ir.builder import GraphBuilder, aten
from quintnet_compiler.ops.attention import cuda
from quintnet_compiler.ops.attention.cuda import CudaAttention, on_gpu
from quintnet_compiler.ops.attention.operator import attention
from quintnet_compiler.passes.autodiff.vector_jacobian import VectorJacobian
from quintnet_compiler.runtime.backends.absent import AbsentBackend
from quintnet_compiler.runtime.backends.whole_state import WholeState
from quintnet_compiler.runtime.launch import world

HOPPER, AMPERE, VOLTA = AbsentGpu(), AbsentGpu((8, 0), cudnn=False), AbsentGpu((7, 0), cudnn=False)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")


# -- which kernel


CHOICES: list[tuple[AbsentGpu, torch.dtype, int, dict[str, Any], str]] = [
    (HOPPER, BF16, 64, {}, "cudnn"),
    (HOPPER, FP16, 128, {"causal": True}, "cudnn"),
    (HOPPER, BF16, 64, {"keys": 2, "grouped": True}, "cudnn"),
    (HOPPER, BF16, 64, {"masked": True}, "cudnn"),
    (HOPPER, BF16, 256, {}, "flash"),
    (HOPPER, BF16, 20, {}, "flash"),  # features are padded to a multiple of 8
    (HOPPER, BF16, 264, {}, "efficient"),
    (HOPPER, FP32, 64, {}, "efficient"),
    (HOPPER, FP32, 64, {"masked": True}, "efficient"),
    (HOPPER, FP32, 6, {}, "math"),  # rows of 24 bytes
    (HOPPER, FP32, 64, {"keys": 2, "grouped": True}, "math"),
    (HOPPER, FP64, 64, {}, "math"),
    (AMPERE, BF16, 64, {}, "flash"),
    (AMPERE, BF16, 64, {"keys": 2, "grouped": True}, "flash"),
    (AMPERE, BF16, 64, {"masked": True}, "efficient"),
    (AMPERE, BF16, 64, {"causal": True, "positions": 8}, "efficient"),  # flash aligns masks at the other end
    (AMPERE, BF16, 64, {"values": 32}, "efficient"),
    (VOLTA, FP16, 64, {}, "efficient"),
    (VOLTA, BF16, 64, {}, "math"),
]


def _call(gpu: AbsentGpu, dtype: torch.dtype, features: int, options: dict[str, Any], device: str) -> CudaAttention:
    heads, keys, positions = 4, options.get("keys", 4), options.get("positions", 16)
    q = torch.empty(2, heads, 16, features, dtype=dtype, device=device)
    k = torch.empty(2, keys, positions, features, dtype=dtype, device=device)
    v = torch.empty(2, keys, positions, options.get("values", features), dtype=dtype, device=device)
    mask = torch.ones(2, 1, 16, positions, dtype=torch.bool, device=device) if options.get("masked") else None
    return CudaAttention(gpu, q, k, v, mask, 0.0, options.get("causal", False), options.get("grouped", False))


@pytest.mark.parametrize(("gpu", "dtype", "features", "options", "kernel"), CHOICES, ids=str)
def test_the_kernel_that_pytorch_would_choose(
    gpu: AbsentGpu, dtype: torch.dtype, features: int, options: dict[str, Any], kernel: str
) -> None:
    assert _call(gpu, dtype, features, options, "cpu").kernel() == kernel


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch decides where CUDA is")
@pytest.mark.parametrize(("dtype", "features", "options"), [row[1:4] for row in CHOICES], ids=str)
def test_the_kernel_that_pytorch_does_choose(dtype: torch.dtype, features: int, options: dict[str, Any]) -> None:
    capability = torch.cuda.get_device_capability()
    cudnn = capability[0] in (9, 10) and (torch.backends.cudnn.version() or 0) > 91500
    one = _call(AbsentGpu(capability, cudnn), dtype, features, options, "cuda")
    chosen = torch._fused_sdp_choice(one.q, one.k, one.v, one.mask, 0.0, one.causal, enable_gqa=one.grouped)
    assert torch.nn.attention.SDPBackend(chosen).name.lower().removesuffix("_attention") == one.kernel()


def test_what_pytorch_was_told_not_to_use() -> None:
    q = torch.empty(2, 4, 16, 64, dtype=BF16)
    one = CudaAttention(HOPPER, q, q, q, None, 0.0, True, False)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert one.kernel() == "efficient"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert one.kernel() == "math"
    columns = q.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert CudaAttention(HOPPER, columns, q, q, None, 0.0, True, False).kernel() == "math"


# -- what the kernels compute


def _templates(target: Any, tensors: list[Tensor], args: tuple[Any, ...], gpu: AbsentGpu, **kwargs: Any) -> list[str]:
    """The operators of a call and its derivative for ``gpu``, proven on numbers."""
    to = GraphBuilder(FakeTensorMode(allow_non_fake_inputs=True))
    stands = fx.Graph()
    given = tuple(stands.placeholder(f"x{i}") for i in range(len(tensors)))
    with to.mode:
        fakes = tuple(torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in tensors)
        made = call_fake(target, (*fakes, *args), kwargs)
    grads = tuple(x.is_floating_point() for x in tensors)
    call = OperatorCall(target, ((*given, *args), kwargs), fakes, grads, tuple(range(len(fakes))), (made,), (0,))
    templates: dict[Any, Any] = {}
    pattern = Derivatives(to, templates, gpu).pattern(call)
    assert all((g is not None) == wanted for g, wanted in zip(pattern.gradients, grads, strict=True))
    return [str(node.target).split(".")[1] for node in to.graph.nodes if "_scaled_dot" in str(node.target)]


def _qkv(dtype: torch.dtype, features: int = 8, keys: int = 4) -> list[Tensor]:
    return [torch.empty(2, heads, 6, features, dtype=dtype) for heads in (4, keys, keys)]


MASK = torch.empty(2, 1, 6, 6, dtype=torch.bool)
KERNELS: dict[str, Any] = {
    "cudnn": (_qkv(BF16), HOPPER, "cudnn"),
    "cudnn of groups": (_qkv(BF16, keys=2), HOPPER, "cudnn"),
    "cudnn with a mask": ([*_qkv(BF16), MASK], HOPPER, "cudnn"),
    "flash": (_qkv(BF16), AMPERE, "flash"),
    "flash with padded features": (_qkv(FP16, 6), AMPERE, "flash"),
    "efficient": (_qkv(FP32), HOPPER, "efficient"),
    "efficient with a mask": ([*_qkv(FP32), MASK], HOPPER, "efficient"),
}


@without_cuda
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_and_its_backward_compute_attention(name: str) -> None:
    tensors, gpu, kernel = KERNELS[name]
    grouped = tensors[1].shape[1] != tensors[0].shape[1]
    rest = () if len(tensors) == 4 else (None, 0.0, True)
    found = _templates(aten.scaled_dot_product_attention.default, tensors, rest, gpu, enable_gqa=grouped)
    name = f"_scaled_dot_product_{kernel}_attention"
    assert found == [name, f"{name}_backward"]


@without_cuda
def test_attention_with_a_window_for_a_gpu() -> None:
    how = {"scale": 0.3, "mask": "causal_window_3"}
    found = _templates(attention, _qkv(FP32), (), HOPPER, **how)
    assert found[0] == "_scaled_dot_product_efficient_attention"
    assert _templates(attention, _qkv(FP64), (), HOPPER, **how) == []


@without_cuda
@pytest.mark.parametrize("what", ["mask", "features"])
def test_a_kernel_that_is_called_wrongly_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [*_qkv(FP32), MASK]
    if what == "mask":
        monkeypatch.setattr(CudaAttention, "_added", lambda self, hidden: self.mask * 1.0)
    else:
        tensors = _qkv(FP16, 6)
        monkeypatch.setattr(cuda, "_padded", lambda x: torch.cat([x, x[..., :2]], -1))
    with pytest.raises(CompileError, match="QN209"):
        _templates(aten.scaled_dot_product_attention.default, tensors, (), HOPPER)


@without_cuda
def test_a_norm_is_fused_and_its_backward_right() -> None:
    x, weight = torch.empty(3, 4, 6), torch.empty(6)
    to = GraphBuilder(FakeTensorMode(allow_non_fake_inputs=True))
    with to.mode:
        fakes = [torch.empty(y.shape, device="cuda") for y in (x, weight)]
    nodes = [to.placeholder(f"x{i}", y, needs_grad=True) for i, y in enumerate(fakes)]
    operators = VectorJacobian(to, {}, lambda _: True, HOPPER)
    (out,), back = operators.apply(aten.rms_norm.default, (nodes[0], [6], nodes[1], 1e-3), {}, [0])
    terms = back([to.placeholder("t", fakes[0])])
    assert [n.target for n in to.made if "norm" in n.name] == [
        aten._fused_rms_norm.default,
        aten._fused_rms_norm_backward.default,
    ]
    env: dict[Any, Any] = {n: torch.randn(value(n).shape) for n in to.graph.nodes if n.op == "placeholder"}
    for node in to.made:
        args = fx.map_arg(node.args, env.__getitem__)
        env[node] = on_cpu(node.target)(*args)
    leaves = [env[n].requires_grad_() for n in nodes]
    with torch.enable_grad():
        expected = torch.nn.functional.rms_norm(leaves[0], [6], leaves[1], 1e-3)
    wanted = torch.autograd.grad(expected, leaves, env[to.graph.find_nodes(op="placeholder")[-1]])
    torch.testing.assert_close(env[out], expected.detach())
    for term, one in zip(terms, wanted, strict=True):
        torch.testing.assert_close(env[term], one)
    mixed = operators.apply(aten.rms_norm.default, (nodes[0], [6], _half(to), 1e-3), {}, [0])
    assert mixed and to.made[-1].target is not aten._fused_rms_norm.default


def _half(to: GraphBuilder) -> fx.Node:
    with to.mode:
        return to.placeholder("w", torch.empty(6, dtype=BF16, device="cuda"), needs_grad=True)


def test_other_operators_are_themselves() -> None:
    assert on_gpu(aten.mm.default, HOPPER) is aten.mm.default is on_cpu(aten.mm.default)


# -- fake tensors


@without_cuda
def test_fake_tensors_of_a_device_that_is_not_here() -> None:
    assert compute_device(CUDA) == CPU and compute_device(torch.device("meta")).type == "meta"
    assert on_device((1, CUDA, {"device": CUDA}), CPU) == (1, CPU, {"device": CPU})
    with FakeTensorMode():
        x = torch.empty(4, 6, device="cuda").t()
        made = call_fake(lambda x, device: (x[None].contiguous(), x.new_empty(2, device=device), 3), (x, CUDA), {})
        assert [getattr(y, "device", y) for y in made] == [x.device, x.device, 3] and made[0].is_contiguous()
        if not torch.backends.cuda.is_built():
            with pytest.raises(RuntimeError):
                x.contiguous()  # what torch does itself


# -- where programs are for, and what holds their state


@without_cuda
def test_where_a_program_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    assert world.device_for(model, "cuda") == (CUDA, AbsentGpu())
    assert world.device_for(model, "cuda:3", AMPERE) == (torch.device("cuda:3"), AMPERE)
    assert world.device_for(model, None, AMPERE) == (CUDA, AMPERE)
    assert world.device_for(nn.Linear(1, 1, device="meta"), None, AMPERE) == (CUDA, AMPERE)
    assert world.device_for(model, "cpu", AMPERE) == (CPU, None)
    assert world.device_for(model, None) == (CPU, None)
    group = {"is_initialized": lambda: True, "get_world_size": lambda: 2, "get_backend_config": lambda: "cpu:gloo"}
    for name, call in group.items():
        monkeypatch.setattr(world.dist, name, call)
    assert world.device_for(model, None, AMPERE) == (CPU, None)  # the ranks that there are
    with pytest.raises(CompileError, match=r"QN108 [^!]*one of 2 ranks, and has no CUDA device"):
        world.device_for(model, "cuda")


def _program(*names: str) -> Any:
    spec = {n: SimpleNamespace(name=n, kind="parameter", shape=(2,), dtype=FP32) for n in names}
    return SimpleNamespace(state=spec, precision=SimpleNamespace(scale=None))


def test_the_state_of_a_program_that_cannot_run() -> None:
    here, empty = nn.Parameter(torch.ones(2)), nn.Parameter(torch.empty(2, device="meta"))
    backend = AbsentBackend(_program("a", "b"), {"a": here, "b": empty}, HOPPER)
    assert isinstance(backend, WholeState) and backend.first and backend.told("x") == ("x",) and not backend.cuts()
    assert backend.parameters["a"] is here and backend.unset == {"b"}
    assert next(backend.parts(_program("a")))[1] is here
    assert dict(backend.wholes(_program("a"), ["a"]))["a"] is here is backend.everywhere(_program("a"), ["a"])["a"]
    backend.agree({"a": "b"})
    backend.learn(_program(), {})
    for refused in (
        backend.run,
        lambda: backend.new_caches(_program(), 2),
        lambda: backend.clip_grad_norm(_program(), 1.0),
        lambda: list(backend.parts(_program("b"))),
    ):
        with pytest.raises(RunError, match=r"QN305[^!]*compute capability 9\.0"):
            refused()
