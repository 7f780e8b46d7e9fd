"""A Hugging Face configuration as a target: the model on the meta device, and a batch that fits it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import typer

from ..compat.transformers import built_on_meta, causal_class

ROWS, SEQUENCE = 8, 1024


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
