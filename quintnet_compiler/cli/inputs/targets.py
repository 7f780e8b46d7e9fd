"""What a verb works on: a model, a batch and a loss, from a function of the user's or a configuration."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer

from ...compat.transformers import built_on_meta, causal_class

ROWS, SEQUENCE = 8, 1024  # of a configuration's batch
Loaded = tuple[Any, Any, Any]  # model, batch, loss function or None


def load_target(target: str) -> Loaded:
    """Model, batch and loss function (or None) of ``package.module:builder`` or ``hf:CONFIG.json[,rows=8,...]``.

    The module is imported, as ``python -m`` does; a configuration is only read. torch is seeded before.

    Raises:
        typer.BadParameter: if there is no such function or file, or it gives something else: one line.
    """
    torch.manual_seed(0)  # equal values at every call, in every process
    if target.startswith("hf:"):
        return from_config(target)
    module, _, name = target.partition(":")
    if not name or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise _bad(f"{target!r} is not package.module:builder (nor hf:CONFIG.json)")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    builder = _explained(f"{target!r} cannot be loaded", lambda: _find(module, name))
    made = _explained(f"{target!r} failed", builder)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        kind = f"{len(made)} values" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise _bad(f"{target!r} must return model, batch[, loss_fn], and returned {kind}")
    return made[0], made[1], made[2] if len(made) == 3 else None


def _find(module: str, name: str) -> Callable[[], Any]:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is a {type(found).__name__}, and no function")
    return found  # type: ignore[no-any-return]


def _explained(what: str, call: Callable[[], Any]) -> Any:
    """Whatever the user's code raises is one line, with the place that raised it."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = last.filename == __file__ or last.filename.startswith("<frozen")
        place = "" if ours else f" ({os.path.basename(last.filename)}:{last.lineno})"
        said = str(error).splitlines()
        raise _bad(f"{what}: {type(error).__name__}: {said[0] if said else ''}{place}") from None


def from_config(target: str) -> tuple[Any, Any, Any]:
    """``hf:CONFIG.json[,rows=8,sequence=1024]``: the model, a global batch of meta tensors, and no loss function.

    The class is the configuration's first architecture, or a causal language model. Nothing is downloaded, and no code
    beside transformers' own runs.

    Raises:
        typer.BadParameter: if the file is no such configuration: one line.
    """
    path, *options = target.removeprefix("hf:").split(",")
    sizes = {"rows": ROWS}
    for option in options:
        name, _, size = option.partition("=")
        if name not in ("rows", "sequence") or not size.isdecimal() or not int(size):
            raise _bad(f"{option!r} is neither rows=NUMBER nor sequence=NUMBER")
        sizes[name] = int(size)
    config = _read(Path(path))
    try:
        from transformers import AutoConfig
    except ImportError:
        raise _bad("hf: needs transformers; pip install 'quintnet-compiler[hf]'") from None
    try:
        known = AutoConfig.for_model(**config)
        with torch.device("meta"):
            model = built_on_meta(_class(config), known)
    except (Exception, SystemExit) as error:
        said = str(error).splitlines()
        raise _bad(f"{path} cannot be built: {type(error).__name__}: {said[0] if said else ''}") from None
    return model, _batch(model, sizes["rows"], sizes.get("sequence")), None


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _bad(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise _bad(f"{file} is no JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise _bad(f"{file} is no configuration: it has no model_type")
    return found


def _class(config: dict[str, Any]) -> Any:
    import transformers

    for name in config.get("architectures") or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return causal_class(transformers.AutoConfig.for_model(config["model_type"]))


def _batch(model: Any, rows: int, sequence: int | None) -> dict[str, Any]:
    config, kind = model.config, type(model).__name__
    size: Any = getattr(config, "image_size", None)
    with torch.device("meta"):
        if model.main_input_name == "pixel_values" and size is not None:
            high, wide = (size, size) if isinstance(size, int) else size
            pixels = torch.zeros(rows, config.num_channels, high, wide, dtype=model.dtype)
            return {"pixel_values": pixels, "labels": torch.zeros(rows, dtype=torch.long)}
        if model.main_input_name != "input_ids":
            raise _bad(f"no batch can be made for {kind}; write a function that returns model, batch")
        longest = getattr(config, "max_position_embeddings", None) or SEQUENCE
        ids = torch.zeros(rows, sequence or min(SEQUENCE, longest), dtype=torch.long)
        one_a_row = kind.endswith("ForSequenceClassification")
        return {"input_ids": ids, "labels": torch.zeros(rows, dtype=torch.long) if one_a_row else ids.clone()}


def _bad(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="TARGET")
