"""Reads the tensors of a Hugging Face folder, in windows of their parameters."""

import dataclasses
import itertools
import json
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.weights import (
    coded_folder,
    coded_tensor,
    huggingface_config,
    safetensors_file,
)
from glm5_jax.weights import huggingface_names as names_lib

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FILE_NAME = re.compile(r"[A-Za-z0-9._-]+\.safetensors")
DTYPES = coded_folder.FLOATS
MAX_LISTED = 100  # names of one kind in an error message

read_config = huggingface_config.read_config
write_config = huggingface_config.write_config


@dataclasses.dataclass
class StoredLeaf(leaves_lib.Leaf):
    """A parameter stored as one or more tensors in the files of a folder."""

    shape: tuple[int, ...]
    dtype: np.dtype
    # Index in the parameter's stack -> tensor, its layout, and the part of it.
    pieces: dict[tuple[int, ...], tuple[Any, names_lib.Layout, int]]

    @property
    def _depth(self) -> int:
        return len(next(iter(self.pieces)))

    @property
    def cuts(self) -> tuple[int, ...]:
        """Returns the axes in the order to cut them: stacks, stored rows, the rest."""
        _, layout, _ = next(iter(self.pieces.values()))
        stack = range(self._depth)
        rest = [axis for axis in range(len(self.shape)) if axis not in stack]
        rows = self._depth + layout.row_axis
        return (*stack, rows, *(axis for axis in rest if axis != rows))

    def read(self, window: leaves_lib.Window) -> np.ndarray:
        """Reads the window from every tensor that it touches."""
        out = np.empty([w.stop - w.start for w in window], self.dtype)
        stack, rest = window[: self._depth], window[self._depth :]
        for index in itertools.product(*(range(w.start, w.stop) for w in stack)):
            tensor, layout, part = self.pieces[index]
            here = tuple(i - w.start for i, w in zip(index, stack, strict=True))
            out[here] = layout.read(tensor, part, rest)
        return out


def load_params(
    folder: str | os.PathLike,
    config: config_lib.ModelConfig,
    abstract_params: dict,
    dtype: Any = None,
    shardings: Any = None,
) -> dict:
    """Reads a folder's tensors into a parameter tree.

    Each process reads only the parts of its own devices, window by window.

    Args:
      folder: with model.safetensors, or an index and the files that it names.
      config: of the model.
      abstract_params: the tree, with anything that has a shape as leaves.
      dtype: see `open_params`.
      shardings: tree of jax shardings; None puts everything on the first device.

    Raises:
      InputError: names whatever is missing, unexpected, damaged or misshapen.
    """
    leaves = open_params(folder, config, abstract_params, dtype)
    treedef = jax.tree.structure(abstract_params)
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.unflatten(treedef, [device] * len(leaves))
    arrays = [
        leaves_lib.place(leaf, sharding)
        for leaf, sharding in zip(
            leaves.values(), treedef.flatten_up_to(shardings), strict=True
        )
    ]
    return jax.tree.unflatten(treedef, arrays)


def open_params(
    folder: str | os.PathLike,
    config: config_lib.ModelConfig,
    abstract_params: dict,
    dtype: Any = None,
) -> dict[leaves_lib.Path, StoredLeaf]:
    """Checks a folder and opens its parameters, which `read` then reads in windows.

    Args:
      folder: with model.safetensors, or an index and the files that it names.
      config: of the model.
      abstract_params: the tree, with anything that has a shape as leaves.
      dtype: of the parameters, except for the router's bias, which becomes float32;
        None keeps the stored dtypes, and reads codes as the config's param_dtype.

    Raises:
      InputError: names whatever is missing, unexpected, damaged or misshapen.
    """
    wanted, _ = leaves_lib.flatten(abstract_params)
    slots = names_lib.tensor_slots(config, wanted)
    stored = _open(pathlib.Path(folder), config, slots)
    pieces: dict[leaves_lib.Path, dict] = {path: {} for path in wanted}
    for slot in slots:
        for part, path in enumerate(slot.paths):
            pieces[path][slot.index] = (stored[slot.name], slot.layout, part)
    kinds = {path: cast(path, dtype) for path in wanted}
    return {
        path: StoredLeaf(
            tuple(leaf.shape), kinds[path] or _dtype(pieces[path], config), pieces[path]
        )
        for path, leaf in wanted.items()
    }


