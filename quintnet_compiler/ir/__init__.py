"""The intermediate programs, one type per compiler stage, with builder, printer and invariants.

Imports ``core``, ``ops``, ``schedules`` and ``guards``.
"""
