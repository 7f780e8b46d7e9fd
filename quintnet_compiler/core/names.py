"""Check names that the user chose before they reach generated code.

torch.fx and torch.export write names of modules and keys of the batch into Python source without escaping them, and
run it.
"""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..compat.torch import pytree
from .errors import CompileError

MAX_NAME_LENGTH = 200
MAX_PATH_LENGTH = 2000
# What people put into names besides letters, digits and "_": "conv-1", "user->item", "<a___to___b>", "en/de", "k=3".
_HARMLESS = re.compile(r"[-+/:@=,()<> ]")


def is_safe(name: str) -> bool:
    """Return whether one component of a name is short, and has only letters, digits, ``_`` and a few harmless signs.

    Letters are those that Python allows in identifiers: no quotes, no control, format or separator characters. Letters
    that Python reads as others (``ﬁ``) and mixtures of scripts that look alike are refused.

    >>> [is_safe(name) for name in ("conv-1", "名前", "", 'a"b', "a.b", "ﬁ")]
    [True, True, False, False, False, False]
    """
    if not 0 < len(name) <= MAX_NAME_LENGTH or not f"_{_HARMLESS.sub('_', name)}".isidentifier():
        return False
    return name.isascii() or (unicodedata.is_normalized("NFKC", name) and not _mixed(name))


def _mixed(name: str) -> bool:
    """Return whether Latin and Cyrillic letters are mixed, so that one may pose as the other."""
    scripts = {unicodedata.name(letter, "").partition(" ")[0] for letter in name}
    return {"LATIN", "CYRILLIC"} <= scripts


def one_line(text: str) -> str:
    r"""Escape everything that is not printable, so that ``text`` stays within one line of a comment.

    >>> one_line("x = 1\nimport os")
    'x = 1\\nimport os'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def check_names(model: nn.Module) -> None:
    """Refuse every name of a module, parameter, buffer or tensor attribute that cannot be written into code.

    Raises:
        CompileError: QN701, with the path that the name is in.
    """
    for path, module in model.named_modules():
        _require(len(path) <= MAX_PATH_LENGTH, "module", path, "nest it less deep")
        for kind, name, read_by_code in _direct_names(module):
            # fx writes "self.layers.class.weight", which is not valid Python
            safe = is_safe(name) and not (read_by_code and keyword.iskeyword(name))
            _require(safe, kind, f"{path}.{name}" if path else name, _RENAME)


def _direct_names(module: nn.Module) -> Iterator[tuple[str, str, bool]]:
    """Yield the kind and name of each direct member of ``module``, and whether generated code reads it.

    Reads the module's own dicts, since ``named_modules`` hides second names.
    """
    for name, child in module._modules.items():
        yield "module", name, keyword.iskeyword(name) and _holds_tensors(child)
    yield from (("parameter", name, True) for name in module._parameters)
    yield from (("buffer", name, True) for name in module._buffers)
    # a tensor that is a plain attribute becomes a constant of the graph, under its name
    yield from (("tensor attribute", name, True) for name, value in vars(module).items() if isinstance(value, Tensor))


def _holds_tensors(module: nn.Module | None) -> bool:
    return module is not None and any(True for m in module.modules() for _ in (*m._parameters, *m._buffers))


def check_batch_names(batch: Any) -> None:
    """Refuse every key of a batch that cannot be written into code.

    Raises:
        CompileError: QN701.
    """
    for path, _ in pytree.tree_flatten_with_path(batch)[0]:
        for entry in path:
            key = getattr(entry, "key", getattr(entry, "name", ""))
            if not isinstance(entry, pytree.SequenceKey):
                name = key if isinstance(key, str) else repr(key)
                _require(is_safe(name), "key of the batch", name, _RENAME)


_RENAME = (
    "rename it: letters, digits, '_' and any of '-+/:@=,()<> ', "
    f"at most {MAX_NAME_LENGTH} characters, no Python keyword"
)


def _require(holds: bool, kind: str, name: str, fix: str) -> None:
    if not holds:
        shown = name if len(name) <= MAX_NAME_LENGTH else f"{name[:90]}...{name[-90:]}"
        raise CompileError("QN701", f"the {kind} {shown!a}", fix=fix)
