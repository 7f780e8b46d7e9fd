"""Programs for CUDA on a machine without it: the operators of GPUs in them, and their prices; they do not run."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quintnet
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.cli.dump import dump
from quintnet_compiler.cli.estimate import estimate
from quintnet_compiler.compat.torch import FakeTensorMode
from quintnet_compiler.core.absent_gpu import CUDA, AbsentGpu
from quintnet_compiler.core.annotations import facts, values
from quintnet_compiler.cost_models.hardware import A100_80
from quintnet_compiler.ir.builder import GraphBuilder
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.autodiff.vector_jacobian import VectorJacobian
from quintnet_compiler.planner.places import PricedCluster
from quintnet_compiler.planner.planning import Planner

from .all_samples import SAMPLES
from .models import WIDTH, Mixture
from .one_operator import Input, Sample

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
VOCABULARY, FEATURES, HEADS, GROUPS = 64, 64, 4, 2
MODE = FakeTensorMode(allow_non_fake_inputs=True)
GPUS: dict[str, Any] = {"precision": "bf16", "device": "cuda", "check": "off"}


class Block(nn.Module):
    """As in Llama: grouped attention and a gated MLP behind norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(FEATURES) for _ in range(2))
        self.qkv = nn.ModuleList(
            nn.Linear(FEATURES, FEATURES // HEADS * heads, bias=False) for heads in (HEADS, GROUPS, GROUPS)
        )
        self.out, self.down = (nn.Linear(n, FEATURES, bias=False) for n in (FEATURES, 2 * FEATURES))
        self.gate, self.up = (nn.Linear(FEATURES, 2 * FEATURES, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        y = self.norms[0](x)
        q, k, v = (part(y).view(rows, length, -1, FEATURES // HEADS).transpose(1, 2) for part in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, -1))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, FEATURES), nn.Linear(FEATURES, VOCABULARY, bias=False)
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(layers)), nn.RMSNorm(FEATURES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


IDS = (torch.arange(8 * 16).reshape(8, 16) % VOCABULARY,)
MIXED = (torch.ones(16, WIDTH), torch.arange(16) % 8)


def _code(program: quintnet.CompiledProgram) -> str:
    return "\n".join(piece.module.code for rank in program.ranks for s in rank.stages for piece in s.pieces.values())


def _fused(code: str) -> set[str]:
    return set(re.findall(r"torch\.ops\.aten\._?(\w*(?:scaled_dot|rms_norm)\w*)\.", code))


def _for_gpus(program: quintnet.CompiledProgram) -> str:
    code = _code(program)
    assert "_for_cpu" not in code and set(re.findall(r"device\(type='(\w+)'\)", code)) == {"cuda"}
    return code


CUDNN = {
    "scaled_dot_product_cudnn_attention", "scaled_dot_product_cudnn_attention_backward", "fused_rms_norm",
    "fused_rms_norm_backward",
}  # fmt: skip


@pytest.mark.slow
def test_a_program_for_gpus_is_dumped_and_priced_and_does_not_run(tmp_path: Path) -> None:
    model = Llama()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    program = quintnet.compile(model, quintnet.Mesh(tp=2), IDS, **GPUS)
    assert _fused(_for_gpus(program)) == CUDNN

    program.dump(tmp_path, costs=quintnet.Cluster("h100"))
    text = "".join(f.read_text() for f in tmp_path.rglob("*") if f.is_file())
    assert "_scaled_dot_product_cudnn_attention" in text and "_for_cpu" not in text

    prices = [program.simulate(quintnet.Cluster(gpu)) for gpu in ("h100", "a100")]
    assert prices[0].seconds < prices[1].seconds

    for refused in (
        lambda: program.step(IDS),
        lambda: program.evaluate(IDS),
        lambda: program(*IDS),
        lambda: program.measure(IDS),
        lambda: program.verify(),
        lambda: program.generate(IDS[0]),
        lambda: program.clip_grad_norm(1.0),
    ):
        with pytest.raises(quintnet.RunError, match=r"QN305[^!]*this machine has none"):
            refused()

    # the module has its parameters, where it had them
    assert {name: x.device.type for name, x in program.state_dict().items()} == dict.fromkeys(before, "cpu")
    assert all(torch.equal(x, before[name]) for name, x in program.state_dict().items())
    assert {id(p) for p in program.parameters()} == {id(p) for p in model.parameters()}
    program.load_state_dict({name: x + 1 for name, x in before.items()})
    assert all(torch.equal(x, before[name] + 1) for name, x in model.state_dict().items())
    program.zero_grad()
    assert quintnet.compile(model, quintnet.Mesh(tp=2), IDS, check="off").step(IDS).isfinite()


LAYOUTS: dict[str, Any] = {
    "dp2, ZeRO 3": (Llama, IDS, {"dp": 2}, {"zero": 3}, CUDNN),
    "cp2, all_gather": (Llama, IDS, {"cp": 2}, {"context": "all_gather"}, CUDNN),
    "cp2, ring": (Llama, IDS, {"cp": 2}, {"context": "ring"}, {"fused_rms_norm", "fused_rms_norm_backward"}),
    "pp2": (lambda: Llama(2), IDS, {"pp": 2}, {"microbatches": 2, "schedule": "zb-h1"}, CUDNN),
    "tp2, recomputed": (Llama, IDS, {"tp": 2}, {"recompute": "full", "async_tp": True}, CUDNN),
    "ep2": (Mixture, MIXED, {"ep": 2}, {}, set()),
    "in 32 bits": (Llama, IDS, {"tp": 2}, {"precision": "model"}, {"fused_rms_norm", "fused_rms_norm_backward"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_for_gpus(name: str) -> None:
    model, batch, axes, options, fused = LAYOUTS[name]
    program = quintnet.compile(model(), quintnet.Mesh(**axes), batch, **{**GPUS, **options})
    assert _fused(_for_gpus(program)) == fused
    assert (name == "ep2") == ("quintnet.grouped_linear." in _code(program))  # _grouped_mm, on GPUs
    h100, a100 = (program.simulate(quintnet.Cluster(gpu)).seconds for gpu in ("h100", "a100"))
    assert 0 < h100 < a100
    with pytest.raises(quintnet.RunError, match="QN305"):
        program.step(batch)


@pytest.mark.slow
def test_every_process_makes_the_same_program() -> None:
    code = (
        "import quintnet, tests.test_cuda_programs as t\n"
        "p = quintnet.compile(t.Llama(2), quintnet.Mesh(pp=2, tp=2), t.IDS, microbatches=2, **t.GPUS)\n"
        "print(p._primary().program.digest)"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ".", "LOCAL_RANK": seed},
            cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600, check=True,
        ).stdout
        for seed in ("0", "1")
    ]  # fmt: skip
    assert found[0] == found[1] and len(found[0].strip()) == 64


@pytest.mark.slow
def test_a_cluster_of_gpus_means_its_gpus() -> None:
    """Where nothing else says where to run; and the planner chooses by what they would run."""
    model, cluster = Llama(), quintnet.Cluster("a100", nodes=1, gpus_per_node=2)
    options = {"plan": {"mesh": {"tp": 2}, "recompute": "none", "microbatches": 1, "precision": "bf16"}}
    program = quintnet.compile(model, cluster, IDS, check="off", **options)  # type: ignore[arg-type]
    assert "scaled_dot_product_flash_attention" in _fused(_for_gpus(program))
    with pytest.raises(quintnet.RunError, match=r"QN305[^!]*compute capability 8\.0"):
        program.step(IDS)


@pytest.mark.slow
def test_estimates_are_of_the_clusters_own_operators() -> None:
    model, plan = Llama(), {"mesh": {"tp": 2}, "precision": "bf16"}
    h100, a100 = (
        quintnet.estimate(model, quintnet.Cluster(gpu, gpus_per_node=2), IDS, plan) for gpu in ("h100", "a100")
    )
    assert 0 < h100.seconds < a100.seconds
    cluster = quintnet.Cluster("a100", gpus_per_node=2)
    planner = Planner.from_captured(
        capture(model, IDS, once=True), 8, PricedCluster(cluster), Plan.model_validate(plan), RULES
    )
    program = planner.folded.program
    assert program.absent == A100_80.gpu != AbsentGpu()
    assert {x.device.type for node in program.graph.nodes if node.op != "output" for x in values(node)} == {"cuda"}


def _llama_config(folder: Path, **sizes: int) -> Path:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    config = {"model_type": "llama", "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "rope_parameters": rope}
    (folder / "llama.json").write_text(json.dumps(config | sizes))
    return folder / "llama.json"


def _attention(folder: Path) -> Counter[str]:
    """What the code of a dump's ranks runs as attention."""
    code = "".join(file.read_text() for file in (folder / "ranks").glob("*.py"))
    return Counter(re.findall(r"aten\._scaled_dot_product_(\w+)\.", code))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("axes", "options"),
    [({"dp": 1}, {}), ({"cp": 2}, {"context": "ulysses"}), ({"tp": 2}, {"sequence_parallel": True}), ({"pp": 2}, {})],
    ids=str,
)
def test_gradients_that_cudnn_gets_have_one_layout(axes: dict[str, int], options: dict[str, Any]) -> None:
    """[B, S, H, D] in memory, whatever is before it: PyTorch keeps cuDNN's plans without the strides of gradients."""
    program = quintnet.compile(Packed(), quintnet.Mesh(**axes), (torch.randn(4, 16, 256),), **GPUS, **options)
    found = 0
    for stage in program.ranks[0].stages:
        for node in stage.backward.module.graph.nodes:
            if node.target is torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default:
                turned = node.args[0]
                laid_out = turned.args[0]
                assert laid_out.target is torch.ops.aten.contiguous.default and not laid_out.kwargs
                assert all(n.args[1:] == (1, 2) and "transpose" in str(n.target) for n in (turned, laid_out.args[0]))
                found += 1
    assert found == 2 // axes.get("pp", 1)


class Packed(nn.Module):
    """Two layers of causal attention with heads of 64 features."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(256, 768) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for qkv in self.qkv:
            q, k, v = qkv(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4).unbind()
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x.square().mean()


@pytest.mark.slow
def test_a_configuration_for_gpus_from_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = _llama_config(tmp_path, num_hidden_layers=1, vocab_size=64, max_position_embeddings=32, **sizes)
    target, plan = f"hf:{config},rows=4,sequence=16", tmp_path / "plan.json"
    plan.write_text(json.dumps({"version": 2, "mesh": {"tp": 2}, "microbatches": 2, "precision": "bf16"}))
    dump(target, tmp_path / "out", plan=plan, device="cuda")
    assert _attention(tmp_path / "out") == {"cudnn_attention": 1, "cudnn_attention_backward": 1}
    assert estimate(target, plan, gpu="h100").text.startswith("tp=2, 2 x 2 rows\nstep ")
    with pytest.raises(typer.BadParameter, match="neither cuda nor cpu"):
        dump(target, tmp_path / "out", plan=plan, device="h100")


@pytest.mark.slow
def test_llama_70b_for_64_gpus(tmp_path: Path) -> None:
    """What docs/simulate.md claims."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    _llama_config(tmp_path, num_hidden_layers=80, vocab_size=128256, max_position_embeddings=8192, **sizes)
    plan = {"version": 2, "mesh": {"pp": 8, "tp": 8}, "microbatches": 32, "precision": "bf16"}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for verb, options in (("dump", "--device cuda --out out"), ("estimate", "--gpu h100 --nodes 8")):
        command = [sys.executable, "-m", "quintnet_compiler.cli", verb, "hf:llama.json,rows=32,sequence=8192"]
        command += ["--plan", "plan.json", *options.split()]
        told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1500)
        assert told.returncode == 0, told.stderr
    assert _attention(tmp_path / "out") == {"cudnn_attention": 80, "cudnn_attention_backward": 80}
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2**20  # in KiB, of the larger process
    for figure in ("step 5.96 s", "bubble 995 ms", "memory of the fullest rank 46.3 GiB"):
        assert figure in told.stdout


def _operators(sample: Sample, gpu: AbsentGpu | None) -> list[tuple[str, Any]]:
    """The operators that a call and its derivative are made of, with what they make."""
    to, dice = GraphBuilder(MODE), torch.Generator().manual_seed(0)
    nodes = []
    for index, one in enumerate(sample.inputs):
        x = one.draw(dice, one.shape)
        with MODE:
            fake = torch.empty(x.shape, dtype=x.dtype, device=torch.device("cpu") if gpu is None else CUDA)
        trains = one.grad and (x.is_floating_point() or x.is_complex())
        nodes.append(to.placeholder(f"x{index}", fake, needs_grad=trains))
    source = iter(nodes)
    args, kwargs = pytree.tree_map(
        lambda a: next(source) if isinstance(a, Input) else a, (sample.args, dict(sample.kwargs))
    )
    made = values(to.call(sample.target, *args, **kwargs))
    wanted = next((i for i, x in enumerate(made) if x is not None and x.is_floating_point()), None)
    if wanted is not None and any(facts(node).needs_grad for node in nodes):
        tangents: list[Any] = [None] * len(made)
        tangents[wanted] = to.placeholder("t", made[wanted])
        try:
            _, pullback = VectorJacobian(to, {}, lambda _: True, gpu).apply(sample.target, args, kwargs, [wanted])
            pullback(tangents)
        except RuntimeError as error:  # PyTorch has no derivative of some operators that are derivatives themselves
            assert re.fullmatch(r"derivative for aten::\w+_backward is not implemented", str(error))
    known = [node for node in to.graph.nodes if node.op == "call_function"]
    return [(str(n.target), [None if x is None else (x.shape, x.dtype) for x in values(n)]) for n in known]


@pytest.mark.slow
def test_which_operators_are_other_ones_for_gpus() -> None:
    """Attention and RMS norms; all others are the same on the CPU, where they are traced."""
    other = set()
    for target, samples in SAMPLES.items():
        for sample in samples:
            found = [_operators(sample, gpu) for gpu in (None, AbsentGpu())]
            if found[0] != found[1]:
                other.add(str(target))
    assert other == {"aten.scaled_dot_product_attention.default", "quintnet.attention.default", "aten.rms_norm.default"}
