"""Handwritten digits: the set that comes with scikit-learn (1797 images of 8 x 8), or MNIST's IDX files."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

IDX_BYTES = 0x08  # the IDX type code of unsigned bytes, the only type MNIST uses


@dataclass(frozen=True)
class Digits:
    """Images with their labels. Pixels stay bytes until a batch needs them, so MNIST is cheap to hand around.

    Attributes:
        pixels: ``[count, size, size]``, uint8, from 0 to ``white``.
        labels: ``[count]``, int64, from 0 to 9.
        white: the value of the brightest pixel.
    """

    pixels: Tensor
    labels: Tensor
    white: int

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: Tensor) -> Digits:
        return Digits(self.pixels[chosen], self.labels[chosen], self.white)

    def first(self, count: int) -> Digits:
        """The first images, at most ``count``."""
        # Chosen by index, which copies: a slice would take all images along when it is sent to a rank.
        return self[torch.arange(min(count, len(self)))]

    @property
    def size(self) -> int:
        """The side of an image in pixels."""
        return self.pixels.shape[-1]

    def tensors(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Images, scaled to [-1, 1], and labels."""
        images = self.pixels.to(device, dtype) * (2 / self.white) - 1
        return images, self.labels.to(device)

    def batches(self, batch: int, generator: torch.Generator) -> Iterator[Digits]:
        """One epoch of full batches in random order; what is left over waits for another epoch."""
        order = torch.randperm(len(self), generator=generator)
        for start in range(0, len(self) - batch + 1, batch):
            yield self[order[start : start + batch]]

    def padded_batches(self, batch: int) -> Iterator[tuple[Digits, int]]:
        """Everything once and in order, as batches of one size, each with its number of real images.

        The last batch is filled up with the first image: a pipeline is built for one batch size.
        """
        for start in range(0, len(self), batch):
            real = min(batch, len(self) - start)
            chosen = torch.zeros(batch, dtype=torch.long)
            chosen[:real] = torch.arange(start, start + real)
            yield self[chosen], real


def bundled_digits(seed: int, validation: int = 360) -> tuple[Digits, Digits]:
    """Scikit-learn's digits, shuffled by ``seed`` and split into training and validation images."""
    # Imported here, because ranks receive the images and need not pay for loading scikit-learn.
    from sklearn.datasets import load_digits

    bunch = load_digits()
    digits = Digits(torch.tensor(bunch.images, dtype=torch.uint8), torch.tensor(bunch.target), white=16)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed))
    return digits[order[validation:]], digits[order[:validation]]


def mnist(folder: Path) -> tuple[Digits, Digits]:
    """MNIST's training and test images, from the IDX files in ``folder``."""
    return _mnist_part(folder, "train"), _mnist_part(folder, "t10k")


def _mnist_part(folder: Path, part: str) -> Digits:
    images_file = _find(folder, f"{part}-images", "idx3-ubyte")
    labels_file = _find(folder, f"{part}-labels", "idx1-ubyte")
    pixels = read_idx(images_file, dims=3)
    labels = read_idx(labels_file, dims=1).long()
    if len(pixels) != len(labels):
        raise ValueError(f"{images_file} has {len(pixels)} images, {labels_file} has {len(labels)} labels")
    if pixels.shape[1] != pixels.shape[2]:
        raise ValueError(f"{images_file}: images are {pixels.shape[1]} x {pixels.shape[2]}, not square")
    if len(labels) and int(labels.max()) > 9:
        raise ValueError(f"{labels_file}: label {int(labels.max())} is no digit")
    return Digits(pixels, labels, white=255)


def _find(folder: Path, stem: str, kind: str) -> Path:
    """The file under one of the names in use, plain or compressed, also where torchvision puts it."""
    names = [f"{stem}{joint}{kind}{end}" for joint in "-." for end in ("", ".gz")]
    places = (folder, folder / "raw", folder / "MNIST" / "raw")
    for path in (place / name for place in places for name in names):
        if path.is_file():
            return path
    raise ValueError(f"no {names[0]} or {names[1]} in {folder}")


def read_idx(path: Path, dims: int) -> Tensor:
    """An IDX file of unsigned bytes, as a tensor with ``dims`` dimensions.

    The file starts with two zero bytes, the type, the number of dimensions, and each dimension's length
    (4 bytes, the highest first); the values follow.
    """
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: {error}") from error
    expected = bytes([0, 0, IDX_BYTES, dims])
    if data[:4] != expected:
        raise ValueError(f"{path}: starts with {data[:4].hex() or 'nothing'}, expected {expected.hex()}")
    start = 4 + 4 * dims
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4)]
    if len(data) != start + math.prod(shape):
        raise ValueError(f"{path}: {len(data)} bytes, but its header promises {start + math.prod(shape)}")
    return torch.frombuffer(bytearray(data[start:]), dtype=torch.uint8).reshape(shape)
