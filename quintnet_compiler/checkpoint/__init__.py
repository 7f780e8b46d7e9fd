"""Checkpoints of training state: any layout reads what any layout wrote.

With ``runtime``, the only package that imports ``torch.distributed``.
"""
