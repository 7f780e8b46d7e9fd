"""Compiler passes: each a frozen dataclass that maps one program type to the next."""
