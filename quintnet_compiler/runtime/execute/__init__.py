"""Carries out a rank's actions: the interpreter of schedules, and the engines that run generated functions.

Imports ``state`` and below.
"""
