# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A tour of GLM-5 in JAX
#
# We build a GLM-5 of a million parameters, look at what its parts do, train it for
# about a minute and let it write. It runs on a CPU, a GPU or a TPU; on two CPU cores
# the whole takes a few minutes, half of them compiling.
#
# Nothing here is made for the notebook: every cell calls what training calls.

# %% [markdown]
# ## Install
#
# Does nothing where the package is there already. On Colab, get the repository first
# (`!git clone ...`) and set `CHECKOUT` to its folder. What connects jax to a GPU or TPU
# is named too, so that it is brought to the version of jax.

# %%
import importlib.util
import subprocess
import sys

CHECKOUT = ".."
PLUGINS = {
    "jax_cuda12_plugin": "jax[cuda12]",
    "jax_cuda13_plugin": "jax[cuda13]",
    "libtpu": "jax[tpu]",
}
if importlib.util.find_spec("glm5_jax") is None:
    extras = [
        name for module, name in PLUGINS.items() if importlib.util.find_spec(module)
    ]
    install = [sys.executable, "-m", "pip", "install", "--quiet", CHECKOUT, *extras]
    subprocess.run(install, check=True)
    importlib.invalidate_caches()

# %%
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from absl import logging

from glm5_jax import config as config_lib
from glm5_jax import losses, presets
from glm5_jax.data.rows import pipeline as pipeline_lib
from glm5_jax.inference import engine
from glm5_jax.model import layers, transformer
from glm5_jax.model import selection as selection_lib
from glm5_jax.model.attention import mla
from glm5_jax.optim import newton_schulz
from glm5_jax.training import loop
from glm5_jax.training.reporting import accounting, metrics
from glm5_jax.weights import loading
from pallas_kernels import selection

print(f"jax {jax.__version__} on {jax.device_count()} x {jax.devices()[0].device_kind}")

# %% [markdown]
# ## Settings
#
# Turn these and run everything again. The corpus `python` is the text that every Python
# carries: its manual and its standard library. No download.

# %% tags=["parameters"]
MODEL = presets.GLM5_1M
DATA = config_lib.DataConfig(
    source="python", bpe_vocab_size=2048, sequence_length=256, batch_size=16
)
STEPS = 40

# %% [markdown]
# ## Parameters
#
# The small model has every part of the large one. A token meets only its own experts,
# so the *active* parameters, which set the price of a token, are fewer than the total.

# %%
small = accounting.count_parameters(MODEL)
large = accounting.count_parameters(presets.GLM5)
print(f"{'':20}{'this model':>12}{'GLM-5':>18}")
for part in large:
    print(f"{part:20}{small.get(part, 0):12,}{large[part]:18,}")

# %% [markdown]
# ## Text
#
# Documents are cut into tokens, packed into rows, and split by the hash of their names:
# a tenth is held out. The first time, a tokenizer is trained (seconds) and kept.

# %%
data = pipeline_lib.make_pipeline(DATA, seed=0)
batch = next(data.eval_batches(1))
for name, array in batch.items():
    print(f"{name:12} {array.dtype} {array.shape}")
print("\nThe first row begins:\n\n" + data.tokenizer.decode(batch["tokens"][0, :100]))

# %% [markdown]
# ## A forward pass, with traces
#
# Parameters are a plain dict of arrays and the model a plain function. `with_traces`
# also returns what each layer put out, what it would cache, and which keys its indexer
# chose.

# %%
forward = jax.jit(transformer.forward, static_argnames=("config", "with_traces"))
rows = [batch[name] for name in ("tokens", "segment_ids", "positions")]
init = jax.jit(transformer.init_params, static_argnums=0)
params = jax.device_put(init(MODEL, jax.random.key(0)), jax.devices()[0])
before = forward(params, MODEL, *rows, with_traces=True)
logits = transformer.logits(params, MODEL, before.hidden)
print(f"logits {logits.shape}, for {np.prod(batch['tokens'].shape):,} tokens")

# %% [markdown]
# ## Which keys the indexer selects
#
# Dense attention reads every earlier token. GLM-5's sparse attention lets a small,
# cheap *indexer* pick `index_topk` of them first, and attends to those alone. To judge
# the choice, we compute the attention that the same layer would have paid to all keys.


# %%
def dense_attention(params: dict, out: transformer.Output) -> jax.Array:
    """The first layer's attention without selection, mean over heads: [B, T, S]."""
    layer = jax.tree.map(lambda x: x[0], params["layers_0"]["block_0"])
    weights, context = layer["self_attn"], out.context
    attended = out.traces["layers_0"]["block_0"].attended
    kv = jax.tree.map(lambda x: x[0], attended.kv)
    x = params["embed_tokens"][batch["tokens"]]
    h = layers.rms_norm(x, layer["input_layernorm"], MODEL.rms_norm_eps)
    c_q = mla.query_latent(weights, MODEL, h)
    every = selection_lib.AllVisible()
    _, (q, k, lse) = mla.expanded(weights, MODEL, c_q, kv, context, every)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * MODEL.softmax_scale
    s = jnp.arange(x.shape[1])[None, None]
    visible = (context.lo[..., None] <= s) & (s < context.hi[..., None])
    probs = jnp.where(visible[:, None], jnp.exp(scores - lse[..., None]), 0)
    return jnp.mean(probs, axis=1)


