"""A program's state as users see it: parameters, gradients, weights on disk, checkpoints."""

from __future__ import annotations

import abc
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.adapters import has_adapters, load_adapters, save_adapters, save_merged
from ..checkpoint.background import Background
from ..checkpoint.lock import FolderLocks
from ..checkpoint.pretrained import Allowed, everywhere, load_weights
from ..checkpoint.pretrained import WeightsSubject as Pretrained
from ..checkpoint.pretrained_save import save_weights
from ..checkpoint.replica import replica
from ..checkpoint.stores.places import folder_at
from ..checkpoint.training_state import Destination, Restored, Snapshot, as_stored, read, snapshot, write
from ..driver.compiler import Compiled
from ..driver.task import Task, modules_of
from ..driver.variants import Programs
from ..runtime.backends.backend import Backend, refuse_unset
from ..runtime.launch.accelerator import group_accelerator
from ..runtime.launch.calls import collective, frequent
from ..runtime.launch.heartbeat import current
from ..runtime.launch.preemption import SIGNALS, Preemption, handling
from ..runtime.state.plain_update import Make
from ..runtime.state.state import without_offset
from ..runtime.state.whole_optimizer import WholeOptimizer
from ..runtime.threads.turns import Turn, in_turn
from ..weights.adapters import is_peft
from .initial_values import InitialValues, give_values


