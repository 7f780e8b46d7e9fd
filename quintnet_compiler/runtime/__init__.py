"""Runs compiled programs. The only part of the package that knows torch.distributed."""