def look(params: dict, out: transformer.Output) -> None:
    """Draws attention and selection of a row, and says how much the selection holds."""
    dense = np.asarray(jax.jit(dense_attention)(params, out))
    attended = out.traces["layers_0"]["block_0"].attended
    (keys,) = attended.index.selection  # a mask, bits or lists
    mask = selection.as_mask(keys[0], dense.shape[-1])  # keys first: [B, S, T]
    chosen = np.asarray(mask).swapaxes(1, 2)
    num_visible = np.asarray(out.context.hi - out.context.lo)
    relative = np.where(dense > 0, dense * num_visible[..., None], np.nan)[0]
    low, high = np.nanquantile(relative, [0.01, 0.99])
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    image = left.imshow(relative, vmin=low, vmax=high)
    figure.colorbar(image, shrink=0.8)
    left.set(title="Attention to all keys (1: even)", xlabel="key", ylabel="query")
    right.imshow(np.where(dense[0] > 0, chosen[0], np.nan))
    right.set(title="Keys that the indexer selects", xlabel="key")
    plt.show()
    has_choice = num_visible > MODEL.index_topk
    best = np.sort(dense)[..., -MODEL.index_topk :].sum(-1)[has_choice].mean()
    held = (dense * chosen).sum(-1)[has_choice].mean()
    chance = (MODEL.index_topk / num_visible[has_choice]).mean()
    print(f"Share of the attention on the selected keys: {held:.3f}")
    print(f"(as many at random: {chance:.3f}; the best ones: {best:.3f})")


look(params, before)

# %% [markdown]
# Nothing is trained yet: attention is even (mind the scale of its colours), and the
# choice no better than chance. A query that sees at most `index_topk` keys takes them
# all. A row can hold several documents, which do not see each other: a triangle each.

# %% [markdown]
# ## The router's load
#
# In a layer with experts each token takes `num_experts_per_tok` of them; the line is an
# even load. What keeps the load near it is a bias on each expert's score that moves
# against the load, step by step.


