"""What a checkpoint says of a Trainer and its data is checked before anything is restored."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quintnet
from quintnet_compiler.checkpoint.folder import Entry
from quintnet_compiler.checkpoint.reading import choice
from quintnet_compiler.checkpoint.reading.plain_values import require_alike, require_options
from quintnet_compiler.core.errors import CheckpointError
from quintnet_compiler.training.resume.resumable_loader import ResumableLoader
from quintnet_compiler.training.resume.stored_checks import require_data_state, require_trainer_state

ROWS = TensorDataset(torch.randn(24, 4), torch.randn(24, 2))


def _trainer(folder: Path, steps: int) -> quintnet.Trainer:
    torch.manual_seed(0)
    loader = DataLoader(ROWS, batch_size=4, shuffle=True, generator=torch.Generator())
    program = quintnet.compile(nn.Linear(4, 2), quintnet.Mesh(dp=1), next(iter(loader)), loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(program.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    options: dict[str, Any] = {"scheduler": scheduler, "checkpoint_folder": folder, "console": False}
    return quintnet.Trainer(program, optimizer, loader, epochs=3, max_steps=steps, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    _trainer(folder, 2).fit()
    return folder / "step-00000002"


@pytest.fixture(scope="module")
def trainer_note(saved: Path) -> dict[str, Any]:
    note: dict[str, Any] = json.loads((saved / "state.json").read_text())["extra"]["trainer"]
    return note


def _set(*path: Any) -> Callable[[Any], None]:
    *to, last, value = path

    def change(document: Any) -> None:
        for key in to:
            document = document[key]
        document[last] = value

    return change


TORCH_STATE = ("data", "states", 0, "now", "tensors")
HOSTILE: dict[str, tuple[Callable[[Any], None], str]] = {
    "a best loss of text": (_set("best", "1"), "best"),
    "a best loss without end": (_set("best", float("inf")), "best"),
    "a count below zero": (_set("bad", -1), "bad"),
    "a position of text": (_set("data", "epoch", "1"), "epoch"),
    "an epoch below zero": (_set("data", "epoch", -1), "epoch"),
    "rows beyond 63 bits": (_set("data", "seen", 10**400), "seen"),
    "batches below zero": (_set("data", "batches", -3), "batches"),
    "no states": (_set("data", "states", []), "states"),
    "a state that is not there": (_set("data", "of", [7]), "of names ranks or states"),
    "no rank": (_set("data", "of", []), "of names ranks or states"),
    "no data ranks": (_set("data", "data_ranks", 0), "data_ranks"),
    "a generator of text": (_set("data", "states", 0, "now", "x"), "now"),
    "a generator without a value": (_set("data", "states", 0, "now", {}), "KeyError"),
    "no tensors": (_set(*TORCH_STATE, {}), "KeyError"),
    "a scheduler of text": (_set("scheduler", "x"), "scheduler"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_trainers_note_is_checked(case: str, trainer_note: dict[str, Any]) -> None:
    require_trainer_state(trainer_note, "it")
    note = copy.deepcopy(trainer_note)
    change, text = HOSTILE[case]
    change(note)
    with pytest.raises(CheckpointError, match=text) as raised:
        require_trainer_state(note, "it")
    assert raised.value.code == "QN602"


def test_states_of_generators_are_tried(trainer_note: dict[str, Any]) -> None:
    """NumPy takes any position in its 624 words."""
    data = copy.deepcopy(trainer_note["data"])
    require_data_state(data)
    numpy = next(pair for pair in data["states"][0]["now"]["value"]["dict"] if pair[0] == "numpy")
    for position in (-1, 10**6):
        numpy[1]["tuple"][2] = position
        with pytest.raises(CheckpointError, match="now: ValueError: position"):
            require_data_state(data)
    data = copy.deepcopy(trainer_note["data"])
    for tensor in data["states"][0]["now"]["tensors"].values():
        tensor[2] = tensor[2][:8]
    with pytest.raises(CheckpointError, match=r"states.0.now"):
        require_data_state(data)


def test_a_trainer_refuses_before_anything_changes(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(saved.parent, 3)
    before = [p.full_tensor().clone() for p in trainer.program.parameters()]  # type: ignore[attr-defined]
    rate = trainer.optimizer.param_groups[0]["lr"]
    real = choice.read_state

    def state_with(change: Callable[[Any], None]) -> None:
        def read_state(*arguments: Any) -> Any:
            state = real(*arguments)
            change(state["extra"]["trainer"])
            return state

        monkeypatch.setattr(choice, "read_state", read_state)

    for change in (
        _set("bad", "1"), _set("data", "of", [9]), _set("scheduler", {"last_epoch": -1}),
        _set("scheduler", "class", "ExponentialLR"), _set("scheduler", "groups", 2), _set("scheduler", "state", 3),
        *(_set("scheduler", "state", "value", {"dict": [list(pair)]}) for pair in (
            ("step", 5), ("optimizer", 5), ("last_epoch", "x"), ("last_epoch", -5), ("gamma", "x"), ("gamma", math.nan),
            ("base_lrs", []), ("base_lrs", ["x"]), ("gamma", {"other": ["", ["os.system"]]}), (3, 4),
            ("gamma", {"enum": ["os", "path", "x"]}), ("gamma", {"array": ["O", [1], ""]}),
        )),
    ):  # fmt: skip
        state_with(change)
        with pytest.raises(CheckpointError, match=r"extra.trainer|the scheduler|the optimizer has") as raised:
            trainer.fit()
        assert raised.value.code == "QN602"
        parameters = [p.full_tensor() for p in trainer.program.parameters()]  # type: ignore[attr-defined]
        assert all(map(torch.equal, before, parameters)) and trainer.optimizer.param_groups[0]["lr"] == rate
    monkeypatch.undo()
    assert trainer.fit().resumed_from == 2


def test_a_loader_refuses_a_state_of_others() -> None:
    data = ResumableLoader([], None)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="epoch"):
        data.load_state_dict({"seen": 0})


def test_values_take_the_places_of_values_like_them() -> None:
    own = {
        "lr": torch.tensor(0.1),
        "betas": (0.9, 0.99),
        "foreach": None,
        "name": "x",
        "maximize": False,
        "more": {"a": 1},
        "seen": [1],
    }
    require_alike({"seen": [1, 2, 3]}, own, "it")
    require_alike({"lr": 1, "betas": [0.5, 0], "foreach": True, "maximize": None, "new": [1, "x"]}, own, "it")
    for wrong in (
        {"lr": "1"}, {"lr": True}, {"lr": [1.0]}, {"betas": [0.9]}, {"seen": ["x"]}, {"betas": 0.9},
        {"betas": ["a", 1]}, {"name": 1},
        {"maximize": 1}, {"more": {"a": "x"}}, {"more": 3}, {"new": float("nan")}, {"new": [10**400]},
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=f"it.{next(iter(wrong))}") as raised:
            require_alike(wrong, own, "it")
        assert raised.value.code == "QN602"


@pytest.mark.parametrize("kind", [name for name in torch.optim.__all__ if name != "Optimizer"])
def test_torchs_optimizers_accept_their_own_options(kind: str) -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    optimizer = getattr(torch.optim, kind, None)
    if not isinstance(optimizer, type):
        pytest.skip("a module")
    made = optimizer([parameter], lr=0.1)
    group = made.param_groups[0]
    options = json.loads(json.dumps({key: x for key, x in group.items() if key != "params"}))
    require_options(made, options, group)
    with pytest.raises(CheckpointError, match=r"options"):
        require_options(made, {**options, "lr": -1.0}, group)


def test_a_folder_that_never_stands_still_is_told() -> None:
    """Every look finds a checkpoint that has vanished."""

    class Files:
        name = "step-00000001"
        path = "nowhere"

        def open(self) -> Any:
            raise choice.VanishedError("it is gone")

    class Folder:
        path = Path("nowhere")

        def named(self) -> list[Any]:
            return [Entry(1, Files())]  # type: ignore[arg-type]

        def leftovers(self) -> list[Any]:
            return []

        def read_mark(self) -> bytes:
            return b""

        def at(self, name: str) -> Files:
            return Files()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice.time, "sleep", lambda _: None)
        with pytest.raises(
            CheckpointError, match=r"60 times, a checkpoint was no longer what it was when listed: .*it is gone"
        ):
            choice.with_newest(lambda text: (text,), Folder(), None, lambda _: lambda: None)  # type: ignore[arg-type]
