"""Parameters that are read in windows, so that none is ever in memory whole.

GLM-5's experts of one kind are one stacked leaf of 450 GB. Code that moves parameters
therefore asks a `Leaf` for windows of bounded size.
"""

import abc
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from glm5_jax import config as config_lib

Path = tuple[str, ...]
Window = tuple[slice, ...]  # one for each dim, with start and stop

WINDOW_BYTES = 2**25  # upper bound, counted as float32 where values are computed


class Leaf(abc.ABC):
    """One parameter, stored anywhere, that can be read in windows."""

    shape: tuple[int, ...]
    dtype: np.dtype  # of the arrays that `read` returns

    @property
    def cuts(self) -> tuple[int, ...]:
        """Returns the axes in the order to cut them, the cheapest first."""
        return tuple(range(len(self.shape)))

    @abc.abstractmethod
    def read(self, window: Window) -> np.ndarray:
        """Returns the elements in a window."""


class DeviceLeaf(Leaf):
    """A parameter on the devices of this process, or on the host."""

    def __init__(self, array: jax.Array | np.ndarray) -> None:
        """Takes the array, sharded or not."""
        self._array = array
        self.shape, self.dtype = array.shape, np.dtype(array.dtype)

    def read(self, window: Window) -> np.ndarray:
        """Returns a window on the host: a copy, or a view of what is there already."""
        if isinstance(self._array, np.ndarray):
            return self._array[window]
        devices = self._array.devices()
        if len(devices) == 1 and next(iter(devices)).platform == "cpu":
            return np.asarray(self._array)[window]  # needs no program
        # The starts are operands, so one program serves all windows of a size.
        starts = [w.start for w in window]
        sizes = [w.stop - w.start for w in window]
        return np.asarray(jax.lax.dynamic_slice(self._array, starts, sizes))


class CastLeaf(Leaf):
    """A parameter in another dtype."""

    def __init__(self, leaf: Leaf, dtype: np.dtype) -> None:
        """Takes the parameter, and the dtype to read it in."""
        self._leaf = leaf
        self.shape, self.dtype = leaf.shape, dtype

    @property
    def cuts(self) -> tuple[int, ...]:
        """Returns the axes of the wrapped parameter."""
        return self._leaf.cuts

    def read(self, window: Window) -> np.ndarray:
        """Reads a window and casts it."""
        return self._leaf.read(window).astype(self.dtype, copy=False)


def flatten(tree: dict) -> tuple[dict[Path, Any], Any]:
    """Returns a tree's leaves by path, and its structure."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return {tuple(key.key for key in path): leaf for path, leaf in pairs}, treedef


def stack_depth(path: Path) -> int:
    """Counts the leading axes of a parameter that are layers and experts."""
    is_scanned = any(name.startswith("layers_") for name in path)
    return is_scanned + ("experts" in path)


def unflatten(leaves: dict[Path, Any]) -> dict:
    """Returns the nested dict with these leaves; the inverse of `flatten`."""
    tree: dict = {}
    for (*parents, name), leaf in leaves.items():
        here = tree
        for parent in parents:
            here = here.setdefault(parent, {})
        here[name] = leaf
    return tree


def chunk_shape(
    shape: Sequence[int], itemsize: int, cuts: Sequence[int], limit: int = WINDOW_BYTES
) -> tuple[int, ...]:
    """Returns the largest window of at most `limit` bytes, cut along `cuts` in turn."""
    chunk = [max(n, 1) for n in shape]  # a chunk needs an element
    for axis in cuts:
        rest = math.prod(chunk) // chunk[axis] * itemsize
        chunk[axis] = min(chunk[axis], max(1, limit // rest))
    return tuple(chunk)


def windows(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[Window]:
    """Yields the windows of a grid of chunks over an array, the last axis fastest."""
    cuts = [
        [slice(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(shape, chunk, strict=True)
    ]
    return itertools.product(*cuts)


def place(leaf: Leaf, sharding: jax.sharding.Sharding, dtype: Any = None) -> jax.Array:
    """Reads this process's parts of a parameter onto its devices, window by window.

    The host holds one window beside the devices. All parts grow together, because their
    windows may lie in the same stored chunk.

    Args:
      leaf: the parameter.
      sharding: of the result.
      dtype: of the result; None keeps the leaf's.
    """
    dtype = np.dtype(leaf.dtype if dtype is None else dtype)
    shape = sharding.shard_shape(leaf.shape)
    parts: dict[jax.Device, Any] = {}
    owners: dict[tuple[int, ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        cuts = zip(index or (), leaf.shape, strict=True)
        owners.setdefault(tuple(c.indices(n)[0] for c, n in cuts), []).append(device)
        parts[device] = None
    # By the global shape: all parts of a matrix may lie in one stored chunk.
    itemsize = max(dtype.itemsize, leaf.dtype.itemsize)
    chunk = chunk_shape(leaf.shape, itemsize, leaf.cuts)
    for window in windows(shape, list(map(min, chunk, shape))):
        for first, devices in owners.items():
            pairs = zip(window, first, strict=True)
            there = tuple(slice(w.start + n, w.stop + n) for w, n in pairs)
            values = leaf.read(there).astype(dtype, copy=False)
            for device in devices:
                new = _written(parts[device], values, window, shape, device)
                parts[device] = new.block_until_ready()
    return jax.make_array_from_single_device_arrays(
        leaf.shape, sharding, [*parts.values()]
    )


def _written(
    part: jax.Array | None,
    values: np.ndarray,
    window: Window,
    shape: tuple[int, ...],
    device: jax.Device,
) -> jax.Array:
    """Returns a device's part with a window written into it, in place."""
    new = jax.device_put(values, device)
    if values.shape == shape:
        return new
    if part is None:
        part = jnp.zeros(shape, values.dtype, device=device)
    return _update(part, new, [w.start for w in window])


# The starts are operands, so one program serves all windows of a size.
_update = jax.jit(jax.lax.dynamic_update_slice, donate_argnums=0)


def require_finite(values: np.ndarray, name: str) -> None:
    """Checks that no weight is NaN or infinite.

    Raises:
      InputError: a weight is not finite.
    """
    if values.dtype == ml_dtypes.bfloat16:  # twice as fast as isfinite
        exponent = np.uint16(0x7F80)
        is_bad = bool(((values.view(np.uint16) & exponent) == exponent).any())
    else:
        is_bad = not np.isfinite(values).all()
    if is_bad:
        raise config_lib.InputError(
            f"{name} holds a NaN or an infinity; take another checkpoint."
        )


def require_finite_params(params: dict) -> None:
    """Checks that no parameter on this process's devices holds a NaN or infinity.

    Raises:
      InputError: a weight is not finite.
    """
    for path, array in flatten(params)[0].items():
        for shard in array.addressable_shards:
            part = shard.data
            if shard.device.platform != "cpu":  # bring one number to the host
                part = jnp.where(jnp.isfinite(part).all(), 0.0, jnp.nan)
            require_finite(np.asarray(part), ".".join(path))
