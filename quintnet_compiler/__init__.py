"""QuintNet: train a plain nn.Module, written for one device, on any number of GPUs."""

import lazy_loader

# what is public stands in __init__.pyi; a name is imported when it is first used
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
