"""Converts a trained model with MLA to one with other attention in some layers.

`layer_types` of the new model say which. A layer that keeps its type keeps its
parameters; so does a "grouped" layer that becomes "grouped_sliding", and so does
everything outside of attention. The stack is cut into scans anew (depth.py). A layer of
type "latent" becomes

- "latent_sliding" or "simple_gated_delta" with the same parameters, without the
  indexer;
- "grouped" or "grouped_sliding" with keys and values restored from the latent for each
  head, and averaged over the heads of a group (arXiv 2305.13245), see `_grouped`;
- "gated_delta" with the restored queries, keys and values and the trained output
  projection, and new gates, decays and convolution (Jet-Nemotron's way, arXiv
  2508.15884). The convolution begins as the identity. Keys are not rotated.

Parameters that the old model does not have are drawn from a fixed seed, and the log
names them. Old and new parameters are on the devices at the same time.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax import lax
from jaxtyping import Array, Float

from glm5_jax import config as config_lib
from glm5_jax import depth, sharding
from glm5_jax.model import block as block_lib
from glm5_jax.model import transformer

_GROUPED = ("grouped", "grouped_sliding")
# What a layer can become with the parameters that it has.
_KEEPS = {"latent": ("latent_sliding", "simple_gated_delta"), "grouped": _GROUPED[1:]}
# What it can become at all.
_BECOMES = {
    "latent": (*_KEEPS["latent"], *_GROUPED, "gated_delta"),
    "grouped": _KEEPS["grouped"],
}
_RESTORED = ("q_proj", "k_proj", "v_proj", "o_proj")  # names of `_restored`
_SEED = 0
_EXACT = lax.Precision.HIGHEST


def require_convertible(
    source: config_lib.ModelConfig, target: config_lib.ModelConfig
) -> None:
    """Checks that `converted` can make the target's parameters, without any array.

    Raises:
      InputError: a layer's type cannot be made of its old one, or sizes differ.
    """
    errors = []
    pairs = {*zip(source.layer_attention, target.layer_attention, strict=False)}
    for old, new in sorted(pairs):
        if old != new and new not in _BECOMES.get(old, ()):
            can = ", ".join(_BECOMES.get(old, ())) or "no other type"
            errors.append(
                f"A layer of type {old!r} cannot become {new!r}; it can become {can}."
            )
    size = target.variants.head_dim
    has_restored = not pairs.isdisjoint(("latent", name) for name in _GROUPED)
    if has_restored and size < max(source.qk_head_dim, source.v_head_dim):
        errors.append(
            f"model.variants.head_dim must be at least "
            f"{max(source.qk_head_dim, source.v_head_dim)} to hold the heads of the "
            f"model in init_from, got {size}."
        )
    if source.num_hidden_layers != target.num_hidden_layers:
        errors.append(
            f"model.num_hidden_layers must be {source.num_hidden_layers} as in "
            f"init_from, got {target.num_hidden_layers}."
        )
    modules = source.num_nextn_predict_layers
    if target.num_nextn_predict_layers != modules:
        errors.append(
            f"model.num_nextn_predict_layers must be {modules} as in init_from, got "
            f"{target.num_nextn_predict_layers}."
        )
    if modules > 1:
        errors.append(
            f"A model with {modules} MTP modules (num_nextn_predict_layers) cannot "
            f"get other layer_types; train it with those layers from the beginning."
        )
    if errors:
        raise config_lib.InputError("\n".join(errors))
    abstract = transformer.abstract_params(source)
    made = jax.eval_shape(lambda p: converted(p, source, target), abstract)
    _require_same_shapes(made, transformer.abstract_params(target))


def source_of(
    stored: config_lib.ModelConfig,
    config: config_lib.ModelConfig,
    by_indexers: bool = False,
) -> config_lib.ModelConfig | None:
    """Returns the config to read a stored model with; None if its layers are the same.

    Args:
      stored: config of the stored model.
      config: config that its parameters shall get.
      by_indexers: of as many layers, those differ too of which one has an indexer and
        the other has none.
    """
    is_same = stored.layer_types == config.layer_types
    if by_indexers and stored.num_hidden_layers == config.num_hidden_layers:
        is_same &= stored.is_full_index_layer == config.is_full_index_layer
    if is_same:
        return None
    return dataclasses.replace(
        stored, dtype=config.dtype, param_dtype=config.param_dtype
    )


def load(
    params: dict,
    source: config_lib.ModelConfig,
    target: config_lib.ModelConfig,
    abstract: Any,
) -> dict:
    """Converts parameters on their devices.

    Args:
      params: of the source.
      source: config of the old model.
      target: config of the new one.
      abstract: shapes, types and shardings of the result.
    """
    new = sorted(_new_names(source, target))
    logging.info(
        "Converting the model to the layers of the config; new parameters: %s.",
        ", ".join(new) or "none",
    )
    places = jax.tree.map(lambda x: x.sharding, abstract)
    convert = jax.jit(lambda p: converted(p, source, target), out_shardings=places)
    return convert(params)


def abstract_source(source: config_lib.ModelConfig, abstract: Any) -> Any:
    """Returns shapes, types and shardings of the source, on the target's mesh."""
    shapes = transformer.abstract_params(source)
    place, *_ = (leaf.sharding for leaf in jax.tree.leaves(abstract))
    if not isinstance(place, jax.sharding.NamedSharding):
        return jax.tree.map(lambda x: x.update(sharding=place), shapes)
    places = sharding.shardings(transformer.param_dims(source), place.mesh)
    return jax.tree.map(lambda x, s: x.update(sharding=s), shapes, places)


