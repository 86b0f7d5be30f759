"""A run: its data, mesh, parameters, optimizer state and compiled step."""

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
from glm5_jax.checkpoint import host_copies, retention, rollback
from glm5_jax.checkpoint import manager as manager_lib
from glm5_jax.config import checks, stages
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.processes import together
from glm5_jax.training import critic as critic_lib
from glm5_jax.training import pinned as pinned_lib
from glm5_jax.training import program as program_lib
from glm5_jax.training import reference, teachers
from glm5_jax.training.feeds import corpus
from glm5_jax.training.feeds import feed as feed_lib
from glm5_jax.training.feeds import rollouts as rl
from glm5_jax.training.reporting import metrics as metrics_lib
from glm5_jax.training.run import folder as run_folder
from glm5_jax.training.run import health as health_lib
from glm5_jax.training.run import host_memory, same_data, same_tokenizer
from glm5_jax.training.run import rows as rows_lib
from glm5_jax.weights import companions, loading

# What makes the batches of each kind of feed.
FEEDS: dict[stages.Feed, Callable[[config_lib.TrainConfig], feed_lib.Feed]] = {
    "text": corpus.Corpus,
    "conversations": corpus.Corpus,
    "rollouts": rl.Rollouts,
    "stream": rl.Rollouts,
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
    rows: Mapping[int, Sequence[int]]  # that this process makes, by size of a batch
    tokenizer: str = ""  # SHA-256 of the run's tokenizer.json
    pinned: pinned_lib.Steps = dataclasses.field(default_factory=dict)  # of other runs
    rolled_back_to: int | None = None  # by the last rollback
    params: dict = dataclasses.field(default_factory=dict)
    opt_state: Any = None
    copies: host_copies.HostCopies | None = None  # None: hosts keep none
    critic: critic_lib.Critic = critic_lib.ABSENT
    critic_state: dict = dataclasses.field(default_factory=dict)
    step: int = 0  # steps done, see feeds/feed.py
    num_left_out: int = 0  # batches that rollbacks skipped
    evaluation: Mapping[str, float] = dataclasses.field(default_factory=dict)  # last
    train_step: Callable = lambda *args: None
    with_reference: Callable = reference.unchanged  # fills its part of a batch
    with_teachers: Callable = reference.unchanged  # fills theirs
    compiled_size: int = 0  # rows of a batch that train_step is compiled for
    compile_seconds: float = 0.0
    restore_seconds: float = 0.0

    @property
    def position(self) -> int:
        """Batches drawn so far: those of the steps done, and the skipped ones."""
        return self.step + self.num_left_out

    @property
    def next_size(self) -> int:
        """Rows of the next batch."""
        is_of_texts = self.config.stage_record.has_batch_size
        batches = self.config.data.batches
        return batches.size(self.position) if is_of_texts else self.config.num_rows

    def to_devices(
        self, batch: dict[str, np.ndarray], num_rows: int | None = None
    ) -> dict[str, jax.Array]:
        """Puts the rows of this process on its devices.

        Args:
          batch: rows of this process; of rollouts, which vary in number, all rows.
          num_rows: of the whole batch; None: the largest, that evaluations have.
        """
        where = program_lib.batch_place(self.program.mesh)
        if jax.process_count() == 1:
            return jax.device_put(batch, where)
        if self.config.stage_record.plays_episodes:
            every = range(len(batch["tokens"]))
            return rows_lib.to_global_arrays(batch, where, every, len(every))
        size = num_rows or self.config.num_rows
        return rows_lib.to_global_arrays(batch, where, self.rows[size], size)

    def compile(self, beside: Callable[[], None] = lambda: None) -> None:
        """Compiles the training step for the size of the next batch.

        Args:
          beside: called meanwhile.
        """
        program, size, began = self.program, self.next_size, time.perf_counter()
        logging.info("Compiling the training step for %d rows ...", size)
        train_step = program.compile(size, beside)
        together.meet(f"compiled for position {self.position}")  # some found it cached
        self.train_step, self.compiled_size = train_step, size
        seconds = time.perf_counter() - began
        self.compile_seconds += seconds
        logging.info("... compiled in %.1f s.", seconds)

    def save(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Starts to write a checkpoint of this step.

        Args:
          metrics: of this step; an evaluation in them ranks the checkpoint.
        """
        self.checkpoints.save(self.step, *self._saved(metrics or {}))

    def copy(self) -> None:
        """Starts to write what each host keeps of this step by itself, if it does."""
        if self.copies:
            self.copies.save(self.step, *self._saved({}))

    def _saved(self, metrics: Mapping[str, Any]) -> tuple[dict, Any]:
        """Returns the state, and all else that a later start needs."""
        state = {"params": self.params, "opt_state": self.opt_state}
        state |= self.critic_state
        # Random numbers and batches are functions of the seed, step and position.
        metadata = {
            "step": self.step,
            "position": self.position,
            "config": command_line.to_json_dict(self.config),
            "data": self.feed.fingerprint,
            "tokenizer": self.tokenizer,
            "pinned": self.pinned,
            "health": self.health.memory(),
            "feed": self.feed.memory(self.position),
            "metrics": {k: v for k, v in metrics.items() if k.startswith("eval/")},
        }
        return state, metrics_lib.finite(metadata)

    def close(self, keeps_copies: bool = False) -> None:
        """Waits for saves; the last checkpoint replaces the hosts' copies.

        A run that began from a newer copy, and ends where it began, saves one first.

        Args:
          keeps_copies: the run ends by an error, without such a checkpoint.
        """
        if self.copies and not keeps_copies:
            self.checkpoints.wait()
            if self.step > max(self.checkpoints.newest_sealed(), 0):
                self.save()
        self.checkpoints.close()
        if self.copies and not keeps_copies:
            self.copies.drop()
        if self.copies:
            self.copies.close()

    def roll_back(self) -> int:
        """Restores the newest checkpoint and skips every batch drawn since.

        If the last rollback went to the same checkpoint, it was saved too late to help:
        the one before it is restored, if there is one.

        Returns:
          The number of steps undone.

        Raises:
          FloatingPointError: there is no checkpoint.
        """
        self.checkpoints.wait()  # for one that is being written
        newest = self.checkpoints.latest_step()
        if newest is None:
            raise FloatingPointError(
                f"step {self.step} went wrong and there is no checkpoint to roll back "
                f"to. Lower optim.learning_rate or checkpoint_every."
            )
        step, position = self.step, self.position
        is_late = newest == self.rolled_back_to and self.checkpoints.has_before(newest)
        self.health.roll_back(self.restore(before=newest if is_late else None))
        self.num_left_out += position - self.position
        self.rolled_back_to = self.step
        if self.copies:
            self.copies.drop()
        if together.is_first():
            memory = self.health.memory()
            note = rollback.Rollback(self.step, self.num_left_out, memory)
            rollback.write(self.workdir, note)
        self.checkpoints.abandon_after(self.step)
        return step - self.step

    def resume(self) -> None:
        """Restores the newest state and, if the run rolled back to it, the note.

        The note in rollback.json counts until a later checkpoint's metadata has it.
        """
        memory, note = self.restore(self.copies), rollback.read(self.workdir)
        if note and note.step == self.step and note.num_left_out > self.num_left_out:
            self.num_left_out, memory = note.num_left_out, note.health or memory
            self.rolled_back_to = self.step
        elif note and note.step == self.checkpoints.newest_sealed() < self.step:
            self.rolled_back_to = note.step  # and a host's copy was made since
        self.health.resume(memory)

    def restore(
        self,
        copies: host_copies.HostCopies | None = None,
        before: int | None = None,
    ) -> Mapping[str, Any]:
        """Restores the newest checkpoint; returns the memory of `health` in it.

        Args:
          copies: of the hosts, which count where they are newer.
          before: a step that the checkpoint must be older than.
        """
        began = time.perf_counter()
        self.params, self.opt_state = {}, None  # memory has no room for two states
        self.critic_state, program = {}, self.program
        abstract = {"params": program.params, "opt_state": program.opt_state}
        abstract |= self.critic.state
        newest = self.checkpoints.newest_sealed()
        found = copies.restore(abstract, newest) if copies else None
        found = found or self.checkpoints.restore(abstract, before=before)
        self.step, state, metadata = found
        # Checkpoints of earlier versions hold less. config.json is equal to this
        # config unless somebody has edited it.
        if "config" in metadata:
            run_folder.require_same_run(metadata["config"], self.config, self.workdir)
        same_data.require_same(metadata["data"], self.feed.fingerprint, self.workdir)
        self.params, self.opt_state = state["params"], state["opt_state"]
        self.critic_state = {name: state[name] for name in self.critic.state}
        self.num_left_out = metadata.get("position", self.step) - self.step
        self.tokenizer = metadata.get("tokenizer", "")
        self.pinned = metadata.get("pinned", self.pinned)
        self.evaluation = metadata.get("metrics", {})
        self.feed.resume(metadata.get("feed", {}))
        self.restore_seconds = time.perf_counter() - began
        return metadata.get("health", self.health.memory())


def make_mesh(config: config_lib.TrainConfig) -> Mesh:
    """Returns the mesh of a run.

    Raises:
      InputError: the devices do not fit it, or cannot share a batch.
    """
    mesh = mesh_lib.make_mesh(config.mesh)
    _require_whole_rows(config, mesh)
    return mesh


def make_feed(config: config_lib.TrainConfig, resumes: bool = False) -> feed_lib.Feed:
    """Opens the feed of a stage: a corpus, or the tasks of an environment.

    Args:
      config: of the run.
      resumes: from a checkpoint; whatever init_from names may be gone.

    Raises:
      InputError: it is unusable, its tokenizer is not that of init_from, or has more
        ids than the model.
    """
    feed = FEEDS[config.stage_record.feed](config)
    if not resumes:
        loading.require_tokenizer(config, feed.tokenizer)
    tokenizer_lib.check_vocab(feed.tokenizer, config.model.vocab_size)
    return feed


def start(config: config_lib.TrainConfig, workdir: pathlib.Path, mesh: Mesh) -> Run:
    """Builds a run, or restores it from its newest checkpoint.

    Raises:
      InputError: data, tokenizer or checkpoint do not fit the config.
    """
    feed = make_feed(config, run_folder.has_checkpoint(workdir))
    same_data.require_same_everywhere(feed.fingerprint)
    keep = retention.of_run(command_line.to_json_dict(config))
    checkpoints = manager_lib.CheckpointManager(workdir, keep)
    with contextlib.ExitStack() as undo:
        undo.callback(checkpoints.close)  # a failed start must not leave its threads
        program = program_lib.make_program(config, mesh)
        sizes = {config.num_rows, *config.data.batch_warmup_sizes}
        rows = {
            size: rows_lib.of_this_process(program.batch_of(size)["tokens"])
            for size in sizes
        }
        feed.restrict_to(rows)
        run = Run(
            config=config,
            workdir=workdir,
            feed=feed,
            checkpoints=checkpoints,
            program=program,
            copies=_open_copies(config, workdir),
            critic=critic_lib.make(config, program),
            health=health_lib.Health(
                config.health, config.num_steps, config.stage_record.is_loss_telling
            ),
            rows=rows,
        )
        _fill(run)
        feed.begin(workdir, run.step)
        run.with_reference = reference.make(config, program, run.pinned)
        run.with_teachers = teachers.make(config, program, run.pinned)
        with jax.set_mesh(mesh):
            run.compile(beside=lambda: feed.prepare(run.params, run.to_devices))
        undo.pop_all()
    host_memory.trim()
    return run


def _open_copies(
    config: config_lib.TrainConfig, workdir: pathlib.Path
) -> host_copies.HostCopies | None:
    if not config.host_copy_every:
        return None
    return host_copies.HostCopies(workdir, config.host_copy_folder)


def _fill(run: Run) -> None:
    """Restores the newest checkpoint, or makes the state of step 0."""
    config, workdir, program = run.config, run.workdir, run.program
    if run.checkpoints.latest_step() is not None:
        run.resume()
        run.tokenizer = same_tokenizer.keep(workdir, run.feed.tokenizer, run.tokenizer)
        run.pinned = pinned_lib.resolve(config, run.pinned)
        logging.info("Resumes from step %d in %s.", run.step, workdir)
        return
    if run.copies:  # of an earlier start that had no checkpoint
        run.copies.drop()
    if together.is_first():
        rollback.forget(workdir)  # of a run whose checkpoints somebody has moved away
        companions.into_training(workdir, config.init_from, run.feed.tokenizer)
    run.tokenizer = same_tokenizer.keep(workdir, run.feed.tokenizer)
    run.pinned = pinned_lib.resolve(config, None)
    run.params, run.opt_state = initial(config, program, run.pinned)
    run.critic_state = run.critic.init(run.params)


def initial(
    config: config_lib.TrainConfig,
    program: program_lib.Program,
    steps: pinned_lib.Steps,
) -> tuple[dict, Any]:
    """Returns the parameters, drawn or read, and the optimizer state of step 0.

    Args:
      config: of the run.
      program: of the run.
      steps: that it reads of other runs.
    """
    if config.init_from is None:
        return program.initial(config.seed)
    place = pinned_lib.path(steps, config.init_from)
    params = loading.load_params(place, config.model, program.params)
    places = program_lib.places(program.opt_state)
    init = jax.jit(program.optimizer.init, out_shardings=places)
    return params, init(params)


def _require_whole_rows(config: config_lib.TrainConfig, mesh: Mesh) -> None:
    """Checks that all devices of the batch axes get the same number of rows.

    With mesh.data=-1 the config alone could not check this.
    """
    names = sharding.RULES["B"]
    num_shares = math.prod(mesh.shape[name] for name in names)
    checks.require(*config.batch_rules(num_shares))
