"""Threads of a process: whose turn it is to run a program, and what is still under way when the process ends.

Imports ``core`` and below.
"""
