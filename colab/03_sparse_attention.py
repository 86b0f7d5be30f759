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
# # Sparse attention and its indexer
#
# In dense attention a token reads every earlier token. In GLM-5's sparse attention a
# small, cheap *indexer* first selects the keys that are worth reading. We look at what
# this costs, train a small dense model, teach its indexers what its attention reads,
# and then let it read an eighth of the keys. It takes about 7 CPU minutes.
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
import dataclasses
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from absl import logging

from glm5_jax import compile_cache, presets
from glm5_jax import config as config_lib
from glm5_jax.data.rows import pipeline as pipeline_lib
from glm5_jax.evals import runner, subject
from glm5_jax.evals.probes import attention as attention_probe
from glm5_jax.model import cached, transformer
from glm5_jax.training import loop
from glm5_jax.training.reporting import accounting

print(f"jax {jax.__version__} on {jax.device_count()} x {jax.devices()[0].device_kind}")
compile_cache.enable()  # a second run of this notebook compiles nothing

# %% [markdown]
# ## Settings
#
# The small model has GLM-5's proportions, without multi-token prediction. The corpus
# `python` is the text that every Python installation contains. `TIMED` is one layer
# with the attention and the indexer of GLM-5 at full size; the rest of it is small.

# %% tags=["parameters"]
LENGTH, TOPK = 256, 32  # tokens of a row; keys that a query reads
MODEL = dataclasses.replace(
    presets.small(hidden=96, layers=4, experts=8, vocab=1024),
    first_k_dense_replace=0,
    num_nextn_predict_layers=0,
    index_topk=TOPK,
)
DATA = config_lib.DataConfig(
    source="python", bpe_vocab_size=1024, sequence_length=LENGTH, batch_size=16
)
DENSE_STEPS, WARMUP_STEPS, ADAPT_STEPS = 240, 60, 60
OPTIM = config_lib.OptimConfig(
    learning_rate=1e-2,
    end_learning_rate=1e-3,
    warmup_steps=DENSE_STEPS // 20,
    ns_dtype="float32",
)
NUM_ROWS = 64  # held-out rows of a measurement
TIMED = dataclasses.replace(
    presets.GLM5,
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=512,
    num_hidden_layers=1,
    num_nextn_predict_layers=0,
    first_k_dense_replace=1,
    dtype="float32",
)
TIMED_LENGTHS = 2048, 8192, 32768  # tokens in the cache

# %% [markdown]
# ## The cost on paper
#
# A query scores every earlier key with the indexer: 32 heads of 128 numbers, without
# values. Attention has 64 heads of 256 numbers and values of 256, but then reads 2,048
# keys at most. Both parts of the cost are counted by the function that reports MFU in
# training.

# %%
lengths = 2 ** np.arange(10, 18)


def gflops(attention: str, length: int) -> float:
    """GLM-5's forward pass for a token, in the mean over a text of this length."""
    model = dataclasses.replace(
        presets.GLM5, attention=attention, num_nextn_predict_layers=0
    )
    training = accounting.flops_per_token(model, int(length))
    return training / 3 / 1e9  # training runs backward too, for twice the cost


_, (left, right) = plt.subplots(1, 2, figsize=(11, 3.5), layout="constrained")
for attention in ("dense", "sparse"):
    left.plot(lengths, [gflops(attention, n) for n in lengths], label=attention)
