"""Success of RL against the age of its rollouts: staleness x objective x seed.

    python benchmarks/staleness_grid.py --workdir=runs/grid --out=runs/grid.png

Staleness is forced and exact. The run keeps the parameters of its last S + 1 versions
and plays the groups of every step with the oldest of them, so step t (from 0) learns
from rollouts of version t - S, and the first S steps from those of the start. Each step
checks all versions; the last with tokens compares log-probs of engine and trainer.

Seed i of RL starts from seed i of SFT, which ends at a part of the held-out words; the
cells of a seed share start, tasks and random numbers. Everything runs in one process,
which compiles each objective once. WORKDIR/results.jsonl gets a line when a run ends;
typed again, the command skips what is there. Order: all cells of a seed, then the next.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import staleness_report
from absl import logging

from glm5_jax import compile_cache, environments, presets
from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.rl import advantages, jobs
from glm5_jax.training import computed, loop, policy
from glm5_jax.training import program as program_lib
from glm5_jax.training.feeds import feed, groups, player, policy_batch
from glm5_jax.training.run import state

TASK = "reverse:3-4"
LENGTH = 24  # tokens: the longest prompt and its answer
START = 0.4  # of the held-out words, at which SFT ends
PARITY = 1e-4  # nats: largest gap of engine and trainer with the same parameters
MODEL = dataclasses.replace(
    presets.BYTES, num_hidden_layers=2, num_nextn_predict_layers=0
)
# The names of the table, and those of rl.objective. With one update a step, grpo has
# no ratio: it takes stale rollouts for its own.
OBJECTIVES = {"none": "grpo", "tis": "tis", "pop": "icepop", "dis": "dis"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A run of the grid."""

    seed: int
    staleness: int  # versions between the sampling parameters and those that learn
    objective: str  # of OBJECTIVES


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all runs of a results file share."""

    steps: int
    learning_rate: float
    most: int = 8  # the largest staleness of the grid


class Versions:
    """The parameters of the last staleness + 1 versions.

    They are copies: the trainer's update donates its own.
    """

    def __init__(self, staleness: int) -> None:
        """Starts without parameters."""
        self._kept: collections.deque = collections.deque(maxlen=staleness + 1)

    def add(self, params: Any, version: int) -> None:
        """Keeps a copy, and forgets the oldest if there are enough."""
        self._kept.append((_copied(params), version))

    @property
    def oldest(self) -> tuple[Any, int]:
        """The parameters that the next groups are played with, and their version."""
        return self._kept[0]


class Grid:
    """The programs that all runs share, and the starts that those of a seed share."""

    def __init__(self, settings: Settings, workdir: pathlib.Path) -> None:
        """Prepares the tasks; programs are compiled as runs need them."""
        self._settings, self._workdir = settings, workdir
        config = rl_config(Cell(0, 0, "none"), settings)
        self.mesh = state.make_mesh(config)
        self._taskset = environments.make(TASK)
        tokenizer = tokenizer_lib.for_corpus(config.data, [])
        self._template = templates.make_template(config.data, tokenizer)
        self._judge = self._player(config)  # its versions must rise from run to run
        self._judged = itertools.count()
        self._programs: dict[str, tuple] = {}
        self._starts: dict[int, float] = {}
        self._logprobs = jax.jit(
            lambda params, batch: policy.token_logprobs(
                computed.rounded(params, config), config, batch
            )
        )

    def learn(self, cell: Cell) -> dict[str, Any]:
        """Returns the record of a run, from the start of its seed to its end."""
        config = rl_config(cell, self._settings, self._start(cell.seed))
        program, step = self._program(cell.objective, config)
        began, cpu = time.perf_counter(), time.process_time()
        params, opt_state = state.initial(config, program, {})
        if cell.seed not in self._starts:
            self._starts[cell.seed] = self._success(params)
        seen, judged = [], None
        actor, versions = self._player(config), Versions(cell.staleness)
        for position in range(config.num_steps):
            versions.add(params, position)
            old, version = versions.oldest
            actor.publish(old, version, "same")
            played, reward = self._play(config, actor, position)
            batch = policy_batch.make(config, played, position)
            age = min(position, cell.staleness)
            require_age(batch, age)
            if batch["loss_mask"].any():  # a group had a gradient
                judged = old, batch
            batch = jax.device_put(batch, program_lib.batch_place(self.mesh))
            params, opt_state, metrics = step(params, opt_state, batch)
            seen.append(measured(jax.device_get(metrics), age, reward))
        parity = self._parity(*judged) if judged else float("nan")
        if not parity <= PARITY:
            raise RuntimeError(f"{cell}: engine and trainer differ by {parity}")
        return {
            **dataclasses.asdict(cell),
            "settings": dataclasses.asdict(self._settings),
            **summary(seen),
            "start": self._starts[cell.seed],
            "success": self._success(params),
            "parity": parity,
            "seconds": round(time.perf_counter() - began, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),
        }

    def _start(self, seed: int) -> str:
        """Returns the folder of a seed's SFT, which is run if it has not ended."""
        folder = self._workdir / f"sft_{seed}"
        loop.train(sft_config(seed), folder)
        return str(folder)

    def _program(
        self, objective: str, config: config_lib.TrainConfig
    ) -> tuple[program_lib.Program, Any]:
        """Returns an objective's program and its compiled step.

        Runs of other seeds and starts share them: a step reads neither.
        """
        if objective not in self._programs:
            program = program_lib.make_program(config, self.mesh)
            self._programs[objective] = program, program.compile(config.num_rows)
        return self._programs[objective]

    def _player(self, config: config_lib.TrainConfig) -> player.Player:
        return player.Player(config, self._taskset, self._template)

    def _play(
        self, config: config_lib.TrainConfig, actor: player.Player, position: int
    ) -> tuple[list[groups.Group], float]:
        """Returns the groups of a step, and the mean reward of their episodes."""
        number, size = config.rl.prompts_per_step, config.rl.group_size
        todo = [
            job
            for group in range(number)
            for job in jobs.of_group(
                config, self._taskset, position * number + group, group
            )
        ]
        done = actor.play(todo, "rollouts")
        played = [done[i : i + size] for i in range(0, len(done), size)]
        kept, _ = advantages.select(played, group_size=size, drop_equal=False)
        rewards = [episode.reward.total for group in kept for episode in group]
        return kept, float(np.mean(rewards))

    def _success(self, params: Any) -> float:
        """Returns the share of held-out words that are spelt right."""
        return self._judge.evaluate(params, next(self._judged))["eval/success"]

    def _parity(self, params: Any, batch: Mapping[str, Any]) -> float:
        """Returns the largest gap of the engine's log-probs to those of `params`."""
        gap = jnp.abs(self._logprobs(params, batch) - batch["rollout_logprobs"])
        return float(jnp.max(jnp.where(batch["loss_mask"] > 0, gap, 0)))


