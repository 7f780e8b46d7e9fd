"""Answers between plans, features and all layers: fields of theirs, and what hosts hold."""
