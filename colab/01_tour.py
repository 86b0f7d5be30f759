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
# about a minute and let it write. The notebook runs on a CPU, a GPU or a TPU. On two
# CPU cores it takes a few minutes, half of which is compilation.
#
# The notebook has no model code of its own: every cell calls what training calls.

# %% [markdown]
# ## Install
#
# This cell does nothing if the package is already installed. On Colab, get the
# repository first (`!git clone ...`) and set `CHECKOUT` to its folder. If jax has a
# plugin for a GPU or TPU, the cell also installs the version of the plugin that matches
# jax.

# %%
import importlib.util
import subprocess
import sys

CHECKOUT = ".."
# Of the kernels for GPUs from compute capability 8.0 on: A100 and L4, not T4.
TRITON = " triton>=3.6,<3.7 jax-triton>=0.3.1,!=0.4.0,!=0.4.1"
PLUGINS = {
    "jax_cuda12_plugin": "jax[cuda12]" + TRITON,
    "jax_cuda13_plugin": "jax[cuda13]" + TRITON,
    "libtpu": "jax[tpu]",
}
if importlib.util.find_spec("glm5_jax") is None:
    extras = [
        name for module, name in PLUGINS.items() if importlib.util.find_spec(module)
    ]
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, CHECKOUT, *" ".join(extras).split()], check=True)
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
from glm5_jax import presets
from glm5_jax.data.rows import pipeline as pipeline_lib
from glm5_jax.evals.probes import attention as attention_probe
from glm5_jax.inference import engine
from glm5_jax.model import transformer
from glm5_jax.training import loop
from glm5_jax.training.reporting import accounting, metrics
from glm5_jax.weights import loading

print(f"jax {jax.__version__} on {jax.device_count()} x {jax.devices()[0].device_kind}")

# %% [markdown]
# ## Settings
#
# Change these values and run everything again. The corpus `python` is the text that
# every Python installation contains: its manual and its standard library. Nothing is
# downloaded.

# %% tags=["parameters"]
MODEL = presets.GLM5_1M
DATA = config_lib.DataConfig(
    source="python", bpe_vocab_size=2048, sequence_length=256, batch_size=16
)
STEPS = 40

# %% [markdown]
# ## Parameters
#
# The small model has every part of the large one. Each token uses only a few of the
# experts. The *active* parameters, which determine the cost of a token, are therefore
# fewer than the total.

# %%
small = accounting.count_parameters(MODEL)
large = accounting.count_parameters(presets.GLM5)
print(f"{'':20}{'this model':>12}{'GLM-5':>18}")
for part in large:
    print(f"{part:20}{small.get(part, 0):12,}{large[part]:18,}")

# %% [markdown]
# ## Text
#
# Documents are split into tokens and packed into rows. A tenth of the documents, chosen
# by the hash of their names, is held out. The first run trains a tokenizer, which takes
# seconds, and keeps it.

# %%
data = pipeline_lib.make_pipeline(DATA, seed=0)
batch = next(data.eval_batches(1))
for name, array in batch.items():
    print(f"{name:12} {array.dtype} {array.shape}")
print("\nThe first row begins:\n\n" + data.tokenizer.decode(batch["tokens"][0, :100]))

# %% [markdown]
# ## A forward pass
#
# Parameters are a plain dict of arrays, and the model is a plain function.

# %%
forward = jax.jit(transformer.forward, static_argnames="config")
rows = [batch[name] for name in ("tokens", "segment_ids", "positions")]
init = jax.jit(transformer.init_params, static_argnums=0)
params = jax.device_put(init(MODEL, jax.random.key(0)), jax.devices()[0])
before = forward(params, MODEL, *rows)
logits = transformer.logits(params, MODEL, before.hidden)
print(f"logits {logits.shape}, for {np.prod(batch['tokens'].shape):,} tokens")

# %% [markdown]
# ## Which keys the indexer selects
#
# Dense attention reads every earlier token. In GLM-5's sparse attention a small, cheap
# *indexer* first picks `index_topk` of them, and the layer attends only to those. To
# judge the choice, we compute the attention that the same layer would pay to all keys.


