"""Rounds a parameter while it is read, each process the parts of its own devices.

One matrix, or what a process needs of it, is in memory as floats at a time.
"""

from typing import Any

import jax
import numpy as np

from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.quantization import leaf as quantized


def place(
    name: str, leaf: leaves_lib.Leaf, places: quantized.Quantized
) -> quantized.Quantized:
    """Returns a parameter's codes and scales on the devices of this process.

    Args:
      name: of the parameter, for messages.
      leaf: the parameter, which is read once for each process.
      places: shardings of codes and scales, which cut no block.

    Raises:
      InputError: a weight is not finite.
    """
    layout = places.layout
    shapes = quantized.abstract(leaf.shape, layout)
    owned = places.values.addressable_devices_indices_map(shapes.values.shape)
    keys = {
        device: _weights_of(index or (), shapes.values.shape, layout)
        for device, index in owned.items()
    }
    rounded: dict[tuple, quantized.Quantized] = {}
    parts = {key: _room(key, layout) for key in keys.values()}
    depth = len(leaf.shape) - len(layout.blocks)
    for index in np.ndindex(*leaf.shape[:depth]):
        rounded.clear()  # what devices share of one matrix is read once
        for key, part in parts.items():
            stack = [*zip(index, key[:depth], strict=True)]
            if not all(start <= i < stop for i, (start, stop) in stack):
                continue
            here = tuple(i - start for i, (start, _) in stack)
            whole = _extended(key[depth:], leaf.shape[depth:], layout)
            if whole not in rounded:
                rounded[whole] = _matrix(name, leaf, index, whole, layout)
            values, scales = _cut(rounded[whole], key[depth:], layout)
            part.values[here], part.scales[here] = values, scales
    found = {device: parts[key] for device, key in keys.items()}

    def joined(what: str) -> jax.Array:
        sharding, shape = getattr(places, what), getattr(shapes, what).shape
        arrays = [
            jax.device_put(getattr(part, what), device)
            for device, part in found.items()
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    return quantized.Quantized(joined("values"), joined("scales"), layout)


_Key = tuple[tuple[int, int], ...]  # start and stop in every dim


def _weights_of(
    index: tuple[slice, ...], shape: tuple[int, ...], layout: quantized.Layout
) -> _Key:
    """Returns the window of weights that a window of codes stands for."""
    cuts = [range(size)[cut] for cut, size in zip(index, shape, strict=True)]
    key = [(cut.start, cut.stop) for cut in cuts]
    if (axis := layout.packed_axis) is not None:
        start, stop = key[axis]
        key[axis] = 2 * start, 2 * stop
    return tuple(key)


def _room(key: _Key, layout: quantized.Layout) -> quantized.Quantized:
    """Returns arrays for the codes and scales of a window, not yet filled."""
    shape = tuple(stop - start for start, stop in key)
    shapes = quantized.abstract(shape, layout)
    return jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)


def _extended(key: _Key, shape: tuple[int, ...], layout: quantized.Layout) -> _Key:
    """Returns the window with all weights that share its scales."""
    sizes = zip(key, shape, layout.blocks, strict=True)
    return tuple(
        (0, size) if block == quantized.WHOLE else cut for cut, size, block in sizes
    )


def _matrix(
    name: str,
    leaf: leaves_lib.Leaf,
    index: tuple[int, ...],
    key: _Key,
    layout: quantized.Layout,
) -> quantized.Quantized:
    """Reads and rounds a window of one matrix."""
    stack = (slice(i, i + 1) for i in index)
    window: Any = (*stack, *(slice(*cut) for cut in key))
    weights = leaf.read(window).reshape([stop - start for start, stop in key])
    leaves_lib.require_finite(weights, name)
    return jax.device_get(quantized.compiled_quantize(weights, layout))


def _cut(
    rounded: quantized.Quantized, key: _Key, layout: quantized.Layout
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes and scales of a window from those of all that share them."""
    codes = [
        slice(*cut) if block == quantized.WHOLE else slice(None)
        for cut, block in zip(key, layout.blocks, strict=True)
    ]
    if (axis := layout.packed_axis) is not None and codes[axis] != slice(None):
        codes[axis] = slice(codes[axis].start // 2, codes[axis].stop // 2)
    return rounded.values[tuple(codes)], rounded.scales
