"""The shape of the code: packages that say what they hold, folders of a readable size, names that mean one thing."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINKS = (ROOT / "quintnet_compiler/passes", ROOT / "quintnet_compiler/cost_models")
FILES = [
    path
    for folder in ("quintnet_compiler", "passes", "cost_models")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not any(link in path.parents for link in LINKS)
]


def test_a_class_name_means_one_thing() -> None:
    found = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_a_folder_has_at_most_twenty_modules() -> None:
    counts = Counter(path.parent.relative_to(ROOT) for path in FILES if path.name != "__init__.py")
    assert {str(folder): count for folder, count in counts.items() if count > 20} == {}


def test_every_package_says_what_it_holds() -> None:
    packages = [path for path in FILES if path.name == "__init__.py"]
    assert [str(path) for path in packages if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_wheels_have_every_package() -> None:
    """pyproject.toml lists them, as two lie elsewhere than they are imported from."""
    folders = {path.parent.relative_to(ROOT) for path in FILES if path.name == "__init__.py"}
    names = {".".join(folder.parts) for folder in folders}
    names = {name if name.startswith("quintnet_compiler") else f"quintnet_compiler.{name}" for name in names}
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted({"quintnet", *names})


def test_what_is_remembered_of_calls_without_arguments_is_one_value_in_all_threads() -> None:
    """``functools.cache`` lets threads that call at the same time have one each: ``call_once`` of compat does not."""
    remembered = [
        f"{path.relative_to(ROOT)} {node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and not ast.unparse(node.args)
        if any("cache" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    assert remembered == []
