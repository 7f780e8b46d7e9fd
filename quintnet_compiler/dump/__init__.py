"""Dump folders: everything that a person needs to see what runs."""
