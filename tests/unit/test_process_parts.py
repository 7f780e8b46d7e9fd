"""What is replaced or set for a while is put back, also after an error, and is not replaced for other threads."""

from __future__ import annotations

import logging
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quintnet_compiler.capture.derivatives.inner_gradients import InnerGradients
from quintnet_compiler.capture.derivatives.user_derivatives import user_derivatives
from quintnet_compiler.capture.messages import without_messages_of_torch
from quintnet_compiler.capture.step_module import StepModule
from quintnet_compiler.core.replaced import for_this_thread, one_thread
from quintnet_compiler.equivalence.reference import same_numbers
from quintnet_compiler.equivalence.unchanged import random_numbers_kept
from quintnet_compiler.huggingface.registries import traced_as_few_nodes
from quintnet_compiler.runtime.launch.inside_launcher import torch_threads

from ..process_state import changes, process_state


def _elsewhere(call: Callable[[], Any]) -> Any:
    """What a call gives in another thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_a_function_is_replaced_for_one_thread() -> None:
    chosen = for_this_thread(lambda x: "ours", len)
    assert chosen([1, 2]) == "ours" and _elsewhere(lambda: chosen([1, 2])) == 2
    assert chosen.__name__ == "len"
    order: list[int] = []
    with one_thread(), one_thread():
        other = threading.Thread(target=one_thread()(lambda: order.append(2)))
        other.start()
        order.append(1)
    other.join()
    assert order == [1, 2]


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


def test_other_threads_compute_as_before() -> None:
    x, step = torch.randn(2, 4, 8), StepModule(torch.nn.Linear(8, 8), None, "outputs", None)

    def work() -> list[Tensor]:
        torch.manual_seed(0)
        y = x.clone().requires_grad_()
        made = F.dropout(F.scaled_dot_product_attention(y, y, y, dropout_p=0.5), 0.5) + Halved.apply(y)
        made.sum().backward()
        assert y.grad is not None
        return [made.detach(), y.grad]

    expected = work()
    with same_numbers(0, 0), user_derivatives(step, InnerGradients(), trained=True), random_numbers_kept([]):
        assert not torch.equal(F.dropout(x, 0.5), x)
        found = _elsewhere(work)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_random_numbers_are_as_they_were_after_an_error_too() -> None:
    states = random.getstate(), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), random_numbers_kept([torch.ones(1)]):
        random.random()
        torch.rand(1)
        raise ZeroDivisionError
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])


def test_threads_of_torch_are_as_many_as_before_after_an_error_too() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_loggers_of_torch_are_quiet_in_this_thread(caplog: pytest.LogCaptureFixture) -> None:
    usual, asked, own = (logging.getLogger(name) for name in ("torch.usual", "torch.asked", "of_the_model"))
    asked.setLevel(logging.INFO)
    with without_messages_of_torch():
        for logger in (usual, asked, own):
            logger.warning("said by %s", logger.name)
        _elsewhere(lambda: usual.warning("said elsewhere"))
        with pytest.warns(UserWarning, match="of the model"):
            warnings.warn("of the model", stacklevel=1)
    usual.warning("said after")
    said = ["said by torch.asked", "said by of_the_model", "said elsewhere", "said after"]
    assert caplog.messages == said and not usual.filters


def test_registries_of_hugging_face_are_as_they_were_after_an_error_too() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    with torch.device("meta"):
        config = transformers.MixtralConfig(vocab_size=8, num_local_experts=2, num_key_value_heads=1, **sizes)
        model = transformers.MixtralForCausalLM(config)
    settings, before = config.to_dict(), process_state()
    with pytest.raises(ZeroDivisionError), traced_as_few_nodes(model, as_shipped=True):
        assert "quintnet" in ALL_EXPERTS_FUNCTIONS and config.use_cache is False
        assert (
            ALL_ATTENTION_FUNCTIONS["sdpa"]
            is not before["registry transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS"]["sdpa"]
        )
        raise ZeroDivisionError
    assert changes(before, process_state()) == [] and config.to_dict() == settings
    assert "quintnet" not in ALL_EXPERTS_FUNCTIONS