def stores_mtp(folder: str | os.PathLike, config: config_lib.ModelConfig) -> bool:
    """Returns whether a folder has tensors of the MTP layer; True if it is damaged.

    Args:
      folder: with model.safetensors, or an index.
      config: of the folder.
    """
    try:
        names = _weight_map(pathlib.Path(folder)) or safetensors_file.read_header(
            pathlib.Path(folder) / SINGLE_FILE
        )
    except config_lib.InputError:
        return True  # `open_params` says what is wrong
    prefix = names_lib.mtp_prefix(config)
    return any(name.startswith(prefix) for name in names)


def is_fp8(settings: dict[str, Any]) -> bool:
    """Returns whether a config.json describes FP8 weights."""
    found = settings.get("quantization_config")
    return isinstance(found, dict) and found.get("quant_method") == "fp8"


def cast(path: leaves_lib.Path, dtype: Any) -> np.dtype | None:
    """Returns the dtype to read a parameter in; the router's bias needs float32."""
    if dtype is None:
        return None
    is_bias = path[-1] == "e_score_correction_bias"
    return jnp.dtype("float32" if is_bias else dtype)


def _dtype(
    pieces: dict[tuple[int, ...], tuple[Any, Any, int]], config: config_lib.ModelConfig
) -> np.dtype:
    """Returns the dtype of a parameter that keeps the dtype of its tensors."""
    tensors = [tensor for tensor, _, _ in pieces.values()]
    if any(isinstance(tensor, coded_tensor.CodedTensor) for tensor in tensors):
        return jnp.dtype(config.param_dtype)
    kinds = {tensor.dtype for tensor in tensors}
    return safetensors_file.DTYPES[kinds.pop() if len(kinds) == 1 else "F32"]


def _open(
    folder: pathlib.Path,
    config: config_lib.ModelConfig,
    slots: list[names_lib.Slot],
) -> dict[str, Any]:
    """Returns tensors by name, to be read lazily; checks all names and shapes first."""
    expected = {slot.name: tuple(slot.layout.shape) for slot in slots}
    index = _weight_map(folder)
    known = _without_mtp(config, index)
    tensors, bad_files = _read_headers(folder, known)
    spare = _take_spare(config, tensors, index)
    coding = _coding(folder)
    shapes, allowed = coding.expected(expected, tensors)
    missing = [
        name
        for name in dict.fromkeys((*shapes, *known))
        if name not in (tensors | spare) and known.get(name) not in bad_files
    ]
    unexpected = sorted(set(tensors) - set(shapes))
    both = [name for name in shapes if name in tensors]
    is_fp8 = any(tensor.dtype == coded_folder.FP8_DTYPE for tensor in tensors.values())
    problems = {
        "Files missing or damaged (download them again)": list(bad_files.values()),
        "Tensors missing": missing,
        "Tensors unexpected": unexpected,
        "Tensors of a wrong shape": [
            f"{n} {list(tensors[n].shape)} instead of {list(shapes[n])}"
            for n in both
            if tensors[n].shape != shapes[n]
        ],
        f"Tensors of a dtype other than {', '.join(DTYPES)}": [
            f"{n} {tensors[n].dtype}"
            for n in both
            if tensors[n].dtype not in allowed[n]
        ],
    }
    if any(problems.values()):
        lines = [f"{title}: {_join(x)}." for title, x in problems.items() if x]
        remedy = _remedy(config, missing, needs_scales=is_fp8 and not coding.block)
        raise config_lib.InputError("\n".join([f"{folder}:", *lines, remedy]))
    _require_equal(config, spare, tensors)
    return {
        name: coding.opened(name, shape, tensors) for name, shape in expected.items()
    }


def _without_mtp(
    config: config_lib.ModelConfig, known: dict[str, str]
) -> dict[str, str]:
    """Drops the MTP layer (it alone has eh_proj) from an index if config has none."""
    prefix = names_lib.mtp_prefix(config)
    if config.has_mtp or prefix + "eh_proj.weight" not in known:
        return known
    return {k: file for k, file in known.items() if not k.startswith(prefix)}


def _take_spare(
    config: config_lib.ModelConfig,
    tensors: dict[str, safetensors_file.Tensor],
    index: dict[str, str],
) -> dict[str, safetensors_file.Tensor]:
    """Removes from `tensors`, and returns, those that make no parameter.

    These are the MTP layer if the config has none, the MTP layer's copies of shared
    tensors, shared experts of width 0, which transformers writes for none, and the
    indexers of layers that share another one's index.
    """
    prefix, spare = names_lib.mtp_prefix(config), set()
    if config.has_mtp:
        spare |= set(names_lib.mtp_copies(config))
    elif prefix + "eh_proj.weight" in (tensors | index):
        spare |= {name for name in tensors if name.startswith(prefix)}
        logging.info("The MTP layer is skipped: num_nextn_predict_layers is 0.")
    if not config.n_shared_experts:
        shared = {name for name in tensors if ".mlp.shared_experts." in name}
        spare |= {name for name in shared if 0 in tensors[name].shape}
    for layer, owns_indexer in enumerate(config.is_full_index_layer):
        start = f"model.layers.{layer}.self_attn.indexer."
        if not owns_indexer:
            spare |= {name for name in tensors if name.startswith(start)}
    return {name: tensors.pop(name) for name in spare if name in tensors}


