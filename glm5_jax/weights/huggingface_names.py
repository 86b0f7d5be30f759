"""Names and layouts of GLM-5's tensors in a Hugging Face folder.

TABLE is the only place that maps a tensor's Hugging Face name to a parameter's path.
"""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import depth

Path = tuple[str, ...]  # of a parameter in its tree


class Row(NamedTuple):
    """One stored tensor and the parameters that it holds.

    dims "(NH)Q -> QNH" means stored as [N*H, Q] and [Q, N, H] here. A tensor of
    several parameters holds them one after another along the dim `join`.
    """

    stored: str
    params: str
    dims: str
    join: str = ""


TABLE = {
    "model": (
        Row("model.embed_tokens.weight", "embed_tokens", "VD -> VD"),
        Row("model.norm.weight", "norm", "D -> D"),
        Row("lm_head.weight", "lm_head", "VD -> DV"),
    ),
    "mtp": (
        Row("enorm.weight", "enorm", "D -> D"),
        Row("hnorm.weight", "hnorm", "D -> D"),
        Row("eh_proj.weight", "eh_proj", "DX -> XD"),
        Row("shared_head.norm.weight", "norm", "D -> D"),
    ),
    "layer": (
        Row("input_layernorm.weight", "input_layernorm", "D -> D"),
        Row("post_attention_layernorm.weight", "post_attention_layernorm", "D -> D"),
        Row("self_attn.q_a_proj.weight", "self_attn.q_a_proj", "QD -> DQ"),
        Row("self_attn.q_a_layernorm.weight", "self_attn.q_a_layernorm", "Q -> Q"),
        Row("self_attn.q_b_proj.weight", "self_attn.q_b_proj", "(NH)Q -> QNH"),
        Row("self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_a_proj", "XD -> DX"),
        Row("self_attn.kv_a_layernorm.weight", "self_attn.kv_a_layernorm", "C -> C"),
        Row(
            "self_attn.kv_b_proj.weight",
            "self_attn.k_b_proj self_attn.v_b_proj",
            "(NP)C -> CNP",
            join="P",
        ),
        Row("self_attn.o_proj.weight", "self_attn.o_proj", "D(NO) -> NOD"),
        Row("self_attn.indexer.wq_b.weight", "indexer.wq_b", "(IJ)Q -> QIJ"),
        Row("self_attn.indexer.wk.weight", "indexer.wk", "JD -> DJ"),
        Row("self_attn.indexer.k_norm.weight", "indexer.k_norm_scale", "J -> J"),
        Row("self_attn.indexer.k_norm.bias", "indexer.k_norm_bias", "J -> J"),
        Row(
            "self_attn.indexer.weights_proj.weight", "indexer.weights_proj", "ID -> DI"
        ),
        Row("mlp.gate_proj.weight", "mlp.gate_proj", "FD -> DF"),
        Row("mlp.up_proj.weight", "mlp.up_proj", "FD -> DF"),
        Row("mlp.down_proj.weight", "mlp.down_proj", "DF -> FD"),
        Row(
            "mlp.shared_experts.gate_proj.weight",
            "mlp.shared_experts.gate_proj",
            "FD -> DF",
        ),
        Row(
            "mlp.shared_experts.up_proj.weight",
            "mlp.shared_experts.up_proj",
            "FD -> DF",
        ),
        Row(
            "mlp.shared_experts.down_proj.weight",
            "mlp.shared_experts.down_proj",
            "DF -> FD",
        ),
        Row("mlp.experts.{e}.gate_proj.weight", "mlp.experts.gate_proj", "FD -> DF"),
        Row("mlp.experts.{e}.up_proj.weight", "mlp.experts.up_proj", "FD -> DF"),
        Row("mlp.experts.{e}.down_proj.weight", "mlp.experts.down_proj", "DF -> FD"),
        Row("mlp.gate.weight", "mlp.gate", "ED -> DE"),
        Row(
            "mlp.gate.e_score_correction_bias",
            "mlp.e_score_correction_bias",
            "E -> E",
        ),
    ),
}


# Matrices that an FP8 release does not quantize (ends of their modules' names).
KEPT_IN_BF16 = (
    *("embed_tokens", "lm_head", "eh_proj"),
    *("mlp.gate", "indexer.weights_proj"),
)


