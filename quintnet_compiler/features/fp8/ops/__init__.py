"""Operators of 8-bit numbers with scales, and how they may be sharded."""
