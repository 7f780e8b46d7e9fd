"""Pipeline schedules as data: how they are written, made, synthesised and checked.

Imports ``core`` only.
"""
