"""Training loops, and what they read and write."""
