"""Threads that run programs: they take turns, or the second one is told who was first."""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from tests.test_generation import large_model

TIMES, THREADS = 10, 3


def _batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=generator, dtype=torch.float64), torch.arange(8) % 4


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)).double()


def _program(model: nn.Module, axes: dict[str, int], **options: Any) -> quintnet.CompiledProgram:
    options.setdefault("loss_fn", F.cross_entropy)
    return quintnet.compile(model, quintnet.Mesh(**axes), _batch(), check="off", **options)


def _together(calls: Sequence[Callable[[], object]]) -> list[BaseException]:
    """What went wrong when each of ``calls`` is made in a thread of its own, at the same time."""
    start, errors = threading.Barrier(len(calls)), list[BaseException]()

    def go(call: Callable[[], object]) -> None:
        start.wait(60)
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=go, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive()
    return errors


def _steps(program: quintnet.CompiledProgram) -> None:
    for _ in range(TIMES):
        program.step(_batch())


def _sums(programs: Sequence[quintnet.CompiledProgram]) -> list[list[Tensor]]:
    """Gradients after steps of all programs in threads, and in this thread."""
    found = []
    for run in (lambda calls: _together(calls) == [], lambda calls: [call() for call in calls]):
        for program in programs:
            program.zero_grad()
        assert run([lambda program=program: _steps(program) for program in programs])
        found.append([p.grad.clone() for p in programs[0].parameters() if p.grad is not None])
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("axes", [{"dp": 1}, {"tp": 2}, {"pp": 2}], ids=str)
def test_gradients_of_threads_add_up(axes: dict[str, int]) -> None:
    programs = [_program(_net(), axes)] * THREADS
    threads, alone = _sums(programs)
    assert len(alone) == 4 and all(map(torch.equal, threads, alone))


def _same_module() -> list[nn.Module]:
    return [_net()] * THREADS


def _same_part() -> list[nn.Module]:
    part = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)).double()
    return [nn.Sequential(part), nn.Sequential(part), part]


def _same_tensor() -> list[nn.Module]:
    first, other = _net(), _net()
    for one, mine in zip(first.modules(), other.modules(), strict=True):
        for name, parameter in one.named_parameters(recurse=False):
            setattr(mine, name, parameter)
    return [first, other]


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [_same_module, _same_part, _same_tensor])
def test_programs_that_share_parameters_take_turns(make: Callable[[], list[nn.Module]]) -> None:
    programs = [_program(model, {"dp": 1}) for model in make()]
    threads, alone = _sums(programs)
    assert len(alone) == 4 and all(map(torch.equal, threads, alone))


def test_a_module_that_the_loss_brings_counts() -> None:
    """Two modules of their own, and one that both losses train."""
    shared = nn.Linear(4, 4).double()
    programs = [
        _program(_net(), {"dp": 1}, loss_fn=lambda out, labels: F.cross_entropy(shared(out), labels)) for _ in range(2)
    ]
    assert shared.weight.grad is None
    for program in programs:
        program.step(_batch())
        program.zero_grad()
    assert _together([lambda program=program: _steps(program) for program in programs]) == []
    threads = shared.weight.grad
    assert threads is not None
    shared.zero_grad()
    for program in programs:
        _steps(program)
    assert shared.weight.grad is not None and torch.equal(threads, shared.weight.grad)


def test_threads_serve_one_program() -> None:
    """A server with several threads, and several ranks in its process."""
    program = quintnet.compile(_net(), quintnet.Mesh(dp=2), _batch()[:1], training=False, check="off")
    expected = [program(_batch(i)[0]).clone() for i in range(4)]

    def serve() -> None:
        for i in range(40):
            assert torch.equal(program(_batch(i % 4)[0]), expected[i % 4])

    assert _together([serve] * THREADS) == []


@pytest.mark.slow
def test_threads_generate_with_one_program() -> None:
    prompts = [torch.tensor([[4, 5, 6 + i]]) for i in range(THREADS)]
    model, mesh = large_model("Llama"), quintnet.Mesh(tp=2)
    program = quintnet.compile(model, mesh, {"input_ids": prompts[0]}, training=False, check="off")
    expected = [program.generate(prompt, max_new_tokens=4, pad_token_id=0) for prompt in prompts]
    found: dict[int, Tensor] = {}

    def write(i: int) -> None:
        for _ in range(3):
            found[i] = program.generate(prompts[i], max_new_tokens=4, pad_token_id=0)

    assert _together([lambda i=i: write(i) for i in range(THREADS)]) == []
    assert all(torch.equal(found[i], expected[i]) for i in range(THREADS))