def converted(
    params: dict, source: config_lib.ModelConfig, target: config_lib.ModelConfig
) -> dict:
    """Returns the parameters of the target made of those of the source."""
    drawn = transformer.init_params(target, jax.random.key(_SEED))
    old = _layers(params, source)
    new = {name: params[name] for name in drawn if not name.startswith("layers_")}
    for g, group in enumerate(depth.layer_groups(target)):
        name, unit = f"layers_{g}", {}
        for p, kind in enumerate(group.unit):
            made = [
                _layer(
                    old[group.layer(repeat, p)],
                    jax.tree.map(lambda x, r=repeat: x[r], drawn[name][f"block_{p}"]),
                    source,
                    target,
                    kind,
                )
                for repeat in range(group.repeats)
            ]
            unit[f"block_{p}"] = jax.tree.map(lambda *x: jnp.stack(x), *made)
        new[name] = unit
    if target.has_mtp:
        own = depth.mtp_kind(source).attention, params["mtp"]["block"]
        kind = depth.mtp_kind(target)
        made = _layer(own, drawn["mtp"]["block"], source, target, kind)
        new["mtp"] = params["mtp"] | {"block": made}
    return new


def _layers(
    params: dict, config: config_lib.ModelConfig
) -> dict[int, tuple[str, dict]]:
    """Returns type and parameters of every layer, by its number."""
    found = {}
    for g, group in enumerate(depth.layer_groups(config)):
        for p, kind in enumerate(group.unit):
            stack = params[f"layers_{g}"][f"block_{p}"]
            for repeat in range(group.repeats):
                own = jax.tree.map(lambda x, r=repeat: x[r], stack)
                found[group.layer(repeat, p)] = kind.attention, own
    return found


def _layer(
    old: tuple[str, dict],
    drawn: dict,
    source: config_lib.ModelConfig,
    target: config_lib.ModelConfig,
    kind: depth.Kind,
) -> dict:
    """Returns one layer: what it has in common with the old one, and its attention."""
    attention, own = old
    made = {name: own.get(name, value) for name, value in drawn.items()}
    if kind.attention in (attention, *_KEEPS.get(attention, ())):
        return made
    table = block_lib.make(target, kind).table()["self_attn"]
    found = _restored(own["self_attn"], own["input_layernorm"], source)
    if kind.attention in _GROUPED:
        found = _grouped(found, source, target)
    found = drawn["self_attn"] | found
    made["self_attn"] = {
        name: found[name].astype(param.dtype(target)) for name, param in table.items()
    }
    return made


