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
# # Reinforcement learning with GLM-5 in JAX
#
# We teach a small GLM-5 to spell words backwards: first with a minute of
# demonstrations, then for a few minutes from rewards alone, with the paper's objective,
# GRPO with IcePop. On the way we look at tokens and transcripts, and at the values on
# which the program that samples and the program that learns must agree. Two CPU cores
# are enough.
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
import contextlib
import dataclasses
import functools
import math
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from absl import logging

from glm5_jax import config as config_lib
from glm5_jax import environments, presets
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates, view
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import service as service_lib
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import objectives, publisher, rollouts
from glm5_jax.training import loop, policy
from glm5_jax.training.reporting import metrics
from glm5_jax.weights import loading

print(f"jax {jax.__version__} on {jax.device_count()} x {jax.devices()[0].device_kind}")

# %% [markdown]
# ## Settings
#
# The task is to spell a word of a few letters backwards. The model has all parts of
# GLM-5, at a size for byte tokens; its indexer chooses 16 of up to 32 keys.

# %% tags=["parameters"]
TASK = "reverse:3-4"
MODEL = dataclasses.replace(
    presets.small(hidden=96, layers=3, experts=8, vocab=320),
    index_topk=16,
    initializer_range=0.1,  # of so narrow a model: its weights then bear the updates
)
SFT_STEPS, SFT_ROWS = 200, 64
RL_STEPS, PROMPTS, GROUP = 100, 32, 8
START = 0.05, 0.8  # the least and the largest success that RL starts from
SHOWN = 8  # held-out tasks that we look at

# %% [markdown]
# ## The objective
#
# A prompt is answered by a *group* of samples, each of which earns a reward $R_i$. GRPO
# prefers samples that did better than their group: the advantage of every token of
# sample $i$ is $A_i = (R_i - \text{mean}\,R) / \text{std}\,R$. No value network is
# needed.
#
# The *trainer* learns and the *engine* samples. Although both hold the same weights
# $\theta_{old}$, they are different programs and compute slightly different
# probabilities. Two ratios keep these apart:
#
# $$\rho = \frac{\pi_{train}(\theta_{old})}{\pi_{infer}(\theta_{old})} \qquad
# r = \frac{\pi_{train}(\theta)}{\pi_{train}(\theta_{old})}$$
#
# IcePop trusts a token only while $\rho$ is in a band, and GLM-5's loss is (Eq. 1 of
# arXiv 2602.15763, $\beta = 2$)
#
# $$-\,\text{pop}(\rho, 1/\beta, \beta)\,\min(r A,\ \text{clip}(r, 1 - 0.2, 1 + 0.28)
# A), \qquad \text{pop}(\rho) = \rho \text{ in the band, else } 0.$$
#
# The same formula in ten lines, compared with the function that training uses:


# %%
def icepop(logprobs, old, rollout, advantages, beta=2.0, low=0.2, high=0.28):
    """The loss of every token."""
    rho = np.exp(old - rollout)
    pop = np.where((1 / beta <= rho) & (rho <= beta), rho, 0)
    r = np.exp(logprobs - old)
    clipped = np.clip(r, 1 - low, 1 + high)
    return -pop * np.minimum(r * advantages, clipped * advantages)


rng = np.random.default_rng(0)
random = (rng.normal(-1, 0.5, (4, 1000)) - [[0], [0], [0], [-1]]).astype(np.float32)
objective = objectives.of(config_lib.RLConfig(objective="icepop"))
ours = jax.jit(objective)(*random, np.ones(1000, bool)).loss
print(f"largest difference of 1000 losses: {np.abs(ours - icepop(*random)).max():.1e}")

# %% [markdown]
# The plot shows how the weight of a token depends on the difference between trainer and
# engine, for each objective of `glm5_jax/rl/objectives.py`. The weight is the slope of
# the loss in the token's log-probability.

