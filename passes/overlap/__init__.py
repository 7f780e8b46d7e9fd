"""Communication beside computation: reordering, and matmuls fused with collectives.

Imports ``autodiff`` and below.
"""
