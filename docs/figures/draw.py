"""Draws the figures of docs/concepts: python docs/figures/draw.py.

Each is made by the functions that training and the engine call, on a model of half a
million parameters with random weights; all take half a minute on a CPU.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import figure

import glm5_jax
from glm5_jax import losses, presets
from glm5_jax.model import context as context_lib
from glm5_jax.model import mtp, transformer
from glm5_jax.model.attention import delta_rule
from glm5_jax.optim import newton_schulz
from glm5_jax.rl import objectives

FOLDER = pathlib.Path(__file__).parent
BLUE, ORANGE, GREEN, GREY = "#3366aa", "#dd8833", "#338866", "#cccccc"
TEXTS = (
    "The indexer reads every earlier token, cheaply, and names the few that matter.",
    "Another document of the same row, which the first one does not see.",
)


def mla() -> figure.Figure:
    """What a token leaves in the cache, and what a query pays for each key."""
    config = presets.GLM5
    n, h, o = config.num_attention_heads, config.qk_head_dim, config.v_head_dim
    c, r, p = (
        config.kv_lora_rank,
        config.qk_rope_head_dim,
        config.qk_nope_head_dim,
    )
    drawn, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    cached = {
        "keys and values\nof 64 heads": n * (h + o),
        "latent and\nrotated key": c + r,
    }
    bars = left.bar(list(cached), list(cached.values()), color=[GREY, BLUE], width=0.6)
    left.bar_label(bars, fmt="{:,.0f}")
    left.set(yscale="log", ylim=(100, 1e5), title="Numbers cached a token and layer")
    queries = np.logspace(0, 4, 200)
    expanded = n * (h + o) + c * n * (p + o) / queries
    absorbed = np.full_like(queries, n * (2 * c + r))
    right.loglog(queries, expanded, color=ORANGE, label="expanded")
    right.loglog(queries, absorbed, color=BLUE, label="absorbed")
    right.set(
        title="Multiplications a query and key",
        xlabel="queries that share the expanded keys",
    )
    right.legend(frameon=False)
    return drawn


def dsa() -> figure.Figure:
    """Keys that each query sees, and those that it selects."""
    model = _model()
    batch = model.batch(TEXTS, sequence_length=144)
    rows = [jnp.asarray(batch[k]) for k in ("tokens", "segment_ids", "positions")]
    forward = jax.jit(
        transformer.forward, static_argnums=1, static_argnames="with_traces"
    )
    out = forward(model.params, model.config, *rows, with_traces=True)
    index = out.traces["layers_0"]["block_0"].attended.index
    chosen = np.asarray(index.selection.keep[0, 0]).T  # keys first, in a mask
    s = np.arange(chosen.shape[1])
    visible = (np.asarray(out.context.lo)[0][:, None] <= s) & (
        s < np.asarray(out.context.hi)[0][:, None]
    )
    image = np.where(chosen, 2.0, np.where(visible, 1.0, 0.0))
    drawn, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    colours = matplotlib.colors.ListedColormap(["white", "#dde6f2", BLUE])
    left.imshow(image, cmap=colours, interpolation="nearest")
    left.set(title="Visible keys, and the selected ones", xlabel="key", ylabel="query")
    right.plot(visible.sum(1), color=GREY, label="visible")
    right.plot(chosen.sum(1), color=BLUE, label="selected")
    right.axhline(model.config.index_topk, color="black", linewidth=0.8)
    right.set(title="Keys that a query attends to", xlabel="query")
    right.legend(frameon=False)
    return drawn


def mtp_chain() -> figure.Figure:
    """Which token each step reads at a position, and which one it predicts."""
    tokens = jnp.arange(8)[None]
    targets, mask = jnp.roll(tokens, -1, 1), jnp.ones((1, 8)).at[0, -1].set(0)
    ones = jnp.ones((1, 8), jnp.int32)
    read = mtp.ahead(tokens, 3)
    predicted, weights = losses.mtp_targets(targets, mask, ones, 3)
    drawn, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
    rows = [(tokens[0], targets[0], mask[0])]
    rows += [(read[k, 0], predicted[k, 0], weights[k, 0]) for k in range(3)]
    names = ["main model", *(f"MTP step {k}" for k in (1, 2, 3))]
    for y, (reads, wants, counts) in enumerate(rows):
        for x in range(8):
            counts_here = bool(counts[x] > 0)
            text = f"$t_{{{int(reads[x])}}}\\to t_{{{int(wants[x])}}}$"
            axis.text(
                *(x, -y, text if counts_here else "-"),
                ha="center",
                va="center",
                bbox={
                    "boxstyle": "round",
                    "facecolor": "#dde6f2" if counts_here else "white",
                    "edgecolor": BLUE if counts_here else GREY,
                },
            )
            if y and counts_here:
                arrow = {"arrowstyle": "->", "color": ORANGE}
                axis.annotate("", (x, -y + 0.25), (x, -y + 0.75), arrowprops=arrow)
    axis.set(xlim=(-0.6, 7.6), ylim=(-3.5, 0.5), xlabel="position i")
    axis.set_yticks([0, -1, -2, -3], names)
    axis.set_title(
        "Token read at a position, and token predicted; arrows: hidden state"
    )
    for side in axis.spines.values():
        side.set_visible(False)
    axis.tick_params(length=0)
    return drawn


def muon() -> figure.Figure:
    """Singular values of each head's gradient, before and after Newton-Schulz."""
    model = _model()
    batch = {k: jnp.asarray(v) for k, v in model.batch(TEXTS, 144).items()}

    def loss(params: dict) -> jax.Array:
        rows = (batch[k] for k in ("tokens", "segment_ids", "positions"))
        hidden = transformer.forward(params, model.config, *rows).hidden
        return losses.next_token_loss(
            *(hidden, params["lm_head"], batch["targets"], batch["loss_mask"]),
            chunk_tokens=256,
        )

    grads = jax.jit(jax.grad(loss))(model.params)
    q_b = grads["layers_0"]["block_0"]["self_attn"]["q_b_proj"][0]  # [Q, N, H]
    steps = newton_schulz.coefficients("polar_express", 5)
    orthogonalized = functools.partial(
        newton_schulz.orthogonalize, steps=steps, dtype=jnp.float32
    )
    whole = orthogonalized(q_b.reshape(len(q_b), -1)).reshape(q_b.shape)
    split = orthogonalized(q_b.swapaxes(0, 1))  # [N, Q, H]
    drawn, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
    titles = ("gradient", "Muon, heads together", "Muon Split")
    for axis, title, heads in zip(
        axes, titles, (q_b.swapaxes(0, 1), whole.swapaxes(0, 1), split), strict=True
    ):
        values = np.linalg.svd(np.asarray(heads), compute_uv=False)
        axis.plot(values.T / (values.max() if title == "gradient" else 1), marker=".")
        axis.set(title=title, ylim=(0, 1.3), xlabel="singular value of a head")
    axes[0].set_ylabel("size (gradient: of the largest)")
    return drawn