# %%
def show_load(**outputs: transformer.Output) -> None:
    """Draws the share of tokens that each expert gets, a group of bars a layer."""
    even = MODEL.num_experts_per_tok / MODEL.n_routed_experts
    num_tokens = batch["tokens"].size
    _, axes = plt.subplots(
        1,
        len(outputs),
        figsize=(10, 3),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for ax, (name, out) in zip(axes[0], outputs.items(), strict=True):
        loads = np.asarray(out.aux["layers_1"]["block_0"].routing.load) / num_tokens
        width = 0.8 / len(loads)
        for i, load in enumerate(loads):
            places = np.arange(load.size) + (i - (len(loads) - 1) / 2) * width
            layer = MODEL.first_k_dense_replace + i
            ax.bar(places, load, width, label=f"layer {layer}")
        ax.axhline(even, color="black", linewidth=1)
        ax.set(title=name, xlabel="expert")
    axes[0, 0].set_ylabel("share of tokens")
    axes[0, -1].legend(frameon=False)
    plt.show()


show_load(untrained=before)

# %% [markdown]
# ## What a token takes in the cache
#
# Plain multi-head attention keeps a key and a value for every head. Latent attention
# keeps one latent and one rotated key for all heads, and the indexer a key of its own.

# %%
for name, model in {"this model": MODEL, "GLM-5": presets.GLM5}.items():
    ours = accounting.cache_bytes_per_token(model) // jnp.dtype(model.dtype).itemsize
    per_layer = model.num_attention_heads * (model.qk_head_dim + model.v_head_dim)
    plain = per_layer * model.num_hidden_layers
    print(
        f"{name:11} {ours:7,} numbers a token, plain {plain:10,}: {plain / ours:.0f} x"
    )

# %% [markdown]
# ## Training
#
# One config, one call; `python -m glm5_jax.train` does the same. The loss is next-token
# prediction plus multi-token prediction, and for the indexer its divergence from the
# attention. Held-out text is scored in bits per byte, which no tokenizer can flatter.

# %%
config = config_lib.TrainConfig(
    num_steps=STEPS,
    eval_every=max(STEPS // 4, 1),
    eval_batches=2,
    sample_tokens=0,  # we sample below
    model=MODEL,
    data=DATA,
    loss=config_lib.LossConfig(indexer_weight=0.1, router_bias_rate=0.01),
    optim=config_lib.OptimConfig(
        learning_rate=1e-2,
        end_learning_rate=1e-3,
        warmup_steps=STEPS // 10,
        ns_dtype="float32",
    ),
)
workdir = pathlib.Path(tempfile.mkdtemp()) / "tour"
logging.set_verbosity(logging.INFO)
logging.get_absl_logger().addFilter(lambda record: "orbax" not in record.pathname)
summary = loop.train(config, workdir)
for name, value in summary.items():
    print(f"{name:28} {value}")

# %% [markdown]
# ## Curves
#
# `metrics.jsonl` holds an object a step (and `loss.png` beside it more curves). The
# indexer's divergence falls while attention is even, and rises when attention takes a
# shape that the indexer has to follow.

# %%
records = metrics.read(workdir / "metrics.jsonl")
curves = {
    "train/lm_loss": "next token, nats",
    "eval/bits_per_byte": "held out, bits per byte",
    "train/indexer_kl": "indexer's divergence, nats",
}
_, axes = plt.subplots(1, 3, figsize=(12, 3), layout="constrained")
for ax, (name, title) in zip(axes, curves.items(), strict=True):
    points = [(record["step"], record[name]) for record in records if name in record]
    ax.plot(*zip(*points, strict=True), marker="o" if "eval" in name else None)
    ax.set(title=title, xlabel="step")
plt.show()

# %% [markdown]
# ## The same look, after training
#
# The folder of a run is all that is needed to load its model. Attention has begun to
# prefer some keys, and the indexer finds them: its choice is now between chance and the
# best one. And the experts' load has evened out.

# %%
_, params, tokenizer = loading.load_model(workdir)
after = forward(params, MODEL, *rows, with_traces=True)
look(params, after)
show_load(untrained=before, trained=after)

# %% [markdown]
# ## Writing
#
# The engine reads all prompts at once, then draws a token at a time with the small
# cache. After a minute of training expect the look of Python and its manual, not their
# sense.

# %%
prompts = ["def ", "class ", "The "]
completions = engine.generate(
    params,
    MODEL,
    [tokenizer.encode(prompt) for prompt in prompts],
    max_new_tokens=64,
    temperature=0.7,
    stop_ids=[tokenizer.eos_id],
)
for prompt, completion in zip(prompts, completions, strict=True):
    print(prompt + tokenizer.decode(completion.tokens))
    print("-" * 60)

# %% [markdown]
# ## Muon Split
#
# A gradient is large in a few directions and tiny in the others. Muon replaces it (its
# momentum, in training) by the nearest matrix whose singular values are all 1. GLM-5
# cuts the projections of its heads first (*Muon Split*): in one matrix the heads
# compete, and within a head the directions stay uneven; cut, every head moves as it
# would alone.


# %%
def loss(last: dict, params: dict) -> jax.Array:
    """Next-token loss of the held-out batch, as a function of the last layers."""
    out = transformer.forward(params | {"layers_1": last}, MODEL, *rows)
    targets, mask = batch["targets"], batch["loss_mask"]
    chunk = config.loss.chunk_tokens
    head = params["lm_head"]
    return losses.next_token_loss(out.hidden, head, targets, mask, chunk_tokens=chunk)


grads = jax.jit(jax.grad(loss))(params["layers_1"], params)
q_b = grads["block_0"]["self_attn"]["q_b_proj"][-1]  # [Q, N, H]
steps = newton_schulz.coefficients(config.optim.ns_coefficients, config.optim.ns_steps)


def orthogonalize(matrices: jax.Array) -> jax.Array:
    """Five Newton-Schulz steps: products of matrices only."""
    return newton_schulz.orthogonalize(matrices, steps, jnp.float32)


together = orthogonalize(q_b.reshape(len(q_b), -1)).reshape(q_b.shape)
head = {
    "gradient": q_b[:, 0],
    "Muon, heads together": together[:, 0],
    "Muon Split": orthogonalize(q_b[:, 0]),
}
print("Singular values of one head (a few):")
for name, matrix in head.items():
    values = np.linalg.svd(np.asarray(matrix), compute_uv=False)
    some = values[np.linspace(0, len(values) - 1, 6).round().astype(int)]
    print(f"{name:21}", *(f"{value:8.2g}" for value in some))

# %% [markdown]
# ## Where to read on
#
# - The way of a token: `glm5_jax/model/transformer.py`, `block.py`, `attention/`,
#   `indexer.py`, `moe.py`, in this order.
# - One training step, whole: `glm5_jax/training/step.py`.
# - Every knob with its unit or source: `glm5_jax/config/`. Models of 1M to 744B:
#   `glm5_jax/presets.py`.
# - A longer run than this one, in two minutes: `configs/quickstart.py`.
# - The kernels, each with a definition of a few lines: `pallas_kernels/*/reference.py`.
# - The papers: GLM-5 (arXiv 2602.15763); DeepSeek-V3.2 for sparse attention
#   (2512.02556), V2 for latent attention (2405.04434), V3 for the router's bias
#   (2412.19437); Muon at scale (2502.16982).
