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

import typer

ROWS, SEQUENCE = 8, 1024  # of a configuration's batch
Loaded = tuple[Any, Any, Any]  # model, batch, loss function or None


def load_target(target: str) -> Loaded:
    """Return model, batch and loss function (or None) of ``package.module:builder`` or ``hf:CONFIG.json[,rows=8,...]``.

    The module is imported, as ``python -m`` does; a configuration is only read. torch is seeded before.

    Raises:
        typer.BadParameter: if there is no such function or file, or it returns something else: one line.
    """
    import torch

    torch.manual_seed(0)  # equal values at every call, in every process
    if target.startswith("hf:"):
        return from_config(target)
    module, _, name = target.partition(":")
    if not name or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise _bad(f"{target!r} is not package.module:builder (nor hf:CONFIG.json)")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    builder = _explained(f"{target!r} cannot be loaded", lambda: _find(module, name))
    loaded = _explained(f"{target!r} failed", builder)
    if not isinstance(loaded, tuple) or len(loaded) not in (2, 3):
        kind = f"{len(loaded)} values" if isinstance(loaded, tuple) else f"a {type(loaded).__name__}"
        raise _bad(f"{target!r} must return model, batch[, loss_fn], and returned {kind}")
    return loaded[0], loaded[1], loaded[2] if len(loaded) == 3 else None


def _find(module: str, name: str) -> Callable[[], Any]:
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    if not callable(value):
        raise TypeError(f"{name} is a {type(value).__name__}, and no function")
    return value  # type: ignore[no-any-return]


def _explained(problem: str, call: Callable[[], Any]) -> Any:
    """Call the user's code; whatever it raises becomes one line, with the place that raised it."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        is_ours = last.filename == __file__ or last.filename.startswith("<frozen")
        place = "" if is_ours else f" ({os.path.basename(last.filename)}:{last.lineno})"
        lines = str(error).splitlines()
        raise _bad(f"{problem}: {type(error).__name__}: {lines[0] if lines else ''}{place}") from None


def from_config(target: str) -> tuple[Any, Any, Any]:
    """Return the model of ``hf:CONFIG.json[,rows=8,sequence=1024]``, a batch of meta tensors, and no loss function.

    The class is the configuration's first architecture, or a causal language model. Nothing is downloaded, and no other
    code than transformers' own runs.

    Raises:
        typer.BadParameter: if the file is no such configuration: one line.
    """
    import torch

    from ...compat.transformers import built_on_meta

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
        configuration = AutoConfig.for_model(**config)
        with torch.device("meta"):
            model = built_on_meta(_class(config), configuration)
    except (Exception, SystemExit) as error:
        lines = str(error).splitlines()
        raise _bad(f"{path} cannot be built: {type(error).__name__}: {lines[0] if lines else ''}") from None
    return model, _batch(model, sizes["rows"], sizes.get("sequence")), None


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _bad(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise _bad(f"{file} is no JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise _bad(f"{file} is no configuration: it has no model_type")
    return config


def _class(config: dict[str, Any]) -> Any:
    import transformers

    from ...compat.transformers import causal_class

    for name in config.get("architectures") or ():
        model_class = getattr(transformers, str(name), None)
        if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
            return model_class
    return causal_class(transformers.AutoConfig.for_model(config["model_type"]))


def _batch(model: Any, rows: int, sequence: int | None) -> dict[str, Any]:
    import torch

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
