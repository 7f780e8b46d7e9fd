"""Hugging Face models as they are: their attention and registries while they are traced, and their parallel plans.

Imports ``core``, ``ops``, ``ir`` and ``weights``.
"""
