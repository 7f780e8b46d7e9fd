"""Private names of torch and transformers: all in ``quintnet_compiler.compat``, and all in what is installed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from quintnet_compiler.compat.torch import FakeTensorMode

PACKAGE = Path(__file__).parent.parent / "quintnet_compiler"
COMPAT = PACKAGE / "compat"
LIBRARIES = ("torch", "transformers")
HIDDEN = ("torch.fx.experimental", "transformers.masking_utils", "transformers.modeling_utils")  # as good as private
SEMI_PUBLIC = frozenset({"_parameters", "_buffers", "_modules"})  # see the docstring of compat
OF_PYTHON = frozenset({"_getframe", "_exit", "_DummyThread", "_lru_cache_wrapper"})  # of sys, os, threading, functools
OPERATORS = ("aten", "torch.ops.aten")

# Private attributes of objects: something that must have them.
_NET, _OPERATOR, _GRAPH = nn.Linear(1, 1), torch.ops.aten.mm.default, torch.fx.Graph()
_LLAMA = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
)
OWNERS: Mapping[str, Any] = MappingProxyType(
    {
        "_backward_hooks": _NET.weight,
        "_backward_pre_hooks": _NET,
        "_check_input_dim": nn.BatchNorm1d(1),
        "_cdata": _NET.weight.untyped_storage(),
        "_codegen": _GRAPH,
        "_forward_hooks": _NET,
        **dict.fromkeys(["_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"], _NET),
        "_forward_pre_hooks": _NET,
        "_func_name": torch.fx.graph.CodeGen(),
        "_is_compiling_flag": torch.compiler,
        "_is_exporting_flag": torch.compiler,
        "_is_full_backward_hook": _NET,
        "_jvp_with_argnums": torch._functorch.eager_transforms,
        "_opname": _OPERATOR,
        "_post_accumulate_grad_hooks": _NET.weight,
        "_root": _GRAPH,
        "_schema": _OPERATOR,
        "_version": _NET.weight,
        "_flat_weights": nn.LSTM(1, 1),
        "_flat_weight_refs": nn.LSTM(1, 1),
        "_dispatch_cache": _OPERATOR,
        "_custom_op_handlers": DTensor._op_dispatcher,
        "_op_dispatcher": DTensor,
        "_ep_plan": _LLAMA,
        "_from_config": _LLAMA,
        "_global_mapping": transformers.AttentionInterface(),
        "_infer_parameters": nn.LazyLinear(1),
        "_init_weights": _LLAMA,
        "_initialize_hook": nn.LazyLinear(1),
        **dict.fromkeys(
            ["_apply_kernel_options", "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", "_identity", "_validate_device"],
            importlib.import_module("torch.nn.attention.flex_attention"),
        ),
        "_no_grad_trunc_normal_": nn.init,
        "_orig_module_call": importlib.import_module("torch.fx._symbolic_trace"),
        "_is_fastpath_enabled": torch.backends.mha,
        "_reset_parameters": nn.MultiheadAttention(1, 1),
        "_keys_to_ignore_on_load_unexpected": _LLAMA,
        "_keys_to_ignore_on_save": _LLAMA,
        "_model_mapping": transformers.AutoModelForCausalLM,
        "_normalize_placements_into_shard_order": DTensorSpec,
        "_pp_plan": _LLAMA,
        "_register_atexit": threading,
        "_split_tensor": Shard(0),
        "_to_replicate_tensor": Shard(0),
        "_get_num_items_in_batch": transformers.Trainer,
        "_prepare_inputs": transformers.Trainer,
        "_save_rng_state": transformers.Trainer,
        "_tp_plan": _LLAMA,
        "_experts_implementation": transformers.MixtralConfig(),
        "_vjp_with_argnums": torch._functorch.eager_transforms,
        **dict.fromkeys(["_ff_block", "_sa_block"], nn.TransformerEncoderLayer),
        "_qkv_same_embed_dim": nn.MultiheadAttention(1, 1),
    }
)
# Those that only a model or a process group makes: tests that would fail without them.
BY_OTHER_TESTS: Mapping[str, str] = MappingProxyType(
    {
        "_apply_gate": "test_experts.py",
        "_accelerator_connector": "test_lightning.py",
        "_precision_flag": "test_lightning.py",
        "_foreach_": "unit/test_torch_foreach.py",
        "_tensor_name": "unit/test_call_attributes.py",
        "_torchdynamo_inline": "unit/test_unfollowed_parts.py",
        "_raw_saved": "unit/test_second_runs.py",
        "_sequence_nr": "unit/test_second_runs.py",
        "_opoverload": "test_rules_of_users.py",
        "_assert_async": "test_frontier_diagnoses.py",
        "_assert_scalar": "test_frontier_diagnoses.py",
        "_get_backend": "test_collectives.py",
        "_timeout": "test_collectives.py",
        "_set_default_timeout": "test_processes.py",
        "_assert_tensor_metadata": "test_frontier_diagnoses.py",
        "_checkpoint_without_reentrant_generator": "unit/test_kept_states.py",
        "_dump_fr_trace_json": "unit/test_device_faults.py",
        "_dump_nccl_trace_json": "unit/test_device_faults.py",
        "_forward_cls": "test_frontier_functions.py",
        "_guards_fn": "test_frontier_diagnoses.py",
        "_hop_compile_and_call": "test_control_flow.py",
        "_is_hf_initialized": "test_initial_values.py",
        "_local_tensor": "test_processes.py",
        "_varlen_attn": "test_varlen_attention.py",
    }
)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _files() -> list[Path]:
    """Each module once; ``passes`` and ``cost_models`` are links."""
    found = [path for folder in sorted(PACKAGE.iterdir()) if folder.is_dir() for path in sorted(folder.rglob("*.py"))]
    return [*sorted(PACKAGE.glob("*.py")), *found]


def _private(name: str) -> bool:
    return len(name) > 1 and name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _imported(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of what is imported from the libraries; name "" for a whole module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names if alias.name.split(".")[0] in LIBRARIES)
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in LIBRARIES:
            yield from ((node.lineno, str(node.module), alias.name) for alias in node.names)


def _texts(node: ast.AST) -> Iterator[ast.Constant]:
    """String constants, but for docstrings and annotations."""
    skipped = {id(e.value) for e in ast.walk(node) if isinstance(e, ast.Expr)}
    for found in ast.walk(node):
        if isinstance(found, ast.Constant) and isinstance(found.value, str) and id(found) not in skipped:
            yield found


@cache
def _own_names() -> frozenset[str]:
    """Private names that the package gives to its own attributes, methods and functions."""
    found: set[str] = set()
    for path in _files():
        if COMPAT in path.parents:
            continue
        for node in ast.walk(_tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Assign):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


@cache
def _attributes_of_compat() -> frozenset[str]:
    """Private attributes of objects that compat reads, or names in a string."""
    found: set[str] = set()
    for path in COMPAT.glob("*.py"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Attribute) and _private(node.attr) and not ast.unparse(node).startswith("torch."):
                found.add(node.attr)
        found |= {str(text.value) for text in _texts(_tree(path)) if _private(str(text.value))}
    axes, own = {"_tp_plan", "_ep_plan", "_pp_plan"}, {"_plan", "_P", "_T"}  # the last two: variables of types
    return frozenset({name for name in found if name.isidentifier()} - own | axes)


def _offences(path: Path) -> Iterator[str]:
    tree = _tree(path)
    for line, module, name in _imported(tree):
        if any(map(_private, [*module.split("."), name])) or module.startswith(HIDDEN):
            yield f"{path.name}:{line} imports {module} {name}".rstrip()
    known = _attributes_of_compat()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _private(node.attr):
            owner, name = ast.unparse(node.value), node.attr
            foreign = name in known or name not in _own_names() or owner.split(".")[0] in LIBRARIES
            if foreign and name not in SEMI_PUBLIC | OF_PYTHON and owner not in OPERATORS:
                yield f"{path.name}:{node.lineno} reads {owner}.{name}"
        elif isinstance(node, ast.keyword) and node.arg is not None and _private(node.arg):
            yield f"{path.name}:{node.value.lineno} passes {node.arg}="
    for text in _texts(tree):
        if text.value in known - SEMI_PUBLIC or str(text.value).startswith(HIDDEN):
            yield f"{path.name}:{text.lineno} names {text.value!r}"


def test_private_names_are_in_compat_alone() -> None:
    found = [offence for path in _files() if COMPAT not in path.parents for offence in _offences(path)]
    assert not found, "\n".join([*found, "give it a name and a line in quintnet_compiler/compat/"])


@pytest.mark.parametrize(
    "code",
    [
        "from torch._ops import OpOverload",
        "import torch.utils._pytree",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "import torch\ntorch._C._nn.linear",
        "x._version",
        "getattr(x, '_schema', None)",
        "f(_some_switch=True)",
        "sys.modules.get('transformers.masking_utils')",
        "model._tp_plan",
    ],
)
def test_a_private_name_elsewhere_is_found(tmp_path: Path, code: str) -> None:
    (tmp_path / "module.py").write_text(code)
    assert list(_offences(tmp_path / "module.py"))


def _names_in_compat() -> list[tuple[str, str, str]]:
    """File, module and dotted name of what compat imports or reads from the libraries themselves."""
    found: list[tuple[str, str, str]] = []
    for path in sorted(COMPAT.glob("*.py")):
        tree = _tree(path)
        found += [(path.name, module, name) for _, module, name in _imported(tree)]
        for node in ast.walk(tree):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if text.startswith(("torch._", "torch.library._", "torch.xpu._", "dist.", "nn_module._")):
                home, _, name = text.partition(".")
                home = {"dist": "torch.distributed", "nn_module": "torch.nn.modules.module"}.get(home, home)
                found.append((path.name, home, name))
    return sorted(set(found))


@pytest.mark.parametrize(("file", "module", "name"), _names_in_compat())
def test_a_name_of_compat_is_in_what_is_installed(file: str, module: str, name: str) -> None:
    try:
        found: Any = importlib.import_module(module)
        for part in filter(None, name.split(".")):
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(f"{module}.{part}")
    except (ImportError, AttributeError):
        library = module.split(".")[0]
        version = sys.modules[library].__version__
        pytest.fail(f"{library} {version} has no {module}.{name}: see what compat/{file} says would take its place")


@pytest.mark.parametrize("name", sorted(OWNERS))
def test_an_attribute_that_compat_reads_is_there(name: str) -> None:
    assert hasattr(OWNERS[name], name), f"{type(OWNERS[name]).__name__} has no {name} any more"


def test_every_attribute_that_compat_reads_is_tested() -> None:
    names = _attributes_of_compat() - SEMI_PUBLIC
    inside = {part for _, _, dotted in _names_in_compat() for part in dotted.split(".")}
    assert names - inside == OWNERS.keys() | BY_OTHER_TESTS.keys()
    for file in BY_OTHER_TESTS.values():
        assert (Path(__file__).parent / file).exists()
    assert "_local_tensor" in DTensor.__slots__


def test_operators_with_an_underscore_are_there() -> None:
    names = {
        node.attr
        for path in _files()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Attribute) and _private(node.attr) and ast.unparse(node.value) in OPERATORS
    }
    assert len(names) > 20 and not [name for name in names if not hasattr(torch.ops.aten, name)]


def _definitions(tree: ast.Module) -> Mapping[str, tuple[int, bool]]:
    """Names at the top of a module that compat defines itself: the line, and whether a docstring says what it is."""
    found: dict[str, tuple[int, bool]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node.lineno, ast.get_docstring(node) is not None
        targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        for target in targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    found |= {} if name.id == "__all__" else {name.id: (node.lineno, False)}
    return found


@pytest.mark.parametrize("path", sorted(set(COMPAT.glob("*.py")) - {COMPAT / "__init__.py"}), ids=lambda p: p.name)
def test_every_name_of_compat_says_what_it_is_for(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    exported = importlib.import_module(f"quintnet_compiler.compat.{path.stem}").__all__
    defined = _definitions(_tree(path))
    assert set(exported) >= {name for name in defined if not _private(name)}
    for name in exported:
        if name in defined:
            line, documented = defined[name]
            while not documented and lines[line - 2].strip() and not lines[line - 2].startswith("#"):
                line -= 1  # neighbours share a comment
            assert documented or lines[line - 2].startswith("#"), f"{path.name}: {name}"
        else:
            assert any(text.strip().startswith(f'"{name}",  # ') for text in lines), f"{path.name}: {name}"


def test_the_ends_of_the_bounds_are_what_the_matrix_runs() -> None:
    root = PACKAGE.parent
    spec = importlib.util.spec_from_file_location("matrix", root / "tools" / "matrix.py")
    assert spec is not None and spec.loader is not None
    matrix = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(matrix)
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    bounds = [project["dependencies"][0], *project["optional-dependencies"]["hf"]]
    for bound, oldest, newest in zip(bounds, matrix.VERSIONS["oldest"], matrix.VERSIONS["newest"], strict=True):
        library, lowest, above = re.fullmatch(r"(\w+)>=([\d.]+),<([\d.]+)", bound).groups()  # type: ignore[union-attr]
        numbers = [[int(n) for n in version.split(".")] for version in (lowest, oldest, newest, above)]
        assert numbers[1][: len(numbers[0])] == numbers[0] <= numbers[2] < numbers[3], bound
        [pin] = [line.removeprefix(f"{library}==") for line in pinned if line.startswith(f"{library}==")]
        assert numbers[1] <= [int(n) for n in pin.split(".")] <= numbers[2], bound
        assert numbers[2][1] + 1 == numbers[3][1], bound
    assert matrix.pins("1", "2").endswith("\ntorch==1\ntransformers==2\n")


def test_importing_compat_does_not_import_transformers() -> None:
    code = "import sys, quintnet_compiler.compat.transformers; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_version_shims_take_what_is_there() -> None:
    from quintnet_compiler.compat import distributed

    names = ("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor")
    found = [getattr(torch.distributed, new, None) or getattr(torch.distributed, old) for new, old in names]
    assert [distributed.all_gather, distributed.reduce_scatter] == found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fake_attention_is_as_large_as_attention(dtype: torch.dtype) -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    made = attention(*torch.ones(3, 2, 4, 16, 8, dtype=dtype))
    with FakeTensorMode():
        fakes = attention(*torch.ones(3, 2, 4, 16, 8, dtype=dtype))
    assert [(x.dtype, x.shape, x.stride()) for x in fakes] == [(x.dtype, x.shape, x.stride()) for x in made]
