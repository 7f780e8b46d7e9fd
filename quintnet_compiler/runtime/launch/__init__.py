"""Processes: how ranks start, meet, watch each other and end.

Imports ``core`` only.
"""