def _restored(
    attn: dict[str, Array],
    input_norm: Float[Array, " D"],
    source: config_lib.ModelConfig,
) -> dict[str, Array]:
    """Returns projections of every head that compute about what MLA computes.

    A head of MLA has the key [W_UK,n c | k_rope] and the value W_UV,n c of the latent
    c = norm(W x). Without the norm these are products of matrices, W_UK,n W x; k_rope,
    which all heads share, has the last dims. The same holds for the queries' latent.
    The norm divides by a size that differs between tokens; here it is the expected one
    (`_norm`), so that the result is exact where all latents have this size.
    """
    rank = source.kv_lora_rank
    attn = jax.tree.map(lambda x: x.astype(jnp.float32), attn)
    kv_a, rope_a = attn["kv_a_proj"][:, :rank], attn["kv_a_proj"][:, rank:]
    eps = source.latent_norm_eps
    c_q = _norm(attn["q_a_proj"], attn["q_a_layernorm"], input_norm, eps)
    c_kv = _norm(kv_a, attn["kv_a_layernorm"], input_norm, eps)

    def restored(latent: Array, weight: Array) -> Array:
        return jnp.einsum("dc,cnh->dnh", latent, weight, precision=_EXACT)

    q = restored(c_q, attn["q_b_proj"])
    k, v = (restored(c_kv, attn[name]) for name in ("k_b_proj", "v_b_proj"))
    rope = jnp.broadcast_to(rope_a[:, None], (*k.shape[:2], source.qk_rope_head_dim))
    k = jnp.concatenate([k, rope], axis=-1)
    return dict(zip(_RESTORED, (q, k, v, attn["o_proj"]), strict=True))


def _grouped(
    restored: dict[str, Array],
    source: config_lib.ModelConfig,
    target: config_lib.ModelConfig,
) -> dict[str, Array]:
    """Averages keys and values over the N / U heads of a group.

    That is exact where the heads of a group are equal. Zeros fill heads up to head_dim,
    and queries make up for the scale of the scores, 1 / sqrt(head_dim).
    """
    size, plain = target.variants.head_dim, source.qk_nope_head_dim
    q, k, v, o = (restored[name] for name in _RESTORED)
    q = q * (size / source.qk_head_dim) ** 0.5

    def wide(x: Array) -> Array:
        zeros = jnp.zeros((*x.shape[:-1], size - x.shape[-1]))
        return jnp.concatenate([x[..., :plain], zeros, x[..., plain:]], axis=-1)

    def of_groups(x: Array) -> Array:
        groups = x.reshape(len(x), target.variants.num_key_value_heads, -1, size)
        return jnp.mean(groups, axis=2)

    missing = size - source.v_head_dim
    return {
        "q_proj": wide(q),
        "k_proj": of_groups(wide(k)),
        "v_proj": of_groups(jnp.pad(v, [(0, 0), (0, 0), (0, missing)])),
        "o_proj": jnp.pad(o, [(0, 0), (0, missing), (0, 0)]),
    }


def _norm(
    down: Float[Array, "D C"],
    weight: Float[Array, " C"],
    input_norm: Float[Array, " D"],
    eps: float,
) -> Float[Array, "D C"]:
    """Returns the product of a down-projection and its norm at the expected size.

    The expectation is over inputs whose dims are uncorrelated and, before the layer's
    first norm multiplies them, of mean square one.
    """
    square = jnp.mean(jnp.sum((down * input_norm[:, None]) ** 2, axis=0))
    return down * weight[None] * lax.rsqrt(square + eps)


def _new_names(
    source: config_lib.ModelConfig, target: config_lib.ModelConfig
) -> set[str]:
    """Returns the names of layers' parameters that the old model does not have."""
    names = set()
    pairs = zip(depth.layer_kinds(source), depth.layer_kinds(target), strict=True)
    for old, new in dict.fromkeys(pairs):
        before, after = (
            block_lib.make(config, kind).table()["self_attn"]
            for config, kind in ((source, old), (target, new))
        )
        if old.attention != new.attention:
            added = set(after) - {*before, *_RESTORED}
            names |= {f"self_attn.{name}" for name in added}
    return names


def _require_same_shapes(made: Any, wanted: Any) -> None:
    """Checks that a conversion makes the parameters of the target."""
    found, want = (
        {jax.tree_util.keystr(path): x.shape for path, x in leaves}
        for leaves in map(jax.tree_util.tree_leaves_with_path, (made, wanted))
    )
    none = "absent"
    lines = [
        f"\n  {name}: {found.get(name, none)} there, {want.get(name, none)} here"
        for name in sorted(found.keys() | want.keys())
        if found.get(name) != want.get(name)
    ]
    if lines:
        raise config_lib.InputError(
            "init_from has other sizes than this run's model:" + "".join(lines[:5])
        )
