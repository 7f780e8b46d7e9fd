"""Write the API reference, docs/api.md and docs/api/, from signatures and docstrings.

    python docs/make_api.py

A test compares the pages with the code. A public name that is on no page is an error.
"""

from __future__ import annotations

import enum
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pydantic

import quintnet

FOLDER = Path(__file__).parent
MAX_LINE_CHARACTERS = 100
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Examples?):$")
NAMED_SECTIONS = frozenset({"Args", "Attributes", "Raises"})  # of lines "name: text"
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`[~.]*([^`]*)`")
BUILT_BY_COMPILE = frozenset({"CompiledProgram"})  # nobody calls the constructor


@dataclass(frozen=True)
class Entry:
    """A public name on a page.

    Attributes:
        name: as in ``quintnet``, or ``module:name`` for what is not exported there.
        bases: of a class, the classes whose members the page lists; empty: all of them.
    """

    name: str
    bases: tuple[str, ...] = ()

    @property
    def value(self) -> Any:
        return pkgutil.resolve_name(self.name if ":" in self.name else f"quintnet:{self.name}")

    @property
    def title(self) -> str:
        name = self.name.rpartition(":")[2]
        return f"class {name}" if inspect.isclass(self.value) else name


@dataclass(frozen=True)
class Page:
    """A page of the reference: a title, an introduction and its entries in order."""

    title: str
    introduction: str
    entries: tuple[Entry, ...]


def _page(title: str, introduction: str, *names: str) -> Page:
    return Page(title, introduction, tuple(Entry(name) for name in names))


PAGES: Mapping[str, Page] = MappingProxyType(
    {
        "compile": _page(
            "Compile", "From a module to a program.",
            "compile", "Mesh", "rule", "find_rule", "Rule", "expert_linear", "hot_experts", "HotExperts", "hf_plan",
            "HuggingFacePlan", "unpack_quantized", "Normal", "Uniform", "Constant",
        ),
        "plan": _page("Decisions of a program", "What `compile` takes as options.", "Plan", "SCHEDULES", "Schedule"),
        "steps_and_state": Page(
            "Compiled programs: steps, state, generation",
            "Steps, parameters and generation. See also [files and reports](files_and_reports.md).",
            (Entry("CompiledProgram", ("CompiledProgram", "ProgramState", "ProgramGeneration")),),
        ),
        "files_and_reports": Page(
            "Compiled programs: files and reports",
            "Checkpoints, weights, dumps and explanations. See also [steps and state](steps_and_state.md).",
            (
                Entry("CompiledProgram", ("ProgramCheckpoints", "ProgramReports")),
                *(Entry(name) for name in ("VerifyReport", "visualize", "TensorPicture")),
            ),
        ),
        "run": _page(
            "Launch and train", "Processes, and the training loop of this package.",
            "launch", "Preempted", "REQUEUE_EXIT_CODE", "Trainer", "History", "RunTime", "TrainConfig", "TrainTask",
            "accuracy",
        ),
        "loaders_and_logs": _page(
            "Batches, callbacks and logs", "What a training loop reads and writes.",
            "BatchSampler", "ResumableLoader", "pad_to_bucket", "Callback", "ConsoleLogger", "JsonLogger",
            "TensorBoardLogger", "WandbLogger",
        ),
        "predict": _page(
            "Plan and simulate", "Time and memory before anything runs.",
            "plan", "estimate", "Cluster", "PlanReport", "Estimate", "Timeline", "Faults",
        ),
        "errors": _page(
            "Errors and warnings", "Their classes. [Every id](../errors.md) has a page with what to do.",
            "QuintNetError", "CompileError", "InputError", "RunError", "CheckpointError", "BackendWarning",
            "CacheWarning", "CheckWarning", "CompileWarning", "CheckpointWarning", "FaultWarning", "LogWarning",
        ),
        "textbook": _page(
            "Textbook examples", "Names of `quintnet.textbook`; `simulate` is one of `quintnet`, too.",
            "textbook", "simulate",
            *(f"quintnet_compiler.textbook:{name}" for name in quintnet.textbook.__all__ if name != "simulate"),
        ),
    }
)  # fmt: skip


def markdown(text: str) -> str:
    """Return prose of a docstring with code as Markdown has it."""
    return ROLE.sub(r"`\1`", text.replace("``", "`"))