def test_others_call_while_one_trains() -> None:
    """Also calls for which a program has to be compiled, and those that read or change gradients."""
    program, other = _program(_net(), {"dp": 2}), _program(_net(), {"dp": 2})
    calls = [
        lambda: _steps(program),
        lambda: [program.evaluate(_batch(i)) for i in range(TIMES)],
        lambda: [program(_batch()[0][:rows]) for rows in (2, 4, 6)],
        lambda: [program.grad_norm() for _ in range(TIMES)],
        lambda: program.verify(_batch(), steps=1),
        lambda: [program.copy_parameters(other) for _ in range(TIMES)],
        lambda: [other.copy_parameters(program) for _ in range(TIMES)],
    ]
    assert _together(calls) == []
    program.zero_grad()
    loss, alone = program.step(_batch()), _program(_net(), {"dp": 2})
    assert torch.equal(loss, alone.step(_batch()))
    for p, q in zip(program.parameters(), alone.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


def test_a_hook_may_call_the_program() -> None:
    program, seen = _program(_net(), {"dp": 2}), list[float]()
    first = next(program.parameters())
    expected = float(program.evaluate(_batch()))
    first.register_post_accumulate_grad_hook(lambda _: seen.append(float(program.evaluate(_batch()))))
    program.step(_batch())
    assert seen == [expected]


class _Nested(torch.autograd.Function):
    """Call a function in as many backwards in one another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, call: Callable[[], object]) -> Tensor:
        ctx.depth, ctx.call = depth, call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.depth:
            _in_backward(ctx.depth - 1, ctx.call)
        else:
            ctx.call()
        return grad, None, None


def _in_backward(depth: int, call: Callable[[], object]) -> None:
    with torch.enable_grad():
        _Nested.apply(torch.ones(1, requires_grad=True), depth, call).backward()


def test_hooks_on_threads_of_autograd_do_not_wait_for_ever() -> None:
    """Only backwards deeper than 60 in one another leave their thread on a CPU."""
    program, seen, threads = _program(_net(), {"dp": 2}), list[float](), list[int]()

    def call() -> None:
        threads.append(threading.get_ident())
        seen.append(float(program.evaluate(_batch())))

    for depth in (0, 1, 70):
        _in_backward(depth, call)
    assert threads[0] == threads[1] == threading.get_ident() != threads[2] and len(set(seen)) == 1
    for depth in (1, 70):
        hook = lambda _, depth=depth: _in_backward(depth, call)  # noqa: E731
        handle = next(program.parameters()).register_post_accumulate_grad_hook(hook)
        if depth == 1:
            program.step(_batch())
        else:
            with pytest.raises(quintnet.RunError, match=r"QN113.*\n.*on a thread of autograd would wait"):
                program.step(_batch())
        handle.remove()
    assert len(seen) == 4
    program.step(_batch())


def test_modules_of_their_own_wait_for_nobody() -> None:
    """A step waits in a hook for a step of another module's program, in another thread."""
    program, other, done = _program(_net(), {"dp": 1}), _program(_net(), {"dp": 1}), threading.Event()

    def waits(_: Tensor) -> None:
        assert done.wait(30)

    next(program.parameters()).register_post_accumulate_grad_hook(waits)
    assert _together([lambda: program.step(_batch()), lambda: (other.step(_batch()), done.set())]) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [2, 3])
def test_hooks_that_call_each_others_programs_in_threads_are_told(number: int) -> None:
    """Each thread's step waits for the next one's program: one thread is told, and all others end."""
    programs = [_program(_net(), {"dp": 1}) for _ in range(number)]
    expected = [float(program.evaluate(_batch())) for program in programs]
    inside, seen = threading.Barrier(number), dict[int, float]()

    def call_next(i: int) -> None:
        inside.wait(60)
        following = (i + 1) % number
        seen[following] = float(programs[following].evaluate(_batch()))

    for i, program in enumerate(programs):
        next(program.parameters()).register_post_accumulate_grad_hook(lambda _, i=i: call_next(i))
    errors = _together([lambda program=program: program.step(_batch()) for program in programs])
    assert len(errors) == 1 and isinstance(errors[0], quintnet.RunError)
    names = re.findall(r"thread '(Thread-\d+) \(go\)'", str(errors[0]))
    assert "QN113" in str(errors[0]) and "none would go on" in str(errors[0])
    assert len(names) == number + 1 and names[0] == names[-1] and len(set(names)) == number
    assert len(seen) == number - 1 and all(seen[i] == expected[i] for i in seen)


def test_a_child_that_was_forked_in_a_step_of_another_thread_has_its_turn() -> None:
    program, inside, forked = _program(_net(), {"dp": 1}), threading.Event(), threading.Event()
    torch.set_num_threads(1)

    def waits(_: Tensor) -> None:
        inside.set()
        assert forked.wait(30)

    handle = next(program.parameters()).register_post_accumulate_grad_hook(waits)
    thread = threading.Thread(target=program.step, args=(_batch(),), daemon=True)
    thread.start()
    assert inside.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        handle.remove()
        program.step(_batch())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    forked.set()
    thread.join(120)


def _second_thread() -> list[str]:
    """What a rank's second thread is told, and its forked child; a second thread after the first one is fine.

    The first thread has its loss and gradients.
    """
    program, inside, told, texts = _program(_net(), {"dp": 2}), threading.Event(), threading.Event(), list[str]()

    def waits(_: Tensor) -> None:
        inside.set()
        assert told.wait(30)

    handle = next(program.parameters()).register_post_accumulate_grad_hook(waits)
    losses = list[Tensor]()
    thread = threading.Thread(target=lambda: losses.append(program.step(_batch())), daemon=True, name="the-first")
    thread.start()
    assert inside.wait(30)
    for call in (lambda: program.step(_batch()), lambda: program.evaluate(_batch()), program.grad_norm):
        try:
            call()
        except quintnet.RunError as error:
            texts.append(str(error))
    told.set()
    thread.join(120)
    handle.remove()
    gradients = [p.grad.clone() for p in program.parameters() if p.grad is not None]
    program.zero_grad()
    assert torch.equal(losses[0], program.step(_batch()))
    again = [p.grad for p in program.parameters() if p.grad is not None]
    assert len(again) == 4 and all(map(torch.equal, again, gradients))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            program.step(_batch())
        except quintnet.RunError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    texts.append(os.read(read, 1000).decode())
    return texts


def test_a_second_thread_of_a_rank_is_told_of_the_first() -> None:
    for texts in quintnet.launch(_second_thread, 2, timeout=240):
        assert len(texts) == 4
        for text in texts[:3]:
            assert "QN113" in text and "thread 'MainThread' runs a program while thread 'the-first' does" in text
        assert "QN113" in texts[3] and "forked from a rank" in texts[3]
