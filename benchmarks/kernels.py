"""How many kernels one layer of Llama-3 70B launches on a GPU, by what they do, and what it sends; without a GPU.

    python benchmarks/kernels.py [--mesh tp=8] [--zero 0] [--rows 1] [--length 8192] [--backend eager] [--operators]

The program of one rank (bf16 with float32 parameters, sequence parallelism) is compiled for CUDA, and its generated
functions run on tensors without values, through the runtime's own transport and sums of gradients. A program with one
layer more is counted beside it; the difference is an inner layer, for one microbatch.

PyTorch's own registry (``native_functions.yaml``) says what is a kernel: an operator that has one for CUDA is one, an
operator that is made of others is what those are, and views and allocations are none. So this counts what PyTorch's
dispatcher runs. A few of these launch more than one kernel: attention's backward, that of a fused norm, large sums.

With ``--backend inductor``, segments between collectives are what TorchInductor's scheduler makes of them, without
compiling them; for a GPU's Triton it may group a few operators in another way.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torchgen
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torchgen.gen import parse_native_yaml
from torchgen.model import DispatchKey

import quintnet
from quintnet_compiler.core import slices
from quintnet_compiler.core.absent_gpu import on_device
from quintnet_compiler.core.annotations import facts, has_facts, leaf, value
from quintnet_compiler.ir.distributed_program import DistributedProgram, Piece
from quintnet_compiler.runtime.execute.comm import Comm
from quintnet_compiler.runtime.execute.segments import Segment, split
from quintnet_compiler.runtime.state import gradients
from quintnet_compiler.runtime.transport.collectives import Native
from quintnet_compiler.runtime.transport.distributed import DistributedTransport
from quintnet_compiler.runtime.transport.transport import Pending

META = torch.device("meta")
FUNCTIONS = ("once", "forward", "backward")
COMPOSITE = (
    DispatchKey.CompositeExplicitAutograd,
    DispatchKey.CompositeExplicitAutogradNonFunctional,
    DispatchKey.CompositeImplicitAutograd,
)
WIDE = [getattr(torch.ops.aten, name).dtype_out for name in ("mm", "addmm", "bmm", "baddbmm")]  # which only CUDA has
FUSED = [torch.ops.aten._fused_rms_norm.default]  # elsewhere made of others, before a dispatch mode sees it
COPIES = ("copy_", "clone", "_to_copy", "cat", "zero_", "fill_")
LLAMA_70B: dict[str, Any] = {
    "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
    "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip


class Registry:
    """PyTorch's CUDA kernels, whatever build of it this is."""

    def __init__(self) -> None:
        folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
        parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
        self.indices = parsed.backend_indices
        self.functions = {str(f.func.name): f for f in parsed.native_functions}

    def has(self, name: str, key: DispatchKey) -> bool:
        """Return whether the operator ``name``, or the one that defines it, has a kernel for ``key``."""
        function = self.functions[name]
        delegate = function.structured_delegate
        return self.indices[key].has_kernel(function) or (delegate is not None and self.has(str(delegate), key))


@dataclass(frozen=True)
class Counts:
    """``kernels``: (function, what it is for, operator) -> how many; ``sent``: (function, collective) -> bytes."""

    kernels: Counter[tuple[str, str, str]]
    sent: Counter[tuple[str, str]]


@dataclass
class Kernels(TorchDispatchMode):
    """Collects the kernels that run inside of it. ``where``: what calls them, for the time being."""

    registry: Registry
    found: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    function: str = ""
    kind: Callable[[str], str] = str

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if func.namespace == "prim":  # a question, of its device say
            return func(*args, **kwargs)
        if func._schema.name == name:
            raise NotImplementedError(f"{func} is no operator of ATen's: nothing says what it launches")
        full = f"{name}.{func._overloadname}".removesuffix(".default")
        if func._schema.is_mutable:  # into memory that is there
            self.note(name)
            if func in WIDE:
                return kwargs["out"]
            return func(*args, **kwargs)
        if self.registry.functions[full].is_view_op or name.startswith(("empty", "new_empty")):
            return func(*args, **kwargs)
        if self.registry.has(full, DispatchKey.CUDA):
            self.note(name)
            return func(*args, **kwargs)
        key = next(key for key in COMPOSITE if self.registry.has(full, key))
        with self:
            return func._op_dk(getattr(torch._C.DispatchKey, key.name), *args, **kwargs)

    def note(self, name: str, count: int = 1) -> None:
        self.found[self.function, self.kind(name), name] += count

    def send(self, name: str, ranks: int, whole: int) -> None:
        """A collective of a ring: each rank sends all of ``whole`` bytes but one part."""
        self.note(name)
        self.sent[self.function, name] += whole * (ranks - 1) // ranks


