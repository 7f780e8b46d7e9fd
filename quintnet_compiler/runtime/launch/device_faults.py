"""What errors of accelerators, and of NCCL between them, mean: torch's text in, an error of ours out.

The texts are those of torch's ProcessGroupNCCL.cpp and NCCLUtils.cpp, of NCCL's ``ncclGetErrorString``, and of CUDA.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.errors import QuintNetError, RunError, Where

WORK = re.compile(r"OpType=(\w+).*?NumelIn=(\d+).*?Timeout\(ms\)=(\d+)")  # of the watchdog's message


@dataclass(frozen=True)
class Symptom:
    """A text that torch's error has in it, what it means, and what to do."""

    text: str
    code: str
    meaning: str
    fix: str


_NETWORK = "run again with NCCL_DEBUG=WARN: NCCL then says which call failed, on which interface"
SYMPTOMS = (  # the first that fits: what names its cause comes first
    Symptom(
        r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|not enough memory|can't allocate memory|std::bad_alloc",
        "QN405",
        "the device has no memory left",
        'more microbatches, recompute="selective" or "full", zero=3, or a larger mesh: program.simulate().peak says '
        "what each needs",
    ),
    Symptom(
        r"device-side assert triggered",
        "QN406",
        "a kernel found an index out of range (a token id or a label that the model does not have, most often)",
        "compare the batch's largest and smallest ids with the model's sizes; device='cpu' names the operator",
    ),
    Symptom(
        r"CUDA error: (an illegal memory access|unspecified launch failure|misaligned address|an illegal instruction)",
        "QN406",
        "a kernel failed, in this operator or before it",
        "run again with CUDA_LAUNCH_BLOCKING=1, which names the operator",
    ),
    Symptom(
        r"Duplicate GPU detected|ncclInvalidUsage|invalid usage",
        "QN407",
        "NCCL was asked for what it does not do: two ranks on one GPU, most often",
        "start at most as many processes as there are GPUs, each with its own LOCAL_RANK; or take NCCL 2.30 or later "
        "with NCCL_MULTI_RANK_GPU_ENABLE=1, which lets ranks share one",
    ),
    Symptom(
        r"is setting up NCCL communicator and retrieving",
        "QN402",
        "this rank connects to the others, and the first of them does not come",
        "see what the first rank does: it ended, or is in other code",
    ),
    Symptom(
        r"Watchdog caught collective operation timeout|Timeout at NCCL work",
        "QN402",
        "a collective was started, and another rank did not come to it in time",
        "see what the other ranks do, or wait longer for them (collective_timeout)",
    ),
    Symptom(
        r"ncclRemoteError|remote process exited or there was a network error|Connection closed by remote peer",
        "QN402",
        "another rank ended, or the network to it failed",
        "look for the first rank that failed; if none did, " + _NETWORK,
    ),
    Symptom(
        r"NCCL communicator was aborted",
        "QN402",
        "communication was given up, after an error or because a rank did not come",
        "look for the first rank that failed",
    ),
    Symptom(
        r"ncclUnhandledCudaError|unhandled cuda error",
        "QN407",
        "a call of CUDA failed within NCCL: an earlier kernel, a full device, or a driver older than this NCCL",
        "look for an earlier error of this rank; " + _NETWORK,
    ),
    Symptom(
        r"ncclSystemError|unhandled system error",
        "QN407",
        "a call of the system failed within NCCL: shared memory, or a network interface",
        "in containers, give /dev/shm more room (--shm-size); " + _NETWORK,
    ),
    Symptom(r"NCCL error|ncclInternalError", "QN407", "NCCL failed", _NETWORK),
)


def symptom_of(error: BaseException | None) -> Symptom | None:
    """Return the symptom that an error, or its cause, shows; None for what is no fault of a device."""
    while error is not None:
        text = str(error)
        symptom = next((symptom for symptom in SYMPTOMS if re.search(symptom.text, text)), None)
        if symptom is not None:
            return symptom
        error = error.__cause__ or error.__context__
    return None


def explained(error: RuntimeError, rank: int, step: int, sites: Sequence[str]) -> RunError | None:
    """Return an error that names the rank, the step, the collective and the module's line, as far as they are known.

    None if it is not the fault of a device or of NCCL. Device work is asynchronous: without a collective's line, it
    failed before the line that the traceback ends in.
    """
    symptom = None if isinstance(error, QuintNetError) else symptom_of(error)
    if symptom is None:
        return None
    lines = [f"rank {rank} in step {step}: {symptom.meaning}"]
    work = WORK.search(str(error))
    if work is not None:
        kind, elements, limit = work.groups()
        lines.append(f"{kind.lower()} of {elements} elements, given up after {int(limit) / 1000:g} s")
    lines.append(f"torch: {_line(error, symptom)}")
    _, _, last = str(error).partition("Last error:\n")
    lines += [f"NCCL: {last.splitlines()[0][:300]}"] if last.strip() else []
    return RunError(symptom.code, "\n  ".join(lines), where=Where(place_of(error, sites)), fix=symptom.fix)


def place_of(error: BaseException, sites: Sequence[str]) -> str:
    """Return the collective of an error with its module and line; or the transfer between stages; or ""."""
    place, frame = "", error.__traceback__
    while frame is not None:
        code, variables = frame.tb_frame.f_code, frame.tb_frame.f_locals
        if "/runtime/transport/" in code.co_filename or code.co_filename.endswith("/runtime/execute/comm.py"):
            at = variables.get("at", variables["args"][-1] if variables.get("args") else None)
            if isinstance(at, int) and 0 <= at < len(sites):
                place = sites[at]
            elif isinstance(variables.get("label"), str):
                place = variables["label"]
        frame = frame.tb_next
    return place


def _line(error: BaseException, symptom: Symptom) -> str:
    """Return the line of the text that shows the symptom, without where in torch it was written."""
    lines = [line for line in str(error).splitlines() if re.search(symptom.text, line)] or str(error).splitlines()[:1]
    return re.sub(r"^\[\S+ ?\S*\] (?=Watchdog)|^NCCL error in: \S+, ", "", lines[0] if lines else "")[:300]
