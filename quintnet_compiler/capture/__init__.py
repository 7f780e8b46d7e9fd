"""From an ``nn.Module`` to a captured graph: torch.export, with user-defined derivatives and hooks as nodes.

Imports ``core``, ``ops``, ``ir``, ``guards`` and ``huggingface``.
"""
