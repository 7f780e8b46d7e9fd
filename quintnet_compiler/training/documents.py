"""Read YAML, with numbers such as ``1e-8`` as numbers."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Yaml(yaml.SafeLoader):
    """A loader that takes ``1e-8`` for a number, as YAML 1.2, JSON and Python do, and not YAML 1.1."""


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"), list("-+.0123456789")
)


def read_yaml(text: str) -> Any:
    """Return the values of a document, which are plain.

    Raises:
        yaml.YAMLError: if it is none.
    """
    loader = _Yaml(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
