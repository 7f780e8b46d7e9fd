"""Draw faults at operations on files while checkpoints are saved and loaded, and compare what is there afterwards.

    LD_PRELOAD=file_faults.so python -m tests.file_faults SEED CASES

Each case saves some checkpoints, then saves or loads in a forked child in which one operation on a file fails, lies, is
cut short, or kills the process. The parent knows every state that was saved. It loads without faults, compares bit by
bit, and saves once more. A line of JSON for each case in which something was wrong is printed, and the number of cases
in which the fault was met.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

CHILD_SECONDS = 240  # the end of an interpreter takes a second of a processor, and others use it
OPEN, READ, WRITE, SYNC, RENAME, MAKE, REMOVE, TRUNCATE, CLOSE = (1 << bit for bit in range(9))
ANY_OPERATION = 0x1FF
State = str  # a digest of parameters, optimizer and what was saved beside them


@dataclass(frozen=True)
class Fault:
    """What happens at an operation. ``action``: as in file_faults.c. ``lies``: success is reported of a write.
    ``damages``: wrong bytes are read."""

    name: str
    action: int
    error: int = errno.EIO
    lies: bool = False
    kills: bool = False
    damages: bool = False
    operations: int = ANY_OPERATION


FAULTS = (
    Fault("EIO", 1),
    Fault("ENOSPC", 1, errno.ENOSPC, operations=WRITE | SYNC | MAKE | OPEN),
    Fault("EDQUOT", 1, errno.EDQUOT, operations=WRITE | SYNC | RENAME | MAKE),
    Fault("ESTALE", 1, errno.ESTALE),
    Fault("EMFILE", 1, errno.EMFILE, operations=OPEN),
    Fault("EACCES", 1, errno.EACCES, operations=OPEN | RENAME | REMOVE | MAKE),
    Fault("the disk is gone", 2),
    Fault("killed before", 3, kills=True),
    Fault("killed after", 4, kills=True),
    Fault("killed in a write", 5, kills=True, operations=WRITE),
    Fault("short", 6, operations=READ | WRITE),
    Fault("nothing is done", 7, lies=True, operations=WRITE | SYNC),
    Fault("a bit is flipped while it is written", 8, lies=True, operations=WRITE),
    Fault("a bit is flipped while it is read", 8, damages=True, operations=READ),
    Fault("slow", 9),
)
OPERATIONS = (ANY_OPERATION, OPEN, READ, WRITE, SYNC, RENAME, MAKE, REMOVE, TRUNCATE, CLOSE)


@dataclass(frozen=True)
class Outcome:
    """How a child ended. ``kind``: ok, refused, raw (an error of no kind of ours), killed, or died of a signal."""

    kind: str
    text: str = ""
    fault_met: bool = True


@dataclass(frozen=True)
class Job:
    """A program with its optimizer, and the number that tells its states apart."""

    program: Any
    optimizer: torch.optim.Optimizer
    counter: list[int] = field(default_factory=lambda: [0])

    @classmethod
    def make(cls, seed: int) -> Job:
        """Compile a small model."""
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
        program = quintnet.compile(model, quintnet.Mesh(dp=1), _batch(0), loss_fn=F.mse_loss)
        return cls(program, torch.optim.AdamW(program.parameters(), lr=1e-2))

    def train(self) -> None:
        """Take a step of training."""
        self.counter[0] += 1
        self.program.step(_batch(self.counter[0]))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, step: int, **options: Any) -> None:
        """Save with the counter beside."""
        self.program.save(folder, step=step, optimizer=self.optimizer, extra={"n": self.counter[0]}, **options)

    def load(self, folder: Path) -> tuple[int, State, list[str]]:
        """Load the newest checkpoint: its step, the state, and the texts of warnings."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            restored = self.program.load(folder, optimizer=self.optimizer)
        return restored.step, self.state(restored.extra["n"]), [str(entry.message) for entry in caught]

    def state(self, number: int | None = None) -> State:
        """Return a digest of parameters, optimizer states and the counter."""
        digest = sha256(str(self.counter[0] if number is None else number).encode())
        for name, parameter in sorted(self.program.named_parameters()):
            digest.update(name.encode() + _bytes(parameter))
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                digest.update(key.encode() + _bytes(torch.as_tensor(value)))
        return digest.hexdigest()[:16]


