"""Reports for people: on a program, on a tensor's parts, on this machine.

Imports everything below ``driver``.
"""
