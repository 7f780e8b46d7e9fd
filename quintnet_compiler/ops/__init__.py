"""Operators: torch custom operators, and facts about all of them (sharding rules, prices, precision).

Imports ``core`` only.
"""
