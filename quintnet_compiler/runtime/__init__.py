"""Runs compiled programs: processes, transports, state, the schedule's interpreter.

With ``checkpoint``, the only package that imports ``torch.distributed``.
"""