# %%
def look(params: dict) -> None:
    """Draws attention and selection of a row, and says how much the selection holds."""
    view = next(attention_probe.views(params, MODEL, batch))  # the first layer
    dense, chosen = np.asarray(view.mass), np.asarray(view.selected)
    num_visible = np.asarray(view.visible).sum(-1)
    relative = np.where(dense > 0, dense * num_visible[..., None], np.nan)[0]
    low, high = np.nanquantile(relative, [0.01, 0.99])
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    image = left.imshow(relative, vmin=low, vmax=high)
    figure.colorbar(image, shrink=0.8, label="attention, in units of an even one")
    left.set_title("Attention to all keys")
    right.imshow(np.where(dense[0] > 0, chosen[0], np.nan))
    right.set_title("Keys that the indexer selects")
    for axis in (left, right):
        axis.set(xlabel="key, place in the row", ylabel="query, place in the row")
    plt.show()
    has_choice = num_visible > MODEL.index_topk
    best = np.sort(dense)[..., -MODEL.index_topk :].sum(-1)[has_choice].mean()
    held = (dense * chosen).sum(-1)[has_choice].mean()
    chance = (MODEL.index_topk / num_visible[has_choice]).mean()
    print(f"Share of the attention on the selected keys: {held:.3f}")
    print(f"(as many at random: {chance:.3f}; the best ones: {best:.3f})")


look(params)

# %% [markdown]
# Nothing is trained yet: attention is nearly even (look at the colour scale), and the
# choice is no better than chance. A query that sees at most `index_topk` keys selects
# all of them. A row can hold several documents, which do not see each other; each is a
# triangle in the picture.

# %% [markdown]
# ## The router's load
#
# In a layer with experts each token is sent to `num_experts_per_tok` of them. The black
# line shows an even load. A bias on each expert's score keeps the load near this line:
# each step lowers the bias of overloaded experts and raises the bias of the others.


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
        *_, last = out.aux.values()  # the layers with experts
        loads = np.asarray(last["block_0"].routing.load) / num_tokens
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
# Plain multi-head attention caches a key and a value for every head. Latent attention
# caches one latent and one rotated key for all heads together, and the indexer caches a
# key of its own.

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
# Training is one config and one call; `python -m glm5_jax.train` does the same. The
# loss is next-token prediction plus multi-token prediction; the indexer is trained by
# its divergence from the attention. Held-out text is scored in bits per byte, which
# does not depend on the tokenizer.

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
# `metrics.jsonl` holds one JSON object for each step, and `loss.png` in the same folder
# shows more curves. The indexer's divergence falls while attention is even, and rises
# when attention develops a shape that the indexer has to follow.

# %%
records = metrics.read(workdir / "metrics.jsonl")
curves = {
    "train/lm_loss": ("next token", "nats a token"),
    "eval/bits_per_byte": ("held out", "bits per byte"),
    "train/indexer_kl": ("indexer's divergence", "nats a query"),
}
_, axes = plt.subplots(1, 3, figsize=(12, 3), layout="constrained")
for ax, (name, (title, unit)) in zip(axes, curves.items(), strict=True):
    points = [(record["step"], record[name]) for record in records if name in record]
    ax.plot(*zip(*points, strict=True), marker="o" if "eval" in name else None)
    ax.set(title=title, xlabel="step", ylabel=unit)
plt.show()

# %% [markdown]
# ## The same look, after training
#
# The folder of a run is enough to load its model. Attention now prefers some keys, and
# the indexer finds them: its choice is better than chance and worse than the best
# possible one. The experts' load has become more even.

# %%
_, params, tokenizer = loading.load_model(workdir)
after = forward(params, MODEL, *rows)
look(params)
show_load(untrained=before, trained=after)

# %% [markdown]
# ## Writing
#
# The engine reads all prompts at once, then draws one token at a time with the small
# cache. After a minute of training the text looks like Python and its manual, but makes
# no sense.

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
# ## Now change something
#
# - `index_topk=16` in `MODEL` (by `dataclasses.replace`): which of the three shares of
#   attention change, and in which direction?
# - `router_bias_rate=0` in the cell on training: what do you expect of the experts'
#   load?
# - `STEPS = 160`: how far do the held-out bits per byte fall, and what does the sample
#   gain?
#
# ## Where to read on
#
# - More of the same kind: `02_rl` (learning from rewards), `03_sparse_attention` (how
#   the indexer learns, and what it saves), `04_muon_split` (the optimizer).
# - The path of a token through the model: `glm5_jax/model/transformer.py`, `block.py`,
#   `attention/`, `indexer.py`, `moe.py`, in this order.
# - A complete training step: `glm5_jax/training/step.py`.
# - Every setting with its unit or source: `glm5_jax/config/`. Models of 1M to 744B:
#   `glm5_jax/presets.py`.
# - A longer run than this one, in about a minute: `configs/quickstart.py`.
# - The kernels, each with a short definition: `pallas_kernels/*/reference.py`.
# - The papers: GLM-5 (arXiv 2602.15763); DeepSeek-V3.2 for sparse attention
#   (2512.02556), V2 for latent attention (2405.04434), V3 for the router's bias
#   (2412.19437); Muon at scale (2502.16982).
