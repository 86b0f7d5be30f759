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
# # Muon Split
#
# GLM-5 trains its matrices with Muon, and cuts the projections of its attention into
# heads first. We look at what the cut does to an update, use it on a small problem of
# our own, and train a small GLM-5 with AdamW, with Muon and with Muon Split. It takes
# about 5 CPU minutes.
#
# The notebook has no optimizer code of its own: every cell calls what training calls.

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

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from absl import logging

from glm5_jax import compile_cache, losses, optim
from glm5_jax.ablations import measures, report, results, runner, scales
from glm5_jax.ablations.study import Arm, Metric, Study
from glm5_jax.data.rows import pipeline as pipeline_lib
from glm5_jax.model import transformer
from glm5_jax.weights import loading

print(f"jax {jax.__version__} on {jax.device_count()} x {jax.devices()[0].device_kind}")
compile_cache.enable()  # a second run of this notebook compiles nothing

# %% [markdown]
# ## Settings
#
# The base is the smallest pre-training of the studies: 0.4M parameters, rows of 128
# tokens. Every evaluation also measures the largest attention logit of each head. Each
# optimizer has the rate that was best for it among a few.

# %% tags=["parameters"]
STEPS, SEEDS = 200, 2
BASE = dataclasses.replace(
    scales.pretrain("tiny"),
    num_steps=STEPS,
    eval_every=STEPS // 10,
    checkpoint_every=0,
    eval_suites=("attention_logits",),
    eval_suite_tasks=8,
)
RATES = {"Muon Split": 1e-2, "Muon": 1e-2, "AdamW": 3e-3}

# %% [markdown]
# ## The mathematics
#
# *Muon* keeps a momentum $M \leftarrow \mu M + G$ of a matrix's gradient and steps
# along the orthogonal matrix nearest to $U = G + \mu M$, so that every direction moves
# equally far, however small its gradient is:
#
# $$U = \sum_i s_i\,u_i v_i^\top \quad\longrightarrow\quad
# \mathrm{NS}(U) \approx \sum_i u_i v_i^\top, \qquad
# W \leftarrow (1 - \eta\lambda) W - \eta \cdot 0.2 \sqrt{\max(\text{rows},
# \text{columns})}\ \mathrm{NS}(U).$$
#
# A projection of attention holds its heads side by side, $W = [W_1 \dots W_N]$, and of
# an orthogonal $[O_1 \dots O_N]$ the blocks need not be orthogonal: heads with large
# gradients take the step from the others. *Muon Split* therefore orthogonalises each
# head by itself, $[\mathrm{NS}(U_1) \dots \mathrm{NS}(U_N)]$.

# %% [markdown]
# ## Muon Split alone, on any dict of parameters
#
# `optim.muon_split` is an optax transformation. *Dimension numbers* say which dims of
# an array are the rows and the columns of its matrices; all other dims count matrices.
# Norms, biases and embeddings go to another optimizer by `optax.partition`.
#
# Here eight heads learn a random matrix each. The loss of a head counts ten times less
# than that of the head before it.

# %%
NUM_HEADS = 8
inputs = jax.random.normal(jax.random.key(0), (64, 32))  # [T, D]
targets = jax.random.normal(jax.random.key(1), (32, NUM_HEADS, 4))  # [D, N, H]
importance = 10.0 ** -jnp.arange(NUM_HEADS)
start = {"query": jnp.zeros_like(targets), "scale": jnp.ones(32)}


def errors(params: dict) -> jax.Array:
    """Mean squared error of each head."""
    weights = params["scale"][:, None, None] * params["query"] - targets
    return jnp.mean(jnp.einsum("td,dnh->tnh", inputs, weights) ** 2, axis=(0, 2))


