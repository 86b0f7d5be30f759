"""What a run is made of: data, mesh, parameters, optimizer, compiled steps."""

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from glm5_jax import command_line, sharding
from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.checkpoint import manager as manager_lib
from glm5_jax.checkpoint import retention
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.inference import loading
from glm5_jax.model import transformer
from glm5_jax.processes import together
from glm5_jax.training import corpus, host_memory, rl, run_folder
from glm5_jax.training import feed as feed_lib
from glm5_jax.training import program as program_lib
from glm5_jax.training import rows as rows_lib


@dataclasses.dataclass
class Run:
    """State of a run between two steps."""

    config: config_lib.TrainConfig
    workdir: pathlib.Path
    feed: feed_lib.Feed
    checkpoints: manager_lib.CheckpointManager
    mesh: Mesh
    rows: Sequence[int]  # of a batch, that this process makes
    params: dict
    opt_state: Any
    step: int  # updates done
    train_step: Callable
    compile_seconds: float

    def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Puts this process's rows of a batch on its devices."""
        where = program_lib.batch_place(self.mesh)
        if jax.process_count() == 1:  # rollouts vary in number
            return jax.device_put(batch, where)
        return rows_lib.place(batch, where, self.rows, self.config.data.batch_size)

    def save(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Starts to write a checkpoint of this step.

        Args:
          metrics: of this step; an evaluation among them says how good it is.
        """
        metrics = metrics or {}
        state = {"params": self.params, "opt_state": self.opt_state}
        # Random numbers and batches are functions of the config's seed and the step.
        metadata = {
            "step": self.step,
            "config": command_line.to_json_dict(self.config),
            "data": self.feed.fingerprint,
            "metrics": {k: v for k, v in metrics.items() if k.startswith("eval/")},
        }
        self.checkpoints.save(self.step, state, metadata)


def start(config: config_lib.TrainConfig, workdir: pathlib.Path) -> Run:
    """Builds a run, or restores it from its newest checkpoint.

    Raises:
      InputError: data, tokenizer, mesh or checkpoint do not fit the config.
    """
    feed = rl.Rollouts(config) if config.stage == "rl" else corpus.Corpus(config)
    tokenizer_lib.check_vocab(feed.tokenizer, config.model.vocab_size)
    _require_same_feed(feed.fingerprint)
    if together.is_first():
        feed.tokenizer.save(workdir / "tokenizer.json")
    keep = retention.of_run(command_line.to_json_dict(config))
    checkpoints = manager_lib.CheckpointManager(workdir, keep)
    mesh = mesh_lib.make_mesh(config.mesh)
    _require_whole_rows(config, feed, mesh)
    program = program_lib.make_program(config, mesh)
    rows = rows_lib.own(program.batch["tokens"])
    feed.take(rows)
    step = 0
    if checkpoints.latest_step() is not None:
        state = {"params": program.params, "opt_state": program.opt_state}
        step, state, metadata = checkpoints.restore(state)
        # config.json says the same, unless somebody has changed it.
        if "config" in metadata:
            run_folder.require_same_run(metadata["config"], config, workdir)
        _require_same_data(metadata["data"], feed.fingerprint, workdir)
        params, opt_state = state["params"], state["opt_state"]
        logging.info("Goes on from step %d in %s.", step, workdir)
    else:
        params = _initial_params(config, program.params)
        opt_places = program_lib.places(program.opt_state)
        init = jax.jit(program.optimizer.init, out_shardings=opt_places)
        opt_state = init(params)
    run = Run(
        config=config,
        workdir=workdir,
        feed=feed,
        checkpoints=checkpoints,
        mesh=mesh,
        rows=rows,
        params=params,
        opt_state=opt_state,
        step=step,
        train_step=lambda *args: None,
        compile_seconds=0.0,
    )
    _compile(run, program)
    host_memory.trim()
    return run


def _compile(run: Run, program: program_lib.Program) -> None:
    """Compiles the training step."""
    began = time.perf_counter()
    compiled = program.lower().compile()
    together.meet("compiled")  # one may have found it in its cache
    # Rollouts of which many forked make a larger batch than was compiled for.
    shape = program.batch["tokens"].shape

    def train_step(params: dict, state: Any, batch: dict) -> tuple:
        fits = batch["tokens"].shape == shape
        return (compiled if fits else program.step)(params, state, batch)

    run.train_step = train_step
    run.compile_seconds = time.perf_counter() - began
    logging.info("Compiled the training step in %.1f s.", run.compile_seconds)


def _initial_params(config: config_lib.TrainConfig, abstract: Any) -> dict:
    if config.init_from is not None:
        return loading.load_params(config.init_from, config.model, abstract)
    places = program_lib.places(abstract)
    init = jax.jit(transformer.init_params, static_argnums=0, out_shardings=places)
    return init(config.model, jax.random.key(config.seed))


def _require_whole_rows(
    config: config_lib.TrainConfig, feed: feed_lib.Feed, mesh: Mesh
) -> None:
    """Each device of the batch axes must get as many rows as any other.

    The config checks this where it says how many devices there are: mesh.data=-1 says
    nothing.
    """
    num_rows = feed.tokens_per_step // config.data.sequence_length
    names = sharding.RULES["B"]
    num_parts = math.prod(mesh.shape[name] for name in names)
    if num_rows % num_parts:
        is_rl = config.stage == "rl"
        rows = "rl.prompts_per_step * rl.group_size" if is_rl else "data.batch_size"
        axes = " * ".join(f"{name}={mesh.shape[name]}" for name in names)
        raise config_lib.InputError(
            f"{rows} must be divisible by the devices of the mesh that share a batch, "
            f"{axes}, got {num_rows} rows on {num_parts} devices; change {rows}, or "
            f"give devices to mesh.tensor."
        )


def _require_same_feed(ours: str) -> None:
    """All processes must read the same data."""
    theirs = together.from_first("data", lambda: ours)
    if theirs != ours:
        raise config_lib.InputError(
            f"this process reads other data than process 0: {_changes(theirs, ours)}. "
            f"Give all hosts the same files and the same Python."
        )


def _changes(theirs: str, ours: str) -> str:
    pairs = zip(theirs.split(), ours.split(), strict=False)
    return ", ".join(f"{a} there, {b} here" for a, b in pairs if a != b)


def _require_same_data(theirs: str, ours: str, workdir: pathlib.Path) -> None:
    """The stream of batches must go on where it stopped, or not at all."""
    if theirs == ours:
        return
    raise config_lib.InputError(
        f"the data of the run in {workdir} has changed: {_changes(theirs, ours)}. Go "
        f"on where that corpus is (the same Python, the same files), or give another "
        f"--workdir."
    )
