"""Writes FP8 folders by loops over blocks, in float64, without glm5_jax."""

import json
import pathlib

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

BLOCK = 128
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F8_E4M3": FP8,
    "I64": np.int64,
}
QUANTIZED = (  # spec/glm5.md 1.9
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj", "wq_b", "wk"),
)
SETTINGS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}


def load_file(path):
    """Loads a file like safetensors.numpy.load_file, which does not support FP8."""
    tensors = {}
    for name, tensor in safetensors.deserialize(pathlib.Path(path).read_bytes()):
        values = np.frombuffer(bytes(tensor["data"]), DTYPES[tensor["dtype"]])
        tensors[name] = values.reshape(tensor["shape"])
    return tensors


def stored_tensors(folder):
    """Returns all tensors of a folder, whatever its files."""
    tensors = {}
    for path in pathlib.Path(folder).glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def write(source, target):
    """Quantizes a folder in bfloat16."""
    tensors = {}
    for name, value in stored_tensors(source).items():
        module = name.removesuffix(".weight")
        if not module.endswith(QUANTIZED):
            tensors[name] = value
            continue
        codes, scales = np.empty(value.shape, FP8), np.empty(blocks(value), np.float32)
        for i, j in np.ndindex(scales.shape):
            here = window(i, j)
            block = value[here].astype(np.float64)
            scales[i, j] = np.abs(block).max() / 448
            codes[here] = (block / np.float64(scales[i, j])).astype(FP8)
        tensors[name], tensors[name + "_scale_inv"] = codes, scales
    save(source, target, tensors, {"quantization_config": SETTINGS})


def write_products(source, target, dtype):
    """Writes the weights that an FP8 folder stands for, in another dtype."""
    stored, tensors = stored_tensors(source), {}
    for name, value in stored.items():
        if name.endswith("_scale_inv"):
            continue
        if name + "_scale_inv" in stored:
            exact = value.astype(np.float64)
            for i, j in np.ndindex(blocks(value)):
                exact[window(i, j)] *= np.float64(stored[name + "_scale_inv"][i, j])
            tensors[name] = exact.astype(np.float32).astype(dtype)
        else:
            tensors[name] = value
    save(source, target, tensors, {"quantization_config": None})


def blocks(value):
    return tuple(-(-n // BLOCK) for n in value.shape)


def window(i, j):
    return np.s_[BLOCK * i : BLOCK * (i + 1), BLOCK * j : BLOCK * (j + 1)]


def save(source, target, tensors, changes):
    target.mkdir()
    safetensors.numpy.save_file(tensors, target / "model.safetensors")
    settings = json.loads((pathlib.Path(source) / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(settings))
