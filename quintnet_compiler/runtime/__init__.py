"""Runs compiled programs: processes, transports, state, the schedule's interpreter.

With ``checkpoint`` (and ``compat``, for private names), the only package that imports ``torch.distributed``.
"""