# %%
gaps = jnp.linspace(-2.2, 2.2, 221)
zeros, ones = jnp.zeros_like(gaps), jnp.ones_like(gaps)
plt.figure(figsize=(7, 3), layout="constrained")
for name in ("grpo", "tis", "dis", "icepop"):
    objective = objectives.of(config_lib.RLConfig(objective=name))

    def total(logprobs, objective=objective):
        """All losses at once; their slopes do not mix."""
        return -objective(logprobs, None, -gaps, ones, ones > 0).loss.sum()

    style = {"linewidth": 3} if name == "icepop" else {"linestyle": "--"}
    slopes = jax.jit(jax.grad(total))(zeros)
    plt.plot(np.exp(gaps), slopes, label=name, **style)
plt.xscale("log", base=2)
plt.xlabel("pi_train / pi_infer")
plt.ylabel("weight of the token")
plt.ylim(-0.2, 6.3)
plt.legend(frameon=False)
plt.show()

# %% [markdown]
# ## A task and its episode
#
# An environment reads and writes messages and never sees a token. The template turns
# messages into ids. In the view below trained ids are green and special ones bold. The
# model ends its answer with the next role token.

# %%
used = tokenizer_lib.named("byte_chat")
template = templates.Template(used, enable_thinking=False)
taskset = environments.make(TASK)
task = taskset.task("train", 0, 0)
demonstration = taskset.demonstration(task)
for message in demonstration:
    print(message)
rendered = template.render(demonstration, end=True)
print()
print(view.view(rendered, used, in_color=True, with_ids=True))

# %% [markdown]
# ## Supervised fine-tuning, a little
#
# Reinforcement learning can only reward answers that are sampled, and random weights
# never sample a right one. A minute of demonstrations is enough to begin.

# %%
logging.set_verbosity(logging.INFO)
logging.get_absl_logger().addFilter(lambda record: "orbax" not in record.pathname)
folder = pathlib.Path(tempfile.mkdtemp())
DATA = config_lib.DataConfig(
    source=f"tasks:{TASK}",
    tokenizer="byte_chat",
    enable_thinking=False,
    sequence_length=32,
    batch_size=SFT_ROWS,
)
sft = config_lib.TrainConfig(
    stage="sft",
    num_steps=SFT_STEPS,
    eval_every=SFT_STEPS,
    eval_batches=1,
    sample_tokens=0,
    model=MODEL,
    data=DATA,
    loss=config_lib.LossConfig(indexer_weight=0.1, router_bias_rate=0.01),
    optim=config_lib.OptimConfig(
        name="adamw",
        learning_rate=3e-3,
        end_learning_rate=3e-4,
        warmup_steps=SFT_STEPS // 30,
    ),
)
summary = loop.train(sft, folder / "sft")
_, before, _ = loading.load_model(folder / "sft")

# %% [markdown]
# ## Episodes, before
#
# The engine decodes many episodes at once. We play held-out tasks, which training never
# sees, and keep what the engine recorded: the ids and the log-probability of each.

# %%
engine = engine_lib.Engine(
    before, MODEL, num_slots=PROMPTS * GROUP, capacity=DATA.sequence_length
)
settings = episodes_lib.Settings(
    max_new_tokens=8, max_turns=1, num_concurrent=PROMPTS * GROUP
)


def play(params, number, weights="same"):
    """Episodes of the first held-out tasks."""
    publisher.publish(engine, params, engine.version + 1, weights)
    tasks = [taskset.task("held_out", 0, i) for i in range(number)]
    jobs = [
        episodes_lib.Job(task, group=i, request_id=i) for i, task in enumerate(tasks)
    ]
    with contextlib.closing(service_lib.Service(engine)) as service:
        return rollouts.collect(service, taskset, template, jobs, settings)


def show(played):
    """A line an episode."""
    for episode in played[:SHOWN]:
        asked, said = (message["content"] for message in episode.transcript)
        reward = episode.reward.total
        print(f"{asked:16} -> {said:10} reward {reward:.2f}  {episode.label.value}")
    solved = np.mean([episode.reward.total == 1 for episode in played])
    print(f"solved: {solved:.1%} of {len(played)}")


show(play(before, PROMPTS * GROUP))

