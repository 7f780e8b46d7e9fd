"""Derivatives that a model's author wrote, or takes in forward, as operators."""
