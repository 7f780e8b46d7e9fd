"""Explanations for people: of a program, of a tensor's parts, of this machine.

Imports everything below ``driver``.
"""
