"""Pipeline schedules as data: generators, synthesis, checks.

Imports ``core`` only.
"""
