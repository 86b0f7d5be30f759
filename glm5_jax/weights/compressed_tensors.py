"""The format of the package compressed-tensors, which vLLM and transformers read.

A matrix X.weight [out, in] is stored as one of

    int8: X.weight [out, in] int8, X.weight_scale [out, 1]
    int4: X.weight_packed [out, in / 8] int32, X.weight_scale [out, in / group],
          X.weight_shape = (out, in); without groups the scale is that of int8

and config.json lists the modules of either kind in its quantization_config.
"""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.quantization import leaf, schemes
from glm5_jax.weights import coded_tensor
from glm5_jax.weights import huggingface_names as names_lib

METHOD = "compressed-tensors"
SCALE, PACKED, SHAPE = "_scale", "_packed", "_shape"  # after the weight's name
_ACTIVATIONS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "dynamic": True,
    "strategy": "token",
}


def layout_of(slot: names_lib.Slot, scheme: schemes.Scheme) -> leaf.Layout | None:
    """Returns the layout of a stored matrix [out, in]; None if it stays as it is."""
    if not slot.is_quantized:
        return None
    path = slot.paths[0]
    kind = schemes.kind_of(scheme, path, slot.layout.parts[0])
    size = leaf.WHOLE
    if schemes.has_groups(kind, path):
        size = schemes.group_of(slot.layout.shape[1])
    return leaf.Layout(kind, (1, size))


def entries(
    slot: names_lib.Slot, layout: leaf.Layout
) -> dict[str, tuple[np.dtype, list[int]]]:
    """Returns names, dtypes and shapes of the tensors that hold a matrix."""
    out, inputs = slot.layout.shape
    scales = (np.dtype(np.float32), [*leaf.scale_shape((out, inputs), layout)])
    if layout.kind == "int8":
        codes = {slot.name: (np.dtype(np.int8), [out, inputs])}
    else:
        codes = {
            slot.name + PACKED: (np.dtype(np.int32), [out, inputs // schemes.WORD]),
            slot.name + SHAPE: (np.dtype(np.int64), [2]),
        }
    return {**codes, slot.name + SCALE: scales}


def coded(weights: np.ndarray, layout: leaf.Layout) -> dict[str, np.ndarray]:
    """Returns rows of the tensors that hold a matrix, by the ends of their names.

    The codes are those that quantization/leaf.py rounds to, bit for bit.
    """
    made = leaf.compiled_quantize(jnp.asarray(weights, jnp.float32), layout)
    if layout.kind == "int8":
        return {"": np.asarray(made.values), SCALE: np.asarray(made.scales)}
    codes = np.asarray(leaf.unpacked(made).values)
    return {PACKED: coded_tensor.packed(codes), SCALE: np.asarray(made.scales)}


def quantization_config(
    slots: list[names_lib.Slot], scheme: schemes.Scheme
) -> dict[str, Any]:
    """Returns config.json's quantization_config for tensors of these slots."""
    kept, groups, found = [], {}, {}
    for slot in slots:
        module = slot.name.removesuffix(".weight")
        layout = layout_of(slot, scheme)
        if layout is not None:
            found.setdefault((layout.kind, layout.blocks[1]), []).append(module)
        elif len(slot.layout.shape) == 2:
            kept.append(module)
    activations = _ACTIVATIONS if scheme.activations == "int8" else None
    for number, ((kind, group), modules) in enumerate(sorted(found.items())):
        weights = {
            "num_bits": 8 if kind == "int8" else 4,
            "type": "int",
            "symmetric": True,
            "dynamic": False,
            "strategy": "channel" if group == leaf.WHOLE else "group",
            "group_size": group or None,
        }
        groups[f"group_{number}"] = {
            "targets": _targets(modules),
            "weights": weights,
            "input_activations": activations,
            "format": "int-quantized" if kind == "int8" else "pack-quantized",
        }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": METHOD,
        "format": "mixed-precision" if len(formats) > 1 else formats.pop(),
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": kept,
    }


def activations(settings: dict[str, Any]) -> leaf.Activations:
    """Returns how products of a folder round their activations.

    Raises:
      InputError: the weights are coded differently.
    """
    groups = settings.get("config_groups")
    found: set[leaf.Activations] = set()
    for group in groups.values() if isinstance(groups, dict) else [None]:
        weights = group.get("weights") if isinstance(group, dict) else None
        inputs = group.get("input_activations") if isinstance(group, dict) else None
        is_known = isinstance(weights, dict) and (
            weights.get("type") == "int"
            and weights.get("num_bits") in (4, 8)
            and weights.get("symmetric") is True
            and weights.get("strategy") in ("channel", "group")
        )
        if isinstance(inputs, dict):
            is_known &= all(inputs.get(k) == x for k, x in _ACTIVATIONS.items())
        if not is_known:
            raise config_lib.InputError(
                f"quantization_config of {METHOD} must have groups of symmetric int8 "
                f"or int4 weights, by channel or group, and activations of none or "
                f"dynamic int8 by token, got {group!r:.300}; take the BF16 "
                f"or FP8 release."
            )
        found.add("same" if inputs is None else "int8")
    if len(found) != 1:
        raise config_lib.InputError(
            f"quantization_config must round the activations of all groups alike, got "
            f"{sorted(found)}; take the BF16 or FP8 release."
        )
    return found.pop()


def _targets(modules: list[str]) -> list[str]:
    """Returns patterns of the modules, with any number for a layer and an expert."""
    patterns = {re.sub(r"\\\.\d+", r"\\.\\d+", re.escape(m)) for m in modules}
    return [f"re:^{p}$" for p in sorted(patterns)]
