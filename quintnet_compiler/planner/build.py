"""From a layout to its units: the folded model goes through the compiler's own passes, once per kind of layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..compiler import axes_of
from ..cost import CostModel, RankCosts
from ..errors import CompileError
from ..mesh import Mesh
from ..passes.axis_view import Wishes
from ..passes.choose_sharding import ChooseSharding
from ..passes.cut_stages import CutStages
from ..passes.differentiate import Differentiate
from ..passes.fold_blocks import Folded
from ..passes.generate_ranks import GenerateRanks
from ..passes.insert_communication import InsertCommunication
from ..passes.join_routes import JoinRoutes
from ..passes.recompute import Recompute
from ..passes.rule_notation import Rule
from ..passes.strategies import RuleBook
from ..plan import Plan, fixed_types
from ..schedule_kinds import gpipe
from .layouts import Layout
from .units import Unit, unit_boundaries, unit_work


@dataclass
class Builder:
    """Units of layouts, kept by what they depend on. Refusals are kept too."""

    folded: Folded
    plan: Plan
    rules: Mapping[Any, Rule]
    cost: CostModel
    costs: RankCosts
    found: dict[tuple[object, ...], tuple[Unit, ...] | CompileError] = field(default_factory=dict)

    def __call__(self, layout: Layout) -> tuple[Unit, ...]:
        """
        Raises:
            CompileError: whatever the compiler says of the layout.
        """
        if layout.inside not in self.found:
            try:
                self.found[layout.inside] = self._units(layout)
            except CompileError as error:
                self.found[layout.inside] = error
        made = self.found[layout.inside]
        if isinstance(made, CompileError):
            raise made
        return made

    def _units(self, layout: Layout) -> tuple[Unit, ...]:
        plan = layout.decided(self.plan)
        begins = unit_boundaries(self.folded)
        sizes = {name: size for name, size in layout.mesh.axes if name != "pp"}
        mesh = Mesh(pp=len(begins) + 1, **sizes)
        names = [leaf.name for leaf in self.folded.program.leaves.values() if leaf.kind == "parameter"]
        fixed = fixed_types(self.plan, names, mesh)
        wishes = Wishes(fixed, plan.sequence_parallel, plan.context, plan.experts or ("ep",))
        book = RuleBook(self.rules, plan.unknown_ops)
        choose = ChooseSharding(axes_of(mesh, layout.microbatches), book, self.cost, wishes, self.folded.repeats)
        sharded = choose(self.folded.program)
        staged = CutStages(mesh["pp"], self.cost, begins)(sharded)
        local = InsertCommunication(dict(self.rules), plan.balance_context)(staged)
        differentiated = Differentiate(True)(JoinRoutes(self.rules)(local))
        if layout.recompute == "full":
            differentiated = Recompute()(differentiated)
        program = GenerateRanks(mesh, gpipe(mesh["pp"], layout.microbatches))(differentiated)
        return unit_work(program, self.folded, self.costs)
