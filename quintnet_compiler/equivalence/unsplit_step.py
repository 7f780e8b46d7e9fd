"""A captured program with its generated derivatives, run in this process on a few rows, without any axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.torch import pytree
from ..core.annotations import leaf
from ..core.rng import Key
from ..ir.program import Captured, DifferentiatedProgram, ShardedProgram, StagedProgram
from ..ops.catalog import op_spec
from ..ops.rank_local import keep_mask, local_noise, loss_scale
from ..ops.rules.notation import Rule
from ..passes.autodiff.differentiate import Differentiate
from ..passes.codegen.python_ops import SPELLING
from ..passes.frontend.normalize import Normalize
from ..passes.lowering.insert_communication import InsertCommunication
from .random_functions import whole_noise
from .reference import whole_mask

Value = tuple[fx.Node, int]
Watch = Callable[[fx.Node, Any], None]


@dataclass(frozen=True)
class UnsplitStep:
    """A captured program on one rank, with one stage and one microbatch, which every layout must equal."""

    program: DifferentiatedProgram
    seed: int
    in_float64: frozenset[torch.dtype] = frozenset()  # dtypes of the graph that are replaced by float64

    @property
    def draws(self) -> bool:
        """Return whether random numbers are drawn."""
        return any(op_spec(node).random for node in self.program.graph.nodes)

    @property
    def changed(self) -> tuple[str, ...]:
        """Return the names of the buffers whose new values are the last outputs."""
        return self.program.local.staged.sharded.program.captured.changed

    @property
    def graph(self) -> fx.Graph:
        """Return the operators of the forward, with global shapes."""
        return self.program.local.staged.sharded.program.graph

    def run_step(
        self,
        tensors: Mapping[str, Tensor],
        batch: Sequence[Tensor],
        settle: Callable[[str, Tensor], None],
        watch: Watch | None = None,
    ) -> list[Tensor]:
        """Run the program, and return its outputs.

        ``settle`` gets the gradient of each parameter as soon as it exists; ``watch`` every value. Values are freed
        after their last use.
        """
        graph = self.program.graph
        names = {node: [] for node in self.program.gradients.values()}  # type: dict[fx.Node, list[str]]
        for (name, _), node in self.program.gradients.items():
            names[node].append(name)
        last = _last_uses(graph, {*self.program.outputs})
        inputs, env = iter(batch), dict[fx.Node, Any]()
        with torch.no_grad():
            for node in graph.nodes:
                if node.op == "output":
                    break
                env[node] = self.value(node, env, tensors, inputs)
                if watch is not None:
                    watch(node, env[node])
                for name in names.get(node, ()):
                    settle(name, env[node])
                for dead in last.get(node, ()):
                    del env[dead]
            return [env[node] for node in self.program.outputs]

    def value(
        self, node: fx.Node, env: Mapping[fx.Node, Any], tensors: Mapping[str, Tensor], batch: Iterator[Tensor]
    ) -> Any:
        """Return the value of a node, from those of its inputs in ``env``."""
        node_leaf = leaf(node) if node.op == "placeholder" else None
        if node_leaf is not None:
            return next(batch) if node_leaf.kind == "input" else tensors[node_leaf.name].detach()
        target: Any = node.target
        arguments: tuple[Any, Any] = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        if self.in_float64:
            arguments = pytree.tree_map_only(torch.dtype, self._dtype, arguments)
        args, kwargs = arguments
        whole = _WHOLE.get(target)
        if whole is not None:
            return whole(self.seed, *args)
        return SPELLING.get(target, target)(*args, **kwargs)

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype in self.in_float64 else dtype


def unsplit_step(
    captured: Captured, rows: int, device: torch.device, rules: Mapping[Any, Rule], seed: int, *, training: bool
) -> UnsplitStep:
    """Return the program for ``rows`` rows, with a derivative if it is for ``training``.

    Raises:
        CompileError: see the passes.
    """
    program = Normalize(rows, device)(captured)
    sharded = ShardedProgram(program, (), dict.fromkeys(program.graph.nodes, ()))
    staged = StagedProgram(sharded, 1, {node: 0 for node in program.graph.nodes if node.op == "call_function"})
    local = InsertCommunication(dict(rules))(staged)
    return UnsplitStep(Differentiate(training)(local), seed)


def _last_uses(graph: fx.Graph, kept: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return, by node, the values whose last use it is."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            last[node] = node
            for used in node.all_input_nodes:
                last[used] = node
    uses: dict[fx.Node, list[fx.Node]] = {}
    for value, user in last.items():
        if value not in kept:
            uses.setdefault(user, []).append(value)
    return uses


def _mask(seed: int, x: Tensor, p: float, op: int, *_layout: Any) -> Tensor:
    return whole_mask(x, p, Key(seed, 0, op))


def _noise(
    seed: int, size: Sequence[int], kind: str, op: int, dtype: torch.dtype, device: torch.device, *_layout: Any
) -> Tensor:
    return whole_noise(kind, size, Key(seed, 0, op), dtype, device)


# what operators that depend on the rank or on the step compute of whole values
_WHOLE: Mapping[Any, Callable[..., Any]] = {
    keep_mask: _mask,
    local_noise: _noise,
    loss_scale: lambda _seed, x: x,
}
