"""Weights in files (safetensors, names, conversions) and initial values of parameters.

Imports ``core`` only.
"""
