"""DifferentiatedProgram -> DifferentiatedProgram: values that the backward computes again instead of keeping."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from ..annotations import annotate, facts
from ..comm_ops import microbatch
from ..program import DifferentiatedProgram
from .repeated_blocks import block_of


@dataclass(frozen=True)
class Recompute:
    """Keep the inputs of each repeated block (``layers.3``), and compute what is inside again in the backward.

    Before: %h = linear(%x, %w);  ...;  %g = gelu_backward(%gy, %h)
    After:  %h = linear(%x, %w);  ...;  %h_1 = linear(%x, %w);  %g = gelu_backward(%gy, %h_1)
    Ensures: no value inside a block is saved; a copy stands right before its first use, and equals the original bit
    by bit: communication is repeated, and random masks depend on nothing but their place (Chen et al. 2016).
    """

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        return _Copying(program).run()


class _Copying:
    def __init__(self, program: DifferentiatedProgram) -> None:
        self.program, self.graph = program, fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.again: dict[fx.Node, fx.Node] = {}
        self.stage: dict[fx.Node, int] = {}

    def run(self) -> DifferentiatedProgram:
        inside = {node for node in self.program.graph.nodes if self._inside(node)}
        for node in self.program.graph.nodes:
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], lambda n: self.new[n]))
                continue
            if node.op == "call_function" and facts(node).phase == "backward":
                for source in node.all_input_nodes:
                    self._copy(source, inside)
            self.new[node] = self._emit(node, again=_backward(node))
        self.graph.lint()
        p, new = self.program, self.new
        return replace(
            p,
            graph=self.graph,
            outputs=tuple(new[n] for n in p.outputs),
            stage=self.stage,
            once=frozenset(new[n] for n in p.once),
            gradients={key: new[n] for key, n in p.gradients.items()},
            values={key: new[n] for key, n in p.values.items()},
            cotangents={key: new[n] for key, n in p.cotangents.items()},
            copies={copy: new[n] for n, copy in self.again.items()},
        )

    def _inside(self, node: fx.Node) -> bool:
        """Whether a forward node is read in its own block only."""
        if node.op != "call_function" or _backward(node) or node.target is microbatch or node in self.program.once:
            return False
        block, stage = block_of(node), self.program.stage.get(node)
        forward = [user for user in node.users if user.op == "call_function" and not _backward(user)]
        returned = node in self.program.outputs
        alone = all(block_of(user) == block and self.program.stage.get(user) == stage for user in forward)
        return block is not None and stage is not None and alone and not returned

    def _copy(self, node: fx.Node, inside: set[fx.Node]) -> None:
        todo = [node]
        while todo:  # not by recursion: chains are long
            last = todo[-1]
            missing = [n for n in last.all_input_nodes if n in inside and n not in self.again]
            if last not in inside or last in self.again:
                todo.pop()
            elif missing:
                todo += missing
            else:
                self.again[last] = self._emit(last, again=True)
                annotate(self.again[last], replace(facts(last), phase="backward"))
                todo.pop()

    def _emit(self, node: fx.Node, *, again: bool) -> fx.Node:
        made = self.graph.node_copy(node, lambda n: self.again[n] if again and n in self.again else self.new[n])
        if node in self.program.stage:
            self.stage[made] = self.program.stage[node]
        return made


def _backward(node: fx.Node) -> bool:
    return node.op == "call_function" and facts(node).phase == "backward"
