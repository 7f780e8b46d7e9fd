"""Options of the tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/*/*.txt instead of comparing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Autograd makes a queue for each device when it first runs: the emulated device must be there before."""
    items.sort(key=lambda item: item.path.name != "test_accelerator.py")
