"""Checks of rewrites: a graph computes what the one before it computed."""
