"""Rewrites weights so that rounding costs less, without changing what they compute.

Rotation (QuaRot, arXiv 2404.00456): a latent c with norm weight g is read by matrices
W, and RMS norms do not see rotations R, so

    W (g * norm(A x)) = (W diag(g) R^T) norm(R A x)

The latents of queries and of keys and values are rotated so, and each head's values,
which have no norm. A rotation spreads the few large channels over all. The residual
stream is not rotated: multi-token prediction normalises the main model's state a second
time, after its norm weight, and would see the rotation.

Smoothing (cross-layer equalisation, arXiv 1906.04721): W_down h = (W_down / s) (s * h),
where s_f scales column f of W_up. With s_f = sqrt(max |row f of W_down|), relative to
the matrix's mean, int4 groups and rows of activations share the spread of W_down.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_SEED = 0
_TINY = 1e-12


def rewritten(params: dict, method: str) -> dict:
    """Returns parameters of the same function, float32; layers without MLA stay.

    Args:
      params: of the model.
      method: one of config.CALIBRATIONS.
    """

    def layer(tree: dict) -> dict:
        if method in ("rotate", "both"):
            tree = _rotated(tree)
        return _smoothed(tree) if method in ("smooth", "both") else tree

    return _map_layers(layer, params)


def _map_layers(function: Any, tree: dict) -> dict:
    """Maps over the layers of a tree, each a dict with an entry self_attn."""
    if "self_attn" in tree:
        return function(tree)
    return {
        name: _map_layers(function, node) if isinstance(node, dict) else node
        for name, node in tree.items()
    }


def _rotated(layer: dict) -> dict:
    """Rotates the latents and the values of a layer, or of a stack of layers."""
    attn, index = dict(layer["self_attn"]), dict(layer.get("indexer", {}))
    if "kv_a_proj" not in attn:
        return layer
    attn = {name: x.astype(jnp.float32) for name, x in attn.items()}
    gain, turn = attn["q_a_layernorm"], rotation(attn["q_a_proj"].shape[-1])
    attn["q_a_proj"] = attn["q_a_proj"] @ turn
    attn["q_b_proj"] = _turned(attn["q_b_proj"], gain, turn)
    if "wq_b" in index:
        index["wq_b"] = _turned(index["wq_b"].astype(jnp.float32), gain, turn)
    attn["q_a_layernorm"] = jnp.ones_like(gain)
    gain = attn["kv_a_layernorm"]
    rank = gain.shape[-1]
    turn, rows = rotation(rank), attn["kv_a_proj"]
    latent = rows[..., :rank] @ turn
    attn["kv_a_proj"] = jnp.concatenate([latent, rows[..., rank:]], axis=-1)
    values = rotation(attn["v_b_proj"].shape[-1])
    attn["k_b_proj"] = _turned(attn["k_b_proj"], gain, turn)
    attn["v_b_proj"] = _turned(attn["v_b_proj"], gain, turn) @ values
    attn["kv_a_layernorm"] = jnp.ones_like(gain)
    attn["o_proj"] = jnp.einsum("...nod,op->...npd", attn["o_proj"], values)
    return layer | {"self_attn": attn} | ({"indexer": index} if index else {})


def _turned(
    weights: Float[Array, "*n C N H"],
    gain: Float[Array, "*n C"],
    turn: Float[Array, "C C"],
) -> Float[Array, "*n C N H"]:
    """Returns R^T diag(g) W: what reads the rotated latent without its norm weight."""
    return jnp.einsum("...cnh,cd->...dnh", weights * gain[..., None, None], turn)


def _smoothed(layer: dict) -> dict:
    """Scales hidden channels of the feed-forward layers."""
    return layer | {"mlp": _smoothed_mlp(layer["mlp"])}


def _smoothed_mlp(mlp: dict) -> dict:
    out = dict(mlp)
    for name in ("experts", "shared_experts"):
        if name in mlp:
            out[name] = _smoothed_mlp(mlp[name])
    if "down_proj" in mlp:
        up, down = (mlp[n].astype(jnp.float32) for n in ("up_proj", "down_proj"))
        sizes = jnp.sqrt(jnp.max(jnp.abs(down), axis=-1) + _TINY)
        sizes = sizes / jnp.mean(sizes, axis=-1, keepdims=True)
        out["up_proj"] = up * sizes[..., None, :]
        out["down_proj"] = down / sizes[..., :, None]
    return out


def rotation(size: int) -> Float[Array, "n n"]:
    """Returns an orthogonal matrix: Hadamard's with random signs, or a random one."""
    rng = np.random.default_rng(_SEED)
    if size & (size - 1):
        return jnp.asarray(np.linalg.qr(rng.normal(size=(size, size)))[0], jnp.float32)
    turn = np.ones((1, 1))
    while len(turn) < size:
        turn = np.block([[turn, turn], [turn, -turn]])
    signs = rng.choice([-1.0, 1.0], size)
    return jnp.asarray(turn * signs[:, None] / np.sqrt(size), jnp.float32)
