"""Lightning's Trainer with a compiled program."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from ..api.compile import compile as compile_program
from ..api.compiled_program import CompiledProgram
from ..core.errors import CompileError
from ..core.mesh import Mesh
from ..runtime.launch.world import judges, world_size

PROGRAM, LOOP = "program", "loop.ckpt"  # in a checkpoint's folder: parameters and optimizer state; the rest


class ProgramPrecision(Precision):  # type: ignore[misc]
    """Clips by the norm of all gradients, those of other stages among them."""

    def __init__(self, strategy: MeshStrategy) -> None:
        super().__init__()
        self.strategy = strategy

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self.strategy.program.clip_grad_norm(clip_val)


class MeshStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """A strategy that trains one part of a LightningModule on a mesh::

        strategy = quintnet.lightning.MeshStrategy(quintnet.Mesh(tp=2), batch)
        trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy=strategy)

        def training_step(self, batch, index):          # of the LightningModule
            loss = self.trainer.strategy.step(batch)    # before: loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

    Every rank runs the same loop (``devices=1``) and reads the same whole batches. ``step`` computes gradients while
    the Trainer trains, and the loss alone while it evaluates. A checkpoint is a folder that any layout reads.

    Args:
        mesh: of all processes that a launcher started, or of ranks in this one.
        batch: like what ``step`` gets.
        model: the attribute of the LightningModule that is trained, and holds all of its parameters.
        loss_fn, options: as of :func:`quintnet.compile`.

    Raises:
        CompileError: QN105 if the LightningModule has parameters beside the model's; as :func:`quintnet.compile`.
    """

    strategy_name = "quintnet"

    def __init__(
        self,
        mesh: Mesh,
        batch: Any,
        *,
        model: str = "model",
        loss_fn: Callable[..., Tensor] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(precision_plugin=ProgramPrecision(self))
        self._mesh, self._sample, self._name, self._loss_fn = mesh, batch, model, loss_fn
        self._options = dict(options or {})
        self._program: CompiledProgram | None = None
        self._resumed = Path()
        self._parts = 1
        self._found: list[tuple[Any, Any]] = []  # gradients of the last step, which backward hands over
        self._training: Callable[[], bool] = lambda: False

    @property
    def program(self) -> CompiledProgram:
        """The compiled program, from the Trainer's setup on."""
        assert self._program is not None, "the Trainer has not begun"
        return self._program

    def step(self, batch: Any) -> Tensor:
        """The loss of a whole batch; with gradients while the Trainer trains."""
        if not self._training():
            return self.program.evaluate(batch).detach()
        parameters = list(self.program.parameters())
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        loss = self.program.step(batch).detach().as_subclass(Tensor)
        self._found = [(p, p.grad) for p in parameters if p.grad is not None]
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad
        return loss

    # -- what the Trainer asks of a strategy

    def setup_environment(self) -> None:
        super().setup_environment()
        self.global_rank = 0 if judges() else 1
        rank_zero_only.rank = self.global_rank

    @property
    def is_global_zero(self) -> bool:
        return judges()

    def model_to_device(self) -> None:
        """A program puts parts where its ranks run."""

    def setup(self, trainer: Any) -> None:
        module: Any = self.lightning_module
        own = {id(p) for p in getattr(module, self._name).parameters()}
        others = [name for name, p in module.named_parameters() if id(p) not in own]
        if others:
            raise CompileError(
                "QN105",
                f"{', '.join(others[:3])} of the LightningModule are not in its {self._name!r}",
                fix="put all parameters into one module, and name it: MeshStrategy(mesh, batch, model=...)",
            )
        self._parts = trainer.accumulate_grad_batches
        self._training = lambda: trainer.training
        if self._program is None:
            model = getattr(module, self._name)
            options = self._options if world_size() > 1 else {"device": self.root_device, **self._options}
            self._program = compile_program(model, self._mesh, self._sample, loss_fn=self._loss_fn, **options)
            list(self._program.parameters())
        super().setup(trainer)

    def teardown(self) -> None:
        """Parts stay where they are: ``program`` can be used, and closed, after the Trainer has ended."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Hand over what ``step`` computed: the Trainer sets gradients to zero in between."""
        with torch.no_grad():
            for p, grad in self._found:
                mine = grad / self._parts if self._parts > 1 else grad  # the mean over batches that are accumulated
                p.grad = mine if p.grad is None else p.grad + mine
        self._found = []
        return closure_loss

    # -- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Tensor]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        folder = Path(filepath)
        optimizer = self.optimizers[0] if self.optimizers else None
        self.program.save(folder / PROGRAM, step=checkpoint["global_step"], optimizer=optimizer, keep=1)
        if judges():
            self.checkpoint_io.save_checkpoint(checkpoint, folder / LOOP, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._resumed = Path(checkpoint_path)
        found: dict[str, Any] = self.checkpoint_io.load_checkpoint(self._resumed / LOOP, weights_only=weights_only)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.program.load(self._resumed / PROGRAM)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self.program.load(self._resumed / PROGRAM, optimizer=self.optimizers[0])

    def remove_checkpoint(self, filepath: Any) -> None:
        if judges():
            shutil.rmtree(filepath, ignore_errors=True)