def sft_config(seed: int) -> config_lib.TrainConfig:
    """Returns the config of a seed's start."""
    return config_lib.TrainConfig(
        stage="sft",
        seed=seed,
        num_steps=1000,
        eval_every=10,
        eval_batches=1,
        eval_success=True,
        sample_tokens=0,
        stop_metric="eval/success",
        stop_at=START,
        model=MODEL,
        data=config_lib.DataConfig(
            source=f"tasks:{TASK}",
            tokenizer="byte_chat",
            enable_thinking=False,
            sequence_length=LENGTH,
            batch_size=64,
        ),
        loss=config_lib.LossConfig(indexer_weight=0.1, router_bias_rate=0.01),
        optim=config_lib.OptimConfig(
            name="adamw", learning_rate=3e-3, schedule="constant", warmup_steps=5
        ),
        rl=config_lib.RLConfig(
            environment=TASK, max_new_tokens=6, max_turns=1, slots=64
        ),
    )


def rl_config(
    cell: Cell, settings: Settings, init_from: str | None = None
) -> config_lib.TrainConfig:
    """Returns the config of a run; max_staleness is the grid's, as programs are."""
    return config_lib.TrainConfig(
        stage="async_rl",
        seed=cell.seed,
        init_from=init_from,
        num_steps=settings.steps,
        eval_every=0,
        model=MODEL,
        data=config_lib.DataConfig(
            tokenizer="byte_chat", enable_thinking=False, sequence_length=LENGTH
        ),
        optim=config_lib.OptimConfig(
            name="adamw",
            learning_rate=settings.learning_rate,
            schedule="constant",
            warmup_steps=5,
            weight_decay=0.0,
            adam_b2=0.98,
            clip_norm=1.0,
        ),
        rl=config_lib.RLConfig(
            environment=TASK,
            prompts_per_step=8,
            group_size=8,
            max_new_tokens=6,
            max_turns=1,
            slots=64,
            objective=OBJECTIVES[cell.objective],
            max_staleness=settings.most,
            num_eval_tasks=256,
        ),
    )


def require_age(batch: feed.Batch, age: int) -> None:
    """Raises RuntimeError unless every sampled token is `age` versions old."""
    found = np.unique(batch["staleness"][batch["loss_mask"] > 0])
    if found.size and found.tolist() != [age]:
        raise RuntimeError(f"tokens must be {age} versions old, got {found}")


