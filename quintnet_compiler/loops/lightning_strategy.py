"""Lightning's Trainer with a compiled program."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from ..api.compile import compile as compile_program
from ..api.compiled_program import CompiledProgram
from ..checkpoint.commit import prune
from ..checkpoint.stores.disk_folder import DiskFolder
from ..compat.trainers import lightning_precision
from ..core.errors import CompileError
from ..core.mesh import Mesh
from ..runtime.launch.world import judges, world_size
from .handed_gradients import differentiable, without_parameter_hooks
from .joined_optimizers import joined
from .together import wait_for_all

PROGRAM, LOOP = "program", "loop.ckpt"  # in a checkpoint's folder: parameters and optimizer state; the Trainer's state


class ProgramPrecision(Precision):  # type: ignore[misc]
    """A precision plugin that clips by the norm of all of an optimizer's gradients, also those of other stages."""

    def __init__(self, strategy: MeshStrategy) -> None:
        super().__init__()
        self.strategy = strategy

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        others = [(p, p.grad) for p in self.strategy.program.parameters() if id(p) not in own]
        for p, _ in others:
            p.grad = None
        self.strategy.program.clip_grad_norm(clip_val)
        for p, grad in others:
            p.grad = grad


class MeshStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """A strategy that trains one submodule of a LightningModule on a mesh.

    Example::

        strategy = quintnet.lightning.MeshStrategy(quintnet.Mesh(tp=2), batch)
        trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy=strategy)

        def training_step(self, batch, index):          # of the LightningModule
            loss = self.trainer.strategy.step(batch)    # before: loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

    Every rank runs the same loop (``devices=1``) and reads the same whole batches. ``step`` computes gradients while
    the Trainer trains, and the loss alone while it evaluates. What ``training_step`` returns may be any function of the
    results of ``step``, and is what is differentiated. A checkpoint is a folder that any layout reads.

    Args:
        mesh: of all processes that a launcher started, or of ranks in this one.
        batch: like what ``step`` gets.
        model: the attribute of the LightningModule that is trained, and holds all of its parameters.
        loss_fn, options: as of :func:`quintnet.compile`.

    Raises:
        CompileError: QN105 if the LightningModule has parameters beside the model's; QN108 for a ``precision`` of the
            Trainer; as :func:`quintnet.compile`.
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
        self._compiled_model: nn.Module | None = None  # of the program
        self._resumed = Path()
        self._training: Callable[[], bool] = lambda: False

    @property
    def program(self) -> CompiledProgram:
        """The compiled program, from the Trainer's setup on."""
        assert self._program is not None, "the Trainer has not begun"
        return self._program

    def step(self, batch: Any) -> Tensor:
        """Return the loss of a whole batch; in training, its ``backward`` adds to the parameters' ``grad``."""
        self._compile_model()
        if not self._training():
            return self.program.evaluate(batch).detach()
        parameters = list(self.program.parameters())
        old_gradients = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        with without_parameter_hooks(parameters):  # autograd calls them, with what is differentiated
            loss = self.program.step(batch).detach().as_subclass(Tensor)
        gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        for p, grad in zip(parameters, old_gradients, strict=True):
            p.grad = grad
        return differentiable(loss, gradients)

    # -- methods that the Trainer calls

    def setup_environment(self) -> None:
        super().setup_environment()
        self.global_rank = 0 if judges() else 1
        rank_zero_only.rank = self.global_rank

    @property
    def is_global_zero(self) -> bool:
        return judges()

    def barrier(self, name: str | None = None) -> None:
        wait_for_all()

    def model_to_device(self) -> None:
        """Do nothing: the program moves its parts."""

    def setup(self, trainer: Any) -> None:
        _refuse_precision(trainer)
        self._compile_model()
        self._training = lambda: trainer.training
        super().setup(trainer)

    def _compile_model(self) -> None:
        """Compile the model that the LightningModule has now, unless the program is of that one."""
        module: Any = self.lightning_module
        model = getattr(module, self._name)
        if self._compiled_model is model:
            return
        own = {id(p) for p in model.parameters()}
        others = [name for name, p in module.named_parameters() if id(p) not in own]
        if others:
            raise CompileError(
                "QN105",
                f"{', '.join(others[:3])} of the LightningModule are not in its {self._name!r}",
                fix="put all parameters into one module, and name it: MeshStrategy(mesh, batch, model=...)",
            )
        options = self._options if world_size() > 1 else {"device": self.root_device, **self._options}
        self._program = compile_program(model, self._mesh, self._sample, loss_fn=self._loss_fn, **options)
        list(self._program.parameters())
        self._compiled_model = model

    def teardown(self) -> None:
        """Leave parts where they are: ``program`` can be used, and closed, after the Trainer has ended."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Tensor]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the program, and then the Trainer's state, which says the step: an earlier one stays until then."""
        folder = Path(filepath)
        step = checkpoint["global_step"]
        self.program.save(folder / PROGRAM, step=step, optimizer=joined(self.optimizers), keep=2)
        if judges():
            self.checkpoint_io.save_checkpoint(checkpoint, folder / LOOP, storage_options=storage_options)
            prune(DiskFolder(folder / PROGRAM), step, 1)
        self.barrier()  # the folder exists for all ranks

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._resumed = Path(checkpoint_path)
        state: dict[str, Any] = self.checkpoint_io.load_checkpoint(self._resumed / LOOP, weights_only=weights_only)
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._compile_model()  # the Trainer restores the model before setup
        self.program.load(self._resumed / PROGRAM, step=checkpoint["global_step"])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            step = checkpoint["global_step"]
            self.program.load(self._resumed / PROGRAM, step=step, optimizer=joined(self.optimizers))

    def remove_checkpoint(self, filepath: Any) -> None:
        if judges():
            shutil.rmtree(filepath, ignore_errors=True)
        self.barrier()


def _refuse_precision(trainer: Any) -> None:
    """Refuse a precision that the Trainer was given: a strategy with a plugin of its own has Lightning ignore it.

    Raises:
        CompileError: QN108.
    """
    precision = lightning_precision(trainer)
    if precision != "32-true":
        raise CompileError(
            "QN108",
            f"the precision of a compiled program is an option of it, and not Trainer(precision={precision!r})",
            fix="leave precision out; MeshStrategy(..., options={'precision': 'bf16'}), or model.double() for float64",
        )
