"""Plans which device of a mesh orthogonalises which matrices, from shapes alone.

Every device holds a block of each matrix. Over mesh axes that shard rows or columns,
devices exchange blocks, so that each gets whole matrices. Devices along axes that shard
the batch dims hold different matrices already, and replicas divide the matrices among
them. As n matrices on k devices take ceil(n / k) rounds, stacks with few matrices form
groups, in which the smaller ones are zero-padded (rows and columns of zeros stay zero
in Newton-Schulz).
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from glm5_jax.optim import dimension_numbers

# Unsharded shape, layout and sharding of a parameter.
Leaf = tuple[tuple[int, ...], dimension_numbers.Layout, PartitionSpec]
NUM_STEPS = 5  # Newton-Schulz steps that the estimates assume
ITEM_BYTES = 2  # bytes of an element that is sent, in the estimates
# Cost of sending a byte in FLOPs; v5p: 394 TFLOP/s over 90 GB/s, one link, one way.
FLOPS_PER_BYTE = 4400
# Fixed cost of a group in FLOPs: two latencies, and 3.5 s of a CPU to compile it.
GROUP_FLOPS = 5e10
# Whole matrices that a device holds at once; Newton-Schulz needs about 5 times that.
PIECE_BYTES = 2**27


@dataclasses.dataclass(frozen=True)
class Stack:
    """A device's blocks of the matrices of a parameter, or of a part of it.

    Blocks that are taller than wide are transposed: accelerators pad the last dim to
    128 elements, and choose layouts in which it is a long one.
    """

    leaf: int  # index of the parameter
    part: int  # 0, or 1 for the second part of a fused weight
    start: int  # index of the first matrix
    count: int  # number of matrices
    block: tuple[int, int]  # rows and columns of a block
    batch_axes: tuple[str, ...]
    row_axes: tuple[str, ...]
    col_axes: tuple[str, ...]
    shards: tuple[int, int]  # blocks along the rows and along the columns
    is_transposed: bool

    @property
    def key(self) -> tuple[int, int]:
        """Returns the index of the parameter and of its part."""
        return self.leaf, self.part

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the rows and columns of a whole matrix."""
        return self.block[0] * self.shards[0], self.block[1] * self.shards[1]

    @property
    def is_tall(self) -> bool:
        """Returns whether a matrix is taller than wide."""
        return self.shape[0] > self.shape[1]

    @property
    def wide_shards(self) -> tuple[int, int]:
        """Returns the number of blocks along the short and along the long side."""
        rows, cols = self.shards
        return (cols, rows) if self.is_tall else (rows, cols)

    @property
    def form(self) -> tuple:
        """Returns all that decides how blocks are put together."""
        return self.row_axes, self.col_axes, self.is_tall


