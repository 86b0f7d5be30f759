"""Ranks the splits of some chips into those that sample and those that train.

    rooflines of decoding and of a step --> simulated run of each split --> rank

rl/actors/simulator.py plays the run: engines that share their time among sequences,
tools that take theirs, and a trainer that learns from groups in order.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glm5_jax import config as config_lib
from glm5_jax.rl.actors import simulator
from glm5_jax.scale import markdown, slice_devices
from glm5_jax.scale.plan import planner as step_planner
from glm5_jax.scale.rl import engines, pushes, request, splits, tasks

SKIPPED = 4  # steps in which a run fills up; the figures are of the steps after them
NOTHING = 1e-9  # seconds, of what is taken away to see whether it limits
WORTH = 1.02  # times as fast: less is not a limit

Turns = Callable[[int, int], Sequence[simulator.Turn]]  # of a group's index and number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run on a split, apart from its speeds."""

    episode_tokens: float | int  # that the model draws, in the mean
    turns: Turns
    settings: simulator.Settings


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A simulated run after its first steps."""

    step_seconds: float
    samples_per_second: float
    tokens_per_second: float  # drawn by the model and trained on
    train_idle: float  # share of the time in which the trainer waits
    engine_idle: float  # share of the engines' time without an active sequence
    occupancy: float  # share of the slots that are active
    staleness: Mapping[
        int, int
    ]  # groups by the versions that their oldest token is old

    @property
    def mean_staleness(self) -> float:
        """Returns the versions that the oldest token of a group is old, in the mean."""
        total = sum(self.staleness.values())
        return sum(age * n for age, n in self.staleness.items()) / max(total, 1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A split with what is to be expected of it."""

    split: splits.Split
    trainer: step_planner.Plan
    engine: engines.Engine
    push: pushes.Push
    push_seconds: float
    outcome: Outcome
    limits: tuple[tuple[str, float], ...]  # times as fast without each, largest first

    @property
    def limit(self) -> str:
        """Returns what limits the run."""
        name, factor = self.limits[0]
        return name if factor >= WORTH else "several equally"


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The splits of some chips, the fastest first, and those that cannot be."""

    config_name: str
    config: config_lib.TrainConfig
    topology: str
    num_slices: int
    mixture: tasks.Mixture
    plans: list[Plan]
    refused: list[tuple[splits.Split, str]]
    pushes: list[pushes.Push]  # of each kind, for reference
    num_steps: int  # simulated
    refusal: str = ""  # a ranking without a split is an error instead

    def write(self, stem: str, page: str, command: str) -> None:
        """Writes STEM.md, which is `page`, and STEM.json."""
        content = {
            "command": command,
            "config": self.config_name,
            "topology": self.topology,
            "slices": self.num_slices,
            "tasks": self.mixture.shares,
            "episodes": dataclasses.asdict(self.mixture.summary),
            "plans": [row(plan) for plan in self.plans],
            "refused": [[split.training, why] for split, why in self.refused],
        }
        markdown.write(stem, content, page)


def make(
    config: config_lib.TrainConfig,
    config_name: str,
    topology: str,
    asked: request.Request,
    *,
    num_slices: int = 1,
    num_shown: int = 10,
) -> Ranking:
    """Plans a run of a stage that plays episodes.

    Args:
      config: of the run; the planner of training steps varies its mesh.
      config_name: what it is called.
      topology: of a slice, see glm5_jax/mesh.py.
      asked: tasks, engine and push.
      num_slices: number of slices of that shape.
      num_shown: plans to keep.

    Raises:
      InputError: there is no such topology or engine, no split is possible, or the
        trainer fits none.
    """
    engine = engines.make(
        config,
        asked.mixture,
        topology.partition(":")[0],
        topology=asked.engine,
        tensor=asked.engine_tensor,
        weights=asked.engine_weights,
        report=asked.engine_report,
    )
    is_one = config.stage_record.feed != "stream"  # the engine is the trainer's
    found = splits.of(topology, num_slices, engine.topology, takes_turns=is_one)
    plans, refused = _plans(found, engine, config, config_name, asked)
    if not plans:
        split, why = max(refused, key=lambda pair: pair[0].training)
        raise config_lib.InputError(
            f"{config_name} has no split on {num_slices} x {topology} with engines of "
            f"{engine.topology}. Of the largest, in which {split.training} train: {why}"
        )
    plans.sort(key=lambda plan: -plan.outcome.tokens_per_second)
    return Ranking(
        config_name=config_name,
        config=config,
        topology=topology,
        num_slices=num_slices,
        mixture=asked.mixture,
        plans=plans[:num_shown],
        refused=refused,
        pushes=[
            pushes.of(config.model, weights, kind)
            for weights in pushes.SCHEMES
            for kind in pushes.KINDS
        ],
        num_steps=asked.num_steps,
    )


def _plans(
    found: Sequence[splits.Split],
    engine: engines.Engine,
    config: config_lib.TrainConfig,
    config_name: str,
    asked: request.Request,
) -> tuple[list[Plan], list[tuple[splits.Split, str]]]:
    """Returns the plans of the splits that can be, and why the others cannot."""
    push = pushes.of(config.model, asked.engine_weights, asked.push)
    turns = functools.cache(asked.mixture.turns)  # every split plays the same episodes
    plans, refused = [], []
    for split in found:
        trainer, why = _trainer(config, config_name, split)
        own = engine
        if trainer is not None and split.takes_turns:
            own = engine.with_memory(_kept(trainer))
            if not own.slots:
                why = "there is no room for a sequence beside the trainer's state."
        if why or trainer is None:
            refused.append((split, why))
            continue
        plans.append(_plan(split, trainer, own, push, config, asked, turns))
    return plans, refused


def simulate(run: Run, speeds: simulator.Speeds) -> Outcome:
    """Simulates a run, and returns its figures without the first steps.

    Args:
      run: its episodes and settings, with the number of steps to be looked at.
      speeds: of the machines.
    """
    settings = dataclasses.replace(run.settings, num_skipped=SKIPPED)
    found = simulator.predict(run.turns, speeds, settings)
    samples = settings.num_steps * settings.batch_size * settings.group_size
    return Outcome(
        step_seconds=found.seconds / settings.num_steps,
        samples_per_second=samples / found.seconds,
        tokens_per_second=samples * run.episode_tokens / found.seconds,
        train_idle=found.train_idle,
        engine_idle=found.engine_idle,
        occupancy=found.occupancy,
        staleness=found.staleness,
    )


def limits(
    run: Run, speeds: simulator.Speeds, found: Outcome
) -> tuple[tuple[str, float], ...]:
    """Returns how many times as fast a run is without one of its costs.

    Each is taken away alone: the training, the sampling, the tools, the pushes, and
    the bound on staleness.

    Args:
      run: of `simulate`.
      speeds: of `simulate`.
      found: what it returned.
    """

    def instant(group: int, number: int) -> list[simulator.Turn]:
        return [simulator.Turn(turn.tokens, 0.0) for turn in run.turns(group, number)]

    settings, changed = run.settings, dataclasses.replace
    unbound = changed(
        settings,
        max_staleness=2 * settings.max_staleness + 2,
        num_concurrent=2 * settings.num_concurrent,
    )
    without = {
        "training": (run, changed(speeds, train_seconds=lambda tokens: NOTHING)),
        "sampling": (run, changed(speeds, step_seconds=lambda number: NOTHING)),
        "tools": (changed(run, turns=instant), speeds),
        "pushes": (run, changed(speeds, publish_seconds=0.0)),
        "staleness": (changed(run, settings=unbound), speeds),
    }
    rate = found.samples_per_second
    gains = {n: simulate(*of).samples_per_second / rate for n, of in without.items()}
    return tuple(sorted(gains.items(), key=lambda item: -item[1]))


def row(plan: Plan) -> dict[str, Any]:
    """Returns all figures of a plan."""
    split, outcome, trainer = plan.split, plan.outcome, plan.trainer
    return {
        "sampling": split.sampling,
        "training": split.training,
        "unused": split.unused,
        "takes_turns": split.takes_turns,
        "engines": split.num_engines,
        "engine": plan.engine.topology,
        "slots_of_an_engine": plan.engine.slots,
        "engine_tokens_per_second": round(plan.engine.tokens_per_second, 1),
        "trainer": f"{split.num_slices} x {split.topology}",
        "trainer_mesh": dict(trainer.setting.sizes),
        "trainer_gib": round(trainer.memory.total / slice_devices.GIB, 2),
        "train_step_seconds": float(f"{trainer.seconds:.4g}"),
        "push": f"{plan.push.weights}, {plan.push.kind}",
        "push_gib": round(plan.push.num_bytes / slice_devices.GIB, 1),
        "push_seconds": float(f"{plan.push_seconds:.3g}"),
        **{
            name: float(f"{getattr(outcome, name):.4g}")
            for name in (
                "step_seconds",
                "samples_per_second",
                "tokens_per_second",
                "train_idle",
                "engine_idle",
                "occupancy",
                "mean_staleness",
            )
        },
        "staleness": {str(age): n for age, n in outcome.staleness.items()},
        "limits": plan.limit,
        "times_as_fast_without": {n: round(f, 3) for n, f in plan.limits},
    }


def train_seconds(
    config: config_lib.TrainConfig, step_seconds: float, share_drawn: float
) -> Callable[[int], float]:
    """Returns the seconds of a step on a number of sampled tokens.

    A step computes all of its rows, full or not. With rl.rows_per_step episodes are
    packed, and those that do not fit make another batch of as many rows.

    Args:
      config: of the run.
      step_seconds: of a batch of rows.
      share_drawn: share of an episode's tokens that the model draws.
    """
    if not config.rl.rows_per_step:
        return lambda tokens: step_seconds
    room = config.num_rows * config.data.sequence_length
    return lambda tokens: step_seconds * max(-(-tokens / share_drawn // room), 1)


def _trainer(
    config: config_lib.TrainConfig, config_name: str, split: splits.Split
) -> tuple[step_planner.Plan | None, str]:
    """Returns a good plan of the trainer's chips, or why there is none."""
    try:
        return step_planner.best(config, config_name, split.topology, split.num_slices)
    except config_lib.InputError as error:
        return None, str(error)


