"""What people train with beside plain layers, on this device: documents, losses in parts, 8 bits, adapters, texts."""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import quintnet
from quintnet_compiler.compat.torch import pytree
from tests.models import CASES, build, reference
from tests.test_generation import NEW, large_model, prompts, theirs

from .entries import Check, Entry, NotRun
from .layouts import Job, narrow_batch
from .setting import Setting

Found = tuple[bool, str]


class Packed(nn.Module):
    """Attention of packed documents, two heads of queries for each of keys. ``dense``: by all scores."""

    def __init__(self, width: int, features: int, *, dense: bool = False) -> None:
        super().__init__()
        self.features, self.dense = features, dense
        self.qkv, self.head = nn.Linear(width, 8 * features), nn.Linear(4 * features, width)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        rows, length, _ = x.shape
        sizes = [n * self.features for n in (4, 2, 2)]
        q, k, v = (y.unflatten(-1, (-1, self.features)).transpose(1, 2) for y in self.qkv(x).split(sizes, -1))

        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (documents[b, q] == documents[b, k])

        if self.dense:
            mask = create_mask(seen, rows, 1, length, length, device=str(x.device))
            k, v = (y.repeat_interleave(2, 1) for y in (k, v))
            y = (q @ k.mT / self.features**0.5).masked_fill(~mask, float("-inf")).softmax(-1) @ v
        else:
            blocks = create_block_mask(seen, rows, None, length, length, device=str(x.device))
            y = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)  # type: ignore[assignment]
        return self.head(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Linears(nn.Module):
    """Two linear layers whose products are in 8 bits where that is asked for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


def mean_square(outputs: Tensor, wanted: Tensor) -> Tensor:
    return F.mse_loss(outputs, wanted)


def run(setting: Setting) -> Iterator[Entry]:
    wide = not setting.emulated
    for dtype, limit in ((torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        for axes, options in (
            ({"dp": 1}, {}),
            ({"cp": 2}, {"context": "ring"}),
            ({"cp": 2}, {"context": "all_gather"}),
        ):
            if wide or dtype is torch.float64:
                what = f"packed documents, {axes} {options}, {dtype}"
                yield _judged(what, lambda a=axes, o=options, d=dtype, m=limit: packed(setting, a, o, d, m))
    for axes in ({"dp": 2}, {"tp": 2}):
        yield _judged(f"loss_chunks=4, {axes}, float64", lambda axes=axes: chunks(setting, axes))
    for recipe in ("tensorwise", "rowwise", "blockwise", "mxfp8") if wide else ("tensorwise",):
        for axes in ({"dp": 1}, {"tp": 2}):
            yield _judged(f"fp8, {recipe}, {axes}", lambda r=recipe, a=axes: eight_bits(setting, a, r))
    for name, axes in (("Llama", {"tp": 2}), ("GPT-2", {"pp": 2})):
        yield _judged(f"tokens of {name}, {axes}", lambda name=name, axes=axes: tokens(setting, name, axes))
    for job in (Job("gpt", {"dp": 2}, {"zero": 3}), Job("gpt", {"pp": 2}, {"microbatches": 2})):
        yield _judged(f"checkpoints, {job}", lambda job=job: checkpoints(setting, job))
    there = importlib.util.find_spec("torchao") is not None
    if not there:
        yield NotRun("adapters on torchao's int8 and int4", "torchao is not installed")
    for kind in ("int8", "int4") if there else ():
        yield _judged(f"adapters on torchao's {kind}", lambda kind=kind: quantised(setting, kind))
    if setting.emulated:
        yield NotRun("kernels of attention", "the emulated accelerator computes with the CPU's")


def _judged(what: str, work: Callable[[], Found]) -> Check:
    try:
        good, details = work()
    except Exception as error:  # whatever it is, the next one runs
        return Check(what, False, f"{type(error).__name__}: {error}"[:1500])
    return Check(what, good, details)


def off(computed: Tensor, wanted: Tensor) -> float:
    """The norm of the difference, relative."""
    computed, wanted = computed.detach().cpu().double(), wanted.detach().cpu().double()
    return float((computed - wanted).norm() / wanted.norm())


def _compared(program: quintnet.CompiledProgram, loss: Tensor, expected: dict[str, Tensor], whole: Tensor) -> float:
    worst = abs(float(loss.detach()) - float(whole.detach())) / abs(float(whole.detach()))
    for name, parameter in program.named_parameters():
        grad: Any = parameter.grad
        worst = max(worst, off(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, expected[name]))
    return worst


def _expected(model: nn.Module, batch: Any, loss_fn: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients and loss of the unsplit module on the CPU, in float64."""
    whole = copy.deepcopy(model).double()
    *inputs, wanted = pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, batch)
    loss = loss_fn(whole(*inputs), wanted)
    loss.backward()
    return {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}, loss


