"""``quintnet train``."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from .answer import Answer
from .inputs.options import Json, Set, settings_of


def train(
    config: Annotated[Path, typer.Argument(help="a YAML file with the keys of quintnet.TrainConfig")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="in place of the file's")] = None,
    settings: Set = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="processes here; without it, as many as the mesh")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="start again after a fault, from the newest checkpoint")] = 0,
    fewest: Annotated[int | None, typer.Option(min=1, help="ranks to restart with; mesh_dim has a -1 then")] = None,
    grace: Annotated[float, typer.Option(min=0, help="seconds that ranks get to save in after SIGTERM")] = 300.0,
    json: Json = False,
) -> Answer:
    """Train a model as a file says, going on from the newest checkpoint if there is one.

    Starts local processes; under torchrun this process is one rank. With --nproc 1, all ranks run in one process.
    Where the file's mesh_dim has a -1, --nproc or torchrun say how many ranks there are.

    Exit code: 0, 2 usage, 4 the model, the layout or the file is not supported, 6 a rank failed, 7 a checkpoint,
    8 a value is not finite, 138 saved and ended because a scheduler asked for it: queue it again.

    Example: quintnet train examples/vit_digits.yaml num_epochs=5

    Example: quintnet train examples/vit_digits.yaml --set zero=1
    """
    from ..runtime.launch.launch import launch
    from ..runtime.launch.world import world_size
    from ..training.config import TrainConfig
    from ..training.documents import read_yaml
    from ..training.run import run as run_training

    pairs = [change.partition("=") for change in changes or ()]
    if any(not sign for _, sign, _ in pairs):
        raise typer.BadParameter("write key=value", param_hint="KEY=VALUE")
    task = TrainConfig.read(config, **{key: read_yaml(value) for key, _, value in pairs})
    decided = settings_of(settings)
    task = task.model_copy(update={"plan": {**task.plan, **decided}})
    ranks = nproc or task.fixed_ranks or world_size()
    if ranks == 1:
        histories = [run_training(task)]
    else:
        histories = launch(run_training, ranks, (task,), restarts=restarts, fewest=fewest, grace=grace)
    history = next(history for history in histories if history is not None)
    return Answer("", dumps(asdict(history)))
