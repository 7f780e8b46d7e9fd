"""A folder of safetensors, as Hugging Face writes it, read as if it were hostile.

Nothing outside the folder is opened by a name that a file holds, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..core.errors import CheckpointError
from ..core.names import one_line
from .sources import Stored

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST_INDEX = 256 * 2**20
METADATA = ".metadata"  # of a folder of torch.distributed.checkpoint

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "F8_E8M0": torch.float8_e8m0fnu,
        "C64": torch.complex64,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)


def shown(text: str) -> str:
    """A name that a file holds, short and on one line."""
    text = one_line(text)
    return text if len(text) <= 300 else f"{text[:140]}...{text[-140:]}"


def conversion(folder: Path, to: str) -> str:
    """The command that writes what is in a folder in another format."""
    return f"quintnet convert {shlex.quote(shown(str(folder)))} NEW_FOLDER --to {to}"


@dataclass(frozen=True)
class Weights:
    """The tensors of a folder, by the names in its files.

    ``text``: all names, shapes and dtypes, and of each file the size and a digest of its end: it differs between
    checkpoints, and needs no reading of values.
    """

    stored: Mapping[str, Stored]
    text: str


@contextlib.contextmanager
def open_weights(folder: Path, single: str = SINGLE) -> Iterator[Weights]:
    """Open the tensors of ``folder``, none of which is read yet; ``single``: the file that may hold all of them.

    Raises:
        CheckpointError: QN601 with every file that is missing, damaged, pickled, or outside the folder.
    """
    safe_open = _safetensors()
    tensors: dict[str, Stored] = {}
    problems: list[str] = []
    lines: list[str] = []
    with contextlib.ExitStack() as stack:
        for file, promised in sorted(_files(folder, single, problems).items()):
            try:
                handle = stack.enter_context(safe_open(str(folder / file), framework="pt"))
                names = list(handle.keys())
                lines.append(_trace(folder / file))
            except Exception as error:  # safetensors raises its own type, for anything that is wrong with a file
                problems.append(f"{file}: {shown(str(error))}")
                continue
            problems += [f"{file}: has no tensor {shown(n)}, which the index says it has" for n in promised - {*names}]
            for name in names:
                if name in tensors:
                    problems.append(f"{file}: the tensor {shown(name)} is also in {tensors[name].file}")
                    continue
                view = handle.get_slice(name)
                shape, kind = tuple(view.get_shape()), view.get_dtype()
                lines.append(f"{one_line(name)} {shape} {kind}")
                if kind not in DTYPES:
                    problems.append(f"{file}: the tensor {shown(name)} has the dtype {shown(kind)}")
                    continue
                tensors[name] = Stored(file, name, shape, DTYPES[kind], _Loader(handle, name))
        refuse_all("QN601", folder, problems, fix="get the folder again from where it came")
        yield Weights(MappingProxyType(tensors), "\n".join(lines))


def _trace(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 2**16))
        end = hashlib.sha256(file.read()).hexdigest()
    return f"{one_line(path.name)}, {size} bytes, SHA-256 of the last ones {end}"


@dataclass(frozen=True)
class _Loader:
    """Blocks of one tensor; only the pages that a block lies on are read."""

    handle: Any
    name: str

    def __call__(self, slices: tuple[slice, ...]) -> Tensor:
        values: Tensor = self.handle.get_slice(self.name)[slices] if slices else self.handle.get_tensor(self.name)
        return values


def refuse_all(code: str, folder: Path | str, problems: list[str], fix: str) -> None:
    """One error for all problems, if there are any."""
    if problems:
        lines = problems[:20] + ([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])
        raise CheckpointError(code, "\n  ".join([f"{shown(str(folder))}:", *lines]), fix=fix)


def _safetensors() -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise CheckpointError(
            "QN601", "the package safetensors is not installed", fix="pip install quintnet-compiler[hf]"
        ) from None
    return safe_open


def _files(folder: Path, single: str, problems: list[str]) -> dict[str, set[str]]:
    """File name -> the tensors that the index promises to be in it."""
    if not folder.is_dir():
        raise CheckpointError(
            "QN601", f"there is no folder {shown(str(folder))!r}", fix="download the model, and pass its local folder"
        )
    if (folder / single).is_file():
        return {single: set()}
    if (folder / INDEX).is_file():
        return _indexed(folder, problems)
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            "QN601",
            f"{shown(str(folder))}: {shown(pickled[0])} is a pickle, which can run any code when it is loaded",
            fix="use the model's safetensors; or convert it, where that can do no harm, with transformers",
        )
    fix = "pass the folder that has them"
    if (folder / METADATA).is_file():
        fix = f"torch.distributed.checkpoint wrote it: {conversion(folder, 'safetensors')}; then load NEW_FOLDER"
    raise CheckpointError("QN601", f"{shown(str(folder))}: there is no {single} and no {INDEX}", fix=fix)


def _indexed(folder: Path, problems: list[str]) -> dict[str, set[str]]:
    try:
        with (folder / INDEX).open("rb") as file:
            data = file.read(LARGEST_INDEX + 1)
        if len(data) > LARGEST_INDEX:
            raise ValueError(f"more than {LARGEST_INDEX} bytes")
        index = json.loads(data)
        places = index["weight_map"]
        if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
            raise ValueError("weight_map does not map names to files")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        refuse_all("QN601", folder, [f"{INDEX}: {shown(f'{type(error).__name__}: {error}')}"], fix="get it again")
        raise AssertionError from error
    files: dict[str, set[str]] = {}
    for name, place in places.items():
        files.setdefault(place, set()).add(name)
    for place in list(files):
        # A plain name and nothing else: what the index says must not lead out of the folder.
        if Path(place).name != place or "\\" in place or "\0" in place or not place.endswith(".safetensors"):
            problems.append(f"{INDEX}: {shown(ascii(place))} is not the name of a safetensors file in this folder")
            del files[place]
        elif not (folder / place).is_file():
            problems.append(f"{INDEX}: there is no file {shown(place)}")
            del files[place]
    return files