def measured(metrics: Mapping[str, Any], age: int, reward: float) -> dict[str, float]:
    """Returns the figures of a step that learnt from tokens of one age."""
    gap = f"{policy.GAP}/stale_{age}" if age else policy.GAP
    return {
        "reward": reward,
        "tokens": float(metrics["rl/trained_tokens"]),
        "masked": float(metrics["rl/masked_fraction"]),
        "grad_norm": float(metrics["train/grad_norm"]),
        "gap": float(metrics[gap]),
    }


def summary(seen: list[dict[str, float]]) -> dict[str, Any]:
    """Returns a run's figures; means are over the tokens of all steps."""
    tokens = np.array([one["tokens"] for one in seen])
    total = max(tokens.sum(), 1)
    return {
        "rewards": [round(one["reward"], 4) for one in seen],
        "masked": float(tokens @ [one["masked"] for one in seen] / total),
        "gap": float(tokens @ [one["gap"] for one in seen] / total),
        "grad_norm_max": max(one["grad_norm"] for one in seen),
        "idle_steps": int((tokens == 0).sum()),
    }


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """Yields the runs, all of a seed before the next."""
    for values in itertools.product(args.seeds, args.staleness, args.objectives):
        cell = Cell(*values)
        if cell.staleness or cell.objective == args.objectives[0] or not args.zero_once:
            yield cell


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records of a results file; a line cut by a kill is dropped."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines := lines[:-1]), encoding="utf-8")
    return [json.loads(line) for line in lines]


def main() -> None:
    """Runs the missing cells, draws the picture and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workdir", type=pathlib.Path, required=True, help="keeps results and starts")
    add("--out", type=pathlib.Path, help="the picture to write")
    add("--seeds", type=_ints, default="0,1,2,3,4", help="default: %(default)s")
    add("--staleness", type=_ints, default="0,2,4,8", help="default: %(default)s")
    add(
        "--objectives",
        type=lambda text: text.split(","),
        default=",".join(OBJECTIVES),
        help="default: %(default)s",
    )
    add("--steps", type=int, default=48, help="of a run; default: %(default)s")
    add("--learning_rate", type=float, default=1e-3, help="default: %(default)s")
    add("--zero_once", action="store_true", help="one objective at 0: they agree")
    add("--report_only", action="store_true", help="run nothing")
    args = parser.parse_args()
    if wrong := set(args.objectives) - OBJECTIVES.keys():
        parser.error(f"--objectives knows {[*OBJECTIVES]}, got {sorted(wrong)}")
    settings = Settings(args.steps, args.learning_rate)
    if min(args.staleness) < 0 or max(args.staleness) > settings.most:
        parser.error(f"--staleness must lie in 0..{settings.most}")
    if max(args.staleness) >= args.steps:
        parser.error(f"--steps must be above --staleness, got {args.steps}")
    path = args.workdir / "results.jsonl"
    records = read(path)
    if any(r["settings"] != dataclasses.asdict(settings) for r in records):
        parser.error(f"{path} has runs of other settings; give another --workdir")
    if not args.report_only:
        args.workdir.mkdir(parents=True, exist_ok=True)
        records += _run(args, settings, path, records)
    wanted = [dataclasses.astuple(cell) for cell in cells(args)]
    records = [record for record in records if _key(record) in wanted]
    print(staleness_report.table(records))
    if args.out and records:
        staleness_report.draw(records).savefig(args.out, dpi=130)


def _run(
    args: argparse.Namespace,
    settings: Settings,
    path: pathlib.Path,
    records: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Runs the cells that have no record; returns theirs."""
    done = [_key(record) for record in records]
    todo = [c for c in cells(args) if dataclasses.astuple(c) not in done]
    logging.set_verbosity(logging.WARNING)
    compile_cache.enable()
    grid, made, began = Grid(settings, path.parent), [], time.perf_counter()
    for number, cell in enumerate(todo, 1):
        with jax.set_mesh(grid.mesh):
            made.append(record := grid.learn(cell))
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        left = (time.perf_counter() - began) / number * (len(todo) - number)
        print(
            f"[{number}/{len(todo)}] seed {cell.seed} staleness {cell.staleness} "
            f"{cell.objective}: {record['start']:.0%} to {record['success']:.1%}, "
            f"masked {record['masked']:.1%}, {record['seconds']:.0f} s; "
            f"{left / 60:.0f} min left",
            flush=True,
        )
    return made


def _key(record: Mapping[str, Any]) -> tuple[int, int, str]:
    return record["seed"], record["staleness"], record["objective"]


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@jax.jit
def _copied(params: Any) -> Any:
    return jax.tree.map(jnp.copy, params)


if __name__ == "__main__":
    main()
