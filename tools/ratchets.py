"""Count what may only become less: complexity, vague names, docstrings that do not begin with a verb, long files.

    python tools/ratchets.py          # what tests/test_ratchets.py compares with tests/ratchets.toml
    python tools/ratchets.py --lower  # write the numbers that became smaller

A number that became larger is mended, or raised by hand in a commit that says why.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ROOT / "tests/ratchets.toml"
FEATURES = ROOT / "quintnet_compiler/features"
FOLDERS = ("quintnet", "quintnet_compiler", "passes", "cost_models")

MAX_DECISIONS = 14  # of a function that is not listed
MAX_FILE_LINES = 400
MAX_PAGE_WORDS = 3500
MAX_FILES_OF_A_NAME = 2
PACKAGE_LINES_STEP = 250  # the limit of a package is the next multiple of it
VAGUE_NAMES = ("found", "made", "given", "told", "one", "known", "whoever", "before")
FRAGMENTS = ("What", "Whether", "Of", "Where", "How")  # first words of docstrings that are not sentences
TORCH_METHODS = frozenset(("backward", "forward", "load_state_dict", "state_dict", "step", "zero_grad"))
LINT_RULES = ("C901", "D", "D401", "N", "PLR0912", "PLR0913")
LINT_OPTIONS = (
    "lint.mccabe.max-complexity=15",
    "lint.pylint.max-branches=12",
    "lint.pylint.max-args=8",
    "lint.pydocstyle.convention='google'",
)

# With these a ``target`` is compared that is the stage or rank of a transfer, or that of another node.
NO_OPERATORS = re.compile(r"None|(.*\.)?(target|index|stage|rank)")

Counts = Mapping[str, int]


@dataclass(frozen=True)
class SourceFile:
    """A module of the product."""

    path: Path

    @property
    def name(self) -> str:
        """Return the path from the root."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def package(self) -> str:
        """Return the folder, at most two levels deep."""
        return "/".join(self.path.relative_to(ROOT).parent.parts[:2])

    @cached_property
    def text(self) -> str:
        """Return the source."""
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        """Return the syntax tree."""
        return ast.parse(self.text)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Yield functions and methods, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def product_files() -> list[SourceFile]:
    """Return the modules of the product. Links to folders are left out."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [SourceFile(path) for path in paths if path.resolve() == path]


def decisions(function: ast.AST) -> int:
    """Return the cyclomatic complexity: one, and each branch, loop, comprehension, assertion and operand of and/or."""
    branches = (
        ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.Assert, ast.match_case,
    )  # fmt: skip
    nodes = list(ast.walk(function))
    operands = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return 1 + operands + sum(isinstance(node, branches) for node in nodes)


def complexity(files: list[SourceFile]) -> Counts:
    """Count decisions of functions that have more than ``MAX_DECISIONS``."""
    counts = Counter[str]()
    for file in files:
        for function in file.functions():
            number = decisions(function)
            if number > MAX_DECISIONS:
                counts[f"{file.name} {function.name}"] = max(number, counts[f"{file.name} {function.name}"])
    return counts


def vague_names(files: list[SourceFile]) -> Counts:
    """Count functions that bind a vague name, by package and name."""
    counts = Counter[str]()
    for file in files:
        for function in file.functions():
            counts.update(f"{file.package} {name}" for name in _bound(function) & set(VAGUE_NAMES))
    return counts


def _bound(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of parameters and locals."""
    parameters = {x.arg for x in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
    stores = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return parameters | {node.id for node in stores}


def fragments(files: list[SourceFile]) -> Counts:
    """Count docstrings of functions and classes whose first word is one of ``FRAGMENTS``, by package."""
    counts = Counter[str]()
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                words = (ast.get_docstring(node) or "").split()
                if words and words[0].strip(",.:;") in FRAGMENTS:
                    counts[file.package] += 1
    return counts


def public_names(files: list[SourceFile]) -> Counts:
    """Count the files that define a public function or method of one name, where they are many.

    Methods of one protocol count once, in the protocol's file, and so do a method and what overrides it. Names that
    torch gives to methods of modules, functions and optimizers do not count, nor do functions inside of functions.
    """
    definitions = [(file.name, node) for file in files for node in _definitions(file.tree)]
    classes = [Class(name, node) for name, node in definitions if isinstance(node, ast.ClassDef)]
    places = defaultdict(set)
    for file_name, node in definitions:
        if not isinstance(node, ast.ClassDef):
            places[node.name].add(file_name)
    for (_, method), origin in _origins(classes).items():
        places[method].add(origin.file)
    names = {name for name in places if not name.startswith("_")} - TORCH_METHODS
    return {name: len(places[name]) for name in names if len(places[name]) > MAX_FILES_OF_A_NAME}


@dataclass(frozen=True)
class Class:
    """A class of the product."""

    file: str
    node: ast.ClassDef

    @cached_property
    def bases(self) -> list[str]:
        """Return the names of the bases, without modules and type arguments."""
        return [re.split(r"[.]", ast.unparse(base).partition("[")[0])[-1] for base in self.node.bases]

    @cached_property
    def methods(self) -> set[str]:
        """Return the names of methods and properties."""
        return {node.name for node in _definitions(self.node) if not isinstance(node, ast.ClassDef)}

    @cached_property
    def required(self) -> set[str]:
        """Return the names of methods: what else a protocol names may be an attribute of what implements it."""
        functions = (node for node in self.node.body if isinstance(node, ast.FunctionDef))
        return {node.name for node in functions if not any("property" in ast.unparse(x) for x in node.decorator_list)}


def _definitions(scope: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yield functions and classes of a module or class, in its branches and inner classes too."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not isinstance(node, ast.ClassDef) or not isinstance(scope, ast.ClassDef):
                yield node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _definitions(node)


def _origins(classes: list[Class]) -> dict[tuple[Class, str], Class]:
    """Return the protocol, or the first of the bases, that a method is from."""
    by_name = defaultdict(list)
    for definition in classes:
        by_name[definition.node.name].append(definition)

    def ancestors(definition: Class) -> list[Class]:
        """Return the class and its bases. Private names may be those of several classes: one file's are meant first."""
        named = (sorted(by_name[name], key=lambda base: base.file != definition.file) for name in definition.bases)
        return [definition, *(ancestor for base in named if base for ancestor in ancestors(base[0]))]

    protocols = [definition for definition in classes if "Protocol" in definition.bases]
    origins = {}
    for definition in classes:
        for ancestor in reversed(ancestors(definition)):
            for method in ancestor.methods & definition.methods:
                origins.setdefault((definition, method), ancestor)
    for definition in classes:
        line = ancestors(definition)
        inherited = {method for ancestor in line for method in ancestor.methods}
        for protocol in protocols:
            if protocol.required and protocol.required <= inherited:
                origins.update(
                    ((ancestor, method), protocol)
                    for ancestor in line
                    for method in ancestor.methods & protocol.methods
                )
    return origins


def operator_identity(files: list[SourceFile]) -> Counts:
    """Count tests of the operator that a node calls (``node.target is aten.sum.default``, ``target in CASTS``).

    Targets of two nodes may be compared, and numbers of stages that are targets of transfers.
    """
    counts = Counter[str]()
    for file in files:
        counts.update(file.package for node in ast.walk(file.tree) if _tests_identity(node))
    return counts


def _tests_identity(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare) or not re.fullmatch(r"(.*\.)?target", ast.unparse(node.left)):
        return False
    if isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        return False  # of numbers
    return not NO_OPERATORS.fullmatch(ast.unparse(node.comparators[0]))


def feature_names(files: list[SourceFile]) -> Counts:
    """Count lines that name a feature elsewhere than in its folder: the folder's name, its operators, its classes."""
    counts = Counter[str]()
    for folder in sorted(path.parent for path in FEATURES.glob("*/__init__.py")):
        names = sorted(_names_of_feature([file for file in files if folder in file.path.parents]))
        pattern = re.compile(rf"(?<![A-Za-z0-9])(?i:{folder.name})(?![A-Za-z0-9])|\\b({'|'.join(names)})\\b")
        for file in files:
            if FEATURES not in file.path.parents and (lines := list(filter(pattern.search, file.text.splitlines()))):
                counts[f"{file.name} {folder.name}"] = len(lines)
    return counts


def _names_of_feature(files: list[SourceFile]) -> Iterator[str]:
    for file in files:
        yield from (node.name for node in file.tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")
        yield from re.findall(r'define_operator\(\s*"(\w+)\(', file.text)


def long_files(files: list[SourceFile]) -> Counts:
    """Count lines of files that have more than ``MAX_FILE_LINES``."""
    lengths = {file.name: len(file.text.splitlines()) for file in files}
    return {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}


def package_lines(files: list[SourceFile]) -> Counts:
    """Count lines of packages, rounded up to ``PACKAGE_LINES_STEP``."""
    counts = Counter[str]()
    for file in files:
        counts[file.package] += len(file.text.splitlines())
    return {package: -(-lines // PACKAGE_LINES_STEP) * PACKAGE_LINES_STEP for package, lines in counts.items()}


def page_words(files: list[SourceFile]) -> Counts:
    """Count words of pages that have more than ``MAX_PAGE_WORDS``."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    lengths = {page.relative_to(ROOT).as_posix(): len(page.read_text().split()) for page in pages}
    return {name: length for name, length in lengths.items() if length > MAX_PAGE_WORDS}


def lint(files: list[SourceFile]) -> Counts:
    """Count what ruff says of ``LINT_RULES``, by package and rule."""
    options = [part for option in LINT_OPTIONS for part in ("--config", option)]
    command = [
        sys.executable, "-m", "ruff", "check", "--isolated", "--exit-zero", "--output-format", "json",
        "--select", ",".join(LINT_RULES), *options, *(file.name for file in files),
    ]  # fmt: skip
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300).stdout
    packages = {str(file.path): file.package for file in files}
    return Counter(f"{packages[entry['filename']]} {entry['code']}" for entry in json.loads(output))


MEASURES: Mapping[str, Callable[[list[SourceFile]], Counts]] = {
    measure.__name__: measure
    for measure in (
        complexity, vague_names, fragments, public_names, operator_identity, feature_names, long_files, package_lines,
        page_words, lint,
    )
}  # fmt: skip


def measured() -> dict[str, Counts]:
    """Return all counts, by measure."""
    files = product_files()
    return {name: measure(files) for name, measure in MEASURES.items()}


def limits() -> dict[str, dict[str, int]]:
    """Return what tests/ratchets.toml allows."""
    document: dict[str, dict[str, int]] = tomllib.loads(LIMITS.read_text())
    return document


def larger(counts: Counts, allowed: Counts) -> dict[str, str]:
    """Return what exceeds its limit, with both numbers."""
    return {key: f"{n} > {allowed.get(key, 0)}" for key, n in counts.items() if n > allowed.get(key, 0)}


def smaller(counts: Counts, allowed: Counts) -> dict[str, str]:
    """Return limits that are larger than they need to be, with both numbers."""
    return {key: f"{counts.get(key, 0)} < {n}" for key, n in allowed.items() if n > counts.get(key, 0)}


def lower() -> None:
    """Write the counts that became smaller to tests/ratchets.toml; none is raised."""
    lines = ["# What may only become less: see tools/ratchets.py. Written by `python tools/ratchets.py --lower`.", ""]
    for name, counts in measured().items():
        lines.append(f"[{name}]")
        for key, limit in sorted(limits()[name].items()):
            number = min(limit, counts.get(key, 0))
            if number:
                lines.append(f"{json.dumps(key)} = {number}")
        lines.append("")
    LIMITS.write_text("\n".join(lines))


def main() -> None:
    """Print totals and what exceeds its limit, or lower the limits."""
    if sys.argv[1:] == ["--lower"]:
        return lower()
    allowed = limits()
    for name, counts in measured().items():
        print(f"{name}: {sum(counts.values())} in {len(counts)}, allowed {sum(allowed[name].values())}")
        for key, numbers in larger(counts, allowed[name]).items():
            print(f"  {key}: {numbers}")


if __name__ == "__main__":
    main()
