"""Compiler passes: each a frozen dataclass or function from one program type to the next."""
