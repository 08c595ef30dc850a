"""Tensors of known shapes in one block of memory, so that they travel as one.

A row is read into such a block by one process, and crosses to the device in one copy.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes; more than any kernel's load asks for

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Place:
    """Where a tensor lies; `start` and `stop` count bytes."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Slab:
    """Tensors by name, all of them views of `memory`, uint8."""

    memory: Tensor
    places: Mapping[str, Place]

    @classmethod
    def of(cls, shapes: Shapes, memory: Tensor | None = None) -> "Slab":
        """Room for tensors in the order given, at the start of `memory` if that is given."""
        if memory is None:
            memory = torch.empty(slab_bytes(shapes), dtype=torch.uint8)
        return cls(memory, _places(shapes)).in_memory(memory)

    def in_memory(self, memory: Tensor) -> "Slab":
        """The same tensors, as the start of `memory` holds them."""
        size = max((place.stop for place in self.places.values()), default=0)
        return Slab(memory[:size], self.places)

    def __getitem__(self, name: str) -> Tensor:
        place = self.places[name]
        return self.memory[place.start : place.stop].view(place.dtype).view(place.shape)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self[name].copy_(tensor)

    def copy_of(self, names: Iterable[str]) -> "Slab":
        """Some tensors that lie side by side, in memory of their own."""
        chosen = {name: self.places[name] for name in names}
        start = min(place.start for place in chosen.values())
        stop = max(place.stop for place in chosen.values())
        places = {n: replace(place, start=place.start - start) for n, place in chosen.items()}
        return Slab(self.memory[start:stop].clone(), places)


def slab_bytes(shapes: Shapes) -> int:
    """What a slab of these tensors takes."""
    return max((place.stop for place in _places(shapes).values()), default=0)


def _places(shapes: Shapes) -> dict[str, Place]:
    places: dict[str, Place] = {}
    stop = 0
    for name, (shape, dtype) in shapes.items():
        places[name] = Place(-(-stop // _ALIGNMENT) * _ALIGNMENT, shape, dtype)
        stop = places[name].stop
    return places
