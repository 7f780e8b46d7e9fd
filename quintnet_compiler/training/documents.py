"""YAML as a person means it."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Yaml(yaml.SafeLoader):
    """YAML 1.1 takes ``1e-8`` for text; YAML 1.2, JSON and Python take it for a number."""


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"), list("-+.0123456789")
)


def read_yaml(text: str) -> Any:
    """What a document holds: plain values only.

    Raises:
        yaml.YAMLError: if it is none.
    """
    loader = _Yaml(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
