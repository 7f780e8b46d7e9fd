"""Texts continued token by token: programs for prompts and for further tokens, which share pages of caches."""
