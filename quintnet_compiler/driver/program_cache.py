"""Programs that were compiled before: read from a folder, or received from rank 0."""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ..core.code_origin import version_of
from ..core.errors import CacheWarning
from ..core.names import one_line
from ..ir.distributed_program import DistributedProgram
from ..ir.plan import Plan
from ..ir.program import Captured
from ..runtime.launch.calls import announced
from ..runtime.launch.consistency import tell, told_by_first
from ..runtime.launch.world import judges
from .cache_folder import CacheFolder, opened, sealed
from .cache_key import key_of
from .captured_text import NotCacheable
from .compiler import Compiled, Runner, compile_program, follow_program
from .pipeline import Request
from .stored_program import program_data, read_program

T = TypeVar("T", Compiled, DistributedProgram)
Data = Mapping[str, Any]


@dataclass(frozen=True)
class _Recipe(Generic[T]):
    """``key``: what it depends on; ``make``: compiles it, for this key; ``data``: what is written of it; ``read``: the
    reverse; ``about``: what is written for people."""

    key: Callable[[], str]
    make: Callable[[str], T]
    data: Callable[[T], Data]
    read: Callable[[Data], T]
    about: Mapping[str, str]


@dataclass(frozen=True)
class ProgramCache:
    """Compiles as :func:`.compiler.compile_program` and :func:`.compiler.follow_program` do, and keeps the programs in
    ``folder``. What cannot be kept is compiled in each process, and a CacheWarning says why.

    ``together``: every rank compiles the program that leads at the same time. Rank 0 then does it for all.
    ``model``: its name, for people who look at the folder.
    """

    folder: CacheFolder
    together: bool = False
    model: str = ""

    def compiled(self, captured: Captured, request: Request, runner: Runner, *, training: bool) -> Compiled:
        """Return what :func:`.compiler.compile_program` returns."""
        again = partial(compile_program, captured, request, training=training)
        start = time.perf_counter()

        def make(key: str) -> Compiled:
            fresh = again(runner)
            return replace(fresh, program=replace(fresh.program, key=key))

        def read(data: Data) -> Compiled:
            program = read_program(data["program"], captured, data["key"], lambda: again(Runner()).program)
            stages = {str(name): tuple(map(int, where)) for name, where in data["stages"]}
            unsplit, wide = (tuple(map(str, data[name])) for name in ("unsplit", "wide"))
            seconds = {type(self).__name__: time.perf_counter() - start}
            return Compiled(program, Plan.from_json(data["plan"]), seconds, stages, unsplit, wide, again)

        key = partial(key_of, captured, request, training=training)
        recipe = _Recipe(key, make, _data, read, self._about(captured, request, training=training))
        if not self.together:
            return self._own(recipe)[0]
        with announced("compile"):
            return self._shared(recipe, request.device)

    def followed(
        self, captured: Captured, request: Request, primary: Compiled, runner: Runner, *, training: bool
    ) -> DistributedProgram:
        """See :func:`.compiler.follow_program`."""
        again = partial(follow_program, captured, request, primary, training=training)

        def make(key: str) -> DistributedProgram:
            return replace(again(runner), key=key)

        def read(data: Data) -> DistributedProgram:
            return read_program(data["program"], captured, data["key"], lambda: again(Runner()))

        key = partial(key_of, captured, request, training=training, primary=primary)
        about = self._about(captured, request, training=training)
        recipe = _Recipe(key, make, lambda program: {"program": program_data(program)}, read, about)
        return self._own(recipe)[0]

    def _about(self, captured: Captured, request: Request, *, training: bool) -> Mapping[str, str]:
        """Return what people want to know of a program."""
        return {
            "model": self.model,
            "parameters": str(sum(x.numel() for x in captured.tensors.values() if isinstance(x, nn.Parameter))),
            "mesh": repr(request.mesh),
            "rows": str(request.batch_size),
            "use": "training" if training else "inference",
            "device": request.device.type,
            "quintnet": version_of("quintnet-compiler"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def _own(self, recipe: _Recipe[T], agreed_key: str | None = None) -> tuple[T, str]:
        """Return the program, and the text that others can read it from; "" where there is none."""
        key = _key(recipe) if agreed_key is None else agreed_key
        if not key:
            return recipe.make(""), ""
        text = self.folder.read(key)
        cached = _read(recipe, key, text) if text else None
        if text and cached is not None:
            return cached, text
        fresh = recipe.make(key)
        text = sealed(json.dumps({"key": key, **recipe.data(fresh)}), recipe.about)
        if _read(recipe, key, text) is None:
            return fresh, ""
        self.folder.write(key, text)
        return fresh, text

    def _shared(self, recipe: _Recipe[T], device: torch.device) -> T:
        """Return on every rank what rank 0 has read or compiled, if all ranks have one key."""
        key = _key(recipe)
        if any(other != key for other in tell(key, device)):
            return self._own(recipe, key)[0]
        if not key:
            return recipe.make("")
        if not judges():
            text = told_by_first("", device)
            cached = _read(recipe, key, text) if text else None
            return recipe.make("") if cached is None else cached
        text = ""
        try:
            program, text = self._own(recipe, key)
        finally:
            told_by_first(text, device)  # the others wait, whatever happens
        return program


def _key(recipe: _Recipe[T]) -> str:
    try:
        return recipe.key()
    except NotCacheable as reason:
        _warn(f"a program is not kept in the cache: {reason}")
        return ""


def _read(recipe: _Recipe[T], key: str, text: str) -> T | None:
    """The program; None, with a warning, if the text is of something else."""
    try:
        data = json.loads(opened(text) or "")
        if data["key"] != key:
            raise ValueError("it is of another key")
        return recipe.read(data)
    except Exception as error:  # of whatever kind: then it is compiled
        _warn(f"a program cannot be read from the cache, and is compiled: {type(error).__name__}: {error}")
        return None


def _data(compiled: Compiled) -> Data:
    return {
        "program": program_data(compiled.program),
        "plan": compiled.plan.to_json(),
        "stages": list(compiled.stages.items()),
        "unsplit": compiled.unsplit,
        "wide": compiled.wide,
    }


def _warn(message: str) -> None:
    warnings.warn(CacheWarning(one_line(message[:500])), stacklevel=2)
