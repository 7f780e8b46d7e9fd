"""Train a module on several layouts, beside the same module as plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {"microbatches": 2}),
    "tp2": ({"tp": 2}, {}),
    "pp2": ({"pp": 2}, {"microbatches": 2}),
    "dp2 tp2 zero3": ({"dp": 2, "tp": 2}, {"zero": 3}),
}
EXACT = 1e-9


def plain_loss(model: nn.Module, batch: Any, loss_fn: Callable[..., Tensor] | None) -> Tensor:
    """What plain PyTorch differentiates."""
    if isinstance(batch, Mapping):
        made = model(**batch)
    else:
        made = model(*batch) if loss_fn is None else loss_fn(model(*batch[:-1]), batch[-1])
    loss = made["loss"] if isinstance(made, Mapping) else getattr(made, "loss", made)
    assert isinstance(loss, Tensor)
    return loss.reshape(())


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


def train_as_plain(
    model: nn.Module,
    layout: str,
    batches: Sequence[Any],
    loss_fn: Callable[..., Tensor] | None = None,
    **options: Any,
) -> quintnet.CompiledProgram:
    """Take a step with each batch, as ``model`` does, and evaluate the last one.

    Returns:
        The program, whose losses, parameters and buffers are those of the module.
    """
    torch.manual_seed(0)
    plain = copy.deepcopy(model)
    sizes, planned = LAYOUTS[layout]
    program = quintnet.compile(model, Mesh(**sizes), batches[0], loss_fn=loss_fn, **{**planned, **options})
    ours, theirs = _optimizer(program.parameters()), _optimizer(plain.parameters())
    for batch in batches:
        ours.zero_grad()
        theirs.zero_grad()
        expected = plain_loss(plain, batch, loss_fn)
        expected.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(program.step(batch), expected.detach(), rtol=EXACT, atol=EXACT)
        ours.step()
        theirs.step()
    for name, parameter in plain.named_parameters():
        mine = dict(program.named_parameters())[name].full_tensor()  # type: ignore[attr-defined]
        torch.testing.assert_close(mine, parameter, rtol=EXACT, atol=EXACT, msg=name)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer, rtol=EXACT, atol=EXACT, msg=name)
    plain.eval()
    with torch.no_grad():
        expected = plain_loss(plain, batches[-1], loss_fn)
    torch.testing.assert_close(program.evaluate(batches[-1]), expected, rtol=EXACT, atol=EXACT)
    return program
