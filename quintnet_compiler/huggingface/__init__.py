"""Support for Hugging Face models: attention and registries during tracing, and the models' own parallel plans.

Imports ``core``, ``ops``, ``ir`` and ``weights``.
"""