def _default(value: Any) -> str:
    """Return a default as a user would write it."""
    if isinstance(value, enum.Enum):
        return str(value.name)
    if isinstance(value, tuple):
        parts = ", ".join(map(_default, value))
        return f"({parts},)" if len(value) == 1 else f"({parts})"
    if isinstance(value, MappingProxyType):
        return repr(dict(value))
    if inspect.isroutine(value) or inspect.isclass(value):
        return str(value.__name__)
    return "..." if "factory" in repr(value) or " object at " in repr(value) else repr(value)


def _parameter(name: str, annotation: Any, default: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    typed = name if annotation is inspect.Parameter.empty else f"{name}: {text}"
    return typed if default is inspect.Parameter.empty else f"{typed} = {_default(default)}"


def _fields(model: type[pydantic.BaseModel]) -> Iterator[str]:
    """Return the fields of a document as keyword arguments."""
    texts: dict[str, Any] = {}
    for base in reversed(model.__mro__):
        texts |= inspect.get_annotations(base) if issubclass(base, pydantic.BaseModel) else {}
    for name, field in model.model_fields.items():
        default = inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
        yield _parameter(name, texts[name], default)


def _parameters(call: inspect.Signature) -> Iterator[str]:
    """Return the parameters with the marks of keyword-only ones."""
    keywords_marked = False
    for parameter in call.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords_marked:
            yield "*"
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        keywords_marked |= parameter.kind in (parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY)
        yield stars + _parameter(parameter.name, parameter.annotation, parameter.default)


def signature(name: str, value: Any) -> str:
    """Return the call of a function or class, one parameter a line where it is long."""
    if inspect.isclass(value) and issubclass(value, pydantic.BaseModel):
        parameters, result = ["*", *_fields(value)], ""
    else:
        call = inspect.signature(value)
        parameters = [text for text in _parameters(call) if not text.startswith(("cls", "_"))]
        known_result = not inspect.isclass(value) and call.return_annotation is not inspect.Signature.empty
        result = f" -> {call.return_annotation}" if known_result else ""
    line = f"{name}({', '.join(parameters)}){result}"
    if len(line) > MAX_LINE_CHARACTERS:
        line = "\n".join([f"{name}(", *(f"    {text}," for text in parameters), f"){result}"])
    return f"```python no-run\n{line}\n```"


def _entries_of_section(lines: Sequence[str]) -> Iterator[str]:
    """Return ``name: text`` with its further lines as one item of a list each."""
    items: list[list[str]] = []
    for line in lines:
        if re.match(r"\S+?: ", line) or not items:
            items.append([line])
        else:
            items[-1].append(line.strip())
    for item in items:
        name, colon, text = " ".join(item).partition(": ")
        yield markdown(f"- `{name.strip('`')}`: {text}" if colon else f"- {name}")


def _paragraphs(lines: Sequence[str]) -> Iterator[str]:
    """Return prose as it is, and examples as code."""
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        paragraph = re.sub(r"(\n|^)::$|(?<=:):$", "", paragraph)  # the mark of a literal block
        text = textwrap.dedent(paragraph).strip("\n")
        if text.startswith(">>>"):
            yield f"```pycon\n{text}\n```"
        elif text:
            yield paragraph if paragraph.startswith("    ") else markdown(text)


def docstring(value: Any) -> Iterator[str]:
    """Return the parts of a docstring in Google's style as Markdown."""
    prose: list[str] = []
    lines = (inspect.getdoc(value) or "").splitlines()
    while lines:
        heading = SECTION.match(line := lines.pop(0))
        if heading is None:
            prose.append(line)
            continue
        yield from _paragraphs(prose)
        prose.clear()
        size = next((i for i, text in enumerate(lines) if text and not text.startswith(" ")), len(lines))
        section, lines = textwrap.dedent("\n".join(lines[:size])).strip().splitlines(), lines[size:]
        yield f"**{heading[1]}**"
        if heading[1] in NAMED_SECTIONS:
            yield "\n".join(_entries_of_section([text for text in section if text]))
        else:
            yield from _paragraphs(section)
    yield from _paragraphs(prose)


def members(entry: Entry) -> Iterator[tuple[str, Any]]:
    """Return public methods and properties of a class, without those of a public base that has its own place."""
    public = {Entry(name).value for name in quintnet.__all__ if name != "SCHEDULES"} - {entry.value}
    names = {name for base in inspect.getmro(entry.value) if base in public for name in vars(base)}
    for base in inspect.getmro(entry.value):
        listed = base.__name__ in entry.bases if entry.bases else base not in public
        if not listed or not base.__module__.startswith("quintnet_compiler"):
            continue
        fields = getattr(entry.value, "__dataclass_fields__", {})
        for name, value in vars(base).items():
            if name.startswith("_") or name in names or name in fields:
                continue
            if inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod)):
                names.add(name)
                yield name, value


