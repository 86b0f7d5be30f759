"""Writes a model as a Hugging Face folder, some rows of a tensor at a time."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import tqdm

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.quantization import leaf, schemes
from glm5_jax.weights import (
    compressed_tensors,
    fp8_blocks,
    huggingface,
    huggingface_config,
    new_folder,
    safetensors_file,
)
from glm5_jax.weights import huggingface_names as names_lib

FP8 = "fp8"
COMPRESSED = tuple(x for x in schemes.NAMES if x != FP8)  # compressed_tensors.py
MAX_SHARD_BYTES = 5 * 10**9
_QUANTIZATION = "quantization_config"
_FLOAT32_BYTES = 4


def save_params(
    params: dict,
    config: config_lib.ModelConfig,
    folder: str | os.PathLike,
    dtype: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a folder that transformers reads; it appears whole or not at all.

    Args:
      params: of the model, on devices of this process.
      config: of the model; goes into config.json.
      folder: to make.
      dtype: of the tensors, see `write_leaves`.
      max_shard_bytes: of one file, unless a single tensor is larger.

    Raises:
      InputError: the folder exists, the disk is too small, or a weight is not finite.
    """
    arrays, _ = leaves_lib.flatten(params)
    leaves = {path: leaves_lib.DeviceLeaf(array) for path, array in arrays.items()}
    with new_folder.new_folder(folder) as partial:
        write_leaves(leaves, config, partial, dtype, max_shard_bytes)


def write_leaves(
    leaves: Mapping[leaves_lib.Path, leaves_lib.Leaf],
    config: config_lib.ModelConfig,
    folder: pathlib.Path,
    dtype: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra_config: dict[str, Any] | None = None,
) -> None:
    """Writes config.json and the tensors into an empty folder.

    Args:
      leaves: parameters of the model, by path.
      config: of the model; goes into config.json.
      folder: that exists.
      dtype: of the tensors, except for the router's bias, which becomes float32;
        None keeps the parameters' dtypes. "fp8" and COMPRESSED write codes and scales
        for the matrices that an FP8 release quantizes. The rest is bfloat16 beside FP8,
        and as the parameters are beside COMPRESSED.
      max_shard_bytes: of one file, unless a single tensor is larger.
      extra_config: more keys of config.json.

    Raises:
      InputError: the format has no such model, the disk is too small, or a weight is
        not finite.
    """
    huggingface_config.require_writable(config)
    slots = names_lib.tensor_slots(config, dict(leaves))
    plans = [_plan(slot, leaves, dtype) for slot in slots]
    new_folder.require_space(folder, sum(plan.size for plan in plans))
    extra = {k: v for k, v in (extra_config or {}).items() if k != _QUANTIZATION}
    if dtype in COMPRESSED:
        scheme = schemes.SCHEMES[dtype]
        extra[_QUANTIZATION] = compressed_tensors.quantization_config(slots, scheme)
    elif dtype == FP8:
        kept = [
            slot.name.removesuffix(".weight")
            for slot in slots
            if len(slot.layout.shape) == 2 and not slot.is_quantized
        ]
        extra[_QUANTIZATION] = fp8_blocks.quantization_config(kept)
    kind: Any = str(_cast(("lm_head",), leaves, dtype))
    config = dataclasses.replace(config, param_dtype=kind)
    huggingface_config.write_config(config, folder, extra)
    tensors = _create_files(folder, plans, max_shard_bytes)
    _write_tensors(plans, leaves, tensors)


class _Plan(NamedTuple):
    """The tensors written for a slot: one, or codes and scales."""

    slot: names_lib.Slot
    entries: dict[str, tuple[np.dtype, list[int]]]
    codes: leaf.Layout | None = None

    @property
    def size(self) -> int:
        """Returns the size of these tensors in bytes."""
        return sum(
            math.prod(shape) * kind.itemsize for kind, shape in self.entries.values()
        )


def _plan(
    slot: names_lib.Slot, leaves: Mapping[leaves_lib.Path, leaves_lib.Leaf], dtype: Any
) -> _Plan:
    path, shape = slot.paths[0], slot.layout.shape
    if dtype in COMPRESSED:
        codes = compressed_tensors.layout_of(slot, schemes.SCHEMES[dtype])
        if codes is not None:
            return _Plan(slot, compressed_tensors.entries(slot, codes), codes)
    if dtype == FP8 and slot.is_quantized:
        block = (fp8_blocks.BLOCK, fp8_blocks.BLOCK)
        scales = fp8_blocks.scale_shape(tuple(shape), block)
        return _Plan(
            slot,
            {
                slot.name: (jnp.dtype("float8_e4m3fn"), shape),
                slot.name + fp8_blocks.SCALE_SUFFIX: (jnp.dtype("float32"), scales),
            },
            leaf.Layout("fp8", block),
        )
    return _Plan(slot, {slot.name: (_cast(path, leaves, dtype), shape)})


