"""Checks that run between the passes: each proves a program, from tables of its own.

They share no code with the passes: only rule notation, which is data.
"""