left.set(xscale="log", title="FLOPs of GLM-5, forward")
left.set(xlabel="tokens of the text", ylabel="GFLOP a token")
left.set_ylim(bottom=0)
left.legend(frameon=False)
per_head = presets.GLM5.qk_head_dim + presets.GLM5.v_head_dim
plain = 2 * presets.GLM5.num_hidden_layers * presets.GLM5.num_attention_heads * per_head
ours = accounting.cache_bytes_per_token(presets.GLM5)
right.plot(lengths, lengths * plain / 2**30, label="keys and values of all heads")
right.plot(lengths, lengths * ours / 2**30, label="latents and indexer keys")
right.set(xscale="log", yscale="log", title="Cache of GLM-5, bfloat16")
right.set(xlabel="tokens of the text", ylabel="GiB")
right.legend(frameon=False)
plt.show()
ratio = gflops("dense", lengths[-1]) / gflops("sparse", lengths[-1])
print(f"At {lengths[-1]:,} tokens a dense token costs {ratio:.1f} x a sparse one.")
print(f"A token takes {ours:,} bytes of the cache, {plain:,} with all keys and values.")

# %% [markdown]
# Sparse attention saves arithmetic and reading, not memory: every latent stays in the
# cache, because a later query may select it. The indexer adds its own key to it.

# %% [markdown]
# ## The cost on this machine
#
# We time one layer that decodes one token behind a cache of random numbers. Dense
# attention takes time in proportion to the cache. The sparse layer still scores every
# key, but its slope is smaller.

# %%
init = jax.jit(transformer.init_params, static_argnums=0)
decode = jax.jit(cached.decode, static_argnums=1, donate_argnums=2)
timed_params = init(TIMED, jax.random.key(0))


def milliseconds(attention: str, length: int, num_tokens: int = 8) -> float:
    """Median time of a token, after the first one, which compiles."""
    config = dataclasses.replace(TIMED, attention=attention)
    cache = cached.empty(config, 1, length + num_tokens + 1)
    entries = {
        name: jax.random.normal(jax.random.key(1), x.shape, x.dtype)
        for name, x in cache.entries.items()
    }
    full = jnp.full(1, length, jnp.int32)
    cache = dataclasses.replace(cache, entries=entries, lengths=full)
    times = []
    for _ in range(num_tokens + 1):
        began = time.perf_counter()
        token = jnp.zeros((1, 1), jnp.int32)
        hidden, cache, _ = decode(timed_params, config, cache, token)
        hidden.block_until_ready()
        times.append(1e3 * (time.perf_counter() - began))
    return float(np.median(times[1:]))


plt.figure(figsize=(6, 3.5), layout="constrained")
for attention in ("dense", "sparse"):
    values = [milliseconds(attention, n) for n in TIMED_LENGTHS]
    plt.plot(TIMED_LENGTHS, values, marker="o", label=attention)
    print(f"{attention:7}", *(f"{value:8.1f} ms" for value in values))
plt.xlabel("tokens in the cache")
plt.ylabel("milliseconds a token")
plt.title("One layer, decoding, attention of GLM-5's size")
plt.legend(frameon=False)
plt.show()

# %% [markdown]
# ## A dense model
#
# GLM-5 is trained with dense attention first. Its indexers exist, but nothing trains
# them.

# %%
logging.set_verbosity(logging.INFO)
logging.get_absl_logger().addFilter(lambda record: "orbax" not in record.pathname)
folder = pathlib.Path(tempfile.mkdtemp())
dense = config_lib.TrainConfig(
    num_steps=DENSE_STEPS,
    eval_every=0,
    sample_tokens=0,
    model=dataclasses.replace(MODEL, attention="dense"),
    data=DATA,
    loss=config_lib.LossConfig(indexer_weight=0.1, router_bias_rate=0.01),
    optim=OPTIM,
)
loop.train(dense, folder / "dense")

# %% [markdown]
# ## Warm-up
#
# The indexer scores key $s$ for query $t$ with $I_{t,s}$. In the warm-up all other
# parameters are frozen and attention reads all keys. The indexers learn to imitate it:
# with $p_{t,s}$, the attention in the mean over heads,
#
# $$L = \sum_t \text{KL}\left(p_t\ \|\ \text{softmax}_s(I_{t,s})\right).$$