def learn(numbers: optim.DimensionNumbers, num_steps: int = 60) -> np.ndarray:
    """Errors of the heads after every step."""
    rate = optax.linear_schedule(1.0, 0.0, num_steps)
    muon = optim.muon_split(
        rate, {"query": numbers}, weight_decay=0.0, ns_dtype=jnp.float32
    )
    optimizer = optax.partition(
        {"muon": muon, "adam": optax.adam(0.01)}, {"query": "muon", "scale": "adam"}
    )

    @jax.jit
    def step(params: dict, state: optax.OptState) -> tuple:
        grads = jax.grad(lambda p: jnp.sum(importance * errors(p)))(params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, errors(params)

    params, state, found = start, optimizer.init(start), []
    for _ in range(num_steps):
        params, state, error = step(params, state)
        found.append(error)
    return np.stack(found)


layouts = {
    "Muon, heads together": optim.DimensionNumbers(rows=0, cols=(1, 2)),
    "Muon Split": optim.DimensionNumbers(rows=0, cols=2),  # dim 1 counts matrices
}
_, axes = plt.subplots(1, 2, figsize=(11, 3.3), sharey=True, layout="constrained")
for axis, (name, numbers) in zip(axes, layouts.items(), strict=True):
    curves = learn(numbers)
    for head, curve in enumerate(curves.T):
        axis.plot(curve, color=plt.cm.viridis(head / NUM_HEADS), label=f"head {head}")
    axis.set(title=name, xlabel="step", ylabel="mean squared error", yscale="log")
    print(f"{name:21} last errors:", *(f"{error:8.1e}" for error in curves[-1]))
axes[1].legend(frameon=False, ncols=2, fontsize="small")
plt.show()

# %% [markdown]
# Together, the heads that count little hardly learn. Split, all heads learn at the same
# rate: the size of a head's gradient no longer matters.

# %% [markdown]
# ## Three optimizers on a small GLM-5
#
# A study trains each arm with the same seeds: the same first parameters and the same
# batches. AdamW updates embedding, head, norms and biases in all of them.

# %%
logging.set_verbosity(logging.INFO)
logging.get_absl_logger().addFilter(lambda record: "orbax" not in record.pathname)
changes = {
    "Muon Split": {},
    "Muon": {"optim.muon_split": False},
    "AdamW": {"optim.name": "adamw"},
}
length = BASE.data.sequence_length
LOGIT = f"eval/attention_logits/{length}/largest"
arms = []
for name, rate in RATES.items():
    rates = {"optim.learning_rate": rate, "optim.end_learning_rate": rate / 10}
    arms.append(Arm(name=name, changes=changes[name] | rates))
study = Study(
    question="What does the optimizer of the matrices do to the loss and the logits?",
    base=BASE,
    arms=tuple(arms),
    metrics=(
        measures.held_out("curve"),
        Metric(
            label="largest attention logit",
            key=LOGIT,
            unit="nats",
            better="lower",
            plot="curve",
        ),
    ),
    paper_says="Muon Split is better than Muon on whole matrices (GLM-5, Table 1).",
)
folder = pathlib.Path(tempfile.mkdtemp())
plan = runner.Plan(study=study, workdir=folder, num_seeds=SEEDS)
runner.check(plan)
runner.run_all(plan, parallel=1, command=())
found = report.collect(plan)
print(report.paragraph(study, found))

# %% [markdown]
# ## Loss
#
# A thin line is a seed, a dot the mean of held-out text at an evaluation.

# %%
colours = dict(zip(changes, ("tab:blue", "tab:orange", "tab:green"), strict=True))
_, (left, right) = plt.subplots(1, 2, figsize=(11, 3.5), layout="constrained")
for result in found:
    name = result.arm.name
    for lines in result.records:
        steps, values = results.curve(lines, "train/lm_loss")
        left.plot(steps, values, color=colours[name], linewidth=0.7)
    curves = [results.curve(lines, "eval/bits_per_byte") for lines in result.records]
    values = np.mean([values for _, values in curves], axis=0)
    right.plot(curves[0][0], values, color=colours[name], marker="o", label=name)
    print(f"{name:11} rate {result.rate:g}, held out {values[-1]:.3f} bits per byte")
left.set(title="Training", xlabel="step", ylabel="next token, nats a token")
right.set(title="Held out", xlabel="step", ylabel="bits per byte")
right.legend(frameon=False)
plt.show()

# %% [markdown]
# ## The largest attention logit of each head
#
# A logit of 10 gives a key $e^{10}$ times the weight of a key with logit 0. Logits that
# grow without end break training, and other recipes clip them. The paper reports that
# with Muon Split they keep their scale without clipping. A line is a head of the first
# seed.

# %%
_, axes = plt.subplots(
    1, len(found), figsize=(13, 3.3), sharey=True, layout="constrained"
)
for axis, result in zip(axes, found, strict=True):
    [lines, *_] = result.records
    heads = sorted(key for key in lines[-1] if key.startswith(f"{LOGIT}/"))
    for i, key in enumerate(heads):
        label = key.removeprefix(f"{LOGIT}/")
        axis.plot(*results.curve(lines, key), color=plt.cm.tab20(i), label=label)
    largest = max(lines[-1][key] for key in heads)
    axis.set(title=f"{result.arm.name}: {largest:.1f} at the end")
    axis.set(xlabel="step", ylabel="largest logit, nats")
axes[-1].legend(frameon=False, fontsize="small")
plt.show()

# %% [markdown]
# ## The spectrum of an update, head by head
#
# This is the gradient of the query projection in the last layer, of the first arm's
# model after training. Its singular values fall steeply. Muon evens the whole matrix
# out, but not each head; Muon Split evens each head out.

# %%
[job, *_] = plan.jobs()
model, params, _ = loading.load_model(job.folder)
held_out = next(pipeline_lib.make_pipeline(BASE.data, seed=0).eval_batches(1))
batch = {name: jnp.asarray(array) for name, array in held_out.items()}
rows = [batch[name] for name in ("tokens", "segment_ids", "positions")]
last = [name for name in params if name.startswith("layers_")][-1]


def loss(layers: dict, params: dict) -> jax.Array:
    """Next-token loss of the held-out batch, as a function of the last layers."""
    out = transformer.forward(params | {last: layers}, model, *rows)
    given = params["lm_head"], batch["targets"], batch["loss_mask"]
    chunk = BASE.loss.chunk_tokens
    return losses.next_token_loss(out.hidden, *given, chunk_tokens=chunk)


grads = jax.jit(jax.grad(loss))(params[last], params)
*_, block = grads.values()  # the last one of the stack's unit
gradient = {"q_b_proj": block["self_attn"]["q_b_proj"][-1]}  # [Q, N, H]


def update(numbers: optim.DimensionNumbers) -> jax.Array:
    """What the optimizer adds to the projection in its first step, without a rate."""
    muon = optim.scale_by_muon_split({"q_b_proj": numbers}, ns_dtype=jnp.float32)
    return muon.update(gradient, muon.init(gradient))[0]["q_b_proj"]


matrices = {
    "gradient": gradient["q_b_proj"],
    **{name: update(numbers) for name, numbers in layouts.items()},
}
_, axes = plt.subplots(1, 3, figsize=(13, 3.3), layout="constrained")
for axis, (name, matrix) in zip(axes, matrices.items(), strict=True):
    values = np.linalg.svd(np.asarray(matrix).swapaxes(0, 1), compute_uv=False)
    values = values / values.max()
    axis.plot(np.arange(1, values.shape[1] + 1), values.T, marker=".")
    axis.set(title=name, xlabel="singular value of a head, by size", ylim=(0, 1.05))
    axis.set_ylabel("share of the largest")
    middle = values[:, values.shape[1] // 2]
    print(f"{name:21} middle value of each head:", *(f"{x:.2f}" for x in middle))
plt.show()

# %% [markdown]
# In our runs (two seeds) Muon Split had 2.178 held-out bits per byte, Muon 2.188 and
# AdamW 2.402. The largest logits ended between 5.3 and 6.1 in all three, so this model
# of four heads is too small to show the paper's effect on logits. The spectrum shows
# the difference: the middle singular value of a head, as a share of the largest, was
# 0.01 in the gradient, 0.26 in Muon's update and 0.87 in that of Muon Split.

# %% [markdown]
# ## Now change something
#
# - Three times the rate: `RATES = {"Muon Split": 3e-2, "Muon": 3e-2, "AdamW": 1e-2}`.
#   What do you expect of the logits and of the loss? (One seed: logits of 22 and 20,
#   losses of 2.263 and 2.247 bits per byte for the first two.)
# - One head: `num_attention_heads=1` in `BASE.model`. What should be left of the
#   difference between Muon and Muon Split?
# - `"optim.muon_split_rope": True` cuts the rotated part of the queries off as well.
# - In the small problem: `importance = jnp.ones(NUM_HEADS)`. Does the cut still help?
# - Each optimizer at the best of four rates: `python -m glm5_jax.ablate --study=muon`.
#
# ## Where to read on
#
# `docs/muon.md` (dimension numbers), `docs/concepts/muon_split.md`,
# `glm5_jax/optim/muon.py`, `glm5_jax/optim/newton_schulz.py`. The papers: GLM-5 (arXiv
# 2602.15763, 2.1), Muon is scalable (2502.16982), Polar Express (2505.16932).
