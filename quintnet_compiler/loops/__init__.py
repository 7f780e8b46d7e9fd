"""Compiled programs inside of other libraries' training loops."""