# %%
warmup = dataclasses.replace(
    dense,
    stage="dsa_warmup",
    init_from=str(folder / "dense"),
    num_steps=WARMUP_STEPS,
    model=dataclasses.replace(MODEL, attention="dense_with_indexer_loss"),
    optim=dataclasses.replace(
        OPTIM,
        learning_rate=5e-3,
        end_learning_rate=2e-4,
        schedule="linear",
        warmup_steps=0,
    ),
)
loop.train(warmup, folder / "warmup")

# %% [markdown]
# ## What the indexer selects
#
# Left: the dense attention of a layer to the keys of one held-out row. Beside it: the
# `TOPK` keys that the layer's indexer would select, before and after the warm-up. A
# query that sees fewer keys selects all of them. A row can hold several documents,
# which do not see each other; each is a triangle in the picture.

# %%
pipeline = pipeline_lib.make_pipeline(DATA, seed=0)
batch = next(pipeline.eval_batches(1))


def views(name: str) -> list[attention_probe.View]:
    """Attention and selection of every layer of a dense run, on the held-out batch."""
    model = subject.load(folder / name, [("model.attention", "dense")])
    return [*attention_probe.views(model.params, model.config, batch)]


def draw(before: attention_probe.View, after: attention_probe.View) -> None:
    """Draws the first row: attention, then the keys that the indexer selects."""
    mass, visible = np.asarray(before.mass[0]), np.asarray(before.visible[0])
    relative = mass * visible.sum(axis=1, keepdims=True)
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    shown = np.where(visible, relative, np.nan)
    image = axes[0].imshow(shown, vmin=0, vmax=np.nanquantile(shown, 0.98))
    figure.colorbar(image, shrink=0.8, label="attention, in units of an even one")
    axes[0].set_title(f"Dense attention, {before.label}")
    for axis, view, title in zip(
        axes[1:], (before, after), ("before", "after"), strict=True
    ):
        chosen = np.asarray(view.selected[0])
        axis.imshow(np.where(visible, chosen, np.nan), vmin=0, vmax=1)
        axis.set_title(f"Selected keys {title} the warm-up")
    for axis in axes:
        axis.set(xlabel="key, place in the row", ylabel="query, place in the row")
    plt.show()


views_before, views_after = views("dense"), views("warmup")
draw(views_before[-1], views_after[-1])

# %% [markdown]
# ## Sparse adaptation
#
# The whole model now trains with the selected keys, at a low rate. For comparison the
# dense model trains for as many further steps.

# %%
further = dataclasses.replace(
    dense,
    init_from=str(folder / "dense"),
    num_steps=ADAPT_STEPS,
    optim=dataclasses.replace(
        OPTIM,
        learning_rate=2.5e-4,
        end_learning_rate=2.5e-4,
        schedule="constant",
        warmup_steps=0,
    ),
)
sparse = dataclasses.replace(
    further,
    stage="dsa_sparse",
    init_from=str(folder / "warmup"),
    model=dataclasses.replace(MODEL, attention="sparse"),
)
loop.train(further, folder / "further")
loop.train(sparse, folder / "sparse")

# %% [markdown]
# ## Recall, layer by layer
#
# The recall is the share of the dense attention that falls on the selected keys, over
# queries that see more than `TOPK`. The grey bars are as many keys at random, the black
# lines the best possible choice.


# %%
def measured(suite: str, name: str, attention: str) -> dict:
    """A suite's figures, of a run whose attention is dense or sparse."""
    model = subject.load(folder / name, [("model.attention", attention)])
    [result] = runner.run(model, [suite], lengths=[LENGTH], num_tasks=NUM_ROWS)
    return result.figures


def by_layer(name: str, attention: str) -> np.ndarray:
    """Recall of every layer of a run."""
    figures = measured("recall", name, attention)
    return np.array([figures[f"recall/{view.label}"].mean for view in views_before])


