"""Runs of stage rl that are over in seconds, and rewards that a random model earns."""

import dataclasses
import pathlib
import shutil
import sys
from unittest import mock

import jax
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import environments
from glm5_jax.checkpoint import manager
from glm5_jax.model import transformer
from glm5_jax.training import loop
from glm5_jax.training import step as step_lib
from glm5_jax.training.reporting import metrics
from tests import environment, runs
from tests.model import tiny
from tests.rl import lottery

LENGTH = 40
Lottery = lottery.Lottery
# One layer, which compiles faster than a stack.
MODEL = tiny.model(
    num_hidden_layers=1, first_k_dense_replace=0, vocab_size=292, mtp_num_steps=1
)

# Changes of it for what does not depend on the model; they compile in half the time.
PLAIN = {"attention": "dense", "num_nextn_predict_layers": 0}
DENSE = PLAIN | {"first_k_dense_replace": 1}  # in a third: it has no experts


def make_config(rl=None, model=None, stage="rl", **changes):
    """A run of 4 steps; `rl` and `model` are changes of those sections."""
    rl_settings = {
        "environment": "reverse_dense:2-3",
        "prompts_per_step": 2,
        "group_size": 4,
        "max_new_tokens": 6,
        "max_turns": 1,
        # Two programs: prompts are shorter than this, and all are read at once.
        "slots": 8,
        "prefill_chunk": 16,
        "num_eval_tasks": 8,
        "max_logprob_gap": 1e-5,
        "min_start_success": 0.0,  # chance pays, so any start will do
        "max_start_success": 1.0,
    }
    config = config_lib.TrainConfig(
        stage=stage,
        num_steps=4,
        eval_every=0,
        checkpoint_every=2,
        model=dataclasses.replace(MODEL, **(model or {})),
        data=config_lib.DataConfig(
            tokenizer="byte_chat", enable_thinking=False, sequence_length=LENGTH
        ),
        optim=config_lib.OptimConfig(
            name="adamw", learning_rate=1e-2, end_learning_rate=1e-3
        ),
        rl=config_lib.RLConfig(**(rl_settings | (rl or {}))),
    )
    return dataclasses.replace(config, **changes)


def make_async(max_staleness, rl=None, **changes):
    """A run of stage async_rl, with the objective for stale tokens."""
    # Chance pays, whatever is asked: no canary is to find that out.
    own = {"max_staleness": max_staleness, "objective": "dis", "canary_every": 0}
    rl = own | (rl or {})
    return make_config(rl, DENSE, stage="async_rl", **changes)


# Several files run it, or take its compiled step.
STALE = make_async(2, num_steps=6)
SLOW = 0.02  # seconds that an environment thinks


class StaleTest(runs.OneDeviceTest):
    """Runs that have the programs of STALE, on a slow lottery."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.enterClassContext(runs.compile_once(STALE))
        cls.taskset = lottery.Lottery(seconds=SLOW)
        make = mock.patch.object(environments, "make", return_value=cls.taskset)
        cls.enterClassContext(make)


def read_state(workdir, config, step=None):
    """Parameters and optimizer state of a checkpoint, the newest if none is given."""
    params = transformer.abstract_params(config.model)
    optimizer = step_lib.make_optimizer(config)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    if step is not None:
        folder = workdir.absolute() / "checkpoints" / str(step)
        return jax.device_get(manager.read_state(folder, state))
    checkpoints = manager.CheckpointManager(workdir, 9)
    _, state, _ = checkpoints.restore(state)
    checkpoints.close()
    return jax.device_get(state)


def assert_same_state(workdir, other, config):
    """Bit by bit."""
    states = [read_state(folder, config) for folder in (workdir, other)]
    jax.tree.map(np.testing.assert_array_equal, *states)


def copy_as_killed(actors, workdir, target):
    """Copies a run's folder as a kill now would leave it, with checkpoint 2 alone.

    In the thread that plays, which notes nothing meanwhile; what it noted is written.
    """

    def unfinished(path, names):
        saves = pathlib.Path(path).name == "checkpoints"
        return [n for n in names if n.startswith(".") or (saves and n != "2")]

    def copy(made):
        made._journal._thread.submit(int).result()
        shutil.copytree(workdir, target, ignore=unfinished)

    actors._local.call(copy)


def computed(workdir):
    """The lines of metrics.jsonl without what depends on the machine or eval_every."""
    others = ("perf/", "eval/", "goodput/")
    return [
        {k: v for k, v in record.items() if not k.startswith(others)}
        for record in metrics.read(workdir / "metrics.jsonl")
    ]


def initial_params(config):
    """The start of a run."""
    init = jax.jit(transformer.init_params, static_argnums=0)
    return jax.device_get(init(config.model, jax.random.key(config.seed)))


def by_path(params):
    """Arrays by tuple of names."""
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    return {tuple(key.key for key in path): value for path, value in flat}


def main():
    """A run with slow environments, to be killed: WORKDIR, seconds, steps, staleness.

    Without a staleness it is of stage rl.
    """
    environment.configure()
    workdir, seconds, num_steps, *staleness = sys.argv[1:]
    taskset = Lottery(seconds=float(seconds))
    answered = taskset.step

    async def step(message):
        print("answer", flush=True)  # noqa: T201  the parent counts them
        return await answered(message)

    taskset.step = step
    with (
        runs.use_devices(),
        mock.patch.object(environments, "make", return_value=taskset),
    ):
        changes = {"num_steps": int(num_steps)}
        is_stale = [make_async(int(n), **changes) for n in staleness]
        config = is_stale[0] if is_stale else make_config(**changes)
        loop.train(config, pathlib.Path(workdir))


if __name__ == "__main__":
    main()