def _cast(
    path: leaves_lib.Path, leaves: Mapping[leaves_lib.Path, leaves_lib.Leaf], dtype: Any
) -> np.dtype:
    """Returns the dtype in which a parameter without codes is written."""
    if dtype in COMPRESSED:
        dtype = None  # as it is
    elif dtype == FP8:
        dtype = "bfloat16"
    return huggingface.cast(path, dtype) or np.dtype(leaves[path].dtype)


def _create_files(
    folder: pathlib.Path, plans: list[_Plan], max_bytes: int
) -> dict[str, safetensors_file.Tensor]:
    """Creates the files with their headers, and an index if there are several."""
    files: list[dict[str, tuple[np.dtype, list[int]]]] = [{}]
    used = 0
    for plan in plans:
        if files[-1] and used + plan.size > max_bytes:
            files.append({})
            used = 0
        files[-1] |= plan.entries
        used += plan.size
    tensors: dict[str, safetensors_file.Tensor] = {}
    for i, entries in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        name = name if len(files) > 1 else huggingface.SINGLE_FILE
        tensors |= safetensors_file.create(folder / name, entries)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(plan.size for plan in plans)},
            "weight_map": {name: tensor.path.name for name, tensor in tensors.items()},
        }
        (folder / huggingface.INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return tensors


def _write_tensors(
    plans: list[_Plan],
    leaves: Mapping[leaves_lib.Path, leaves_lib.Leaf],
    tensors: dict[str, safetensors_file.Tensor],
) -> None:
    """Writes the tensors in the order of the parameters, one chunk at a time."""
    total = sum(plan.size for plan in plans)
    with tqdm.tqdm(
        total=total, unit="B", unit_scale=True, desc="writing", disable=None
    ) as bar:
        for plan in sorted(plans, key=lambda p: (p.slot.paths, p.slot.index)):
            slot = plan.slot
            for rows in _row_windows(slot.layout):
                values = _read_rows(slot, rows, leaves)
                leaves_lib.require_finite(values, slot.name)
                _write_rows(plan, rows.start, values, tensors)
            if slot.name + compressed_tensors.SHAPE in plan.entries:
                shape = np.array(slot.layout.shape, np.int64)
                tensors[slot.name + compressed_tensors.SHAPE].write(0, shape)
            bar.update(plan.size)
    for path in {tensor.path for tensor in tensors.values()}:
        with path.open("rb") as file:  # before the folder's rename can reach the disk
            os.fsync(file.fileno())


def _write_rows(
    plan: _Plan,
    start: int,
    values: np.ndarray,
    tensors: Mapping[str, safetensors_file.Tensor],
) -> None:
    """Writes rows of a weight, coded as the plan says, from row `start` on."""
    name = plan.slot.name
    if plan.codes is None:
        kind = safetensors_file.DTYPES[tensors[name].dtype]
        tensors[name].write(start, np.ascontiguousarray(values, kind))
    elif plan.codes.kind == "fp8":
        codes, scales = fp8_blocks.quantize(values.astype(np.float32))
        tensors[name].write(start, codes)
        tensors[name + fp8_blocks.SCALE_SUFFIX].write(start // fp8_blocks.BLOCK, scales)
    else:
        for end, rows in compressed_tensors.coded(values, plan.codes).items():
            tensors[name + end].write(start, rows)


def _row_windows(layout: names_lib.Layout) -> Iterator[slice]:
    """Yields rows of at most WINDOW_BYTES in float32, in whole steps and FP8 blocks."""
    step = math.lcm(layout.rows_per_step, fp8_blocks.BLOCK)
    row_bytes = math.prod(layout.shape[1:]) * _FLOAT32_BYTES
    step *= max(1, leaves_lib.WINDOW_BYTES // (step * row_bytes))
    for start in range(0, layout.shape[0], step):
        yield slice(start, min(start + step, layout.shape[0]))


def _read_rows(
    slot: names_lib.Slot,
    rows: slice,
    leaves: Mapping[leaves_lib.Path, leaves_lib.Leaf],
) -> np.ndarray:
    index = tuple(slice(i, i + 1) for i in slot.index)
    parts = []
    for part, path in enumerate(slot.paths):
        window = slot.layout.window(part, rows)
        values = leaves[path].read((*index, *window))
        parts.append(values.reshape(values.shape[len(index) :]))
    return slot.layout.write(parts)
