"""Save and load a compiled program: checkpoints of any layout, and Hugging Face folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.lock import FolderLocks
from ..core.errors import CheckpointError
from ..core.files import path_of
from ..runtime.launch.accelerator import group_accelerator
from ..runtime.launch.calls import collective
from ..runtime.launch.heartbeat import current
from .program_state import ProgramState

if TYPE_CHECKING:
    from ..checkpoint.background import Background
    from ..checkpoint.pretrained import WeightsSubject as Pretrained
    from ..checkpoint.training_state import Restored, Snapshot


class ProgramCheckpoints(ProgramState):
    """Saves and loads a compiled program: on disks, and in object stores."""

    _saving: Background | None
    _locks: FolderLocks
    _interrupted: bool  # the last call was a step, which another rank's fault ended before it changed anything

    # -- Hugging Face folders

    @collective
    def load_pretrained(
        self, folder: str | os.PathLike[str], *, missing: Sequence[str] = (), unexpected: Sequence[str] = ()
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
        from ..checkpoint.adapters import has_adapters, load_adapters
        from ..checkpoint.pretrained import Allowed, load_weights

        path = path_of(folder, "QN601", CheckpointError)
        if has_adapters(path, self._task.model):
            load_adapters(self._pretrained(), path)
            return
        load_weights(self._pretrained(), path, Allowed(tuple(missing), tuple(unexpected)))

    @collective
    def save_pretrained(
        self, folder: str | os.PathLike[str], *, merged: bool = False, max_file_bytes: int = 5 * 10**9
    ) -> None:
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
        from ..checkpoint.adapters import save_adapters, save_merged
        from ..checkpoint.pretrained_save import save_weights
        from ..weights.adapters import is_peft

        path = path_of(folder, "QN603", CheckpointError)
        self._agree("save_pretrained", None, None, merged=merged)
        if merged:
            save_merged(self._pretrained(), path)
        elif is_peft(self._task.model):
            save_adapters(self._pretrained(), path)
        else:
            save_weights(self._pretrained(), path, max_file_bytes)

    def _pretrained(self) -> Pretrained:
        from ..checkpoint.pretrained import WeightsSubject as Pretrained

        program, aliases = self._primary().program, self._programs.captured[self._task.primary_kind].aliases
        return Pretrained(self._task.model, program, self._state(), aliases)

    # -- checkpoints

    @collective
    def save(
        self,
        folder: str | os.PathLike[str],
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
            extra: values to load again, such as a scheduler's ``state_dict()`` or the position in the data: numbers,
                texts, small tensors and arrays, and lists, tuples, sets and dicts of them. All keep their types.
            keep: how many of the newest whole checkpoints to keep, this one among them; None: all.

        Returns:
            The checkpoint's path, or its URL.

        Raises:
            CheckpointError: QN603 if it cannot be written, or another process writes there, QN604 if a tensor has no
                values; on every rank.
        """
        from ..checkpoint.stores.places import folder_at
        from ..checkpoint.training_state import Destination, write

        to = Destination(folder_at(folder), step, keep, self._locks)
        self._agree("save", optimizer, extra, folder=to.folder.path, step=step, keep=keep)
        snapshot = self._snapshot(optimizer, extra).copy_to_host()
        if self._saving is not None:
            self._saving.wait()
        path = write(snapshot, to)
        self._state().saved(path)
        return path

    @collective
    def save_async(
        self,
        folder: str | os.PathLike[str],
        *,
        step: int,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> Future[Path | str]:
        """Save as :meth:`save`, but return when everything is copied to the CPU; a thread writes it while training
        continues. The future's ``result()`` is the path, or raises the error. Waits for an earlier save that is still
        running.
        """
        from ..checkpoint.background import Background
        from ..checkpoint.pretrained import everywhere
        from ..checkpoint.stores.places import folder_at
        from ..checkpoint.training_state import Destination

        to = Destination(folder_at(folder), step, keep, self._locks)
        self._agree("save_async", optimizer, extra, folder=to.folder.path, step=step, keep=keep)
        snapshot = self._snapshot(optimizer, extra)
        if self._saving is None:
            self._saving = Background.make()
        saving = self._saving.save(snapshot, to, everywhere(self._state(), "QN603"))
        self._state().saved(saving)
        return saving

    @collective
    def load(
        self,
        folder: str | os.PathLike[str],
        *,
        step: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        accept: Callable[[Restored], object] | None = None,
    ) -> Restored:
        """Load the newest intact checkpoint of a folder, or that of ``step``, whatever layout wrote it.

        Parameters, the optimizer's state and options, and the state of random numbers are restored bit by bit. Every
        file is read and compared with its hashes first. A damaged checkpoint is reported by a
        :class:`quintnet.CheckpointWarning`, and the one before it is tried. Others may write there meanwhile; a
        :meth:`save_async` of this program is waited for.
        ``accept`` is called with what the checkpoint has beside tensors, before anything is changed, and may raise.

        Returns:
            The step, and what was given to ``save`` as ``extra``.

        Raises:
            CheckpointError: QN601 if no checkpoint is intact (or that of ``step`` is not), or one cannot be read, QN602
                with every name, shape and dtype that is not this program's. Nothing was changed, on any rank, unless a
                disk failed after all was compared: then the program refuses to run (QN604).
        """
        from ..checkpoint.stores.places import folder_at
        from ..checkpoint.training_state import read

        self._agree("load", optimizer, None, step=step)
        if self._saving is not None:
            self._saving.wait()
        restored = read(self._pretrained(), folder_at(folder, "QN601"), step, optimizer, accept)
        if "rng" in restored.run:
            self.set_rng_state(restored.run["rng"])
        if "loss_scale" in restored.run:
            scaler = self._state().scaler
            scaler.scale, scaler.good = restored.run["loss_scale"]
        return restored

    @collective
    def reserve(self, folder: str | os.PathLike[str]) -> None:
        """Become the one that writes into a folder of checkpoints from now on, as with the first save.

        Raises:
            CheckpointError: QN603 on every rank, if another process writes there.
        """
        from ..checkpoint.pretrained import everywhere
        from ..checkpoint.stores.places import folder_at

        self._agree("reserve", None, None, folder=folder_at(folder).path)
        with everywhere(self._state(), "QN603"):
            if self._state().first:
                self._locks.take(folder_at(folder))

    def rescue(
        self,
        folder: str | os.PathLike[str],
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
        from ..checkpoint.replica import replica
        from ..checkpoint.stores.places import folder_at
        from ..checkpoint.training_state import Destination, write

        pulse = current.get()
        if pulse is None or not self._interrupted or group_accelerator() is not None:
            return None
        snapshot = replica(self._pretrained(), optimizer, extra or {}, self._run_now())
        if snapshot is None or not pulse.chosen():
            return None
        if self._saving is not None:
            self._saving.wait()  # it has failed, if it still waited for others
        path = write(snapshot.copy_to_host(), Destination(folder_at(folder), step, keep, self._locks), alone=True)
        pulse.announce_checkpoint(step)
        return path

    def _agree(
        self, call: str, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None, **more: Any
    ) -> None:
        """Raises: RunError QN403 on every rank, if they were given something else."""
        from ..checkpoint.training_state import as_stored

        claims = {
            f"{name} of {call}": os.path.abspath(x) if isinstance(x, Path) else str(x) for name, x in more.items()
        }
        claims[f"optimizer of {call}"] = "None" if optimizer is None else type(optimizer).__name__
        claims[f"extra of {call}"] = as_stored(extra or {})
        self._state().agree(claims, f"call {call} with the same arguments on every rank")

    def _snapshot(self, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None) -> Snapshot:
        from ..checkpoint.training_state import snapshot

        return snapshot(self._pretrained(), optimizer, extra or {}, self._run_now())

    def _run_now(self) -> dict[str, Any]:
        """Return what a checkpoint has of this run beside tensors."""
        aliases, scaler = self._pretrained().aliases, self._state().scaler
        rng, scale = self.get_rng_state(), [scaler.scale, scaler.good]
        tied = {"tied": dict(aliases)} if aliases else {}
        return {"rng": rng, "loss_scale": scale, "mesh": str(self._task.mesh), **tied}
