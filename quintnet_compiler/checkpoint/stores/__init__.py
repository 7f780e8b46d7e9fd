"""Where checkpoints are stored: folders of a file system, and of an object store."""