class Layout:
    """Converts between a stored tensor and the arrays of its parameters."""

    def __init__(self, row: Row, shapes: list[tuple[int, ...]]) -> None:
        """Takes the shapes of the parameters' arrays."""
        stored, natural = row.dims.split(" -> ")
        self.groups = [a or b for a, b in re.findall(r"\((\w+)\)|(\w)", stored)]
        letters = "".join(self.groups)
        self.natural, self.join = natural, letters.find(row.join) if row.join else 0
        self.to_stored = [natural.index(letter) for letter in letters]
        self.to_natural = [letters.index(letter) for letter in natural]
        self.sizes = dict(zip(natural, shapes[0], strict=True))
        self.starts = [0] * len(shapes)
        self.parts = [tuple(shape) for shape in shapes]
        if row.join:
            widths = [shape[natural.index(row.join)] for shape in shapes]
            self.starts = [sum(widths[:i]) for i in range(len(widths))]
            self.sizes[row.join] = sum(widths)
        self.shape = [math.prod(self.sizes[x] for x in group) for group in self.groups]

    @property
    def row_axis(self) -> int:
        """Returns the axis of the parameter's array along which the stored rows run."""
        return self.to_natural.index(0)

    @property
    def rows_per_step(self) -> int:
        """Returns the number of stored rows that one step along `row_axis` covers."""
        return self.shape[0] // self.sizes[self.groups[0][0]]

    def window(self, part: int, rows: slice) -> tuple[slice, ...]:
        """Returns the window of a parameter that holds these stored rows."""
        window = [slice(0, n) for n in self.parts[part]]
        step = self.rows_per_step
        window[self.row_axis] = slice(rows.start // step, rows.stop // step)
        return tuple(window)

    def read(self, stored: Any, part: int, window: tuple[slice, ...]) -> np.ndarray:
        """Reads a window of a parameter from a stored tensor, which may be lazy."""
        bounds = dict(zip(self.natural, window, strict=True))
        cuts, shape, rest = [], [], []
        for first, *others in self.groups:
            # A merged dim is cut along its first letter only; the rest is cut below.
            start, stop = bounds[first].start, bounds[first].stop
            inner = [self.sizes[letter] for letter in others]
            cuts.append(slice(start * math.prod(inner), stop * math.prod(inner)))
            shape += [stop - start, *inner]
            rest += [slice(None), *(bounds[letter] for letter in others)]
        if start := self.starts[part]:
            cut = rest[self.join]
            rest[self.join] = slice(start + cut.start, start + cut.stop)
        array = stored[tuple(cuts)].reshape(shape)
        return array[tuple(rest)].transpose(self.to_natural)

    def write(self, parts: list[np.ndarray]) -> np.ndarray:
        """Returns the stored rows of the parts' windows, as `window` gives them."""
        parts = [part.transpose(self.to_stored) for part in parts]
        return np.concatenate(parts, axis=self.join).reshape(-1, *self.shape[1:])


class Slot(NamedTuple):
    """One stored tensor of a model: the entry `index` of each of its parameters."""

    name: str
    layout: Layout
    paths: tuple[Path, ...]
    index: tuple[int, ...]

    @property
    def is_quantized(self) -> bool:
        """Returns whether an FP8 release holds it in FP8."""
        module = self.name.removesuffix(".weight")
        return len(self.layout.shape) == 2 and not module.endswith(KEPT_IN_BF16)


def require_one_mtp_module(num_modules: int) -> None:
    """Checks that the steps of multi-token prediction share a module, if there is one.

    Raises:
      InputError: they do not.
    """
    if num_modules > 1:
        raise config_lib.InputError(
            f"A model with num_nextn_predict_layers={num_modules} has no Hugging Face "
            f"form here: several MTP modules are trained and measured in runs only. "
            f"Set it to 1 where the steps share a module, or to 0 without MTP."
        )


def tensor_slots(config: config_lib.ModelConfig, leaves: dict[Path, Any]) -> list[Slot]:
    """Lists every stored tensor of a model with these parameters.

    Raises:
      InputError: see `require_one_mtp_module`.
    """
    require_one_mtp_module(config.num_nextn_predict_layers)
    slots = []
    for section, prefix, root, index in _places(config):
        for row in TABLE[section]:
            paths = tuple((*root, *name.split(".")) for name in row.params.split())
            if paths[0] not in leaves:
                continue
            shapes = [leaves[path].shape[len(index) :] for path in paths]
            indices = [index]
            if "{e}" in row.stored:
                indices = [(*index, e) for e in range(shapes[0][0])]
                shapes = [shape[1:] for shape in shapes]
            layout = Layout(row, shapes)
            for i in indices:
                name = prefix + row.stored.format(e=(None, *i)[-1])
                slots.append(Slot(name, layout, paths, i))
    unknown = set(leaves) - {path for slot in slots for path in slot.paths}
    assert not unknown, f"parameters without a row in TABLE: {unknown}"
    return slots


def _places(
    config: config_lib.ModelConfig,
) -> Iterator[tuple[str, str, Path, tuple[int, ...]]]:
    """Yields section of TABLE, prefix of stored names, subtree, index in its stacks."""
    yield "model", "", (), ()
    for g, group in enumerate(depth.layer_groups(config)):
        for repeat in range(group.repeats):
            for p in range(len(group.unit)):
                prefix = f"model.layers.{group.layer(repeat, p)}."
                yield "layer", prefix, (f"layers_{g}", f"block_{p}"), (repeat,)
    yield "mtp", mtp_prefix(config), ("mtp",), ()
    yield "layer", mtp_prefix(config), ("mtp", "block"), ()


def mtp_copies(config: config_lib.ModelConfig) -> dict[str, str]:
    """Returns the tensors that some folders repeat in the MTP layer, by name."""
    prefix = mtp_prefix(config)
    return {
        prefix + "embed_tokens.weight": "model.embed_tokens.weight",
        prefix + "shared_head.head.weight": "lm_head.weight",
    }


def mtp_prefix(config: config_lib.ModelConfig) -> str:
    """Returns the prefix of the names of the MTP layer's tensors."""
    return f"model.layers.{config.num_hidden_layers}."