def _member(owner: str, name: str, value: Any) -> Iterator[str]:
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    yield f"### {owner}.{name}"
    if isinstance(value, property):
        result = inspect.signature(function).return_annotation
        yield f"```python no-run\n{owner}.{name}: {result}\n```"
    else:
        yield signature(f"{owner}.{name}", function)
    yield from docstring(function)


def entry_text(entry: Entry) -> Iterator[str]:
    """Return the parts of one entry: heading, signature, docstring and members."""
    value, name = entry.value, entry.name.rpartition(":")[2]
    yield f"## {entry.title}"
    if isinstance(value, Mapping):
        yield f"{', '.join(f'`{key}`' for key in value)}."
        return
    if isinstance(value, int):
        yield f"```python no-run\n{name}: int = {value}\n```"
        return
    if not isinstance(value, ModuleType) and name not in BUILT_BY_COMPILE and callable(value):
        error = inspect.isclass(value) and issubclass(value, BaseException)
        yield f"```python no-run\nclass {name}({value.__base__.__name__})\n```" if error else signature(name, value)
    yield from docstring(value)
    if inspect.isclass(value):
        for member, inner in members(entry):
            yield from _member(name, member, inner)


def page_text(page: Page) -> str:
    """Return a page of the reference."""
    head = [f"# {page.title}", "Written by `python docs/make_api.py`; do not edit.", page.introduction]
    return "\n\n".join([*head, *(part for entry in page.entries for part in entry_text(entry))]) + "\n"


def _first_sentence(value: Any) -> str:
    if isinstance(value, (Mapping, int)):
        return ""
    text = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    return markdown(re.split(r"(?<=[.:])\s", text)[0])


def index_text() -> str:
    """Return the page that lists every name."""
    head = (
        "# API reference\n\nWritten by `python docs/make_api.py`; do not edit.\n\nNames of `quintnet`, for example "
        "`quintnet.compile`, by topic. The package that defines them is\n`quintnet_compiler`; its modules are not "
        "public."
    )
    sections = [head]
    for file, page in PAGES.items():
        rows = ["| name | |", "|---|---|"]
        for entry in page.entries:
            anchor = re.sub(r"[^\w\s-]", "", entry.title).strip().lower().replace(" ", "-")
            rows.append(f"| [`{entry.title}`](api/{file}.md#{anchor}) | {_first_sentence(entry.value)} |")
        sections += [f"## {page.title}", "\n".join(rows)]
    return "\n\n".join(sections) + "\n"


def pages() -> dict[str, str]:
    """Return the text of every page by its path below ``docs``.

    Raises:
        ValueError: if a public name is on no page.
    """
    names = {entry.name for page in PAGES.values() for entry in page.entries}
    if missing := sorted(set(quintnet.__all__) - names):
        raise ValueError(f"on no page of the reference: {', '.join(missing)}")
    return {"api.md": index_text()} | {f"api/{name}.md": page_text(page) for name, page in PAGES.items()}


def main() -> None:
    """Write every page."""
    (FOLDER / "api").mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
