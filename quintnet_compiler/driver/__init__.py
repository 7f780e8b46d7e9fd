"""The passes in order, and the programs of one model (training, evaluation, outputs) that share parameters.

Imports every layer below; ``planner`` and ``api`` use it.
"""
