"""What a Trainer is told of processes, and what it is refused."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from quintnet_compiler.compat import trainers  # noqa: E402
from quintnet_compiler.loops import one_process, refused  # noqa: E402
from quintnet_compiler.loops import transformers_trainer as mixin  # noqa: E402


def arguments(**changes: Any) -> Any:
    made = transformers.TrainingArguments("unused", use_cpu=True, report_to=[], per_device_train_batch_size=3)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_batches_are_those_of_all_data_ranks() -> None:
    given = arguments()
    found = one_process.arguments_of_one_process(given, 4)
    assert (given.train_batch_size, found.train_batch_size) == (3, 12)
    assert found.world_size == found.n_gpu == 1 and found.should_save and isinstance(found, type(given))


def test_the_first_batch_leaves_no_trace_in_random_numbers() -> None:
    states = torch.get_rng_state(), random.getstate()
    loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=2, shuffle=True)
    assert len(one_process.first_of(loader)) == 2
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()


def test_all_that_cannot_be_followed_is_named_at_once() -> None:
    plain = type("Plain", (mixin.TrainerMixin, transformers.Trainer), {})
    refused.refuse_arguments(plain.__new__(plain), arguments(), {})
    with pytest.raises(Exception, match=r"QN108[\s\S]*fp16=True[\s\S]*torch_compile=True[\s\S]*model_init"):
        refused.refuse_arguments(plain.__new__(plain), arguments(fp16=True, torch_compile=True), {"model_init": print})


def test_random_states_are_written_by_the_trainer(tmp_path: Path) -> None:
    trainer = SimpleNamespace(args=SimpleNamespace(world_size=1))
    trainers.save_random_states(trainer, str(tmp_path))
    assert (tmp_path / "rng_state.pth").is_file()


def test_a_strategy_reads_whole_batches_in_one_process() -> None:
    pytest.importorskip("lightning")
    import quintnet
    from quintnet_compiler.loops.lightning_strategy import MeshStrategy

    strategy = MeshStrategy(quintnet.Mesh(tp=2), (torch.zeros(2, 4),))
    assert strategy.is_global_zero and strategy.world_size == 1 and strategy.restore_checkpoint_after_setup
    x = torch.ones(3)
    assert strategy.reduce(x) is x and strategy.optimizer_state(None) == {}
