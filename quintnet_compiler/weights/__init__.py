"""Weights: safetensors files, names and conversions, and initial values of parameters.

Imports ``core`` only.
"""