@dataclasses.dataclass(frozen=True)
class Group:
    """Stacks whose matrices are distributed over the devices together."""

    stacks: tuple[Stack, ...]
    exchanged: tuple[str, ...]  # mesh axes that hold blocks of one matrix
    shared: tuple[str, ...]  # mesh axes of replicas, which divide the matrices
    num_exchanged: int  # devices along `exchanged`
    num_shared: int  # devices along `shared`
    num_pieces: int = 1  # parts of the stack that are exchanged in turn

    @property
    def num_owners(self) -> int:
        """Returns the number of devices that divide the matrices among them."""
        return self.num_exchanged * self.num_shared

    @functools.cached_property
    def shape(self) -> tuple[int, int]:
        """Returns the wide shape to which the matrices of all stacks are padded."""
        sides = []
        for side in (0, 1):
            size = max(sorted(stack.shape)[side] for stack in self.stacks)
            parts = math.lcm(*(stack.wide_shards[side] for stack in self.stacks))
            sides.append(-(-size // parts) * parts)
        return sides[0], sides[1]

    def block(self, stack: Stack) -> tuple[int, int]:
        """Returns the rows and columns of a stack's block, padded."""
        short, long = (
            n // k for n, k in zip(self.shape, stack.wide_shards, strict=True)
        )
        return (long, short) if stack.is_tall else (short, long)

    @functools.cached_property
    def num_rounds(self) -> int:
        """Returns the number of matrices of a device, padding included."""
        return -(-sum(stack.count for stack in self.stacks) // self.num_owners)

    @functools.cached_property
    def work(self) -> "Work":
        """Returns the work of one device."""
        useful = sum(s.count * newton_schulz_flops(*s.shape) for s in self.stacks)
        num_bytes = float(self.num_rounds * math.prod(self.shape) * ITEM_BYTES)
        return Work(
            useful_flops=useful / self.num_owners,
            flops=self.num_rounds * newton_schulz_flops(*self.shape),
            exchanged_bytes=2 * num_bytes * (1 - 1 / self.num_exchanged),
            gathered_bytes=(self.num_shared - 1) * num_bytes,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one device in one update."""

    useful_flops: float = 0.0
    flops: float = 0.0  # with those on padding
    exchanged_bytes: float = 0.0  # sent in the all-to-alls
    gathered_bytes: float = 0.0  # received from the other replicas

    def __add__(self, other: "Work") -> "Work":
        """Adds field by field."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return Work(**{name: mine[name] + theirs[name] for name in mine})

    def __str__(self) -> str:
        """Returns the cells of a Markdown row."""
        flops = f"{self.flops / 1e12:.2f} | {self.useful_flops / 1e12:.2f}"
        sent, gathered = self.exchanged_bytes / 2**30, self.gathered_bytes / 2**30
        return f"{flops} | {sent:.2f} | {gathered:.2f}"

    @property
    def cost(self) -> float:
        """Returns the cost in FLOPs, communication included."""
        num_bytes = self.exchanged_bytes + self.gathered_bytes
        return self.flops + FLOPS_PER_BYTE * num_bytes


def newton_schulz_flops(rows: int, cols: int) -> float:
    """Returns the FLOPs of X X^T, A A, (b A + c A A) X, on the short side."""
    short, long = sorted((rows, cols))
    return NUM_STEPS * (4.0 * short**2 * long + 2.0 * short**3)


def plan(leaves: Sequence[Leaf], mesh_shape: Mapping[str, int]) -> tuple[Group, ...]:
    """Groups the matrices of all parameters.

    Args:
        leaves: unsharded shape, layout and sharding of every parameter.
        mesh_shape: devices along each mesh axis.
    """
    alike = collections.defaultdict(list)
    for index, leaf in enumerate(leaves):
        for stack in _stacks(index, leaf, mesh_shape):
            shape = tuple(sorted(stack.shape))
            alike[_axes(stack, mesh_shape), stack.batch_axes, shape].append(stack)
    large, groups = [], []
    for (exchanged, _, _), stacks in alike.items():
        group = _shared_or_repeated(tuple(stacks), exchanged, mesh_shape)
        pieces, rest = _pieces(group)
        large += pieces
        groups += rest
    while len(groups) > 1:
        pairs = itertools.combinations(groups, 2)
        saving, pair = max(((_saving(*p), p) for p in pairs), key=lambda x: x[0])
        if saving <= 0:
            break
        groups = [group for group in groups if group not in pair]
        groups.append(_merged(*pair))
    return (*large, *groups)


def total(groups: Sequence[Group]) -> Work:
    """Returns the work of one device for all groups."""
    return sum((group.work for group in groups), Work())


def markdown(groups: Sequence[Group]) -> str:
    """Returns the plan of one device in Markdown, a row for each group and the sum."""
    rows = [
        "| matrices | padded to | rounds | TFLOP | useful | sent GiB | gathered |",
        "|---|---|---|---|---|---|---|",
    ]
    for group in groups:
        shapes = sorted({tuple(sorted(stack.shape)) for stack in group.stacks})
        names = ", ".join(f"{a} x {b}" for a, b in shapes)
        size = f"{group.shape[0]} x {group.shape[1]}"
        rows.append(f"| {names} | {size} | {group.num_rounds} | {group.work} |")
    return "\n".join([*rows, f"| all | | | {total(groups)} |"])


def _stacks(index: int, leaf: Leaf, mesh_shape: Mapping[str, int]) -> list[Stack]:
    """Returns the blocks that a device holds of a parameter."""
    shape, layout, spec = leaf
    cut = layout.cut[0] if layout.cut is not None else None

    def axes_of(dim: int) -> tuple[str, ...]:
        names = (*spec, *[None] * len(shape))[dim] or ()
        names = (names,) if isinstance(names, str) else names
        return tuple(a for a in names if mesh_shape[a] > 1 and dim != cut)

    axes = [axes_of(dim) for dim in range(len(shape))]
    dims = (layout.batch, layout.rows, layout.cols)
    batch, rows, cols = (sum((axes[i] for i in part), ()) for part in dims)

    def size(names: Sequence[str]) -> int:
        return math.prod(mesh_shape[name] for name in names)

    stacks = []
    for part, part_shape in enumerate(layout.part_shapes(shape)):
        local = [n // size(axes[i]) for i, n in enumerate(part_shape)]
        count, height, width = (math.prod(local[i] for i in part) for part in dims)
        sides = [(height, rows), (width, cols)]
        if is_transposed := height > width:
            sides.reverse()
        block, names = zip(*sides, strict=True)
        shards = (size(names[0]), size(names[1]))
        stacks.append(
            Stack(
                leaf=index,
                part=part,
                start=0,
                count=count,
                block=block,
                batch_axes=batch,
                row_axes=names[0],
                col_axes=names[1],
                shards=shards,
                is_transposed=is_transposed,
            )
        )
    return stacks


def _axes(stack: Stack, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes that shard a stack's matrices, in the order of the mesh."""
    return tuple(a for a in mesh_shape if a in stack.row_axes + stack.col_axes)


def _shared_or_repeated(
    stacks: tuple[Stack, ...], exchanged: tuple[str, ...], mesh_shape: Mapping[str, int]
) -> Group:
    """Returns a group whose replicas divide the work, or repeat it if cheaper."""
    taken = (*exchanged, *stacks[0].batch_axes)
    free = tuple(a for a, n in mesh_shape.items() if n > 1 and a not in taken)

    def group(shared: tuple[str, ...]) -> Group:
        sizes = (math.prod(mesh_shape[a] for a in axes) for axes in (exchanged, shared))
        return Group(stacks, exchanged, shared, *sizes)

    return min(group(free), group(()), key=lambda group: group.work.cost)


def _pieces(group: Group) -> tuple[list[Group], list[Group]]:
    """Returns groups of one large stack each, computed in pieces; and the rest.

    A piece has at most as many matrices as fit in PIECE_BYTES, and at least half as
    many: the number that leaves the smallest remainder. The remainder is grouped with
    small stacks if they divide exactly, so that it waits for no other large stack.
    """
    most = max(PIECE_BYTES // (math.prod(group.shape) * ITEM_BYTES), 1)
    is_large = lambda stack: stack.count // group.num_owners > most
    small = [stack for stack in group.stacks if not is_large(stack)]
    pieces, rest = [], []
    for stack in filter(is_large, group.stacks):
        rounds = stack.count // group.num_owners
        size = min(range(most, most // 2, -1), key=lambda size: rounds % size)
        done = rounds // size * size * group.num_owners
        first = (dataclasses.replace(stack, count=done),)
        pieces.append(
            dataclasses.replace(group, stacks=first, num_pieces=rounds // size)
        )
        left = dataclasses.replace(stack, start=done, count=stack.count - done)
        if filled := _filled(left, small, group.num_owners):
            small = [stack for stack in small if stack not in filled]
            pieces.append(dataclasses.replace(group, stacks=filled))
        elif left.count:
            rest.append(left)
    rest = (*rest, *small)
    return pieces, [dataclasses.replace(group, stacks=rest)] if rest else []


def _filled(
    stack: Stack, others: Sequence[Stack], num_owners: int
) -> tuple[Stack, ...] | None:
    """Returns a stack and others that together divide exactly among the owners."""
    filled = [stack]
    for other in others:
        missing = -sum(stack.count for stack in filled) % num_owners
        if other.count <= missing:
            filled.append(other)
    is_exact = sum(stack.count for stack in filled) % num_owners == 0
    return tuple(filled) if stack.count and is_exact else None


def _saving(one: Group, other: Group) -> float:
    """Returns the FLOPs that a device saves if two groups become one."""
    if _placement(one) != _placement(other):
        return -math.inf
    merged = _merged(one, other)
    return one.work.cost + other.work.cost + GROUP_FLOPS - merged.work.cost


def _placement(group: Group) -> tuple:
    return group.exchanged, group.shared, set(group.stacks[0].batch_axes)


def _merged(one: Group, other: Group) -> Group:
    return dataclasses.replace(one, stacks=one.stacks + other.stacks)