class _Group(Native):
    """A process group of nobody, in which each message is one kernel of NCCL."""

    def __init__(self, size: int, kernels: Kernels) -> None:
        self.size, self.rank, self.kernels = size, 0, kernels

    def add(self, x: Tensor, later: bool = True) -> Pending:
        self.kernels.send("all_reduce", self.size, 2 * x.nbytes)
        return lambda: x

    def all_gather(self, x: Tensor, into: Tensor, later: bool) -> Pending:
        self.kernels.send("all_gather", self.size, into.nbytes)
        return lambda: into

    def reduce_scatter(self, x: Tensor, into: Tensor, later: bool) -> Pending:
        self.kernels.send("reduce_scatter", self.size, x.nbytes)
        return lambda: into

    def all_gather_each(self, xs: Sequence[Tensor], into: Sequence[Tensor], later: bool) -> Pending:
        self.kernels.send("all_gather", self.size, sum(x.nbytes for x in into))
        return lambda: into

    def reduce_scatter_each(self, xs: Sequence[Tensor], into: Sequence[Tensor], later: bool) -> Pending:
        self.kernels.send("reduce_scatter", self.size, sum(x.nbytes for x in xs))
        return lambda: into


class _Transport(DistributedTransport):
    """A rank's own part of communication, over groups of :class:`_Group`."""

    def __init__(self, program: DistributedProgram, kernels: Kernels) -> None:
        self.mesh, self.rank, self.kernels = program.mesh, 0, kernels
        self.place = program.mesh.coordinate(0)
        sizes = {name: program.mesh[name] for name in program.mesh.names}
        self.axis = {name: _Group(n, kernels) for name, n in sizes.items()}

    def _all_to_all(
        self, x: Tensor, axis: str, dim: int, parts: int, to_dim: int, to_parts: int, at: int, *, later: bool = False
    ) -> Pending:
        group: Any = self.axis[axis]
        outgoing = slices.stack(x, to_dim, to_parts, group.size).contiguous()
        group.kernels.send("all_to_all", group.size, x.nbytes)
        return lambda: slices.unstack(outgoing, dim, parts)

    def start_sum(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Pending:
        return _Group(len(ranks), self.kernels).add(x)

    def start_scatter(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Pending:
        return _Group(len(ranks), self.kernels).reduce_scatter(x, x.chunk(len(ranks))[0], True)


class _Run(fx.Interpreter):
    """A generated function on tensors without values, on the meta device in place of the GPU."""

    def __init__(self, piece: Piece, kernels: Kernels, compiled: Container[str] = ()) -> None:
        """``compiled``: names of nodes that inductor runs."""
        super().__init__(piece.module)
        self.kernels, self.compiled = kernels, compiled

    def run_node(self, n: fx.Node) -> Any:
        self.kernels.kind = lambda name: _kind(n, name)
        if n.name not in self.compiled:
            return super().run_node(n)
        counts = self.kernels.found.copy()
        result = super().run_node(n)
        self.kernels.found = counts
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = on_device(args, META), on_device(kwargs, META)
        if target not in FUSED:
            return super().call_function(target, args, kwargs)  # type: ignore[no-untyped-call]
        self.kernels.note(target._schema.name.removeprefix("aten::"))
        with _disable_current_modes():
            return target(*args, **kwargs)


def _kind(node: fx.Node, name: str) -> str:
    """Return the purpose of a kernel, by its operator or by the module whose code it is."""
    if name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        return "collectives"
    if name.startswith("_scaled_dot_product"):
        return "attention"
    if node.target == "accumulate_matmul":
        return "matmul, of weights' gradients"
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        return "matmul"
    if node.target == "accumulate":
        return "sums of weights' gradients"
    module = facts(node).where.module if has_facts(node) else ""
    last = module.rpartition(".")[2]
    if "norm" in last:
        return "norm"
    if name in COPIES and last.endswith("_proj"):
        return "copies"
    if last == "self_attn":
        return "rotary embedding" if name not in ("clone", "copy_") or "slice" in node.name else "copies"
    if last in ("mlp", "act_fn"):
        return "activation"
    return "residual, and sums of gradients"


def count(program: DistributedProgram, registry: Registry, backend: str = "eager") -> Kernels:
    """The kernels of the first rank's functions, for one microbatch."""
    kernels = Kernels(registry)
    wide = mock.patch.object(gradients, "adds_up", lambda slot, factor: True)  # CUDA has those kernels
    with torch.no_grad(), wide:
        part, transport = program.rank(0), _Transport(program, kernels)
        store = gradients.GradientStore(program, part, transport, META)
        for bucket in store.buckets:
            bucket.left = bucket.terms
        comm = Comm(transport, program.mesh, part.coordinate, store)
        for stage in part.stages:
            for kernels.function in FUNCTIONS:
                if (piece := stage.pieces.get(kernels.function)) is not None:
                    placeholders = [n for n in piece.module.graph.nodes if n.op == "placeholder"]
                    args = [comm, *map(_like, placeholders[1:])]
                    inside = _compiled(piece, kernels) if backend == "inductor" and kernels.function != "once" else ()
                    with kernels:
                        _Run(piece, kernels, inside).run(*args, enable_io_processing=False)
    return kernels


def _compiled(piece: Piece, kernels: Kernels) -> set[str]:
    """Counts what inductor makes of segments; the names of their nodes."""
    from inductor_kernels import fused_kernels

    fused: set[str] = set()
    for segment in split(piece.module.graph):
        if isinstance(segment, Segment) and (fused_counts := fused_kernels(segment)) is not None:
            inside = [node for node in segment.nodes if node.op == "call_function"]
            kernels.kind = lambda name: "fused by inductor" if name == "fused" else _kind(inside[-1], name)  # noqa: B023
            for name, n in fused_counts.items():
                kernels.note(name, n)
            fused.update(node.name for node in inside)
    return fused


def _like(node: fx.Node) -> Tensor:
    x, node_leaf = value(node), leaf(node)
    held = node_leaf.held if node_leaf is not None else None
    return torch.empty_strided(x.shape, x.stride(), dtype=held or x.dtype, device=META)


def compiled(layers: int, mesh: quintnet.Mesh, rows: int, length: int, **options: Any) -> DistributedProgram:
    """Llama-3 70B with fewer layers, as transformers writes it, for CUDA."""
    import transformers

    config = transformers.LlamaConfig(num_hidden_layers=layers, **LLAMA_70B)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    ids = torch.empty(rows, length, dtype=torch.long, device="meta")
    compile_options: dict[str, Any] = {"precision": "bf16", "device": "cuda", "check": "off", **options}
    compiled_program = quintnet.compile(model, mesh, {"input_ids": ids, "labels": ids}, **compile_options)
    return compiled_program._primary().program


def layer(programs: Iterable[DistributedProgram], backend: str = "eager") -> Counts:
    """Return the kernels that the second of two programs has more than the first."""
    registry = Registry()
    less, more = (count(program, registry, backend) for program in programs)
    return Counts(more.found - less.found, more.sent - less.sent)


def minimum(mesh: quintnet.Mesh, zero: int, rows: int, length: int) -> dict[str, float]:
    """Bytes that a rank has to send for a layer and microbatch, by function. Tensor parallelism with sequence
    parallelism: as in Megatron-LM, each layer gathers and scatters two activations forward and two back, and gathers
    two again for the gradients of weights (Korthikanti et al. 2022); ranks add up the gradients of its two norms. Data
    parallelism: gradients are added up in float32 by a ring; ZeRO 1 gathers parameters once, ZeRO 3 twice (Rajbhandari
    et al. 2020), in 16 bits."""
    tp, dp = mesh["tp"], mesh["dp"]
    hidden, wide = LLAMA_70B["hidden_size"], LLAMA_70B["intermediate_size"]
    heads, groups = LLAMA_70B["num_attention_heads"], LLAMA_70B["num_key_value_heads"]
    activation = 2 * rows // dp * length * hidden * (tp - 1) / tp
    products = 2 * hidden * hidden * (1 + groups / heads) + 3 * hidden * wide
    norms = 4 * 2 * 2 * hidden * (tp - 1) / tp
    share = (products / tp + 2 * hidden) * (dp - 1) / dp
    return {
        "once": 2 * share * (zero in (1, 2)),
        "forward": 4 * activation + 2 * share * (zero == 3),
        "backward": 6 * activation + norms + 4 * share * (1 if zero else 2) + 2 * share * (zero == 3),
    }


def report(counts: Counts, least: Mapping[str, float]) -> str:
    """A table of kernels by what they do, and of bytes."""
    lines = [f"{'kernels':<36}" + "".join(f"{name:>10}" for name in FUNCTIONS)]
    for kind in (*sorted({kind for _, kind, _ in counts.kernels}), "all"):
        sums = [sum(n for (f, k, _), n in counts.kernels.items() if f == name and kind in (k, "all"))
                for name in FUNCTIONS]  # fmt: skip
        lines.append(f"{kind:<36}" + "".join(f"{n:>10}" for n in sums))
    sent = [sum(n for (f, _), n in counts.sent.items() if f == name) / 2**20 for name in FUNCTIONS]
    lines.append(f"{'MiB that a rank sends':<36}" + "".join(f"{n:>10.1f}" for n in sent))
    lines.append(f"{'the least':<36}" + "".join(f"{least[name] / 2**20:>10.1f}" for name in FUNCTIONS))
    return "\n".join(lines)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--mesh", type=lambda text: text.split(","), default=["tp=8"])
    options.add_argument("--zero", type=int, default=0)
    options.add_argument("--rows", type=int)
    options.add_argument("--length", type=int, default=8192)
    options.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    options.add_argument("--operators", action="store_true", help="list every operator")
    given = options.parse_args()
    mesh = quintnet.Mesh(**{k: int(n) for k, n in (a.split("=") for a in given.mesh)})
    rows = given.rows or mesh["dp"]
    chosen = {"zero": given.zero, "backend": given.backend}
    found = layer((compiled(n, mesh, rows, given.length, **chosen) for n in (2, 3)), given.backend)
    if given.operators:
        for key, n in sorted(found.kernels.items()):
            print(f"{n:>4}", *key)
    print(report(found, minimum(mesh, given.zero, rows, given.length)))
