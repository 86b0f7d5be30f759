"""Every way to divide the chips of some slices into engines and a trainer.

The trainer gets whole slices, or a slice of its own that is smaller; engines are whole,
and each is a slice of its own. Chips that are too few for another engine are unused. Of
GPUs both have whole nodes.
"""

import dataclasses
import math
from collections.abc import Iterator

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib

_BLOCK = 4  # chips along a side of the cubes that larger slices are made of


@dataclasses.dataclass(frozen=True)
class Split:
    """Chips that sample and chips that train; they are devices as jax counts them."""

    topology: str  # of a slice of the trainer
    num_slices: int  # of the trainer
    training: int  # devices
    num_engines: int
    engine: int  # devices of an engine
    unused: int
    takes_turns: bool = False  # the same devices sample, then train

    @property
    def sampling(self) -> int:
        """Returns the devices of all engines."""
        return self.num_engines * self.engine

    @property
    def total(self) -> int:
        """Returns the devices of the whole."""
        both = self.sampling + self.training
        return max(self.sampling, self.training) if self.takes_turns else both


def of(
    topology: str, num_slices: int, engine: str, *, takes_turns: bool = False
) -> list[Split]:
    """Lists the splits, those with the smallest trainer first.

    Args:
      topology: of a slice.
      num_slices: number of slices of that shape.
      engine: topology of an engine.
      takes_turns: all devices may also sample, then train.

    Raises:
      InputError: there is no such topology, an engine is of other chips, or the slices
        have no room for an engine, beside a trainer where nothing takes turns.
    """
    kind = topology.partition(":")[0]
    total = mesh_lib.num_devices(topology, num_slices)
    size = mesh_lib.num_devices(engine)
    require_chip(kind, engine)
    found = []
    for name, slices in _trainers(topology, num_slices):
        training = mesh_lib.num_devices(name, slices)
        number, unused = divmod(total - training, size)
        if number:
            found.append(Split(name, slices, training, number, size, unused))
    if takes_turns and size <= total:
        found.append(alternating(topology, num_slices, engine))
    if not found:
        raise config_lib.InputError(
            f"{num_slices} x {topology} have {total} devices: there is no split into "
            f"engines of {size} ({engine}) and a trainer. Take more chips, or a "
            f"smaller --engine."
        )
    return sorted(found, key=lambda split: split.training)


def require_chip(chip: str, engine: str) -> None:
    """Checks that an engine is of a chip.

    Raises:
      InputError: it is not.
    """
    if engine.partition(":")[0] != chip:
        raise config_lib.InputError(
            f"--engine must be a slice of {chip}, like --topology, got {engine!r}."
        )


def alternating(topology: str, num_slices: int, engine: str) -> Split:
    """Returns the split of stage rl: all devices sample, then all of them train."""
    total = mesh_lib.num_devices(topology, num_slices)
    size = min(mesh_lib.num_devices(engine), total)
    number, unused = divmod(total, size)
    return Split(topology, num_slices, total, number, size, unused, takes_turns=True)


def smallest(kind: str, num_devices: float | int) -> str:
    """Returns the smallest slice that is sold with as many devices, or the largest.

    Of GPUs, nodes whose number is a power of two.
    """
    if kind in mesh_lib.GPUS:  # as many nodes as experts can be divided among
        nodes = math.ceil(num_devices / mesh_lib.NODE)
        return _nodes(kind, 2 ** max(nodes - 1, 0).bit_length())
    names = [f"{kind}:{shape}" for shape in mesh_lib.TOPOLOGIES[kind]]
    enough = [n for n in names if mesh_lib.num_devices(n) >= num_devices]
    return enough[0] if enough else names[-1]


def _trainers(topology: str, num_slices: int) -> Iterator[tuple[str, int]]:
    """Yields the slices that a trainer may have: a part of one, or whole ones."""
    kind, _, shape = topology.partition(":")
    if kind in mesh_lib.GPUS:
        for number in _round_numbers(mesh_lib.num_nodes(topology)):
            yield _nodes(kind, number), 1
        for number in _round_numbers(num_slices):
            yield topology, number
        return
    sides = sorted(int(n) for n in shape.split("x"))
    shapes = {tuple(map(int, n.split("x"))) for n in mesh_lib.TOPOLOGIES[kind]}
    if sides[-1] > _BLOCK:  # also of fewer layers than the slice
        shapes |= {(*sides[:-1], n) for n in range(_BLOCK, sides[-1], _BLOCK)}
    sizes = {}
    for found in shapes:
        parts = sorted(found)
        fits = all(a <= b for a, b in zip(parts, sides, strict=True))
        if fits and parts != sides:
            sizes.setdefault(math.prod(parts), parts)
    for _, parts in sorted(sizes.items()):
        yield f"{kind}:{'x'.join(map(str, parts))}", 1
    for number in range(1, num_slices):
        yield topology, number


def _nodes(kind: str, number: int) -> str:
    """Returns the topology of some nodes of GPUs."""
    return (
        f"{kind}:{mesh_lib.NODE}" if number == 1 else f"{kind}:{number}x{mesh_lib.NODE}"
    )


def _round_numbers(limit: int) -> list[int]:
    """Lists powers of two and their triples below a number: rows divide by them."""
    twos = [2**i for i in range(limit.bit_length())]
    return sorted(n for n in (*twos, *(3 * n for n in twos)) if n < limit)