def limits(view: attention_probe.View) -> tuple[float, float]:
    """Share of the attention on TOPK random keys, and on the best ones."""
    num_visible = np.asarray(view.visible).sum(-1)
    has_choice = num_visible > TOPK
    best = np.sort(np.asarray(view.mass))[..., -TOPK:].sum(-1)
    return (TOPK / num_visible[has_choice]).mean(), best[has_choice].mean()


recalls = {
    "before": by_layer("dense", "dense"),
    "after the warm-up": by_layer("warmup", "dense"),
    "after the adaptation": by_layer("sparse", "sparse"),
}
chance, best = np.array([limits(view) for view in views_before]).T
places = np.arange(len(best))
plt.figure(figsize=(8, 3.5), layout="constrained")
plt.bar(places - 0.3, chance, 0.2, color="lightgrey", label="random keys")
for i, (name, values) in enumerate(recalls.items()):
    plt.bar(places + 0.2 * i - 0.1, values, 0.2, label=name)
    print(f"recall {name:21}", *(f"{value:.3f}" for value in values))
plt.hlines(best, places - 0.4, places + 0.4, "black", label="the best keys")
plt.xticks(places, [view.label for view in views_before])
plt.xlabel("layer")
plt.ylabel("share of the attention")
plt.ylim(0, 1.3)
plt.legend(frameon=False, ncols=3, loc="upper left")
plt.show()
print(f"random {chance.mean():.3f}, best {best.mean():.3f}")

# %% [markdown]
# ## Quality
#
# All are scored on the same held-out rows. "Warm-up only" is the dense model made to
# read the selected keys. In the paper (Table 6) such a model falls from 79.2 to 71.4 on
# RULER at 128K, and adaptation restores 78.9.

# %%
arms = {
    "dense": ("further", "dense"),
    "no warm-up, no adaptation": ("dense", "sparse"),
    "warm-up only": ("warmup", "sparse"),
    "adapted": ("sparse", "sparse"),
}
scores = {
    label: measured("bits_per_byte", name, attention)["all"]
    for label, (name, attention) in arms.items()
}
plt.figure(figsize=(7, 3), layout="constrained")
for label, (mean, low, high, _) in scores.items():
    plt.errorbar(mean, label, xerr=[[mean - low], [high - mean]], fmt="o", capsize=3)
    print(f"{label:26} {mean:.3f} bits per byte ({low:.3f} to {high:.3f})")
plt.xlabel("held out, bits per byte (95% interval over rows)")
plt.ylabel("model")
plt.gca().invert_yaxis()
plt.show()

# %% [markdown]
# In our run (one seed) the mean recall rose from 0.28 to 0.65 in the warm-up; the best
# possible choice held 0.71. Against 2.405 bits per byte of dense attention, the model
# had 2.576 without warm-up, 2.453 after it and 2.417 after the adaptation. The
# intervals are wide because rows differ; all models read the same ones.

# %% [markdown]
# ## Now change something
#
# - `TOPK = 8`: a query reads a 32nd of the row. What do you expect of the recall after
#   the warm-up, of the best choice, and of the distance between "warm-up only" and
#   "adapted"?
# - `WARMUP_STEPS = 10`. Which layer suffers first?
# - Skip the warm-up: let `sparse` start from `folder / "dense"`, with
#   `init_from_changes=("attention",)`. A start refuses this without the field; why?
# - `index_topk_freq=2` in `MODEL`: every second layer reads the keys of the layer
#   before it (IndexShare). How do the bars of the pairs differ?
# - Three seeds of these arms, with a control that skips the warm-up:
#   `python -m glm5_jax.ablate --study=dsa`.
#
# ## Where to read on
#
# `docs/concepts/dsa.md` (the formulas), `glm5_jax/model/indexer.py`,
# `glm5_jax/model/attention/dsa.py`, `glm5_jax/config/stages/dsa_warmup.py`,
# `docs/evaluation.md` (needles and other suites). The papers: GLM-5 (arXiv 2602.15763),
# DeepSeek-V3.2 (2512.02556).
