"""The examples of loops that people have: on two processes they give the losses of one device, and resume."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import quintnet

EXAMPLES = Path(__file__).parents[1] / "examples" / "loops"
CLOSE = {"rel": 2e-5, "abs": 1e-6}


def _needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An example's module, by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> ModuleType:
        return __import__(name)

    return load


def _run(script: str, mesh: str, *given: str) -> Any:
    """What the example prints last."""
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / script), "--mesh", mesh, *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@_needs("transformers")
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("tp=2", "pp=2"),
        pytest.param("pp=2", "dp=2", marks=pytest.mark.slow),
        pytest.param("dp=2", "tp=2", marks=pytest.mark.slow),
    ],
)
def test_a_plain_loop(first: str, then: str, example: Any, tmp_path: Path) -> None:
    known = example("plain_loop").run(None, "", 6)
    begun = ast.literal_eval(_run("plain_loop.py", first, "--out", str(tmp_path), "--steps", "4"))
    mesh = quintnet.Mesh(**{axis: int(size) for axis, size in [then.split("=")]})
    ended, _ = quintnet.launch(example("plain_loop").run, mesh.size, args=(mesh, str(tmp_path), 6), timeout=400)
    assert begun + ended == pytest.approx(known, **CLOSE)


@pytest.mark.slow
@_needs("transformers", "accelerate")
@pytest.mark.parametrize(("first", "then"), [("dp=2", "tp=2"), ("tp=2", "pp=2"), ("pp=2", "dp=2")])
def test_transformers_trainer(first: str, then: str, example: Any, tmp_path: Path) -> None:
    known = {line[:2]: line[2] for line in example("hf_trainer").plain(str(tmp_path / "plain"))}
    out = ("--out", str(tmp_path / "ours"))
    for mesh, given in ((first, ()), (then, ("--resume", "4"))):
        found = {line[:2]: line[2] for line in ast.literal_eval(_run("hf_trainer.py", mesh, *out, *given))}
        assert found.keys() == known.keys() and found == pytest.approx(known, **CLOSE)
    assert (tmp_path / "ours" / "final" / "model.safetensors").is_file()


@pytest.mark.slow
@_needs("transformers", "lightning")
@pytest.mark.parametrize(("first", "then"), [("dp=2", "tp=2"), ("pp=2", "dp=2")])
def test_lightning(first: str, then: str, example: Any, tmp_path: Path) -> None:
    known, evaluated = example("lightning_loop").run(None, str(tmp_path / "plain"), 2)
    out = ("--out", str(tmp_path / "ours"))
    begun, _ = ast.literal_eval(_run("lightning_loop.py", first, *out, "--epochs", "1"))
    ended, loss = ast.literal_eval(_run("lightning_loop.py", then, *out, "--epochs", "2"))
    assert begun + ended == pytest.approx(known, **CLOSE) and loss == pytest.approx(evaluated, **CLOSE)


@pytest.mark.slow
@_needs("lightning")
def test_parameters_beside_the_model_are_refused() -> None:
    import lightning
    import torch

    from quintnet_compiler.loops.lightning_strategy import MeshStrategy

    class Two(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.trainer.strategy.step(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader(torch.zeros(4, 4), batch_size=2)
    strategy = MeshStrategy(quintnet.Mesh(dp=2), (torch.zeros(2, 4),))
    trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, logger=False)
    with pytest.raises(quintnet.CompileError, match=r"QN105[\s\S]*head.weight"):
        trainer.fit(Two(), data)


@pytest.mark.slow
@_needs("transformers")
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "pp=2"])
def test_preferences_are_those_of_plain_pytorch(mesh: str) -> None:
    words = _run("preferences.py", mesh).replace(",", "").replace(";", "").split()
    assert float(words[3]) < 1e-12 and float(words[6]) < 1e-12


@pytest.mark.slow
@_needs("trl", "peft", "datasets")
@pytest.mark.parametrize("adapters", [False, True])
def test_sft(adapters: bool, example: Any, tmp_path: Path) -> None:
    known = example("sft").run(None, str(tmp_path / "plain"), int(adapters))
    found = ast.literal_eval(_run("sft.py", "tp=2", "--out", str(tmp_path / "ours"), "--adapters", str(int(adapters))))
    assert found == pytest.approx(known, **CLOSE)
    assert (tmp_path / "ours" / "final" / ("adapter_config.json" if adapters else "config.json")).is_file()
