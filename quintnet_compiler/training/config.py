"""A training run as a document."""

from __future__ import annotations

import difflib
import math
import os
import signal
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..core.axes import AXES
from ..core.errors import CompileError
from ..core.files import path_of
from ..core.mesh import Mesh
from ..core.names import one_line
from ..ir.plan import Plan
from ..runtime.launch.preemption import SIGNALS
from .documents import read_yaml

REST = -1  # the size of an axis that gets all remaining ranks
ALL_THREE = "3d"  # the other name of dp_tp_pp
SCHEDULES = {"afab": "gpipe"}  # another name: all forward, all backward


def strategy_axes(name: str) -> tuple[str, ...]:
    """Return the axes that a strategy may split a model over.

    >>> strategy_axes("dp_tp"), strategy_axes("3d")
    (('dp', 'tp'), ('dp', 'tp', 'pp'))

    Raises:
        ValueError: if the name is not made of axes.
    """
    axes = ("dp", "tp", "pp") if name == ALL_THREE else tuple(name.split("_"))
    if not {*axes} <= {*AXES} or len({*axes}) != len(axes):
        raise ValueError(f"strategy_name {name}: join axes of {', '.join(AXES)} by _, or give {ALL_THREE}")
    return axes


class TrainConfig(BaseModel):
    """The configuration of a training run. Unknown keys are refused.

    Attributes:
        model: ``package.module:function`` or ``path/to/file.py:function``, which returns a :class:`quintnet.TrainTask`.
        model_args: keyword arguments of that function.
        strategy_name: the axes that the run uses, such as ``dp_tp``, or ``3d`` for ``dp_tp_pp``; others have size 1.
        mesh_dim: sizes of the mesh's axes, outermost first. One may be -1: as many as the number of ranks leaves for
            it, when the run starts and when it goes on with more or fewer ranks.
        mesh_name: names of the mesh's axes, in the same order.
        schedule: as in a :class:`quintnet.Plan`, or ``afab`` (for ``gpipe``).
        grad_acc_steps: the number of microbatches.
        plan: keys of a plan, such as ``zero: 3``; they override ``schedule``, ``grad_acc_steps`` and ``seed``.
        batch_size: rows of the global batch.
        num_epochs: passes over the data after which the run ends.
        max_steps: steps after which the run ends, if that is sooner.
        optimizer: the name of a class of torch.optim.
        learning_rate: of the optimizer.
        weight_decay: of the optimizer.
        optimizer_args: its further arguments.
        lr_schedule: the learning rate after the warmup: ``constant``, or down to 0 at the end of the run.
        warmup_steps: steps of a linear rise of the learning rate.
        max_grad_norm: the largest global L2 norm of all gradients; None: no clipping.
        patience: validations without a better loss before the run stops; None: never.
        val_interval: steps between validations; None: after every epoch.
        save_interval: steps between checkpoints; None: after every epoch; ``auto``: see :class:`Trainer`.
        mean_time_between_failures: seconds, of the whole run; ``auto`` needs it.
        log_interval: steps between log lines.
        checkpoint_dir: where checkpoints are saved, and from where the run resumes.
        keep_checkpoints: how many of the newest to keep.
        preempt_signals: names of the signals after which the run saves and ends, see :class:`Trainer`.
        log_dir: for metrics.
        tensorboard: also write TensorBoard events.
        measure_step: the step (from 1) whose timeline is written to ``log_dir``, for ``quintnet dump --measured``.
        num_workers: of the data loader.
        shuffle: whether each epoch has its own random order.
        seed: of the model's initial values, the data's order and dropout masks.
        device: ``auto`` uses GPUs if every rank has one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str
    model_args: dict[str, Any] = Field(default_factory=dict)
    strategy_name: str | None = None
    mesh_dim: tuple[int, ...] = (1,)
    mesh_name: tuple[str, ...] = ("dp",)
    schedule: str = "1f1b"
    grad_acc_steps: int = Field(default=1, ge=1)
    plan: dict[str, Any] = Field(default_factory=dict)
    batch_size: int = Field(ge=1)
    num_epochs: int = Field(default=1, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    optimizer: str = "AdamW"
    learning_rate: float = Field(default=1e-3, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    optimizer_args: dict[str, Any] = Field(default_factory=dict)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    max_grad_norm: float | None = Field(default=None, gt=0)
    patience: int | None = Field(default=None, ge=1)
    val_interval: int | None = Field(default=None, ge=1)
    save_interval: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    mean_time_between_failures: float | None = Field(default=None, gt=0)
    log_interval: int = Field(default=10, ge=1)
    checkpoint_dir: str | None = None
    keep_checkpoints: int = Field(default=3, ge=1)
    preempt_signals: tuple[str, ...] = tuple(number.name for number in SIGNALS)
    log_dir: str | None = None
    tensorboard: bool = False
    measure_step: int | None = Field(default=None, ge=1)
    num_workers: int = Field(default=0, ge=0)
    shuffle: bool = True
    seed: int = Field(default=0, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if len(self.mesh_dim) != len(self.mesh_name) or len(set(self.mesh_name)) != len(self.mesh_name):
            raise ValueError(f"mesh_dim {list(self.mesh_dim)} and mesh_name {list(self.mesh_name)} do not pair up")
        if self.mesh_dim.count(REST) > 1:
            raise ValueError(f"mesh_dim {list(self.mesh_dim)}: one axis can be {REST}")
        unknown = [name for name in self.preempt_signals if name not in signal.Signals.__members__]
        if unknown:
            raise ValueError(f"preempt_signals: there is no signal {', '.join(unknown)}; write SIGTERM or SIGUSR1")
        if self.measure_step is not None and self.log_dir is None:
            raise ValueError("measure_step needs a log_dir to write to")
        if self.strategy_name is not None:
            self._check_strategy(self.strategy_name)
        return self

    def _check_strategy(self, name: str) -> None:
        """Raise ValueError unless the mesh has the axes of this strategy, and no others."""
        allowed = strategy_axes(name)
        sizes = dict(zip(self.mesh_name, self.mesh_dim, strict=True))
        wrong = [
            f"{axis}={size} is not among them" for axis, size in sizes.items() if size != 1 and axis not in allowed
        ]
        wrong += [f"no {axis}" for axis in allowed if axis not in sizes]
        if wrong:
            raise ValueError(f"strategy_name {name} is over {', '.join(allowed)}: {'; '.join(wrong)}")

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of ``mesh_dim`` and ``mesh_name``.

        Raises:
            CompileError: QN201 if the size of an axis is left open, or is none.
        """
        return Mesh(**dict(zip(self.mesh_name, self.mesh_dim, strict=True)))

    @property
    def fixed_ranks(self) -> int | None:
        """Return the number of ranks of the mesh; None if it has as many as there are."""
        return None if REST in self.mesh_dim else self.mesh.size

    def mesh_of(self, ranks: int) -> Mesh:
        """Return the mesh of ``mesh_dim`` and ``mesh_name`` for so many ranks, of which an axis of -1 gets the rest.

        Raises:
            CompileError: QN201 if there is none.
        """
        if REST not in self.mesh_dim:
            return self.mesh
        fixed = math.prod(size for size in self.mesh_dim if size != REST)
        if fixed < 1 or ranks % fixed:
            message = f"there is no mesh of mesh_dim {list(self.mesh_dim)} with {ranks} ranks"
            raise CompileError("QN201", message, fix="start a multiple of the sizes that mesh_dim names")
        sizes = (ranks // fixed if size == REST else size for size in self.mesh_dim)
        return Mesh(**dict(zip(self.mesh_name, sizes, strict=True)))

    @property
    def decisions(self) -> Plan:
        """Return the plan of these keys."""
        schedule = SCHEDULES.get(self.schedule, self.schedule)
        return Plan().changed(
            {"schedule": schedule, "microbatches": self.grad_acc_steps, "seed": self.seed, **self.plan}
        )

    @classmethod
    def read(cls, path: str | os.PathLike[str], **changes: Any) -> TrainConfig:
        """Read a YAML file; ``changes`` override its values.

        Raises:
            CompileError: QN207 naming each key that is unknown or has a wrong value.
        """
        file = path_of(path, "QN207")
        try:
            document = read_yaml(file.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise CompileError("QN207", one_line(f"{file}: {error}"), fix="give a YAML file") from None
        if not isinstance(document, dict):
            raise CompileError("QN207", f"{file} is not a mapping of keys to values", fix="write key: value lines")
        return cls.make({**document, **changes})

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Return a configuration of these values; raise CompileError QN207 as :meth:`read`."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            lines = []
            for problem in error.errors():
                key = ".".join(map(str, problem["loc"]))
                near = difflib.get_close_matches(key, cls.model_fields, 1)
                guess = f" (did you mean {near[0]}?)" if near and problem["type"] == "extra_forbidden" else ""
                lines.append(f"{key}: {problem['msg']}{guess}" if key else problem["msg"])
            raise CompileError(
                "QN207", one_line("; ".join(lines)), fix=f"the keys are {', '.join(cls.model_fields)}"
            ) from None