def _require_equal(
    config: config_lib.ModelConfig,
    spare: dict[str, safetensors_file.Tensor],
    tensors: dict[str, safetensors_file.Tensor],
) -> None:
    """Checks that the MTP layer's copies equal the tensors that it shares."""
    for name, original in names_lib.mtp_copies(config).items():
        if not config.has_mtp or name not in spare:
            continue
        copy, other = spare[name], tensors[original]
        is_same = (copy.dtype, copy.shape) == (other.dtype, other.shape)
        itemsize = safetensors_file.DTYPES[other.dtype].itemsize
        axes = range(len(other.shape))
        chunk = leaves_lib.chunk_shape(other.shape, itemsize, axes)
        if not is_same or not all(
            np.array_equal(copy[window].view(np.uint8), other[window].view(np.uint8))
            for window in leaves_lib.windows(other.shape, chunk)
        ):
            raise config_lib.InputError(
                f"{copy.path}: {name} differs from {original}, but glm5_jax has one "
                f"tensor for both. Set model.num_nextn_predict_layers=0 to load the "
                f"model without its MTP layer."
            )


def _read_headers(
    folder: pathlib.Path, known: dict[str, str]
) -> tuple[dict[str, safetensors_file.Tensor], dict[str, str]]:
    """Returns the tensors found, and what is wrong with each bad file."""
    tensors: dict[str, safetensors_file.Tensor] = {}
    bad_files = {}
    for file in sorted({*known.values()} or {SINGLE_FILE}):
        try:
            found = safetensors_file.read_header(folder / file)
        except safetensors_file.DamagedError as error:
            bad_files[file] = str(error).rstrip(".")
            continue
        # The index decides which of two files with the same name is read.
        tensors |= {n: x for n, x in found.items() if known.get(n, file) == file}
    if SINGLE_FILE in bad_files:
        raise config_lib.InputError(
            f"{folder}: {bad_files[SINGLE_FILE]}; download it again."
        )
    return tensors, bad_files


def _coding(folder: pathlib.Path) -> coded_folder.Coding:
    """Reads from config.json how weights are coded; read_config checked the rest."""
    try:
        settings = huggingface_config.read_json(folder / "config.json")
        return coded_folder.coding(settings.get("quantization_config"))
    except (OSError, ValueError, AttributeError) as error:
        if isinstance(error, config_lib.InputError):
            raise config_lib.InputError(f"{folder}/config.json: {error}") from error
        return coded_folder.Coding()


def _weight_map(folder: pathlib.Path) -> dict[str, str]:
    """Returns the index's file of each tensor; {} for a folder with a single file."""
    if (folder / SINGLE_FILE).exists():
        return {}
    path = folder / INDEX_FILE
    try:
        content = json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=safetensors_file.unique,
        )
        weight_map = dict(content["weight_map"])
        if not weight_map:
            raise ValueError("weight_map is empty")
    except FileNotFoundError as error:
        raise config_lib.InputError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; give a folder with "
            f"safetensors files."
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise config_lib.InputError(
            f"{path} is not a valid index ({error!r}); download it again."
        ) from error
    # Untrusted names that become paths.
    bad = {str(f) for f in weight_map.values() if not FILE_NAME.fullmatch(str(f))}
    if bad:
        raise config_lib.InputError(
            f"{path} names files other than plain *.safetensors: {sorted(bad)}; do not "
            f"trust this folder."
        )
    return weight_map


def _join(names: list[str]) -> str:
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _remedy(
    config: config_lib.ModelConfig, missing: list[str], needs_scales: bool
) -> str:
    """Returns advice on tensors that do not fit."""
    prefix = names_lib.mtp_prefix(config)
    if needs_scales:
        return (
            "The tensors are in FP8, but config.json has no quantization_config: use "
            "the config.json of the FP8 release."
        )
    if missing and all(name.startswith(prefix) for name in missing):
        return (
            "The folder has no MTP layer (transformers drops it): set "
            "model.num_nextn_predict_layers=0."
        )
    return "Use the config.json that belongs to these weights, in BF16, F32 or FP8."
