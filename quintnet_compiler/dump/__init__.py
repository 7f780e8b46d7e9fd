"""Dump folders: programs after each pass, generated code, communication and timelines as files and a page."""