def _kept(trainer: step_planner.Plan) -> float:
    """Returns the bytes of a device that a trainer keeps between its steps."""
    return sum(trainer.memory.arguments.values()) + trainer.memory.beside


def _plan(
    split: splits.Split,
    trainer: step_planner.Plan,
    engine: engines.Engine,
    push: pushes.Push,
    config: config_lib.TrainConfig,
    asked: request.Request,
    turns: Turns,
) -> Plan:
    rl, summary = config.rl, asked.mixture.summary
    push_seconds = 0.0
    if not split.takes_turns:
        push_seconds = push.seconds(split, trainer.setting.device)
    is_async = config.stage_record.feed == "stream"
    run = Run(
        episode_tokens=summary.drawn,
        turns=turns,
        settings=simulator.Settings(
            batch_size=rl.prompts_per_step,
            group_size=rl.group_size,
            max_staleness=rl.max_staleness if is_async else 0,
            num_concurrent=2 * split.num_engines * engine.slots,
            num_steps=asked.num_steps,
            concurrency=rl.concurrency,
            part=asked.mixture.part if len(rl.concurrency) > 1 else lambda group: 0,
        ),
    )
    speeds = simulator.Speeds(
        num_engines=split.num_engines,
        slots=engine.slots,
        step_seconds=engine.step_seconds,
        train_seconds=train_seconds(config, trainer.seconds, summary.share_drawn),
        publish_seconds=push_seconds,
    )
    found = simulate(run, speeds)
    return Plan(
        split=split,
        trainer=trainer,
        engine=engine,
        push=push,
        push_seconds=push_seconds,
        outcome=found,
        limits=limits(run, speeds, found),
    )