class ProgramState(abc.ABC):
    """What a compiled program keeps between steps."""

    _task: Task
    _steps: int
    _programs: Programs
    _saving: Background | None
    _locks: FolderLocks
    _preemption: Preemption | None
    _compiling: float
    _batch: Any  # the latest
    _interrupted: bool  # the last call was a step, which another rank's fault ended before it changed anything

    def _primary(self) -> Compiled:
        return self._programs.primary

    @abc.abstractmethod
    def _state(self) -> Backend: ...

    @property
    @abc.abstractmethod
    def _label(self) -> str: ...

    @property
    @abc.abstractmethod
    def _turn(self) -> Turn: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters (those of its stages) under the model's names. All ranks in one process: whole; one
        process per rank: DTensors. Both have ``full_tensor()``."""
        yield from self._state().parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """As :meth:`named_parameters`, without the names: what an optimizer takes."""
        for _, parameter in self.named_parameters():
            yield parameter

    @in_turn
    def state_dict(self) -> dict[str, Tensor]:
        """The module's state dict (with one process per rank: this rank's DTensors), and under ``loss_fn.`` that of the
        loss function. The tensors are the trained ones, not copies.

        With :meth:`load_state_dict`, this makes a program Stateful for torch.distributed.checkpoint:
        ``dcp.save({"model": program}, checkpoint_id=folder)`` writes, and ``dcp.load`` reads, what it does for the
        plain module and for ``fully_shard``'s, on any layout.
        """
        parameters = dict(self.named_parameters())
        found = {
            ".".join(filter(None, (prefix, name))): x
            for prefix, module in modules_of(self._task).items()
            for name, x in module.state_dict().items()
        }
        found |= {name: p.detach() for name, p in parameters.items() if name not in found}
        return {name: without_offset(x) for name, x in found.items()}

    @in_turn
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state_dict` gave on this layout, or whole tensors on any: each rank keeps its part.

        Raises:
            RuntimeError: for names that are missing or unexpected, and for other shapes, as ``Module.load_state_dict``.
        """
        cuts, model = self._state().cuts(), self._task.model
        own = model.state_dict().keys()
        of_loss = {name: x for name, x in state.items() if name.startswith("loss_fn.") and name not in own}
        brought: dict[str, Any] = {
            name: p for name, p in self.named_parameters() if name.startswith("loss_fn.") and name not in own
        }
        loss_module = self._task.loss_fn if isinstance(self._task.loss_fn, nn.Module) else None
        known = {f"loss_fn.{name}" for name in loss_module.state_dict()} if loss_module else brought.keys()
        if known != of_loss.keys():
            missing, unexpected = sorted(known - of_loss.keys()), sorted(of_loss.keys() - known)
            raise RuntimeError(f"missing in the state: {missing}; unexpected in it: {unexpected}; nothing was loaded")
        model.load_state_dict({name: x for name, x in state.items() if name not in of_loss})
        if loss_module:
            loss_module.load_state_dict({name.removeprefix("loss_fn."): x for name, x in of_loss.items()})
        else:
            with torch.no_grad():
                for name, p in brought.items():
                    p.copy_(cuts[name](of_loss[name], p) if name in cuts else of_loss[name])
        parameters = {spec.name for spec in self._primary().program.state.values() if spec.kind == "parameter"}
        self._state().unset -= parameters | state.keys()  # other ranks load those of their stages

    @collective
    def initialize(self, values: InitialValues = "model", *, seed: int | None = None) -> None:
        """Give parameters and buffers initial values: the same on every layout. Each rank keeps its parts, and makes
        whole tensors one at a time.

        Args:
            values: where values come from.

                - ``"model"``: the module's own reset functions (``init_weights`` of a Hugging Face model, else
                  ``reset_parameters`` of each module, its children's first). The values are those that
                  ``torch.manual_seed(seed)`` and these functions give the unsplit module on the CPU.
                - a function that builds the module, such as its class: the values of
                  ``torch.manual_seed(seed); build()``, of buffers and tensors in attributes, too.
                - a dict from names (or globs) of parameters to :class:`quintnet.Normal`, ``Uniform``, ``Constant``, or
                  to functions that fill a tensor, such as those of ``torch.nn.init``. Later patterns win, and what
                  none matches keeps its values. Buffers are given by their full names. Functions are called in the
                  order of ``model.named_parameters()`` (and buffers last), after ``torch.manual_seed(seed)``.
            seed: by default the program's.

        Raises:
            CompileError: QN204 for a pattern that matches no parameter; QN604 with the tensors that would be left
                without values, before any is changed, or if a function does not fill its tensor.
            RunError: QN403 if ranks have other code or constants.
        """
        seed = self._task.plan.seed if seed is None else seed
        give_values(self._primary().program, self._state(), modules_of(self._task), values, seed)

    # -- Hugging Face folders

    @collective
    def load_pretrained(
        self, folder: str | Path, *, missing: Sequence[str] = (), unexpected: Sequence[str] = ()
    ) -> None:
        """Read the weights of a Hugging Face folder (safetensors); each rank reads its own shards of each tensor.

        Names are those of the model, or what transformers converts to them (other prefixes, experts one by one).
        Values are exact: a wider floating dtype than the stored one is fine, a narrower one is refused.
        A folder with PEFT's adapters is read into those of a ``peft.PeftModel``; all else keeps its values. Any other
        folder is read into the model that PEFT has wrapped, and adapters keep theirs.

        Args:
            folder: has ``model.safetensors``, or several files and ``model.safetensors.index.json``.
            missing: globs of parameters that the files need not have (a new head); they keep their values.
            unexpected: globs of stored tensors to leave out.

        Raises:
            CheckpointError: QN601 if files cannot be read (or would have to be unpickled), QN602 with every name,
                shape and dtype that does not fit. No parameter was changed, on any rank.
            RunError: QN403 if ranks see different files.
        """
        if has_adapters(Path(folder), self._task.model):
            load_adapters(self._pretrained(), Path(folder))
            return
        load_weights(self._pretrained(), Path(folder), Allowed(tuple(missing), tuple(unexpected)))

    @collective
    def save_pretrained(self, folder: str | Path, *, merged: bool = False, max_file_bytes: int = 5 * 10**9) -> None:
        """Write a folder that ``transformers``' ``from_pretrained`` loads: config.json and safetensors (for a module
        that is not Hugging Face's, safetensors alone). Of a ``peft.PeftModel`` only its adapters, in PEFT's format.

        Every rank calls this; tensors are gathered one at a time, and rank 0 writes them. The folder appears when it is
        complete.

        Args:
            folder: a new (or empty) folder.
            merged: of a ``peft.PeftModel``: the whole model instead, as ``merge_and_unload`` makes it. Rank 0 holds all
                of it on the host.
            max_file_bytes: the size beyond which a further file is started.

        Raises:
            CheckpointError: QN603 if it cannot be written, QN604 if a tensor has no values; on every rank.
        """
        self._agree("save_pretrained", None, None, merged=merged)
        if merged:
            save_merged(self._pretrained(), Path(folder))
        elif is_peft(self._task.model):
            save_adapters(self._pretrained(), Path(folder))
        else:
            save_weights(self._pretrained(), Path(folder), max_file_bytes)

    def _pretrained(self) -> Pretrained:
        program, aliases = self._primary().program, self._programs.captured[self._task.primary_kind].aliases
        return Pretrained(self._task.model, program, self._state(), aliases)

    @in_turn
    def zero_grad(self) -> None:
        """Set every parameter's ``grad`` to None."""
        deque(map(setattr, self._state().parameters.values(), repeat("grad"), repeat(None)), maxlen=0)

    @in_turn
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global L2 norm is at most ``max_norm``. Returns the norm before."""
        with frequent("clip_grad_norm", self._label):
            return self._state().clip_grad_norm(self._primary().program, max_norm)

    @in_turn
    def grad_norm(self) -> Tensor:
        """The global L2 norm of all gradients, those of other stages among them."""
        with frequent("grad_norm", self._label):
            return self._state().clip_grad_norm(self._primary().program, math.inf)

    @property
    def loss_scale(self) -> float:
        """The next step's loss scale with ``precision="fp16"``, else 1."""
        return self._state().scaler.scale

    def get_rng_state(self) -> dict[str, int]:
        """The seed of dropout masks and the number of the next training step, which determine all masks."""
        return {"seed": self._task.plan.seed, "step": self._steps}

    def set_rng_state(self, state: Mapping[str, int]) -> None:
        """Continue with the dropout masks that followed when ``state`` was taken, on this or any other layout."""
        plan = self._task.plan.changed({"seed": state["seed"]})
        self._task = replace(self._task, plan=plan)
        self._steps = state["step"]

    @collective
    def optimizer(self, make: Make, parameters: Iterable[Any] | None = None) -> WholeOptimizer:
        """An optimizer whose update of a parameter needs all of it (Muon, Adafactor, Shampoo): the same on every layout
        as ``make`` of the unsplit parameters. With ``offload=("optimizer",)`` in the plan, whatever optimizer: the
        host's processor computes the update, and keeps the state, and copies of the parameters, in its memory
        (ZeRO-Offload, Ren et al. 2021).

        Each parameter and its gradient are gathered on one of the ranks that share it, which computes the update, keeps
        the state and sends the parts back: ranks divide the work. :meth:`save` and :meth:`load` take the optimizer; any
        layout reads its state.

        Args:
            make: makes the optimizer of whole parameters: ``lambda p: torch.optim.Muon(p, lr=0.02)``. An update must be
                a function of one parameter, its gradient and its state; none may depend on other parameters.
            parameters: those of this program to optimize, or groups of them; by default all.

        Raises:
            RunError: QN113 for parameters of others.
        """
        given = self.parameters() if parameters is None else parameters
        backend, program = self._state(), self._primary().program
        refuse_unset(backend.unset, program)
        return WholeOptimizer(given, make, backend.whole_tensors(program))

    # -- checkpoints

    @collective
    def save(
        self,
        folder: str | Path,
        *,
        step: int,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> Path | str:
        """Write a checkpoint that any layout can load. Every rank calls this, and each writes its own shards.

        ``folder/step-00000042`` appears when all of it is on the disk (safetensors and JSON, written by a plan of
        torch.distributed.checkpoint, with hashes of all files). If anything fails, the folder's other checkpoints
        stay as they were.

        Args:
            folder: on a disk that all ranks share, or the URL of a prefix in an object store (``s3://bucket/run``), of
                those that `fsspec <https://filesystem-spec.readthedocs.io>`_ knows.
            step: its number. A checkpoint of the same step is replaced; those of later steps are of a run that this one
                left, and move to ``folder/abandoned-01``.
            optimizer: of this program's parameters, whose state is saved with them.
            extra: anything that JSON can hold, such as a scheduler's ``state_dict()`` or the position in the data.
            keep: how many of the newest whole checkpoints to keep, this one among them; None: all.

        Returns:
            The checkpoint's path, or its URL.

        Raises:
            CheckpointError: QN603 if it cannot be written, or another process writes there, QN604 if a tensor has no
                values; on every rank.
        """
        to = Destination(folder_at(folder), step, keep, self._locks)
        self._agree("save", optimizer, extra, folder=to.folder.path, step=step, keep=keep)
        found = self._snapshot(optimizer, extra).on_host()
        if self._saving is not None:
            self._saving.wait()
        path = write(found, to)
        self._state().saved(path)
        return path

    @collective
    def save_async(
        self,
        folder: str | Path,
        *,
        step: int,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> Future[Path | str]:
        """As :meth:`save`, but returns when everything is copied to the CPU; a thread writes it while training
        continues. The future's ``result()`` is the path, or raises the error. Waits for an earlier save that is still
        running.
        """
        to = Destination(folder_at(folder), step, keep, self._locks)
        self._agree("save_async", optimizer, extra, folder=to.folder.path, step=step, keep=keep)
        found = self._snapshot(optimizer, extra)
        if self._saving is None:
            self._saving = Background.make()
        saving = self._saving.save(found, to)
        self._state().saved(saving)
        return saving

    @collective
    def load(
        self,
        folder: str | Path,
        *,
        step: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        accept: Callable[[Restored], object] | None = None,
    ) -> Restored:
        """Load the newest intact checkpoint of a folder, or that of ``step``, whatever layout wrote it.

        Parameters, the optimizer's state and options, and the state of random numbers are restored bit by bit. Every
        file is read and compared with its hashes first. A damaged checkpoint is reported by a
        :class:`quintnet.CheckpointWarning`, and the one before it is tried. Others may write there meanwhile.
        ``accept`` is called with what the checkpoint has beside tensors, before anything is changed, and may raise.

        Returns:
            The step, and what was given to ``save`` as ``extra``.

        Raises:
            CheckpointError: QN601 if no checkpoint is intact (or that of ``step`` is not), or one cannot be read, QN602
                with every name, shape and dtype that is not this program's. Nothing was changed, on any rank, unless a
                disk failed after all was compared: then the program refuses to run (QN604).
        """
        self._agree("load", optimizer, None, step=step)
        found = read(self._pretrained(), folder_at(folder), step, optimizer, accept)
        if "rng" in found.run:
            self.set_rng_state(found.run["rng"])
        if "loss_scale" in found.run:
            scaler = self._state().scaler
            scaler.scale, scaler.good = found.run["loss_scale"]
        return found

    @collective
    def reserve(self, folder: str | Path) -> None:
        """Be the one that writes into a folder of checkpoints from now on, as with the first save.

        Raises:
            CheckpointError: QN603 on every rank, if another process writes there.
        """
        self._agree("reserve", None, None, folder=folder_at(folder).path)
        with everywhere(self._state(), "QN603"):
            if self._state().first:
                self._locks.take(folder_at(folder))

    def rescue(
        self,
        folder: str | Path,
        *,
        step: int,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> Path | str | None:
        """After a step that another rank's fault ended, save what this rank has in memory, so that no step is lost::

            try:
                program.step(batch)
            except quintnet.RunError:
                program.rescue(folder, step=step - 1, optimizer=optimizer)
                raise

        Each rank that is left may call this, and does not wait for the others. Under :func:`quintnet.launch`, one that
        has all parameters, and all of the optimizer's state, writes a checkpoint of them; all other ranks have ended
        then. A :class:`quintnet.Trainer` with a checkpoint_folder does this by itself.

        Args:
            step: of the last step whose optimizer step was finished; all else as in :meth:`save`.

        Returns:
            The checkpoint's path, or its URL. None if nothing was written: the last call of this program was not a step
            that failed with QN402 or QN303, which changes nothing; or something is split over ranks (ZeRO, ``tp``,
            ``pp``); or another rank was chosen; or no launching process is there to choose; or ranks communicate
            between accelerators, where the host may have gone on after a collective that failed. The newest checkpoint
            is then what there is.

        Raises:
            CheckpointError: QN603 if it cannot be written.
        """
        pulse = current.get()
        if pulse is None or not self._interrupted or group_accelerator() is not None:
            return None
        found = replica(self._pretrained(), optimizer, extra or {}, self._run_now())
        if found is None or not pulse.chosen():
            return None
        if self._saving is not None:
            self._saving.wait()  # it has failed, if it still waited for others
        path = write(found.on_host(), Destination(folder_at(folder), step, keep, self._locks), alone=True)
        pulse.saved(step)
        return path

    @contextmanager
    def on_preempt(
        self, save: Callable[[], object], *, signals: Sequence[int] = SIGNALS
    ) -> Iterator[Callable[[], None]]:
        """While inside, a scheduler may ask this run to end: by one of ``signals``, sent to any rank.

        ::

            with program.on_preempt(lambda: program.save(folder, step=step, optimizer=optimizer)) as end_of_step:
                for step in range(first + 1, steps + 1):
                    program.step(batches[step - 1])
                    optimizer.step()
                    optimizer.zero_grad()
                    end_of_step()

        Every rank enters this, and calls what it gets after each step. There ``save`` is called on every rank after the
        same step, and :class:`quintnet.Preempted` is raised, which ends the process with
        :data:`quintnet.REQUEUE_EXIT_CODE`. Ranks agree on the step through the sum that checks whether its gradients
        are finite. With ``check_finite=False``, each step waits for that sum. A signal that comes after the last step
        has no effect.

        Handling signals changes the process: Python's handlers are set on entry, and those before on exit.

        Args:
            save: writes what the run needs to go on.
            signals: by default SIGTERM and SIGUSR1.

        Raises:
            RunError: QN306 outside of the main thread, or for a signal that cannot be handled.
        """
        before, asked = self._preemption, Preemption()
        with handling(signals, asked.ask):
            self._preemption = asked
            try:
                yield partial(asked.leave_if_agreed, save)
            finally:
                self._preemption = before

    def _agree(
        self, call: str, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None, **more: Any
    ) -> None:
        """Raises: RunError QN403 on every rank, if they were given something else."""
        claims = {
            f"{name} of {call}": os.path.abspath(x) if isinstance(x, Path) else str(x) for name, x in more.items()
        }
        claims[f"optimizer of {call}"] = "None" if optimizer is None else type(optimizer).__name__
        claims[f"extra of {call}"] = as_stored(extra or {})
        self._state().agree(claims, f"call {call} with the same arguments on every rank")

    def _snapshot(self, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None) -> Snapshot:
        return snapshot(self._pretrained(), optimizer, extra or {}, self._run_now())

    def _run_now(self) -> dict[str, Any]:
        """What a checkpoint has of this run beside tensors."""
        aliases, scaler = self._pretrained().aliases, self._state().scaler
        rng, scale = self.get_rng_state(), [scaler.scale, scaler.good]
        tied = {"tied": dict(aliases)} if aliases else {}
        return {"rng": rng, "loss_scale": scale, "mesh": str(self._task.mesh), **tied}
