"""The intermediate programs, one type per stage of the compiler, with their builder, printer and invariants.

Imports ``core``, ``ops``, ``schedules`` and ``guards``.
"""
