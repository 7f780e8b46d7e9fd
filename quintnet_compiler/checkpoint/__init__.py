"""Checkpoints of training state: any layout reads what any layout wrote.

With ``runtime`` (and ``compat``, for private names), the only package that imports ``torch.distributed``.
"""
