"""The public functions and the compiled program that they return.

Imports everything below but the command line and ``training``.
"""
