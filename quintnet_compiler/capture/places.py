"""Find the place in the user's code where a node of an exported graph was made."""

from __future__ import annotations

import re
from pathlib import Path

from torch import fx

from ..core.code_origin import PACKAGE, TORCH
from ..core.errors import Where

OWN = (TORCH, PACKAGE)  # code that is not the user's
LEAF, WHERE = "quintnet_leaf", "quintnet_where"  # entries of ``meta`` of a captured graph's nodes


def where_of(node: fx.Node) -> Where:
    """Return the module and the innermost line that is the user's."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    path = re.sub(r"^(L__self___|L\['self'\]\.?)", "", path)
    path = path.removeprefix("_export_root.").removeprefix("model").removeprefix(".")
    source = ""
    text = node.meta.get("stack_trace")
    if text:
        frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n?\s*([^\n]*)', text)
        for name, line, code in reversed(frames):
            if not name.startswith(OWN):
                source = f"{Path(name).name}:{line}: {code.strip()}"
                break
    return Where(path, source)
