"""Private names of torch and transformers, in one place, and what differs between supported versions.

No other module imports one, or reads a private attribute of their objects; ``tests/test_compat.py`` checks that, and
that each name exists. Each name has a line that says what it is for, and what would replace it. ``torch``: tensors,
operators, graphs; ``torch_hooks``: hooks and the derivatives that users write; ``torch_constants``: values that a trace
knows; ``torch_inductor``: kernels; ``distributed``: process groups and DTensor, for the runtime and checkpoints alone;
``transformers``: Hugging Face models, without importing it before one is there.

Two kinds of underscored names are used everywhere. ``Module._parameters``, ``._buffers`` and ``._modules`` are what
``Module.__getattr__`` itself reads, and other libraries depend on them. Operators such as ``aten._to_copy`` are data:
one that is gone is an error where its table is imported.
"""
