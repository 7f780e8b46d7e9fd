"""How operators may be sharded: rules in factor notation, the table of operators, and the strategies that rules allow.

Imports ``core``, ``ops`` and ``ir``; no other pass.
"""
