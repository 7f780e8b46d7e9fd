"""Cost models: hardware constants with their sources, and what they predict."""
