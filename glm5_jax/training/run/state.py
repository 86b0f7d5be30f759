"""What a run is made of: data, mesh, parameters, optimizer, compiled steps."""

import contextlib
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
from glm5_jax.checkpoint import retention, rollback
from glm5_jax.config import checks, stages
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.processes import together
from glm5_jax.training import program as program_lib
from glm5_jax.training.feeds import corpus
from glm5_jax.training.feeds import feed as feed_lib
from glm5_jax.training.feeds import rollouts as rl
from glm5_jax.training.reporting import metrics as metrics_lib
from glm5_jax.training.run import folder as run_folder
from glm5_jax.training.run import health as health_lib
from glm5_jax.training.run import host_memory
from glm5_jax.training.run import rows as rows_lib
from glm5_jax.weights import companions, loading

# What makes the batches of each kind of feed.
FEEDS: dict[stages.Feed, Callable[[config_lib.TrainConfig], feed_lib.Feed]] = {
    "text": corpus.Corpus,
    "conversations": corpus.Corpus,
    "rollouts": rl.Rollouts,
}


@dataclasses.dataclass
class Run:
    """State of a run between two steps."""

    config: config_lib.TrainConfig
    workdir: pathlib.Path
    feed: feed_lib.Feed
    checkpoints: manager_lib.CheckpointManager
    program: program_lib.Program
    health: health_lib.Health
    rows: Sequence[int]  # of a batch, that this process makes
    tokenizer: str = ""  # SHA-256 of the run's tokenizer.json
    rolled_back_to: int | None = None  # by the last rollback
    params: dict = dataclasses.field(default_factory=dict)
    opt_state: Any = None
    step: int = 0  # updates done
    num_left_out: int = 0  # batches, by rollbacks
    evaluation: Mapping[str, float] = dataclasses.field(default_factory=dict)  # last
    train_step: Callable = lambda *args: None
    compile_seconds: float = 0.0
    restore_seconds: float = 0.0

    @property
    def position(self) -> int:
        """Batches behind this run: those of its updates, and those left out."""
        return self.step + self.num_left_out

    def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Puts this process's rows of a batch on its devices."""
        where = program_lib.batch_place(self.program.mesh)
        if jax.process_count() == 1:  # rollouts vary in number
            return jax.device_put(batch, where)
        return rows_lib.place(batch, where, self.rows, self.config.num_rows)

    def save(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Starts to write a checkpoint of this step.

        Args:
          metrics: of this step; an evaluation among them says how good it is.
        """
        metrics = metrics or {}
        state = {"params": self.params, "opt_state": self.opt_state}
        # Random numbers and batches are functions of the seed, step and position.
        metadata = {
            "step": self.step,
            "position": self.position,
            "config": command_line.to_json_dict(self.config),
            "data": self.feed.fingerprint,
            "tokenizer": self.tokenizer,
            "health": self.health.memory(),
            "metrics": {k: v for k, v in metrics.items() if k.startswith("eval/")},
        }
        self.checkpoints.save(self.step, state, metrics_lib.finite(metadata))

    def roll_back(self) -> int:
        """Restores the newest checkpoint; the batches drawn since do not come again.

        Where that is where the last rollback went to, it was saved too late to help:
        the one before it is restored, if there is one.

        Returns:
          Updates undone.

        Raises:
          FloatingPointError: there is no checkpoint.
        """
        self.checkpoints.wait()  # one may be on its way to the disk
        newest = self.checkpoints.latest_step()
        if newest is None:
            raise FloatingPointError(
                f"step {self.step} went wrong and there is no checkpoint to roll back "
                f"to. Lower optim.learning_rate or checkpoint_every."
            )
        step, position = self.step, self.position
        is_late = newest == self.rolled_back_to and self.checkpoints.has_before(newest)
        self.health.go_back(self.restore(before=newest if is_late else None))
        self.num_left_out += position - self.position
        self.rolled_back_to = self.step
        if together.is_first():
            memory = self.health.memory()
            note = rollback.Rollback(self.step, self.num_left_out, memory)
            rollback.write(self.workdir, note)
        self.checkpoints.abandon_after(self.step)
        return step - self.step

    def go_on(self) -> None:
        """Restores the newest checkpoint at the start; knows of a rollback to it."""
        memory, note = self.restore(), rollback.read(self.workdir)
        # One that a later checkpoint has not taken into its metadata.
        if note and note.step == self.step and note.num_left_out > self.num_left_out:
            self.num_left_out, memory = note.num_left_out, note.health or memory
            self.rolled_back_to = self.step
        self.health.go_on(memory)

    def restore(self, before: int | None = None) -> Mapping[str, Any]:
        """Takes up the newest checkpoint; returns what `health` remembered there.

        Args:
          before: a step that it must be older than.
        """
        began = time.perf_counter()
        self.params, self.opt_state = {}, None  # there is no room for two
        program = self.program
        abstract = {"params": program.params, "opt_state": program.opt_state}
        self.step, state, metadata = self.checkpoints.restore(abstract, before=before)
        # Steps of earlier versions hold less. config.json says the same, unless
        # somebody has changed it.
        if "config" in metadata:
            run_folder.require_same_run(metadata["config"], self.config, self.workdir)
        require_same_data(metadata["data"], self.feed.fingerprint, self.workdir)
        self.params, self.opt_state = state["params"], state["opt_state"]
        self.num_left_out = metadata.get("position", self.step) - self.step
        self.tokenizer = metadata.get("tokenizer", "")
        self.evaluation = metadata.get("metrics", {})
        self.restore_seconds = time.perf_counter() - began
        return metadata.get("health", self.health.memory())


def make_mesh(config: config_lib.TrainConfig) -> Mesh:
    """The devices of a run, in its mesh.

    Raises:
      InputError: they do not fit it, or a batch cannot be shared among them.
    """
    mesh = mesh_lib.make_mesh(config.mesh)
    _require_whole_rows(config, mesh)
    return mesh


def make_feed(config: config_lib.TrainConfig) -> feed_lib.Feed:
    """Opens what the stage learns from: a corpus, or the tasks of an environment.

    Raises:
      InputError: it cannot be used, or the model has too few ids for its tokenizer.
    """
    feed = FEEDS[config.stage_record.feed](config)
    tokenizer_lib.check_vocab(feed.tokenizer, config.model.vocab_size)
    return feed


def start(config: config_lib.TrainConfig, workdir: pathlib.Path, mesh: Mesh) -> Run:
    """Builds a run, or restores it from its newest checkpoint.

    Raises:
      InputError: data, tokenizer or checkpoint do not fit the config.
    """
    feed = make_feed(config)
    _require_same_feed(feed.fingerprint)
    keep = retention.of_run(command_line.to_json_dict(config))
    checkpoints = manager_lib.CheckpointManager(workdir, keep)
    with contextlib.ExitStack() as undo:
        undo.callback(checkpoints.close)  # its threads outlive a start that fails
        program = program_lib.make_program(config, mesh)
        rows = rows_lib.own(program.batch["tokens"])
        feed.take(rows)
        run = Run(
            config=config,
            workdir=workdir,
            feed=feed,
            checkpoints=checkpoints,
            program=program,
            health=health_lib.Health(
                config.health, config.num_steps, config.stage_record.is_loss_telling
            ),
            rows=rows,
        )
        _fill(run)
        _compile(run)
        undo.pop_all()
    host_memory.trim()
    return run


def _fill(run: Run) -> None:
    """Restores the newest checkpoint, or makes the state before the first step."""
    config, workdir, program = run.config, run.workdir, run.program
    if run.checkpoints.latest_step() is not None:
        run.go_on()
        run.tokenizer = _same_tokenizer(workdir, run.feed.tokenizer, run.tokenizer)
        logging.info("Goes on from step %d in %s.", run.step, workdir)
        return
    if together.is_first():
        companions.into_training(workdir, config.init_from, run.feed.tokenizer)
    run.tokenizer = _same_tokenizer(workdir, run.feed.tokenizer)
    run.params, run.opt_state = _initial(config, program)


def _same_tokenizer(
    workdir: pathlib.Path, tokenizer: tokenizer_lib.Tokenizer, wanted: str = ""
) -> str:
    """SHA-256 of the run's tokenizer.json, which must be what a checkpoint says.

    Whoever evaluates or exports the run reads that file. Where it is the run's own, and
    not one that came with init_from, it is written anew.

    Raises:
      DamagedError: it is another, and cannot be written anew.
    """

    def mended() -> str:
        path = workdir / companions.TOKENIZER
        found = tokenizer_lib.digest_of(path) if path.exists() else ""
        if not wanted or found == wanted:
            return found
        if tokenizer.digest != wanted:
            raise config_lib.DamagedError(
                f"{path} is not the file that the run began with, whose SHA-256 is "
                f"{wanted}; copy it there from init_from or data.tokenizer."
            )
        tokenizer.save(path)
        logging.error("%s WAS DAMAGED and is written anew.", path)
        return wanted

    return together.from_first("tokenizer.json", mended)


def _compile(run: Run) -> None:
    """Compiles the training step."""
    program, began = run.program, time.perf_counter()
    logging.info("Compiling the training step ...")
    compiled = program.lower().compile()
    together.meet("compiled")  # one may have found it in its cache
    # Rollouts of which many forked make a larger batch than was compiled for.
    shape = program.batch["tokens"].shape

    def train_step(params: dict, state: Any, batch: dict) -> tuple:
        fits = batch["tokens"].shape == shape
        return (compiled if fits else program.step)(params, state, batch)

    run.train_step = train_step
    run.compile_seconds = time.perf_counter() - began
    logging.info("... compiled in %.1f s.", run.compile_seconds)


def _initial(
    config: config_lib.TrainConfig, program: program_lib.Program
) -> tuple[dict, Any]:
    """Parameters and optimizer state, drawn or read, before the first step."""
    if config.init_from is None:
        return program.initial(config.seed)
    params = loading.load_params(config.init_from, config.model, program.params)
    places = program_lib.places(program.opt_state)
    init = jax.jit(program.optimizer.init, out_shardings=places)
    return params, init(params)


def _require_whole_rows(config: config_lib.TrainConfig, mesh: Mesh) -> None:
    """Checks that each device of the batch axes gets as many rows as any other.

    The config checks this where it says how many devices there are: mesh.data=-1 says
    nothing.
    """
    names = sharding.RULES["B"]
    checks.require(config.batch_rule(math.prod(mesh.shape[name] for name in names)))


def _require_same_feed(ours: str) -> None:
    """Checks that all processes read the same data."""
    theirs = together.from_first("data", lambda: ours)
    if theirs != ours:
        raise config_lib.InputError(
            f"this process reads other data than process 0: {_changes(theirs, ours)}. "
            f"Give all hosts the same files and the same Python."
        )


def _changes(theirs: str, ours: str) -> str:
    """Returns those of two lists of key=value that differ."""
    there, here = _pairs(theirs), _pairs(ours)
    differing = [
        f"{key}={there.get(key, 'absent')} there, {key}={here.get(key, 'absent')} here"
        for key in there | here
        if there.get(key) != here.get(key)
    ]
    return ", ".join(differing) or f"{theirs} there, {ours} here"


def _pairs(fingerprint: str) -> dict[str, str]:
    parts = (part.partition("=") for part in fingerprint.split())
    return {key: value for key, _, value in parts}


def require_same_data(theirs: str, ours: str, workdir: pathlib.Path) -> None:
    """Checks that the stream of batches can go on where it stopped.

    Args:
      theirs: fingerprint of the data that the run in `workdir` has read.
      ours: fingerprint of the data that the config names.
      workdir: folder of the run, for the message.

    Raises:
      InputError: they differ.
    """
    if theirs == ours:
        return
    raise config_lib.InputError(
        f"the data of the run in {workdir} has changed: {_changes(theirs, ours)}. Go "
        f"on where that corpus is (the same Python, the same files), or give another "
        f"--workdir."
    )
