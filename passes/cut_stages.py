from __future__ import annotations
from dataclasses import dataclass
from typing import Any
from ..annotations import leaf, is_getitem, origin
from ..program import StagedProgram
@dataclass(frozen=True)
class CutStages:
    num_stages: int
    cost: Any
    boundaries: tuple[str, ...] = ()
    def __call__(self, program):
        dep=set(); g=program.program.graph
        for n in g.nodes:
            if n.op=='placeholder':
                if leaf(n).kind=='parameter': dep.add(n)
            elif n.op!='output' and any(i in dep for i in n.all_input_nodes): dep.add(n)
        calls=[n for n in g.nodes if n in dep and n.op!='placeholder']
        st={n:i*self.num_stages//len(calls) for i,n in enumerate(calls)}
        for n in calls:
            if is_getitem(n): st[n]=st[origin(n)[0]]
        return StagedProgram(program,self.num_stages,st)
def parameter_stages(staged):
    res={}
    for n in staged.sharded.program.graph.nodes:
        if n.op=='placeholder' and leaf(n).kind=='parameter':
            res[n]=tuple(sorted({staged.stage[u] for u in n.users if u in staged.stage})) or (0,)
    return res
def boundaries(staged): return ()
