"""The public face of quintnet_compiler: ``quintnet.compile(model, mesh)``."""

import importlib

import quintnet_compiler as _compiler

__all__ = list(_compiler.__all__)


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(_compiler, name)
    if name in ("hf", "lightning"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
