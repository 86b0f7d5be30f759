"""Newton-Schulz on a mesh: collects each matrix on one device and sends it back.

    blocks of all matrices --all_to_all--> whole matrices --Newton-Schulz-->
    whole matrices --all_to_all--> blocks

The order in which rows and columns are put together does not matter, as Newton-Schulz
commutes with permutations. docs/design/0006-muon-on-a-mesh.md has the numbers.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from glm5_jax.optim import dimension_numbers, matrix_groups

Function = Callable[[Array], Array]  # of arrays [matrices, rows, cols]
Parts = dict[tuple[int, int], Array]  # by parameter and part: [matrices, rows, cols]


def map_matrices(
    function: Function,
    arrays: Sequence[Array],
    layouts: Sequence[dimension_numbers.Layout],
    specs: Sequence[PartitionSpec],
    slow_axes: Sequence[str] = (),
) -> list[Array]:
    """Applies a function to every matrix, once, on some device of the mesh.

    Call it under jax.set_mesh, or inside a jit that is.

    Args:
        function: maps [matrices, rows, cols]. Like Newton-Schulz, it must commute with
            transposition and with permutations of rows and of columns, and keep rows
            and columns of zeros.
        arrays: parameters, in the type in which they are sent and returned.
        layouts: the dims of each array that are rows and columns.
        specs: the sharding of each array and of its result.
        slow_axes: axes of the mesh, none of the specs', over which no matrices are
            sent: their devices repeat the work.
    """
    mesh = jax.sharding.get_abstract_mesh()
    shapes = [x.shape for x in arrays]
    leaves = list(zip(shapes, layouts, specs, strict=True))
    shared = {axis: n for axis, n in mesh.shape.items() if axis not in slow_axes}
    groups = matrix_groups.plan(leaves, shared)

    stacks = {stack.key: stack for group in groups for stack in group.stacks}

    def local(*arrays: Array) -> list[Array]:
        split = [layout.split(x) for layout, x in zip(layouts, arrays, strict=True)]
        parts = {
            key: dimension_numbers.stacked(
                split[stack.leaf][stack.part], stack.is_transposed
            )
            for key, stack in stacks.items()
        }
        for group in groups:
            parts |= _mapped(function, group, parts)
        for (leaf, part), x in parts.items():
            shape, is_transposed = (
                split[leaf][part].shape,
                stacks[leaf, part].is_transposed,
            )
            split[leaf][part] = dimension_numbers.unstacked(x, is_transposed, shape)
        return [
            layout.join(part, x.shape)
            for layout, part, x in zip(layouts, split, arrays, strict=True)
        ]

    specs = [_without_cut(*leaf) for leaf in zip(layouts, specs, strict=True)]
    return jax.shard_map(
        local, in_specs=tuple(specs), out_specs=specs, check_vma=False
    )(*arrays)


def _without_cut(
    layout: dimension_numbers.Layout, spec: PartitionSpec
) -> PartitionSpec:
    """Returns the sharding of a parameter without that of a fused dim."""
    if layout.cut is None:
        return spec
    return PartitionSpec(
        *(None if i == layout.cut[0] else a for i, a in enumerate(spec))
    )


def _mapped(function: Function, group: matrix_groups.Group, parts: Parts) -> Parts:
    """Returns the parts of a group with its matrices mapped."""
    if group.num_pieces > 1:
        (stack,) = group.stacks
        return {stack.key: _in_pieces(function, group, parts[stack.key])}
    blocks = [parts[s.key][s.start : s.start + s.count] for s in group.stacks]
    changed = {}
    for stack, block in zip(
        group.stacks, _exchanged(function, group, blocks), strict=True
    ):
        whole = parts[stack.key]
        end = stack.start + stack.count
        is_whole = stack.count == len(whole)
        changed[stack.key] = (
            block if is_whole else whole.at[stack.start : end].set(block)
        )
    return changed


def _in_pieces(function: Function, group: matrix_groups.Group, x: Array) -> Array:
    """Maps a large stack piece by piece in place, so that few whole matrices exist."""
    size = group.stacks[0].count // group.num_pieces

    def piece(i: Array, x: Array) -> Array:
        part = lax.dynamic_slice_in_dim(x, i * size, size)
        (part,) = _exchanged(function, group, [part])
        return lax.dynamic_update_slice_in_dim(x, part, i * size, 0)

    return lax.fori_loop(0, group.num_pieces, piece, x)


def _exchanged(
    function: Function, group: matrix_groups.Group, blocks: list[Array]
) -> list[Array]:
    """Exchanges blocks for whole matrices, maps these, and exchanges them back."""
    forms = {stack.form: stack for stack in group.stacks}
    padded = []
    for stack, x in zip(group.stacks, blocks, strict=True):
        x = _resized(x, (len(x), *group.block(stack)))
        padded.append(x if len(forms) == 1 else x.reshape(len(x), -1))
    x = jnp.concatenate(padded)
    rounds = -(-len(x) // group.num_owners)
    x = _resized(x, (rounds * group.num_owners, *x.shape[1:]))
    x = x.reshape(group.num_shared, group.num_exchanged, rounds, *x.shape[1:])
    x = x[_index(group.shared)]
    x = _all_to_all(x, group.exchanged)
    form = _own_forms(group, [len(block) for block in blocks], rounds)
    whole = _select(form, [_whole(x, group, stack) for stack in forms.values()], 0)
    whole = function(whole)
    parts = [_parts(whole, group, stack, x.shape) for stack in forms.values()]
    x = _select(form, parts, 1)
    x = _all_to_all(x, group.exchanged)
    if group.shared:
        x = lax.all_gather(x, group.shared)
    x = x.reshape(rounds * group.num_owners, *padded[0].shape[1:])
    counts = np.cumsum([len(block) for block in blocks])
    return [
        _resized(part.reshape(-1, *group.block(stack)), block.shape)
        for stack, block, part in zip(
            group.stacks, blocks, jnp.split(x[: counts[-1]], counts[:-1]), strict=True
        )
    ]


def _all_to_all(x: Array, axes: tuple[str, ...]) -> Array:
    """Sends x[i] to device i of the axes, and receives as many."""
    # Without the barrier XLA's simplifier on CPU (jax 0.10.2) moves a transposition
    # into one of the operands, whose layouts then differ: the verifier refuses.
    return lax.all_to_all(lax.optimization_barrier(x), axes, 0, 0) if axes else x


def _whole(x: Array, group: matrix_groups.Group, stack: matrix_groups.Stack) -> Array:
    """Joins blocks [devices, rounds, ...] to wide matrices [rounds, rows, cols]."""
    x = x.reshape(*_axis_sizes(group), x.shape[1], *group.block(stack))
    x = x.transpose(_block_order(group, stack))
    rows, cols = reversed(group.shape) if stack.is_tall else group.shape
    x = x.reshape(-1, rows, cols)
    return x.mT if stack.is_tall else x


def _parts(
    whole: Array,
    group: matrix_groups.Group,
    stack: matrix_groups.Stack,
    shape: tuple[int, ...],
) -> Array:
    """Undoes `_whole`: returns blocks of this shape."""
    x = whole.mT if stack.is_tall else whole
    order = _block_order(group, stack)
    blocked = (*_axis_sizes(group), shape[1], *group.block(stack))
    x = x.reshape([blocked[i] for i in order])
    return x.transpose(np.argsort(order)).reshape(shape)


def _block_order(
    group: matrix_groups.Group, stack: matrix_groups.Stack
) -> tuple[int, ...]:
    """Returns the order that turns [*exchanged, rounds, rows, cols] into matrices."""
    n = len(group.exchanged)
    rows = [group.exchanged.index(axis) for axis in stack.row_axes]
    cols = [group.exchanged.index(axis) for axis in stack.col_axes]
    return n, *rows, n + 1, *cols, n + 2


def _axis_sizes(group: matrix_groups.Group) -> tuple[int, ...]:
    return tuple(lax.axis_size(axis) for axis in group.exchanged)


def _own_forms(group: matrix_groups.Group, counts: list[int], rounds: int) -> Array:
    """Returns the index of the form of each of this device's matrices."""
    forms = list(dict.fromkeys(stack.form for stack in group.stacks))
    each = [forms.index(stack.form) for stack in group.stacks]
    indices = np.zeros(rounds * group.num_owners, np.int32)
    indices[: sum(counts)] = np.repeat(each, counts)
    indices = indices.reshape(group.num_shared, group.num_exchanged, rounds)
    return jnp.asarray(indices)[_index(group.shared), _index(group.exchanged)]


def _select(form: Array, options: list[Array], axis: int) -> Array:
    """Selects for each matrix, along an axis of the options, the one of its form."""
    chosen = options[0]
    others = [i for i in range(chosen.ndim) if i != axis]
    for i, option in enumerate(options[1:], start=1):
        chosen = jnp.where(jnp.expand_dims(form == i, others), option, chosen)
    return chosen


def _index(axes: tuple[str, ...]) -> Array | int:
    return lax.axis_index(axes) if axes else 0


def _resized(x: Array, shape: tuple[int, ...]) -> Array:
    """Truncates or zero-pads the end of every axis."""
    x = x[tuple(slice(size) for size in shape)]
    return jnp.pad(x, [(0, n - size) for n, size in zip(shape, x.shape, strict=True)])
