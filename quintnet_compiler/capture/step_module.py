"""The user's model and loss as one module, whose ``forward`` is what is traced."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from ..core.errors import CompileError
from ..guards.attribute_reads import Read
from ..guards.function_reads import trainable
from ..guards.guards import Guards, global_modes, guards_of
from ..guards.tensor_attributes import originals_of
from ..ir.containers import LossOfNames, loss_inputs, model_inputs, rebuilt, takes_labels_of
from ..ir.result_form import ResultForm
from .block_reuse import Unseen
from .changes.saved_tensors import unchanged_since_saved
from .changes.user_lines import UserLines
from .places import OWN
from .watched_trace import WatchedTrace

LossFn = Callable[..., Tensor]
Call = Callable[[nn.Module, Any], Any]


@dataclass
class _Seen:
    """The record of the latest trace (torch.export restores a module's own attributes)."""

    trace: WatchedTrace | None = None
    changed: bool = False  # whether forward changed plain data
    refuse: bool = False
    result: ResultForm | None = None
    begin: Callable[[], None] | None = None  # called when a trace begins
    done: Callable[[], None] | None = None  # called when the user's code has run


class StepModule(nn.Module):
    """The user's model and loss as one function of the batch.

    A loss function that is a module is its submodule ``loss_fn``; so are, after :meth:`adopt`, modules and parameters
    that another loss function uses: ``loss_fn.head``.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        want: str,
        call: Call | None,
        *,
        buffers: bool = False,
        brought: nn.Module | None = None,
    ) -> None:
        """Combine a model and its loss. ``brought``: see :attr:`adopted`, of an earlier trace."""
        super().__init__()
        self.buffers_change = buffers  # whether forward may put others in their places
        self.unseen = Unseen()
        self.model, self.want, self.call, self.compute = model, want, call, None
        if isinstance(loss_fn, nn.Module):
            self.loss_fn = loss_fn
        else:
            self.compute = loss_fn
            if brought is not None and want == "loss":
                self.loss_fn = brought
        self.seen = _Seen()
        self.modes = global_modes()
        self.stands_for: dict[int, Callable[[], Tensor]] = {}
        self.remember()

    def remember(self) -> None:
        """Record the places in which a trace puts its own parameters, besides those recorded before."""
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.stands_for[id(parameter)] = functools.partial(_at, module._parameters, name)
        paths = ((path.removeprefix("model").lstrip("."), module) for path, module in self.named_modules())
        self.originals = originals_of(paths)

    def brought_by_user(self) -> dict[str, Any]:
        """Return the model and the loss function, by label."""
        return {"": self.model, "loss_fn": self.compute if self.compute is not None else getattr(self, "loss_fn", None)}

    def parameter_paths(self) -> dict[str, nn.Parameter]:
        """Return every parameter by each of its paths, those in the loss function after ``loss_fn.``."""
        roots = [(name.removeprefix("model"), root) for name, root in self.named_children()]
        return {
            f"{name}.{path}".lstrip("."): parameter
            for name, root in roots
            for path, parameter in root.named_parameters(remove_duplicate=False)
        }

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield submodules without unseen ones: torch.export finds parameters and buffers by this."""
        modules = super().named_modules(memo, prefix, remove_duplicate)
        return ((name, module) for name, module in modules if id(module) not in self.unseen.modules)

    def forward(self, batch: Any) -> Any:
        roots = {name.removeprefix("model"): module for name, module in self.named_children()}
        functions = () if self.compute is None or self.want != "loss" else (self.compute,)
        self.seen.trace = trace = WatchedTrace(roots, functions, OWN, self.unseen, self.originals)
        return trace.run_forward(
            lambda: self._step(batch), self.stands_for, refuse=self.seen.refuse, buffers=self.buffers_change
        )

    def _step(self, batch: Any) -> Any:
        if self.seen.begin is not None:
            self.seen.begin()
        check = unchanged_since_saved((name.removeprefix("model"), module) for name, module in self.named_children())
        with UserLines():
            result = self.compute_result(batch)
        if self.seen.done is not None:
            self.seen.done()
        self.seen.result, tensors = ResultForm.of_result(result)
        if self.want != "loss":
            return tensors
        check(result)
        return result

    def compute_result(self, batch: Any) -> Any:
        """Return the loss, or whatever the model returns, without anything that only a trace needs.

        Raises:
            CompileError: QN103 for a loss function beside a dict, all of which the model takes.
        """
        if self.call is not None:
            return self.call(self.model, rebuilt(batch))
        loss = self.compute if self.compute is not None else getattr(self, "loss_fn", None)
        batch = rebuilt(batch)
        if self.want != "loss":
            return called(self.model, batch)
        if isinstance(batch, dict) and loss is not None and not isinstance(loss, LossOfNames):
            raise CompileError(
                "QN103",
                "loss_fn takes what the model returns and the last value of a tuple; this batch is a dict "
                f"({', '.join(map(str, batch))}), all of which the model takes",
                fix="make the batch a tuple, (*inputs, labels), or compute the loss in the model's forward and "
                "leave out loss_fn",
            )
        out = called(self.model, model_inputs(batch, loss))
        if loss is not None and takes_labels_of(batch, loss):
            out = loss(out, loss_inputs(batch, loss))
        return loss_of(out)

    def traced(self, export: Callable[[], ExportedProgram]) -> ExportedProgram:
        """Return the result of ``export`` for this module.

        Forward may set an attribute to plain data in its first call, if further calls leave it as it is and have the
        same operators.

        Raises:
            CompileError: QN110 if forward changes more than that, QN105 (see :meth:`adopt`).
        """
        exported = export()
        if self.adopt():
            exported = export()
        first = self.seen.trace
        self.seen.changed = first is not None and bool(first.changes)
        if first is None or not first.changes:
            return exported
        for change in first.changes:
            if change.put is not None:
                change.put()
        try:
            again = export()
        finally:
            for change in first.changes:
                if change.undo is not None:
                    change.undo()
        second = self.seen.trace
        if second is None or second.changes or str(again.graph) != str(exported.graph):
            self.seen.refuse = True
            export()
        self.seen.trace = first  # which read what the second found in a table that the first had filled
        return exported

    @property
    def result(self) -> ResultForm:
        """Return the form of the latest trace's result."""
        assert self.seen.result is not None, "nothing was traced"
        return self.seen.result

    @property
    def used_unseen(self) -> bool:
        """Return whether the latest trace used a tensor of the unseen submodules."""
        return self.seen.trace is not None and self.seen.trace.used_unseen

    @property
    def assigned(self) -> frozenset[str]:
        """Return the buffers that the latest trace replaced by other tensors."""
        return frozenset() if self.seen.trace is None else self.seen.trace.assigned

    def brought(self) -> list[nn.Module | nn.Parameter]:
        """Return the modules and parameters that a loss function which is no module may train."""
        return [] if self.compute is None else list(trainable(self.compute, self).values())

    def adopt(self) -> bool:
        """Make parameters of the loss function that the trace used parts of this module; return whether there are some.

        Raises:
            CompileError: QN105 for one that requires a gradient and that has no name.
        """
        if self.seen.trace is None or not self.seen.trace.foreign:
            return False
        foreign = dict(self.seen.trace.foreign)
        holder = nn.Module()
        if self.adopted is not None:
            holder._modules.update(self.adopted._modules)
            holder._parameters.update(self.adopted._parameters)
        for name, part in trainable(self.compute, self).items():
            inside = {id(part)} if isinstance(part, nn.Parameter) else set(map(id, part.parameters()))
            if inside & foreign.keys():
                foreign = {key: entry for key, entry in foreign.items() if key not in inside}
                setattr(holder, re.sub(r"\W", "_", name) or "self", part)
        for x, where in foreign.values():
            if x.requires_grad:
                raise CompileError(
                    "QN105",
                    f"a tensor of shape {list(x.shape)} requires a gradient, and is no parameter of the model or of "
                    "its loss function",
                    where=where,
                    fix="make it an nn.Parameter of the model, or of the module that is given as loss_fn",
                )
        if not any(True for _ in holder.children()) and not holder._parameters:
            return False
        self.loss_fn = holder
        self.remember()
        return True

    @property
    def adopted(self) -> nn.Module | None:
        """Return a module of the parts that the trace used of a loss function which is no module, or None."""
        return None if self.compute is None else getattr(self, "loss_fn", None)

    @property
    def changed(self) -> bool:
        """Return whether the first call of forward set attributes to plain data."""
        return self.seen.changed

    @property
    def reads(self) -> Sequence[Read]:
        """Return the attributes that the latest trace read."""
        return () if self.seen.trace is None else self.seen.trace.reads.found

    @property
    def reads_whole_modules(self) -> bool:
        """Return whether the latest trace read the ``__dict__`` of a module."""
        trace = self.seen.trace
        return trace is not None and any(isinstance(owner, nn.Module) for owner in trace.reads.whole.values())

    def guards(self, *, training: bool, of_all: Callable[[Sequence[Read]], list[Read]] = list) -> Guards | None:
        """Return guards of the Python state that a trace read; None if nothing was traced.

        ``of_all``: converts the attributes that the trace read to those that a trace of all blocks reads.
        """
        trace = self.seen.trace
        if trace is None:
            return None
        reads = [read for read in of_all(self.reads) if training or read.name != "training"]
        roots = [(name.removeprefix("model"), module) for name, module in self.named_children()]
        return guards_of(trace.taken(roots, reads, of_all(trace.reads.missing), self.modes, flags=training))


def _at(parameters: Mapping[str, Any], name: str) -> Tensor:
    parameter: Tensor = parameters[name]
    return parameter


def called(model: nn.Module, inputs: Any) -> Any:
    """Call the model with its arguments: a tuple, or a dict by name."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def loss_of(out: Any) -> Any:
    if isinstance(out, Mapping) and "loss" in out:
        out = out["loss"]
    elif not isinstance(out, Tensor) and getattr(out, "loss", None) is not None:
        out = out.loss
    if isinstance(out, Tensor) and all(isinstance(size, int) and size == 1 for size in out.shape):
        return out.reshape(()) if out.dim() else out  # of one element, PyTorch's backward takes any shape
    message, fix = _no_loss(out)
    raise CompileError("QN103", message, fix=fix)


def _no_loss(out: Any) -> tuple[str, str]:
    """Return the reason why a model's result is no loss, and a fix."""
    needed = "where a scalar loss is needed"
    if isinstance(out, Tensor):
        shape = tuple(out.shape)
        return (
            f"the model returned a tensor of shape {shape} {needed}",
            "give loss_fn=, or return .mean() or .sum() of it",
        )
    usual = "give loss_fn=, or return the loss (or an object with .loss)"
    if not isinstance(out, (tuple, list)):
        return f"the model returned a {type(out).__name__} {needed}", usual
    parts = [f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}" for x in out]
    scalars = [i for i, x in enumerate(out) if isinstance(x, Tensor) and x.dim() == 0]
    message = f"the model returned a {type(out).__name__} of {', '.join(parts)} {needed}"
    if not scalars:
        return message, usual
    hook = f"model.register_forward_hook(lambda module, inputs, outputs: outputs[{scalars[0]}])"
    which = "" if len(scalars) == 1 else f", and {' and '.join(map(str, scalars[1:]))} likewise"
    return message, f"if element {scalars[0]} is the loss{which}: {hook}, before you compile"