def _batch(number: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(1000 + number)
    return torch.randn(4, 6, generator=dice), torch.randn(4, 3, generator=dice)


def _bytes(x: Tensor) -> bytes:
    return x.detach().contiguous().view(torch.uint8).numpy().tobytes() if x.dim() else str(x.item()).encode()


class Injector:
    """Faults in this process, by the library that was loaded before libc."""

    def __init__(self) -> None:
        """
        Raises:
            RuntimeError: if LD_PRELOAD does not name the library.
        """
        self.library = ctypes.CDLL(None)
        if not hasattr(self.library, "faults_arm"):
            raise RuntimeError("LD_PRELOAD must name the library that file_faults.c makes")
        self.library.faults_arm.argtypes = [ctypes.c_int] * 3 + [ctypes.c_char_p] + [ctypes.c_int] * 2

    def forbid_exchange(self, forbid: bool) -> None:
        """Behave as a file system that cannot exchange two names."""
        self.library.faults_forbid_exchange(int(forbid))

    def arm(self, fault: Fault, number: int, operations: int, folder: Path) -> None:
        """Let the ``number``-th of ``operations`` below ``folder`` fail."""
        self.library.faults_arm(fault.action, number, operations, str(folder).encode(), fault.error, 1000)

    def disarm(self) -> bool:
        """Let nothing fail any more. Return whether the fault was met."""
        self.library.faults_disarm()
        return bool(self.library.faults_happened())


def in_child(work: Callable[[], str], before: Callable[[], None], after: Callable[[], bool]) -> Outcome:
    """Run ``work`` in a forked child, between ``before`` and ``after``."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _report(work, before, after, writing)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return Outcome("killed") if number == signal.SIGKILL else Outcome("died", signal.Signals(number).name)
    return Outcome(*json.loads(answer))


def _report(work: Callable[[], str], before: Callable[[], None], after: Callable[[], bool], pipe: int) -> None:
    """Write how ``work`` ended into a pipe, and end the process."""
    try:
        signal.alarm(CHILD_SECONDS)
        before()
        try:
            kind, text = "ok", work()
        except quintnet.QuintNetError as error:
            kind, text = "refused", str(error)
        except BaseException as error:  # the parent says that it should not have been
            kind, text = "raw", f"{type(error).__name__}: {error}"
        os.write(pipe, json.dumps([kind, text, after()]).encode())
    finally:
        os._exit(0)


@dataclass
class Case:
    """One drawn case: what is there, what is done, and what may be there afterwards."""

    number: int
    dice: random.Random
    folder: Path
    writer: Job
    reader: Job
    injector: Injector
    saved: dict[int, State] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    description: str = ""

    def save(self, step: int) -> None:
        """Train, save without a fault, and remember the state."""
        self.writer.train()
        self.writer.save(self.folder, step)
        self.saved[step] = self.writer.state()

    def release(self) -> None:
        """Let another process write into the folder."""
        self.writer.program._locks.release()

    def draw(self, faults: Sequence[Fault]) -> tuple[Fault, int, int]:
        """Draw a fault, the operations that it concerns, and at which of them it happens."""
        fault = self.dice.choice(faults)
        operations = self.dice.choice(OPERATIONS) & fault.operations or fault.operations
        number = self.dice.randrange(1, 60 if operations in (ANY_OPERATION, READ, OPEN) else 8)
        self.description = f"{fault.name} at operation {number} of {operations:#x}"
        return fault, operations, number

    def run(self, work: Callable[[], str], faults: Sequence[Fault]) -> tuple[Fault, Outcome]:
        """Run ``work`` in a child with a drawn fault."""
        fault, operations, number = self.draw(faults)
        outcome = in_child(
            work, lambda: self.injector.arm(fault, number, operations, self.folder), self.injector.disarm
        )
        self.description += f": {outcome.kind} {outcome.text}"
        if outcome.kind in ("raw", "died"):
            self.problem("an error that is not ours")
        return fault, outcome

    def problem(self, text: str) -> None:
        """Note what was wrong."""
        self.problems.append(text)

    def check_folder(self, allowed: Mapping[int, set[State]], lied: bool) -> tuple[int, State] | None:
        """Load without a fault and compare with what may be there. Return what is there."""
        try:
            step, state, texts = self.reader.load(self.folder)
        except quintnet.QuintNetError as error:
            if not lied:
                self.problem(f"nothing can be loaded: {error}")
            return None
        if state not in allowed.get(step, set()):
            self.problem(f"step {step} has a state that was not saved as that, or one that is not the newest")
        if texts and not lied:
            self.problem(f"a warning though no file is damaged: {texts}")
        return step, state

    def check_next_save(self) -> None:
        """Save once more and load it."""
        step = max(self.saved, default=0) + 10
        self.writer.train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.writer.save(self.folder, step)
                loaded, state, _ = self.reader.load(self.folder)
            except quintnet.QuintNetError as error:
                return self.problem(f"the next save: {error}")
        if (loaded, state) != (step, self.writer.state()):
            self.problem(f"the next save: step {loaded} was loaded, and {step} was saved")
        leftovers = [name for name in os.listdir(self.folder) if name.startswith(".step")]
        if leftovers:
            self.problem(f"left after the next save: {leftovers}")


def save_case(case: Case, faults: Sequence[Fault]) -> bool:
    """Save with a fault: a new step, one in place of another, with ``keep``, in the background, or an earlier step."""
    steps = case.dice.choice([[1], [1, 2], [1, 2, 3]])
    for step in steps:
        case.save(step)
    case.release()
    case.writer.train()
    last, state = steps[-1], case.writer.state()
    way = case.dice.choice(["new", "overwrite", "keep", "background", "back"])
    step = {"overwrite": last, "back": case.dice.randrange(0, last)}.get(way, last + 1)
    options = {"keep": case.dice.choice([1, 2])} if way == "keep" or case.dice.random() < 0.3 else {}

    def work() -> str:
        if way == "background":
            arguments = {"step": step, "optimizer": case.writer.optimizer, "extra": {"n": case.writer.counter[0]}}
            return str(case.writer.program.save_async(case.folder, **arguments).result())
        case.writer.save(case.folder, step, **options)
        return ""

    fault, outcome = case.run(work, [fault for fault in faults if fault.operations != READ])
    case.description = f"save ({way} {options}, steps {steps} then {step}), {case.description}"
    before = {number: {saved} for number, saved in case.saved.items()}
    newest = {last: before[last]}
    if outcome.kind == "ok" and not fault.lies:
        allowed = {step: {state}}
    elif outcome.kind == "ok":
        allowed = {**before, step: {state, *before.get(step, set())}}
    else:
        allowed = {**newest, step: {state, *newest.get(step, set())}}
    there = case.check_folder(allowed, fault.lies)
    if outcome.kind == "refused" and there == (step, state) and "has its name" not in outcome.text:
        case.problem("refused, and the checkpoint is there")
    if outcome.kind == "refused" and there != (step, state) and "is whole and has its name" in outcome.text:
        case.problem("said to be there, and it is not")
    case.saved[step] = state
    case.check_next_save()
    return outcome.fault_met


def load_case(case: Case, faults: Sequence[Fault]) -> bool:
    """Load with a fault: the newest state, or an error; nothing of the folder changes."""
    steps = case.dice.choice([[1], [1, 2], [1, 2, 3]])
    for step in steps:
        case.save(step)
    case.release()
    last = steps[-1]
    untouched = case.reader.state(0)

    def work() -> str:
        try:
            return json.dumps(case.reader.load(case.folder))
        except quintnet.QuintNetError:
            if case.reader.state(0) != untouched:
                raise RuntimeError("a load that was refused changed the program") from None
            raise

    fault, outcome = case.run(work, [fault for fault in faults if not fault.lies])
    case.description = f"load (steps {steps}), {case.description}"
    if outcome.kind == "ok":
        step, state, texts = json.loads(outcome.text)
        if state != case.saved[step]:
            case.problem("what was loaded was not saved")
        if step != last and not (fault.damages and texts):
            case.problem(f"an older step was loaded: {texts}")
    case.check_folder({last: {case.saved[last]}}, lied=False)
    case.check_next_save()
    return outcome.fault_met


def reader_case(case: Case, faults: Sequence[Fault]) -> bool:
    """Load with a fault while another process saves: over the same step, or growing steps of which some are kept."""
    rotates, keep = case.dice.random() < 0.5, case.dice.choice([1, 2, 3])
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _write_until_closed(case, writing, rotates, keep)
    os.close(writing)

    def work() -> str:
        states = []
        for _ in range(5):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                restored = case.reader.program.load(case.folder, optimizer=case.reader.optimizer)
            values = {float(x) for p in case.reader.program.parameters() for x in p.detach().unique()}
            states.append(sorted({*values, float(restored.extra["n"])}))
        return json.dumps(states)

    os.read(reading, 1)  # the first of the writer's states is there
    fault, outcome = case.run(work, [fault for fault in faults if not fault.lies and not fault.kills])
    os.close(reading)
    os.waitpid(child, 0)
    case.description = f"load beside a writer (rotates: {rotates}, keep {keep}), {case.description}"
    if outcome.kind == "ok" and any(len(values) != 1 for values in json.loads(outcome.text)):
        case.problem(f"states are mixed: {outcome.text}")
    if outcome.kind == "refused" and (fault.name == "slow" or not outcome.fault_met):
        case.problem("a load beside a writer was refused, and no file failed")
    return outcome.fault_met


def _write_until_closed(case: Case, pipe: int, rotates: bool, keep: int) -> None:
    """Fill every parameter with a number and save, again and again, until the pipe has no reader."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.alarm(CHILD_SECONDS)
    try:
        step = 1
        for value in range(1, 100_000):
            step += rotates
            with torch.no_grad():
                for parameter in case.writer.program.parameters():
                    parameter.fill_(value)
            extra = {"n": value}
            case.writer.program.save(case.folder, step=step, keep=keep, optimizer=case.writer.optimizer, extra=extra)
            os.write(pipe, b".")
    except BrokenPipeError:
        pass
    finally:
        os._exit(0)


def exit_case(case: Case, faults: Sequence[Fault]) -> bool:
    """Save in the background with a fault and end the process at once: the save is there, or it was said why not."""
    case.save(1)
    case.release()
    case.writer.train()
    state = case.writer.state()
    fault, operations, number = case.draw([fault for fault in faults if not fault.lies and fault.operations != READ])
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            signal.alarm(CHILD_SECONDS)
            case.injector.arm(fault, number, operations, case.folder)
            case.writer.program.save_async(
                case.folder, step=2, optimizer=case.writer.optimizer, extra={"n": case.writer.counter[0]}
            )
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        text = output.read().decode()
    case.description = f"exit after save_async, {case.description}: status {status}, {text[-600:]}"
    there = case.check_folder({1: {case.saved[1]}, 2: {state}}, lied=False)
    if not status and not text and there != (2, state):
        case.problem("a save that was started is lost, and nothing was said")
    if os.WIFSIGNALED(status) and not fault.kills:
        case.problem("died of a signal")
    case.saved[2] = state
    case.check_next_save()
    return True


KINDS = (save_case, save_case, load_case, reader_case, exit_case)


def main() -> None:
    """Run cases and print what was wrong."""
    seed, cases = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    writer, reader, injector = Job.make(seed), Job.make(seed + 1), Injector()
    writer.train()
    root, met, parent = Path(tempfile.mkdtemp(prefix="file-faults-")), 0, os.getpid()
    try:
        for number in range(cases):
            dice = random.Random(f"{seed} {number}")
            injector.forbid_exchange(dice.random() < 0.2)
            case = Case(number, dice, root / str(number), writer, reader, injector)
            kind = KINDS[number % len(KINDS)]
            met += kind(case, FAULTS)
            case.release()
            shutil.rmtree(case.folder, ignore_errors=True)
            for problem in case.problems:
                print(json.dumps([number, problem, case.description]), flush=True)
    finally:
        if os.getpid() == parent:
            shutil.rmtree(root, ignore_errors=True)
    print(json.dumps({"cases": cases, "met": met}))


if __name__ == "__main__":
    main()
