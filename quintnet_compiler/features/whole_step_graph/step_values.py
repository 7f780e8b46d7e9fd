"""What changes from step to step and is no tensor of the program: keys of random numbers, and the loss scale."""

from __future__ import annotations

import torch

from ...core.rng import Key, KeyOnDevice
from ...runtime.execute.executor import Run


class DrawnKeys:
    """Makes keys of random numbers, and notes which ones a step draws: by microbatch and operator.

    Attributes:
        first: the number of the step's first draw.
        drawn: each key's distance from the first draw, and its operator, in order.
    """

    def __init__(self, first: int) -> None:
        """Begin with no keys. ``first``: the number of the step's first draw."""
        self.first = first
        self.drawn: dict[tuple[int, int], None] = {}

    def __call__(self, seed: int, step: int, op: int) -> Key:
        """Return the key itself."""
        self.drawn[step - self.first, op] = None
        return Key(seed, step, op)


class StepValues:
    """Values of a step, on the device: a graph reads them where they are, and each step writes others there.

    Attributes:
        scale: the loss scale, float64; None where the loss is not scaled.
    """

    def __init__(self, keys: DrawnKeys, device: torch.device, *, scaled: bool) -> None:
        """Allocate the values of a step that draws these keys."""
        self.drawn, self.first = list(keys.drawn), 0
        self.hashes = torch.empty(len(self.drawn), 2, dtype=torch.int64, device=device)
        self.rows = dict(zip(self.drawn, map(KeyOnDevice, self.hashes.unbind()), strict=True))
        self.scale = torch.empty((), dtype=torch.float64, device=device) if scaled else None

    def set(self, options: Run, first: int) -> None:
        """Write the values of a step. ``first``: the number of its first draw."""
        self.first = first
        if self.drawn:
            keys = [Key(options.seed, first + distance, op) for distance, op in self.drawn]
            hashes = torch.tensor([[key.hash(0), key.hash(1)] for key in keys])
            self.hashes.copy_(hashes, non_blocking=True)
        if self.scale is not None:
            assert options.scale is not None
            self.scale.fill_(options.scale)

    def drawn_key(self, seed: int, step: int, op: int) -> KeyOnDevice:
        """Return where the key of an operator is on the device."""
        return self.rows[step - self.first, op]
