"""A stage of training as a record: everything in which one stage differs from another.

A record is data and small functions of a config; it computes nothing. The code that
computes asks the record and never compares a stage's name. The kinds `Feed` and
`Update` have one class or function each: the tables are FEEDS in training/run/state.py
and STEPS in training/program.py.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

from glm5_jax.config.data import DataConfig
from glm5_jax.config.model import AttentionMode, ModelConfig
from glm5_jax.config.optim import LossConfig
from glm5_jax.config.rl import RLConfig

Path = tuple[str, ...]  # of a parameter, e.g. ("mtp", "block", "mlp", "gate")
Rule = tuple[bool, str]  # whether it holds, and the message where it does not
Feed = Literal["text", "conversations", "rollouts", "stream"]
Update = Literal["losses", "policy"]
Loss = Literal["next_token", "mtp", "balance", "indexer_kl", "policy"]


@runtime_checkable
class Config(Protocol):
    """The parts of a TrainConfig that a stage's rules read."""

    @property
    def stage(self) -> str:
        """The stage's name."""
        ...

    @property
    def init_from(self) -> str | None:
        """The folder of the first parameters."""
        ...

    @property
    def num_steps(self) -> int:
        """The steps of the whole run."""
        ...

    @property
    def stop_metric(self) -> str:
        """The figure of an evaluation that ends the run, or ""."""
        ...

    @property
    def checkpoints_keep_best(self) -> int:
        """The checkpoints that evaluations choose."""
        ...

    @property
    def model(self) -> ModelConfig:
        """The section of the model."""
        ...

    @property
    def data(self) -> DataConfig:
        """The section of the data."""
        ...

    @property
    def loss(self) -> LossConfig:
        """The section of the losses' weights."""
        ...

    @property
    def rl(self) -> RLConfig:
        """The section of reinforcement learning."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure of an evaluation, and which of two values is better."""

    name: str
    is_higher_better: bool
    most: float  # largest value that a run can be asked to reach

    def is_reached(self, value: float, goal: float) -> bool:
        """Tells whether a value is as good as the goal."""
        return value >= goal if self.is_higher_better else value <= goal


BITS_PER_BYTE = Metric(name="eval/bits_per_byte", is_higher_better=False, most=99.0)
SUCCESS = Metric(name="eval/success", is_higher_better=True, most=1.0)
METRICS = {metric.name: metric for metric in (BITS_PER_BYTE, SUCCESS)}


def everything(path: Path) -> bool:
    """Tells that every parameter is trained."""
    del path
    return True


def no_rules(config: Config) -> list[Rule]:
    """Returns no rules beyond those of every run."""
    del config
    return []


def as_given(model: ModelConfig) -> ModelConfig:
    """Returns the model's section without defaults of a stage."""
    return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage: what it learns from, what it trains, and how it is measured."""

    name: str  # value of TrainConfig.stage

    # What it learns from, and how much of it a step takes.
    feed: Feed = "text"
    # Fields of the config whose product is the rows of a step. The first is the one
    # to lower where a step needs too much memory.
    rows: tuple[str, ...] = ("data.batch_size",)
    # Field with the rows of a step that replaces them, unless it is 0.
    packed_rows: str = ""
    # Field of the config with the updates of a step, each on an equal part of its
    # rows; "": one update.
    updates: str = ""
    # Arrays [rows, sequence_length] of a batch, of int32 and of float32.
    integers: tuple[str, ...] = ("tokens", "targets", "segment_ids", "positions")
    floats: tuple[str, ...] = ("loss_mask",)
    # With rl.router_replay the batch also holds the experts that the engine chose.
    can_replay_routing: bool = False
    # Policies of earlier stages (rl.teachers) give the advantages.
    has_teachers: bool = False
    # The run's own engine plays episodes, which one process can do.
    plays_episodes: bool = False

    # What it trains.
    update: Update = "losses"  # which step of training/ makes the updates
    losses: tuple[Loss, ...]  # terms that it minimises
    monitored: tuple[Loss, ...] = ()  # terms that it computes for the metrics alone
    trains: Callable[[Path], bool] = everything  # by path of a parameter
    moves_router_bias: bool = True  # against the load of the experts, each step
    # The model learns to attend to the keys that warmed-up indexers select.
    adapts_to_selection: bool = False

    # How it is measured.
    measures: tuple[Metric, ...] = (BITS_PER_BYTE,)  # figures of every evaluation
    can_measure_success: bool = False  # eval_success=true adds eval/success
    best: Metric = BITS_PER_BYTE  # figure that ranks checkpoints

    # Defaults and checks of a config.
    attention: AttentionMode | None = None  # the only one that it runs with; None: any
    rules: Callable[[Config], list[Rule]] = no_rules
    model_defaults: Callable[[ModelConfig], ModelConfig] = as_given

    def computes(self, loss: Loss) -> bool:
        """Tells whether a step computes a term, minimised or not."""
        return loss in self.losses or loss in self.monitored

    def rows_of(self, config: Config) -> tuple[str, ...]:
        """Returns the fields whose product is the rows of a step of a run."""
        path = self.packed_rows
        return (path,) if path and operator.attrgetter(path)(config) else self.rows

    def has_engine(self, config: Config) -> bool:
        """Tells whether a run's own engine plays episodes, not servers of others."""
        return self.plays_episodes and not config.rl.servers

    def has_critic(self, config: Config) -> bool:
        """Tells whether a critic gives the advantages of a run."""
        return config.rl.critic and self.update == "policy"

    @property
    def has_batch_size(self) -> bool:
        """True where data.batch_size is the rows of a step, in one update."""
        return self.rows == ("data.batch_size",) and not self.updates

    @property
    def is_loss_telling(self) -> bool:
        """False where the loss is near 0 however training goes: a policy gradient's."""
        return "policy" not in self.losses

    @property
    def trains_everything(self) -> bool:
        """True where every parameter learns from the losses of the whole model."""
        return self.update == "losses" and self.trains is everything