def packed(setting: Setting, axes: dict[str, int], options: dict[str, Any], dtype: torch.dtype, limit: float) -> Found:
    rows, length, width, features = (2, 64, 32, 8) if setting.emulated else (2, 1024, 128, 64)
    torch.manual_seed(0)
    model, dense = Packed(width, features).to(dtype), Packed(width, features, dense=True)
    dense.load_state_dict(model.state_dict())
    dice = torch.Generator().manual_seed(1)
    documents = (torch.rand(rows, length, generator=dice) < 0.01).cumsum(1)
    batch = (
        torch.randn(rows, length, width, generator=dice).to(dtype),
        documents,
        torch.randn(rows, length, width).to(dtype),
    )
    gradients, loss = _expected(dense, batch, mean_square)
    program = quintnet.compile(
        model, quintnet.Mesh(**axes), batch, loss_fn=mean_square, device=setting.device, check="off", **options
    )
    worst = _compared(program, program.step(batch), gradients, loss)
    return worst < limit, f"{worst:.0e} of {limit:.0e}"


def chunks(setting: Setting, axes: dict[str, int]) -> Found:
    case = CASES["gpt"]
    batch = case.batch(8)
    program = quintnet.compile(
        build("gpt"), quintnet.Mesh(**axes), batch, loss_fn=case.loss_fn, device=setting.device, loss_chunks=4
    )
    loss, gradients = reference(build("gpt"), batch, case.loss_fn)
    worst = _compared(program, program.step(batch), gradients, loss)
    return worst < 1e-8, f"{worst:.0e}"


def eight_bits(setting: Setting, axes: dict[str, int], recipe: str) -> Found:
    """Beside the same program on the CPU, where what 8-bit numbers stand for is multiplied."""
    width, rows = (32, 8) if setting.emulated else (256, 512)
    torch.manual_seed(0)
    model = Linears(width)
    batch = torch.randn(rows, width), torch.randn(rows, width)
    made: list[dict[str, Tensor]] = []
    for device in (setting.device, torch.device("cpu")):
        mine = copy.deepcopy(model)
        program = quintnet.compile(
            mine,
            quintnet.Mesh(**axes),
            batch,
            loss_fn=mean_square,
            device=device,
            precision="fp8",
            fp8_recipe=recipe,  # type: ignore[arg-type]
            check="off",
        )
        program.step(batch)
        made.append({n: p.grad.full_tensor().cpu() for n, p in program.named_parameters()})  # type: ignore[union-attr,attr-defined]
    code = program.ranks[0].forward.code
    exact, _ = _expected(model, batch, mean_square)
    worst = max(off(made[0][name], made[1][name]) for name in exact)
    away = max(off(made[0][name], exact[name]) for name in exact)
    there = max(off(made[1][name], exact[name]) for name in exact)
    good = "scaled_matmul" in code and worst < 3e-2 and away < 1.1 * there
    return good, f"{worst:.1e} from the CPU's; {away:.2%} from float64, on the CPU {there:.2%}"


def tokens(setting: Setting, name: str, axes: dict[str, int]) -> Found:
    ids, mask = prompts()
    expected = theirs(large_model(name), ids, mask)
    program = quintnet.compile(
        large_model(name), quintnet.Mesh(**axes), {"input_ids": ids}, training=False, device=setting.device
    )
    generated = program.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0).cpu()
    same = int((generated == expected).sum())
    return torch.equal(generated, expected), f"{same} of {generated.numel()} tokens are transformers'"


def checkpoints(setting: Setting, job: Job) -> Found:
    """Training goes on from a checkpoint as it did, bit by bit."""
    case = CASES[job.model]
    options = {"loss_fn": case.loss_fn, "device": setting.device, "check": "off", **job.options}
    batch = narrow_batch(job)
    program = quintnet.compile(build(job.model, torch.float32), quintnet.Mesh(**job.axes), batch, **options)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)

    def step() -> float:
        loss = float(program.step(batch))
        program.clip_grad_norm(0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("save", "save_async"):
            written = getattr(program, kind)(Path(folder) / kind, step=1, optimizer=optimizer)
            after = [step() for _ in range(3)]
            if kind == "save_async":
                written.result()
            program.load(Path(folder) / kind, optimizer=optimizer)
            if [step() for _ in range(3)] != after:
                wrong.append(kind)
    return not wrong, ", ".join(wrong) or "equal bits"


def quantised(setting: Setting, kind: str) -> Found:
    """Gradients of adapters beside the same layers on the CPU."""
    from tests.test_quantized import Adapted, batch, torchao_int4, torchao_int8

    inputs, grads = batch(), []
    for device in (setting.device, torch.device("cpu")):
        model = Adapted(torchao_int8 if kind == "int8" else torchao_int4)
        quintnet.unpack_quantized(model)
        program = quintnet.compile(
            model, quintnet.Mesh(dp=2), inputs, loss_fn=F.mse_loss, device=device, zero=3, check="off"
        )
        program.step(inputs)
        grads.append([p.grad.full_tensor().cpu() for p in program.parameters() if p.grad is not None])  # type: ignore[attr-defined]
    worst = max(off(x, y) for x, y in zip(*grads, strict=True))
    return worst < 1e-4, f"{worst:.0e}"
