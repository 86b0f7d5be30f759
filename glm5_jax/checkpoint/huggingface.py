"""Reads and writes the tensors of a Hugging Face folder.

Everything streams: reading holds one parameter's local shards at a time, writing one
file.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import huggingface_config
from glm5_jax.checkpoint import huggingface_names as names_lib

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FILE_NAME = re.compile(r"[A-Za-z0-9._-]+\.safetensors")
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
MAX_SHARD_BYTES = 5 * 10**9
MAX_LISTED = 100  # names of one kind in an error message

read_config = huggingface_config.read_config
write_config = huggingface_config.write_config


def load_params(
    folder: str | os.PathLike,
    config: config_lib.ModelConfig,
    abstract_params: dict,
    dtype: Any = None,
    shardings: Any = None,
) -> dict:
    """Reads a folder's tensors into a parameter tree.

    A process reads only what its devices hold.

    Args:
      folder: with model.safetensors, or an index and the files that it names.
      config: of the model.
      abstract_params: the tree, with anything that has a shape as leaves.
      dtype: of the parameters, except the router's bias, which is float32 then;
        None keeps what is stored.
      shardings: tree of jax shardings; None puts everything on the first device.

    Raises:
      InputError: names whatever is missing, unexpected, damaged or misshapen.
    """
    leaves, treedef = _flatten(abstract_params)
    slots = names_lib.tensor_slots(config, leaves)
    stored = _open(pathlib.Path(folder), config, slots)
    pieces: dict[names_lib.Path, list[tuple[names_lib.Slot, int]]] = {
        path: [] for path in leaves
    }
    for slot in slots:
        for part, path in enumerate(slot.paths):
            pieces[path].append((slot, part))
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.unflatten(treedef, [device] * len(leaves))
    arrays = [
        _load_leaf(leaf.shape, sharding, _cast(path, dtype), pieces[path], stored)
        for (path, leaf), sharding in zip(
            leaves.items(), treedef.flatten_up_to(shardings), strict=True
        )
    ]
    return jax.tree.unflatten(treedef, arrays)


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
      dtype: of the tensors, except the router's bias, which is float32 then; None
        keeps that of the parameters.
      max_shard_bytes: of one file, unless a single tensor is larger.

    Raises:
      InputError: the folder exists, or the disk is too small.
    """
    folder = pathlib.Path(folder).absolute()
    if folder.exists():
        raise config_lib.InputError(f"{folder} exists; choose another target.")
    leaves, _ = _flatten(params)
    files = _plan(
        names_lib.tensor_slots(config, leaves), leaves, dtype, max_shard_bytes
    )
    total = sum(size for file in files for _, _, size in file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder.parent).free) < total:
        raise config_lib.InputError(
            f"{folder.parent} has {free:,} bytes free, the tensors take {total:,}; "
            f"choose another target."
        )
    partial = pathlib.Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        weight_map = {}
        for i, file in enumerate(files):
            name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
            name = name if len(files) > 1 else SINGLE_FILE
            _write_file(partial / name, file, leaves)
            weight_map |= {slot.name: name for slot, _, _ in file}
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        kind: Any = str(_cast(("lm_head",), dtype) or leaves["lm_head",].dtype)
        write_config(dataclasses.replace(config, param_dtype=kind), partial)
        partial.chmod(0o755)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _flatten(tree: dict) -> tuple[dict[names_lib.Path, Any], Any]:
    """Leaves by path, and the structure."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return {tuple(key.key for key in path): leaf for path, leaf in pairs}, treedef


def _cast(path: names_lib.Path, dtype: Any) -> np.dtype | None:
    """What to cast a parameter to: a bias of float32 decides between close experts."""
    if dtype is None:
        return None
    is_bias = path[-1] == "e_score_correction_bias"
    return jnp.dtype("float32" if is_bias else dtype)


def _load_leaf(
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
    dtype: np.dtype | None,
    pieces: list[tuple[names_lib.Slot, int]],
    stored: dict[str, Any],
) -> jax.Array:
    """Reads one parameter, shard by shard."""
    if dtype is None:
        kinds = {DTYPES[stored[slot.name].get_dtype()] for slot, _ in pieces}
        dtype = jnp.dtype(kinds.pop() if len(kinds) == 1 else "float32")

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = [c.indices(n) for c, n in zip(index or (), shape, strict=True)]
        window = [slice(start, stop) for start, stop, _ in bounds]
        out = np.empty([stop - start for start, stop, _ in bounds], dtype)
        for slot, part in pieces:
            here = tuple(i - w.start for i, w in zip(slot.index, window, strict=False))
            if all(0 <= i < n for i, n in zip(here, out.shape, strict=False)):
                rest = tuple(window[len(here) :])
                out[here] = slot.layout.read(stored[slot.name], part, rest)
        return out

    return jax.make_array_from_callback(shape, sharding, read).block_until_ready()


def _weight_map(folder: pathlib.Path, expected: dict[str, Any]) -> dict[str, str]:
    """File of each tensor, as the index says; or the only file for all."""
    if (folder / SINGLE_FILE).exists():
        return dict.fromkeys(expected, SINGLE_FILE)
    path = folder / INDEX_FILE
    try:
        weight_map = dict(json.loads(path.read_text())["weight_map"])
    except FileNotFoundError as error:
        raise config_lib.InputError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; give a folder of "
            f"safetensors."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise config_lib.InputError(
            f"{path} is no index of safetensors ({error!r}); download it again."
        ) from error
    # These names come from strangers and become paths.
    bad = {str(f) for f in weight_map.values() if not FILE_NAME.fullmatch(str(f))}
    if bad:
        raise config_lib.InputError(
            f"{path} names files that are no plain *.safetensors: {sorted(bad)}; do "
            f"not trust this folder."
        )
    return weight_map


def _open(
    folder: pathlib.Path,
    config: config_lib.ModelConfig,
    slots: list[names_lib.Slot],
) -> dict[str, Any]:
    """Lazily readable tensors by name, after a check of all names and shapes."""
    expected = {slot.name: slot.layout.shape for slot in slots}
    weight_map = _weight_map(folder, expected)
    tensors: dict[str, Any] = {}
    bad_files = {}
    for file in sorted(set(weight_map.values())):
        try:
            opened = safetensors.safe_open(folder / file, framework="np")
        except (OSError, safetensors.SafetensorError) as error:
            bad_files[file] = f"{file} ({error})"
            continue
        for name in opened.keys():  # noqa: SIM118 (it is no dict)
            if weight_map.get(name, file) == file:
                tensors[name] = opened.get_slice(name)
    missing = [
        name
        for name in expected
        if name not in tensors and weight_map.get(name) not in bad_files
    ]
    unexpected = sorted(set(tensors) - set(expected))
    misshapen = [
        f"{name} {stored} instead of {shape}"
        for name, shape in expected.items()
        if name in tensors and (stored := tensors[name].get_shape()) != shape
    ]
    dtypes = {name: tensor.get_dtype() for name, tensor in tensors.items()}
    unreadable = [f"{n} {d}" for n, d in dtypes.items() if d not in DTYPES]
    problems = {
        "Files missing or damaged (download them again)": list(bad_files.values()),
        "Tensors missing": missing,
        "Tensors unexpected": unexpected,
        "Tensors of a wrong shape": misshapen,
        f"Tensors of a dtype other than {', '.join(DTYPES)}": unreadable,
    }
    if any(problems.values()):
        lines = [f"{title}: {_join(x)}." for title, x in problems.items() if x]
        raise config_lib.InputError(
            "\n".join([f"{folder}:", *lines, _remedy(config, missing, unexpected)])
        )
    return tensors


def _join(names: list[str]) -> str:
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _remedy(
    config: config_lib.ModelConfig, missing: list[str], unexpected: list[str]
) -> str:
    """What to do about tensors that do not fit."""
    prefix = names_lib.mtp_prefix(config)
    if missing and all(name.startswith(prefix) for name in missing):
        return (
            "The folder has no MTP layer (transformers drops it): set "
            "model.num_nextn_predict_layers=0."
        )
    if unexpected and all(name.startswith(prefix) for name in unexpected):
        return "The folder has an MTP layer: set model.num_nextn_predict_layers=1."
    return "Use the config.json that belongs to these weights, in BF16 or F32."


def _plan(
    slots: list[names_lib.Slot],
    leaves: dict[names_lib.Path, Any],
    dtype: Any,
    max_bytes: int,
) -> list[list[tuple[names_lib.Slot, np.dtype, int]]]:
    """Tensors of each file, with their dtype and size in bytes."""
    files: list[list[tuple[names_lib.Slot, np.dtype, int]]] = [[]]
    used = 0
    for slot in slots:
        path = slot.paths[0]
        kind = _cast(path, dtype) or jnp.dtype(leaves[path].dtype)
        size = math.prod(slot.layout.shape) * kind.itemsize
        if files[-1] and used + size > max_bytes:
            files.append([])
            used = 0
        files[-1].append((slot, kind, size))
        used += size
    return files


def _write_file(
    path: pathlib.Path,
    file: list[tuple[names_lib.Slot, np.dtype, int]],
    leaves: dict[names_lib.Path, Any],
) -> None:
    tensors = {}
    for slot, kind, _ in file:
        parts = [np.asarray(leaves[path][slot.index]) for path in slot.paths]
        tensors[slot.name] = np.ascontiguousarray(slot.layout.write(parts), kind)
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library's 0600 would keep a group from its weights
