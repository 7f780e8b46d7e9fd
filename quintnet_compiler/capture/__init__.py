"""From an ``nn.Module`` to a captured graph: torch.export, watched, with user-made derivatives and hooks as nodes.

Imports ``core``, ``ops``, ``ir``, ``guards`` and ``huggingface``.
"""
