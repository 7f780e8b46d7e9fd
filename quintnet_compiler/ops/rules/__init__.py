"""How operators may be sharded: rules in factor notation, and the table of operators.

Imports ``core``, ``compat`` and the rest of ``ops``; cost models read from it what an operator sums over.
"""
