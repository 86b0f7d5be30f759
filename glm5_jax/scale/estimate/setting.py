"""A candidate mesh of a config, and the sizes of its shards."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

from glm5_jax import collectives, sharding
from glm5_jax import config as config_lib
from glm5_jax import depth as depth_lib
from glm5_jax.model import block, expert_rounds, layers, transformer
from glm5_jax.scale import slice_devices
from pallas_kernels import selection


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter of one layer, and the mesh axes that it is split over."""

    name: str
    param: layers.Param
    item: int  # bytes of an element as it is computed with

    @functools.cached_property
    def size(self) -> int:
        """Elements of the whole."""
        return math.prod(self.param.shape)

    @functools.cached_property
    def stored_axes(self) -> tuple[str, ...]:
        """Mesh axes that its stored form is split over."""
        parts = sharding.axes_of(self.param.dims)
        return tuple(axis for axes in parts for axis in axes)

    @functools.cached_property
    def fetched_axes(self) -> tuple[str, ...]:
        """Mesh axes that are gathered before its use, in order."""
        found = collectives.fetched_axes(self.param.dims)
        return tuple(axis for axes in found for axis in axes)

    @property
    def is_expert(self) -> bool:
        """Returns whether it is a stack of routed experts."""
        return self.param.dims[0] == "E" and len(self.param.dims) > 1


@dataclasses.dataclass(frozen=True)
class Setting:
    """A config with a mesh of known sizes on some device."""

    config: config_lib.TrainConfig
    sizes: Mapping[str, int]
    device: slice_devices.Device

    def over(self, *axes: str) -> int:
        """Devices along some mesh axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    @property
    def model(self) -> config_lib.ModelConfig:
        """The architecture."""
        return self.config.model

    @property
    def parts(self) -> int:
        """Parts of an update's rows, computed one after the other."""
        return self.config.optim.accumulation_steps

    @property
    def updates(self) -> int:
        """Updates of a step, each with an equal part of its rows."""
        return self.config.updates_per_step

    @property
    def all_parts(self) -> int:
        """Parts of all updates of a step."""
        return self.parts * self.updates

    @property
    def critic_updates(self) -> int:
        """Updates of a critic, each with all rows of a step; 0 without one."""
        has_critic = self.config.stage_record.has_critic(self.config)
        return self.config.rl.critic_updates if has_critic else 0

    @property
    def reads(self) -> int:
        """Forward passes of the policy alone over all rows of a step.

        They give the log-probs of a reference and of teachers, and those before several
        updates.
        """
        return self.config.num_other_policies + (self.updates > 1)

    @property
    def rows(self) -> int:
        """Rows of a part that a device works on."""
        return self.config.num_rows // (self.over(*collectives.ROWS) * self.all_parts)

    @property
    def keys(self) -> int:
        """Tokens of a row."""
        return self.config.data.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of a part that a device works on."""
        return self.rows * self.keys // self.over(*collectives.CONTEXT)

    @property
    def item(self) -> int:
        """Bytes of an element of an activation."""
        return jnp.dtype(self.model.dtype).itemsize

    @property
    def state(self) -> int:
        """Bytes of the hidden states between two layers."""
        return self.tokens * self.model.hidden_size * self.item

    @property
    def chunks(self) -> int:
        """Parts of the tokens that meet the experts one after the other."""
        are_side_by_side = self.model.remat_policy == "experts"
        return 1 if are_side_by_side else self.model.expert_chunks

    @property
    def spare(self) -> float | int:
        """Times an even load that the experts' buffers have room for."""
        return expert_rounds.spare(self.model.expert_transport, self.over("expert"))

    @property
    def expert_rows(self) -> int:
        """Rows of an expert buffer, in a chunk."""
        chosen = min(self.model.num_experts_per_tok, self.model.n_routed_experts)
        return int(self.tokens * chosen * self.spare) // self.chunks

    def keeps(self, what: str) -> bool:
        """Returns whether the backward pass has some results of a layer at hand.

        Args:
          what: "kernels", with the states after attention; "experts", their first
            products; "rest".
        """
        policy = self.model.remat_policy
        if what == "rest" or policy in ("none", "dots"):
            return policy in ("none", "dots")
        return policy == "experts" or policy == what

    @property
    def has_lists(self) -> bool:
        """True if attention gathers listed keys instead of masking the others."""
        is_sparse = self.model.attention == "sparse" and self.selects
        is_long = self.keys >= selection.lists_from(self.device.chip)
        return is_sparse and (is_long or bool(self.model.batch_invariant))

    @property
    def selects(self) -> bool:
        """Returns whether there are more keys than the indexer keeps."""
        return self.model.attention != "dense" and self.keys > self.model.index_topk

    @property
    def has_indexer_loss(self) -> bool:
        """Returns whether the divergence of the indexer is computed."""
        return self.config.has_indexer_loss

    @property
    def mtp_steps(self) -> int:
        """Times that the module for later tokens runs."""
        return self.config.num_mtp_steps

    @property
    def trunk(self) -> "Setting":
        """The setting of a critic, which has the layers without MTP."""
        rl = dataclasses.replace(self.config.rl, trains_mtp=False)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, rl=rl))

    @functools.cached_property
    def _plain(self) -> config_lib.ModelConfig:
        """The architecture that all candidates share."""
        return dataclasses.replace(self.model, expert_chunks=1)

    @functools.cached_property
    def layer_kinds(self) -> dict[depth_lib.Kind, int]:
        """Counts the layers of each kind (glm5_jax/depth.py), without MTP."""
        kinds = depth_lib.layer_kinds(self.model)
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    @property
    def mtp_kind(self) -> depth_lib.Kind:
        """The kind of MTP's layer."""
        return depth_lib.mtp_kind(self.model)

    def layer(self, kind: depth_lib.Kind) -> tuple[Weight, ...]:
        """Parameters of a layer."""
        return _weights(self._plain, kind)

    @property
    def others(self) -> dict[str, Weight]:
        """Embedding, head, and the parameters of MTP outside its layer."""
        return _others(self._plain)

    def stored(self, weight: Weight) -> int:
        """Elements that a device keeps of a parameter."""
        return weight.size // self.over(*weight.stored_axes)

    def fetched(self, weight: Weight) -> int:
        """Elements that a device computes with."""
        return self.stored(weight) * self.over(*weight.fetched_axes)


def dense(weights: tuple[Weight, ...]) -> Iterator[Weight]:
    """Matrices of a layer that every token meets."""
    return (w for w in weights if not w.is_expert and len(w.param.dims) > 1)


def experts(weights: tuple[Weight, ...]) -> Iterator[Weight]:
    """Its routed experts."""
    return (w for w in weights if w.is_expert)


@functools.cache
def _weights(model: config_lib.ModelConfig, kind: depth_lib.Kind) -> tuple[Weight, ...]:
    flat = jax.tree_util.tree_flatten_with_path(
        block.make(model, kind).table(), is_leaf=lambda x: isinstance(x, layers.Param)
    )[0]
    item = jnp.dtype(model.dtype).itemsize
    return tuple(
        Weight(".".join(k.key for k in path), p, 4 if p.is_float32 else item)
        for path, p in flat
    )


@functools.cache
def _others(model: config_lib.ModelConfig) -> dict[str, Weight]:
    table, item = transformer.table(model), jnp.dtype(model.dtype).itemsize
    found = {name: table[name] for name in ("embed_tokens", "lm_head")}
    if model.has_mtp:
        found["eh_proj"] = table["mtp"]["eh_proj"]
    return {name: Weight(name, p, item) for name, p in found.items()}
