"""Values of a device that wait in host memory, or in files."""
