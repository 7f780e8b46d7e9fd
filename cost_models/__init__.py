"""Cost models: hardware constants with their sources, and predictions of time and memory."""