# %% [markdown]
# ## Reinforcement learning
#
# In each step the engine gets the current weights and answers `PROMPTS` tasks `GROUP`
# times each. The environment rewards the right word with 1 and any other with 0. Then
# one update follows.

# %%
rl = config_lib.TrainConfig(
    stage="rl",
    init_from=str(folder / "sft"),
    num_steps=RL_STEPS,
    eval_every=max(RL_STEPS // 5, 1),
    sample_tokens=0,
    model=MODEL,
    data=DATA,
    optim=config_lib.OptimConfig(
        name="adamw",
        learning_rate=5e-4,
        end_learning_rate=5e-4,
        schedule="constant",
        warmup_steps=RL_STEPS // 20,
        weight_decay=0.0,
        adam_b2=0.98,
        clip_norm=1.0,
    ),
    rl=config_lib.RLConfig(
        environment=TASK,
        prompts_per_step=PROMPTS,
        group_size=GROUP,
        max_new_tokens=8,
        max_turns=1,
        slots=PROMPTS * GROUP,
        num_eval_tasks=PROMPTS * GROUP,
        min_start_success=START[0],
        max_start_success=START[1],
    ),
)
summary = loop.train(rl, folder / "rl")
for name, value in summary.items():
    print(f"{name:28} {value}")

# %% [markdown]
# ## Curves
#
# `loss.png` in the run's folder has these curves and more. Watch all of them: if the
# reward rises while the entropy falls to 0, the policy has stopped exploring; if the
# gap grows, trainer and engine compute different probabilities.

# %%
records = metrics.read(folder / "rl" / "metrics.jsonl")
curves = {
    "rollout/reward": ("rewards of the rollouts", "mean reward"),
    "eval/success": ("held-out tasks", "share solved"),
    "rl/entropy": ("entropy", "nats a token"),
    "rl/logprob_gap_max": ("largest gap of log-probs", "nats"),
}
_, axes = plt.subplots(1, 4, figsize=(14, 3), layout="constrained")
for ax, (name, (title, unit)) in zip(axes, curves.items(), strict=True):
    points = [(record["step"], record[name]) for record in records if name in record]
    ax.plot(*zip(*points, strict=True), marker="o" if "eval" in name else None)
    ax.set(title=title, xlabel="step", ylabel=unit)
plt.show()

# %% [markdown]
# ## Episodes, after
#
# These are the same held-out tasks with the same random numbers; only the weights have
# changed. On two CPU cores the share of solved tasks rose from 43% to 79% at the last
# evaluation (one seed), and more steps improve it further.

# %%
_, after, _ = loading.load_model(folder / "rl")
played = play(after, PROMPTS * GROUP)
show(played)

# %% [markdown]
# ## The parity gate
#
# The engine reads a cache and draws one token at a time; the trainer reads whole rows.
# If they disagree about the probability of the samples, the ratio $\rho$ is noise and
# learning fails, often much later. Every step therefore compares them
# (`rl/logprob_gap`), and a run stops if the mean exceeds `rl.max_logprob_gap`. This
# cell makes the same comparison:


# %%
score = jax.jit(functools.partial(policy.token_logprobs, config=rl))


def trainer_logprobs(params, samples):
    """What the trainer says of every token but the first: a row a sample."""
    shape = len(samples), DATA.sequence_length
    batch = {
        name: np.zeros(shape, np.int32)
        for name in ("tokens", "targets", "segment_ids", "positions")
    }
    for i, sample in enumerate(samples):
        size = len(sample.tokens) - 1
        batch["tokens"][i, :size] = sample.tokens[:-1]
        batch["targets"][i, :size] = sample.tokens[1:]
        batch["segment_ids"][i, :size] = 1  # 0 is padding
        batch["positions"][i, :size] = np.arange(size)
    rows = zip(np.asarray(score(params, batch=batch)), samples, strict=True)
    return [row[: len(sample.tokens) - 1] for row, sample in rows]


def log_ratios(params, played):
    """log pi_train - log pi_infer of all sampled tokens, and their ids."""
    samples = [sample for episode in played for sample in episode.samples]
    found = []
    for sample, row in zip(samples, trainer_logprobs(params, samples), strict=True):
        mask = np.array(sample.mask[1:])
        gap = row - np.array(sample.logprobs[1:])
        found.append(np.stack([gap[mask], np.array(sample.tokens[1:])[mask]]))
    return np.concatenate(found, axis=1)


same, _ = log_ratios(after, played)
print(f"{same.size} tokens, largest gap {np.abs(same).max():.1e}")

# %% [markdown]
# ## Rollouts in int8
#
# If serving rounds the weights to save memory, the engine samples from a different
# policy than the one that is trained. Here the trainer keeps its float32 weights, the
# engine gets rounded ones, and we count the tokens outside the band [0.5, 2]. At this
# size int8 costs little; rounding to 4 bits shows why the band is needed.


# %%
@functools.partial(jax.jit, static_argnames="bits")
def rounded(params, bits):
    """Matrices of the layers as multiples of 2 to a number of bits, minus one."""

    def one(path, weight):
        is_layer = path[0].key.startswith("layers")
        if not is_layer or weight.ndim < 3:  # a block's matrices are stacked
            return weight
        levels = 2 ** (bits - 1) - 1
        scale = jnp.max(jnp.abs(weight), axis=-1, keepdims=True) / levels
        scale = jnp.maximum(scale, jnp.finfo(weight.dtype).tiny)
        return jnp.round(weight / scale) * scale

    return jax.tree_util.tree_map_with_path(one, params)


served = {
    "int8": play(after, PROMPTS * GROUP, weights="int8"),
    "4 bits": play(rounded(after, 4), PROMPTS * GROUP),
}
_, axes = plt.subplots(1, 2, figsize=(11, 3), sharey=True, layout="constrained")
for ax, (name, others) in zip(axes, served.items(), strict=True):
    ratios, ids = log_ratios(after, others)
    is_masked = np.abs(ratios) > math.log(rl.rl.pop_beta)
    ax.hist(ratios, bins=60, log=True)
    for edge in (-1, 1):
        ax.axvline(edge * math.log(rl.rl.pop_beta), color="black", linewidth=1)
    ax.set(title=name, xlabel="log(pi_train / pi_infer), nats", ylabel="tokens")
    worst = [used.spell([int(i)]) for i in ids[np.argsort(-np.abs(ratios))[:8]]]
    print(
        f"{name:7} mean gap {np.abs(ratios).mean():.1e}, masked {is_masked.mean():.2%}"
    )
    print(f"        least alike: {' '.join(worst)}")
plt.show()

# %% [markdown]
# If more than 1% of the tokens are masked, something is wrong between trainer and
# engine. Above 10% learning stops, because the masked tokens are the surprising ones,
# which teach most.
#
# ## Exercises
#
# - How strong must the start be? Try `SFT_STEPS` of 100 and 400. A group whose rewards
#   are all equal teaches nothing. Set `dynamic_sampling=True`, which draws other groups
#   in their place, and count the dropped ones in `rollout/dropped_equal_groups`.
# - `environment="reverse_dense:3-4"` rewards each letter. Does it reach success sooner?
# - `rollout_weights="int8"` with `objective="icepop"` and `"grpo"`: does the mismatch
#   hurt at this size? One seed proves nothing; `benchmarks/rl_curves.py` draws several.
# - `updates_per_rollout=4`: the policy moves away from its rollouts. Which of
#   `rl/ratio`, `rl/clip_fraction` and `train/grad_norm` shows it first?
# - `TASK = "calculator_untold:2"`: several turns with a tool (rows of 128 tokens or
#   more, `max_turns=2`). Look at the mask: no token of the tool is green.
# - Write an environment of your own: it takes two small classes (`docs/rl.md`).
#
# ## Where to read on
#
# `glm5_jax/training/feeds/rollouts.py` (a step), `rl/gateway.py` (why no token is ever
# tokenised twice), `rl/advantages.py`, `rl/objectives.py`, `inference/engine.py`. The
# papers: GLM-5 (arXiv 2602.15763), GRPO (2402.03300), DAPO (2503.14476).
