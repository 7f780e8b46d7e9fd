"""Commands, launchers and the Trainer on this device, as a user starts them."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .entries import Check, Entry, NotRun
from .setting import Setting

ROOT = Path(__file__).parent.parent.parent
LIMIT = 80.0  # seconds of a command
CLI = ("-c", "from quintnet_compiler.cli import main; main()")
TRAIN = """
model: examples/vit_digits.py:build
strategy_name: 3d
mesh_dim: [1, 1, 1]
mesh_name: [pp, dp, tp]
grad_acc_steps: 2
batch_size: 128
num_epochs: {epochs}
optimizer: AdamW
learning_rate: 0.002
max_grad_norm: 1.0
device: cuda
checkpoint_dir: {folder}/checkpoints
log_dir: {folder}
"""


def run(setting: Setting) -> Iterator[Entry]:
    if not setting.cuda:
        yield NotRun("commands, torchrun and the Trainer", "they take CUDA devices; the tests start them on CPUs")
        return
    with tempfile.TemporaryDirectory() as folder:
        yield from _trainer(Path(folder))
    yield _command("quintnet doctor", (*CLI, "doctor"))
    with tempfile.TemporaryDirectory() as folder:
        for what, epochs in (("a run", 1), ("the same run, resumed", 2)):
            path = Path(folder) / "run.yaml"
            path.write_text(TRAIN.format(folder=folder, epochs=epochs))
            yield _command(f"quintnet train, {what}", (*CLI, "train", str(path), "--nproc", "1"))
        dump = ("--dump", str(Path(folder) / "dump"))
        vit = ("examples/train_vit.py", "--device", "cuda", *dump)
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "1")
        yield _command("torchrun, one process, NCCL", (*torchrun, *vit, "--mesh", "dp=1", "--epochs", "20"))
        few = (*vit, "--local", "--mesh", "pp=2,dp=2,tp=2", "--epochs", "2")
        yield _command("eight ranks in one process", few, _same_losses)


Done = subprocess.CompletedProcess[str]


def _fine(done: Done) -> bool:
    return done.returncode == 0


def _same_losses(done: Done) -> bool:
    """Return whether an example, too short for its accuracy, has equal losses."""
    return "largest relative difference" in done.stdout and "MISSED: losses" not in done.stdout


def _command(what: str, arguments: tuple[str, ...], good: Callable[[Done], bool] = _fine) -> Check:
    """Run a Python command, and check that it succeeds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return Check(what, False, f"not done after {LIMIT:.0f} s: {str(late.output)[-800:]}")
    print(f"--- {what}\n{done.stdout}", flush=True)
    return Check(what, good(done), done.stdout[-800:])


def _trainer(folder: Path) -> Iterator[Entry]:
    """Compare transformers' Trainer in bf16 on a mesh with the plain one on this device."""
    try:
        import transformers
    except ImportError:
        yield NotRun("transformers' Trainer", "transformers is not installed")
        return
    sys.path.append(str(ROOT / "examples/loops"))
    import hf_trainer
    from small import Texts, language_model

    import quintnet

    def losses(trainer: transformers.Trainer) -> list[float]:
        trainer.train()
        return [value for _, name, value in hf_trainer.losses_of(trainer) if name == "loss"]

    for narrow in (False, True):
        data = {"train_dataset": Texts(22), "eval_dataset": Texts(10, seed=1)}
        values = dataclasses.asdict(hf_trainer.arguments(str(folder / "trainer"), 4)) | {
            "use_cpu": False,
            "bf16": narrow,
        }
        names = {f.name for f in dataclasses.fields(transformers.TrainingArguments) if f.init}
        arguments = {name: value for name, value in values.items() if name in names}
        if narrow:
            arguments["eval_strategy"] = "no"
        limit = 2e-2 if narrow else 1e-4
        what = f"the Trainer, {'bf16' if narrow else 'float32'}"
        try:
            plain = losses(transformers.Trainer(language_model(), transformers.TrainingArguments(**arguments), **data))
            for axes in ({"dp": 1}, {"tp": 2}):
                mesh = quintnet.Mesh(**axes)
                mine = losses(
                    hf_trainer.MeshTrainer(
                        language_model(), transformers.TrainingArguments(**arguments), **data, mesh=mesh
                    )
                )
                worst = max(abs(x - y) / abs(y) for x, y in zip(mine, plain, strict=True))
                yield Check(f"{what}, {mesh}", worst < limit, f"losses {worst:.0e} from the plain Trainer's")
        except Exception as error:  # the others go on
            yield Check(what, False, f"{type(error).__name__}: {error}"[:1000])
