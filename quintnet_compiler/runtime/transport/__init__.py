"""How values travel between ranks: in one process, on torch.distributed, in rings.

Imports ``launch`` and below.
"""
