"""Every error: its first line, why it happens, and what to do.

Messages, ``quintnet explain`` and docs/errors.md are made from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class ErrorEntry:
    """An error's first line, why it happens, and what to do."""

    summary: str
    why: str
    fix: str


ERRORS: Mapping[str, ErrorEntry] = MappingProxyType(
    {
        "QN101": ErrorEntry(
            "the model cannot be traced",
            "torch.export cannot follow the model's Python code: it needs a tensor's values (an `if` on data, "
            ".item(), .numpy()), or calls something that cannot be traced. The message has the line.",
            "Decide by shapes or configuration instead of by values, or use torch.where; move reporting "
            "(printing, logging) out of forward.",
        ),
        "QN102": ErrorEntry(
            "the batch does not fit the program",
            "There was no batch yet, a batch is neither a tuple nor a dict of tensors, has no rows, or holds NumPy "
            "arrays or objects of other classes, or ranks were given different batches, or changed their modules in "
            "different ways.",
            "Give compile a batch, or call prepare(batch); read the same data on every rank.",
        ),
        "QN103": ErrorEntry(
            "there is no scalar loss",
            "A training program needs one scalar to differentiate, but the model does not return one, and "
            "there is no loss_fn. Or there is one, and the batch is a dict, of which no value is left for it.",
            "Pass loss_fn= and a tuple, return the loss, or return an object with .loss.",
        ),
        "QN104": ErrorEntry(
            "the loss cannot be split into microbatches",
            "An operator cannot run on a part of the batch: it combines rows (contrastive losses, "
            "statistics), needs a sum over all rows, or its rule cannot split rows. The message says which.",
            "Use microbatches=1, or write the loss as a sum or a mean over rows; or, if each microbatch shall be a "
            'batch of its own, batch_statistics="microbatch".',
        ),
        "QN105": ErrorEntry(
            "the model uses something that is not supported yet",
            "The model uses something that would not give the unsplit model's gradients (hooks without a result, "
            "other random generators, models that another library has split, ...), so it is refused rather than "
            "approximated.",
            "The message names what and where; it suggests what to use instead.",
        ),
        "QN106": ErrorEntry(
            "the batch does not divide",
            "The batch's rows do not divide over data ranks and microbatches, and this program needs rows that do: its "
            "microbatches are batches of their own, an operator may not see padding, a single row would be spread over "
            "ep, or the model's code fixes the number of rows.",
            "Use the number of rows in the message, or drop the last incomplete batch of a loader.",
        ),
        "QN107": ErrorEntry(
            "the program is for inference",
            "The program was compiled with training=False: it has no backward.",
            "To call step or verify, compile without training=False.",
        ),
        "QN108": ErrorEntry(
            "an option is not valid",
            "An option has a value that does not exist.",
            "The message lists the valid values.",
        ),
        "QN109": ErrorEntry(
            "an operator cannot be rewritten",
            "An operator that was traced fails when its program is built, whatever the number of rows. The "
            "message has the operator and torch's error.",
            "Check whether model(*batch) works on this device; then write that line with other operators.",
        ),
        "QN110": ErrorEntry(
            "forward changes something, or draws what is drawn once",
            "A program returns its results and the new values of buffers and parameters. Any other effect of forward "
            "(it counts in an attribute, keeps a tensor there, changes its batch, draws Python's random numbers) "
            "would happen once, during tracing, and never again. A new value may not require a gradient, nor share its "
            "memory with another tensor, nor take the place of one that autograd has saved for the backward.",
            "The message names what changes and the line. Change it outside of forward, return it, or keep it "
            "in a buffer; put numbers that change with every step into the batch.",
        ),
        "QN111": ErrorEntry(
            "the program differs from the module",
            "Before anything trains, the traced program is compared with the module itself on a few rows of "
            "the batch: the loss, every gradient, and what forward changes. They differ.",
            "The message says which results differ, and the first operator that does. Write that line so that "
            'tracing can follow it. check="off" turns the comparison off: the traced program is trained as it '
            "is.",
        ),
        "QN112": ErrorEntry(
            "the module changed, and the program cannot follow",
            "Something that the program depends on was replaced, added or removed: a part or a parameter of "
            "the module. Changes of modes, attributes and requires_grad need no action: another program is "
            "compiled for them.",
            "Compile the module again after changing it, and give the new program's parameters to the optimizer.",
        ),
        "QN113": ErrorEntry(
            "a split program cannot serve this use of the module",
            "Code that is correct for a module in one process asks for something that a split program does "
            "not have: outputs of model(x) on a rank with parts of the weights, the backward of a loss whose "
            "gradients exist already, a norm of one stage's gradients alone.",
            "The message has the call to use instead.",
        ),
        "QN114": ErrorEntry(
            "a fake kernel is wrong",
            "The fake kernel of a custom operator (register_fake) says what the operator returns, and a program is "
            "built of that. The operator ran on small inputs, and returned other sizes, strides, dtypes or another "
            "number of tensors, or wrote to an argument of which its schema does not say so.",
            "Return tensors of the operator's own sizes, strides and dtypes from register_fake; name what it writes to "
            "in mutates_args.",
        ),
        "QN201": ErrorEntry(
            "the mesh is not valid",
            "An axis is unknown, its size is not a whole number, or a plan asks for an axis that the mesh "
            "does not have.",
            "Axes are pp, dp, ep, cp and tp; the mesh's sizes multiply to the number of ranks.",
        ),
        "QN202": ErrorEntry(
            "an operator has no sharding rule",
            "The compiler splits an operator only by a rule, and this one has none. Guessing could be silently wrong.",
            'Run it unsplit with plan={"unknown_ops": "replicate"}; or add one line, '
            'rules=[quintnet.rule(op, "b n, n k -> b k")], with one group of names for each tensor, those in lists and '
            "tuples too. quintnet.find_rule(op, *samples) finds that line by trial.",
        ),
        "QN203": ErrorEntry(
            "the layout does not divide",
            "A size (heads, rows, channels) is not a multiple of the number of ranks that share it. Nothing "
            "is ever padded or dropped silently.",
            'Use a size of the axis that divides, or leave the parameter whole: plan={"parameters": '
            '{"*.name": {"tp": "I"}}}.',
        ),
        "QN204": ErrorEntry(
            "the plan names something that the model does not have",
            "A plan, or a question, names a module or parameter that the model does not have. Rules that "
            "match nothing are errors, because they usually are typos.",
            "Compare with model.named_parameters(); the message has the closest names.",
        ),
        "QN205": ErrorEntry(
            "no sharding satisfies the plan",
            "No strategy of some operator satisfies everything that the plan fixes and the axes allow.",
            "If the plan fixes parameters, fix fewer, or those of one module at a time.",
        ),
        "QN206": ErrorEntry(
            "the pipeline cannot be cut",
            "The model has fewer places to cut than stages were asked for, or the cuts are out of order.",
            "Use a smaller pp or fewer virtual_stages, or name stages in the order in which the model runs.",
        ),
        "QN207": ErrorEntry(
            "the plan document is not valid",
            "The plan is not a valid document: an unknown key, a wrong type, or decisions that contradict each other.",
            "The message has the key. quintnet.Plan() shows all keys and their defaults.",
        ),
        "QN208": ErrorEntry(
            "the schedule is not valid",
            "A schedule would compute something before its inputs exist, twice or never, or could deadlock.",
            "Use one of the schedules by name; the message has the rank and the place in its order.",
        ),
        "QN209": ErrorEntry(
            "a compiled program failed a check of the compiler",
            "A program failed a check that every program must pass before it runs: the compiler has made a mistake.",
            "Open an issue with the form for bugs: it asks for the model and what `quintnet doctor` prints.",
        ),
        "QN210": ErrorEntry(
            "the cost model has no price for this",
            "An operator or a collective has no price, so a prediction with it would be too low.",
            "Measure it with quintnet calibrate, or give the operator's cost.",
        ),
        "QN211": ErrorEntry(
            "the calibration or the timeline is not valid",
            "The file is not a calibration or timeline of this version, or its numbers or its layout are impossible.",
            "Make it again: quintnet calibrate --out machine.json; quintnet measure TARGET --out step.json.",
        ),
        "QN212": ErrorEntry(
            "no layout fits the cluster",
            "No layout that was allowed fits into the devices' memory, or none was found in time.",
            "The message has the smallest change after which something fits; or search longer with --seconds.",
        ),
        "QN213": ErrorEntry(
            "the budget of saved values is too small",
            "Even with everything recomputed, the backward needs more saved values than "
            "activation_memory_budget allows.",
            "Allow what the message says, use more microbatches, or split the model further.",
        ),
        "QN214": ErrorEntry(
            "a partial sum would be rounded before it is added up",
            "A value is a sum whose terms lie on several ranks, and the terms would be rounded before they "
            "are added up.",
            'Use sum_dtype="float32", or leave the operator that the message names unsplit.',
        ),
        "QN215": ErrorEntry(
            "the precision does not fit the model",
            "The precision does not fit the model's dtype: 16-bit copies need float32 parameters.",
            'Use precision="model", or give the model float32 parameters.',
        ),
        "QN216": ErrorEntry(
            "a question to the planner is not valid",
            "An objective, a price, a number of tokens, a reserve of memory or a number of devices is none that the "
            "planner can answer for.",
            "The message has what is possible. A price is of one device and hour; a reserve is a share of its memory.",
        ),
        "QN301": ErrorEntry(
            "the mesh does not fit the world",
            "The mesh has a different number of ranks than there are processes (or devices).",
            "Start as many processes as the sizes of the mesh multiply to.",
        ),
        "QN302": ErrorEntry(
            "a launched process failed",
            "A process that launch started raised an error, or ended. The first failure is shown; the others followed.",
            "Look at the first traceback. A negative exit code is a signal: -9 often means out of memory.",
        ),
        "QN303": ErrorEntry(
            "a rank does not answer",
            "A rank was stopped (SIGSTOP) or sent no heartbeat for too long, while the others wait for it. The message "
            "names it, and where the others' stacks are. One that a debugger holds is waited for, as long as "
            "collective_timeout says.",
            "Continue the rank, or end it: with restarts= all ranks start again from their checkpoint.",
        ),
        "QN304": ErrorEntry(
            "the run takes too long",
            "The run took longer than launch's timeout, which limits the whole run; or ranks that were asked to end "
            "took longer than its grace.",
            "Give a longer timeout, or none; collective_timeout is how long ranks wait for each other. Give a longer "
            "grace if saving takes as long.",
        ),
        "QN305": ErrorEntry(
            "the program is for a GPU that is not here",
            'A program was compiled for a kind of GPU that this machine does not have, because device="cuda" or a '
            "cluster of GPUs was asked for. It can be dumped, explained and simulated, and cannot run. The module's "
            "parameters stay as they were.",
            'Run it on a machine with such GPUs; or compile with device="cpu" for a program that runs here.',
        ),
        "QN306": ErrorEntry(
            "a signal cannot be handled here",
            "A run was to save itself when a scheduler sends it a signal. Python handles signals in the main thread of "
            "a process only, and some (SIGKILL, SIGSTOP) cannot be handled at all.",
            "Train in the main thread; or give no signals: Trainer(preempt_signals=()).",
        ),
        "QN307": ErrorEntry(
            "launch cannot start its ranks",
            "Ranks are processes of their own. They import the script that launched them, and its import must not "
            "launch ranks again. The function and its arguments are sent to them, which locks, open files, generators "
            "and compiled programs cannot be. They need the machine's loopback and room in TMPDIR, and a daemonic "
            "process may start none.",
            'Call launch below `if __name__ == "__main__":`; make what cannot be sent inside the function.',
        ),
        "QN401": ErrorEntry(
            "ranks disagree about communication",
            "Two ranks called different collectives, or the same one with different shapes or dtypes (a desync); or "
            "one made a call that the others did not make, such as save or clip_grad_norm.",
            "The message has both operators or calls, and their source lines. Ranks must see batches of equal shapes, "
            "and make the same calls in the same order.",
        ),
        "QN402": ErrorEntry(
            "a rank waits for something that never comes",
            "A rank waits for a message or a collective of a rank that never reaches it.",
            "Look at what the other rank does: it has finished, it ended, or it runs other code.",
        ),
        "QN403": ErrorEntry(
            "ranks run different programs",
            "Ranks compiled different programs: the model, the plan or a version differs.",
            "Give all ranks the same code, plan and versions; quintnet diff compares their dumps.",
        ),
        "QN404": ErrorEntry(
            "ranks hold different values",
            "Ranks run the same program on different values: their modules were built with different seeds or "
            "loaded from different files, they were given different batches, or one of them changed a parameter or a "
            "setting of its optimizer alone. The message says which ranks, and which tensors or settings.",
            "Seed before the module is built, load the same file, and read the same global batch on every "
            "rank; a data rank's own rows are batch_is_local=True. Change parameters and optimizers on all ranks.",
        ),
        "QN405": ErrorEntry(
            "the device is out of memory",
            "A rank's step needs more memory than its device has (or, on a CPU, than the host gives). The message has "
            "the rank, what torch says, the operator and its line, what was alive on the rank, and the peak that the "
            "program's simulation predicts, for some other options too.",
            'Use more microbatches, recompute="selective" or "full", zero=3, or a larger mesh; program.simulate().peak '
            "predicts what each needs.",
        ),
        "QN406": ErrorEntry(
            "a kernel failed on the device",
            "Work on a device failed, often some lines before the one where it is noticed. After it, the process "
            "cannot use the device any more.",
            "Compare ids and labels with the model's sizes; device='cpu', or CUDA_LAUNCH_BLOCKING=1, shows the line.",
        ),
        "QN407": ErrorEntry(
            "communication between devices failed",
            "NCCL failed on this rank: a call of the system or of CUDA, or two ranks on one GPU, which it has from "
            "version 2.30 on alone. The message has what it said.",
            "NCCL_DEBUG=WARN makes NCCL say which call failed. In containers, see the size of /dev/shm. Ranks may "
            "share a GPU with NCCL 2.30 or later and NCCL_MULTI_RANK_GPU_ENABLE=1.",
        ),
        "QN501": ErrorEntry(
            "a value is not finite",
            "The loss or a gradient is NaN or Inf. No parameter was changed on any rank.",
            "The message has the first operator, rank and microbatch. Look at the data there, and the learning rate.",
        ),
        "QN601": ErrorEntry(
            "weights or a checkpoint cannot be read",
            "A file is missing or truncated, or its bytes are not those that were written (hashes).",
            "Load an older checkpoint, or fetch the weights again. Pickles are refused on purpose.",
        ),
        "QN602": ErrorEntry(
            "weights or a checkpoint do not fit the model",
            "Weights on disk have other names, shapes or dtypes than the model. No parameter was changed.",
            "Build the model with the configuration of the weights.",
        ),
        "QN603": ErrorEntry(
            "weights or a checkpoint cannot be written",
            "Writing failed: no space, no permission, or something else is where files should be. What was there "
            "before is untouched.",
            "Free space, or write elsewhere.",
        ),
        "QN604": ErrorEntry(
            "a tensor has no values yet",
            "A parameter or buffer is on the meta device: it has a shape but no values.",
            "Load weights or initialise them first.",
        ),
        "QN701": ErrorEntry(
            "a name cannot be used safely",
            "The name of a module, a key, or a path could run as code or write outside its folder.",
            "Rename it: letters, digits, '_' and a few harmless signs.",
        ),
    }
)
