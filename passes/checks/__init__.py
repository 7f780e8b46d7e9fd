"""Checks of what passes made. They share no code with the passes: only rule notation, which is data."""
