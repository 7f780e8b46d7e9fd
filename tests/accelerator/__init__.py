"""An accelerator that is host memory, and a process group with NCCL's rules: a GPU's hazards on a machine without one.

``device``: a PrivateUse1 device whose kernels are the CPU's. They run on streams, later than the host launches them;
memory is poison until it is written and after it is freed; devices have indices and do not mix; what makes the host
wait, copies and kernels are counted. ``process_group``: collectives on streams of their own, with communicators that
are made as NCCL makes them, lazily or one for each group. Only the tests use this.
"""
