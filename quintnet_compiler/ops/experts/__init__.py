"""Layers of experts, and grouped products of rows in the order of their experts."""