def icepop() -> figure.Figure:
    """What a token weighs, by how far trainer and engine are apart."""
    rho = jnp.geomspace(0.2, 5, 600)
    zeros, ones = jnp.zeros_like(rho), jnp.ones_like(rho)
    clip = {"clip_low": 0.2, "clip_high": 0.28}
    choices = {
        "GRPO": (functools.partial(objectives.grpo, **clip), GREY),
        "TIS, cap 2": (functools.partial(objectives.tis, tis_cap=2.0, **clip), GREEN),
        "IcePop, beta 2": (
            functools.partial(objectives.icepop, beta=2.0, **clip),
            BLUE,
        ),
    }
    drawn, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for name, (objective, colour) in choices.items():
        taken = objective(zeros, None, -jnp.log(rho), ones, ones > 0)
        axis.plot(rho, -taken.loss, color=colour, label=name)
    axis.axvspan(0.5, 2, color="#dde6f2", zorder=0)
    axis.set(
        xscale="log", xlabel="rho = trainer's probability / engine's", ylim=(-0.1, 2.4)
    )
    axis.set_ylabel("weight of a token")
    axis.set_xticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"], minor=False)
    axis.minorticks_off()
    axis.legend(frameon=False, loc="upper left")
    return drawn


def delta() -> figure.Figure:
    """What a state answers to one key, token by token, and what it takes to keep it."""
    num_tokens, key_dim = 48, 32
    asked, again, second = 6, 20, 34  # tokens with the key; start of a document
    keys = np.array(jax.random.normal(jax.random.key(0), (num_tokens, key_dim)))
    keys[again] = keys[asked]
    k = delta_rule.unit(jnp.asarray(keys))[None, :, None]
    q = jnp.broadcast_to(k[:, asked : asked + 1], k.shape)
    values = jnp.eye(num_tokens)[None, :, None]  # so an output is a row of weights
    place = jnp.arange(num_tokens)[None]
    lo = jnp.where(place < second, 0, second)
    none = jnp.zeros((1, num_tokens, 1))
    context = context_lib.Context(none, none, lo, place + 1, place >= 0)
    log_decay = jnp.full((1, num_tokens, 1, 1), -1 / 32)
    beta = jnp.ones((1, num_tokens, 1))
    weights, _ = delta_rule.over_documents(q, k, values, log_decay, beta, context)
    drawn, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    image = left.imshow(weights[0, :, 0], cmap="RdBu", vmin=-1, vmax=1)
    drawn.colorbar(image, ax=left, shrink=0.8)
    left.set(
        title=f"Answer to the key of tokens {asked} and {again}",
        xlabel="token of the value",
        ylabel="tokens read",
    )
    config = presets.GLM5
    lengths = np.geomspace(128, 131072, 50)
    row = config.kv_lora_rank + config.qk_rope_head_dim
    heads, state = config.num_attention_heads, config.qk_head_dim * config.v_head_dim
    right.loglog(lengths, row * lengths, color=ORANGE, label="MLA: a row a token")
    right.loglog(
        lengths, np.full(50, heads * state), color=BLUE, label="delta rule: a state"
    )
    right.set(title="Numbers cached a layer, GLM-5's sizes", xlabel="tokens read")
    right.legend(frameon=False)
    return drawn


FIGURES = {
    "mla": mla,
    "dsa": dsa,
    "mtp": mtp_chain,
    "muon_split": muon,
    "icepop": icepop,
    "delta": delta,
}


@functools.cache
def _model() -> glm5_jax.Model:
    return glm5_jax.new(presets.BYTES)


def main() -> None:
    """Writes all figures beside this file."""
    for name, draw in FIGURES.items():
        drawn = draw()
        drawn.savefig(FOLDER / f"{name}.png", dpi=110, metadata={"Software": None})
        plt.close(drawn)


if __name__ == "__main__":
    main()
