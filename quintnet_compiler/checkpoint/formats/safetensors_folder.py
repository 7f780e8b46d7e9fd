"""Folders of safetensors, as Hugging Face writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ...core.errors import CheckpointError
from ...weights.files import DTYPES, open_weights, shown
from ...weights.safetensors_writer import TensorEntry, files_of, storable, write_weights
from .contents import Contents

LARGEST_FILE = 5 * 10**9  # bytes, as transformers has it
CONFIGS = ("config.json", "generation_config.json")


def read_safetensors(folder: Path) -> Contents:
    """Read all tensors, under the names of the files.

    Raises:
        CheckpointError: QN601 if files are missing or damaged.
    """
    with open_weights(folder) as weights:
        return Contents({name: stored.load(()).clone() for name, stored in weights.stored.items()})


def write_safetensors(folder: Path, contents: Contents, config: Path | None) -> None:
    """Write the model's tensors, and beside them the configuration that ``config`` (a folder, or a file) has.

    Raises:
        CheckpointError: QN603 for a dtype that safetensors cannot hold, or a configuration that is none.
    """
    entries = []
    for name, x in contents.model.items():
        if not storable(x.dtype):
            raise CheckpointError(
                "QN603",
                f"{shown(name)} is {x.dtype}, which safetensors cannot hold",
                fix=f"it holds {', '.join(str(kind).removeprefix('torch.') for kind in DTYPES.values())}",
            )
        entries.append(TensorEntry(name, name, tuple(x.shape), x.dtype))
    files = files_of(entries, LARGEST_FILE)
    ordered = [entry for group in files.values() for entry in group]
    write_weights(folder, files, (contents.model[entry.source] for entry in ordered))
    if config is not None:
        _configure(folder, config)


def _configure(folder: Path, config: Path) -> None:
    candidates = {CONFIGS[0]: config} if config.is_file() else {name: config / name for name in CONFIGS}
    present = {name: path for name, path in candidates.items() if path.is_file()}
    if CONFIGS[0] not in present:
        raise CheckpointError("QN603", f"{shown(str(config))} has no {CONFIGS[0]}", fix="give the model's folder")
    for name, path in present.items():
        try:
            json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            why = f"{shown(str(path))} is no JSON: {shown(str(error))}"
            raise CheckpointError("QN603", why, fix="give another") from None
        shutil.copyfile(path, folder / name)
