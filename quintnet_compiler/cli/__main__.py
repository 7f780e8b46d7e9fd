"""For launchers that start modules: ``torchrun -m quintnet_compiler.cli train run.yaml``."""

from .app import main

if __name__ == "__main__":
    main()
