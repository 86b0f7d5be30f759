"""Asynchronous against synchronous RL with slow tools, beside the simulator.

    python benchmarks/async_rl.py --init_from=runs/sft --workdir=DIR --steps=60

The calculator's recipe with small batches, at equal numbers of steps, groups and
episodes. A call of its tool takes 0.05 to 2 s (benchmarks/slow_tools.py). First come a
short run of each stage whose calls all take 0.5 s, and async_speeds.py. They give the
machine's speeds, the lengths of turns, and how an engine and a trainer of one process
slow each other. From these, and from the seconds that the tools will take, the
simulator predicts both runs; then they are made. Prints a table: seconds of the steps
after the first 20 beside the prediction. Engines compile all their programs before
they draw (warmed_train.py).
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys

import slow_tools

from glm5_jax.rl.actors import simulator

ROOT = pathlib.Path(__file__).parent.parent
CALIBRATION = 40  # steps
ENGINE_IDLE = "actors/engines_idle_seconds"  # of stage async_rl alone
SKIPPED = 20  # steps, in which a run fills up
GROUPS, MEMBERS, SLOTS = 4, 8, 32


def train(
    workdir: pathlib.Path, stage: str, tools: str, steps: int, args: argparse.Namespace
) -> list[dict]:
    """Makes a run; returns its lines of metrics without the first ones."""
    engines = args.engines if stage == "async_rl" else 0
    command = [
        *(sys.executable, f"{ROOT}/benchmarks/warmed_train.py"),
        f"--config={ROOT}/configs/small_async_calculator.py",
        f"--workdir={workdir}",
        f"--config.stage={stage}",
        f"--config.init_from={args.init_from}",
        f"--config.seed={args.seed}",
        f"--config.num_steps={steps}",
        *("--config.eval_every=0", "--config.checkpoint_every=0"),
        *("--config.rl.num_eval_tasks=8", "--config.sample_tokens=0"),
        "--config.optim.warmup_steps=0",
        *("--config.rl.min_start_success=0", "--config.rl.max_start_success=1"),
        *("--config.rl.dynamic_sampling=False", "--config.rl.min_used_groups=0"),
        f"--config.rl.environment=slow_tools:{tools}",
        f"--config.rl.prompts_per_step={GROUPS}",
        f"--config.rl.group_size={MEMBERS}",
        f"--config.rl.slots={SLOTS}",
        f"--config.rl.max_staleness={args.max_staleness}",
        f"--config.rl.num_engines={engines}",
    ]
    environ = {**os.environ, "PYTHONPATH": search_path()}
    subprocess.run(command, cwd=ROOT, env=environ, check=True)
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][SKIPPED:]


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured before the runs that are predicted."""

    seed: int  # of the runs
    turns: list[list[int]]  # tokens that were drawn in each turn of some episodes
    rollout_seconds: float  # with steady tools
    rested_seconds: float  # of a step after a pause in which nothing worked
    step_seconds: float  # of one without
    handed_seconds: float  # beside the engine: weights handed over, groups taken
    max_staleness: int  # of the asynchronous run with steady tools
    engine_idle: float  # share of its time
    contention: simulator.Contention

    @property
    def trainer_seconds(self) -> float:
        """Returns those of an asynchronous step, alone on the machine."""
        return self.step_seconds + self.handed_seconds / self.contention.step


def measure(workdir: pathlib.Path, args: argparse.Namespace) -> Measured:
    """Makes two runs with steady tools, and times engine and trainer by themselves."""
    steady, out = workdir / "steady", workdir / "speeds.json"
    records = train(steady, "rl", "Steady", CALIBRATION, args)
    rollouts = [r["perf/rollout_seconds"] for r in records]
    rested = [r["perf/step_seconds"] - r["perf/rollout_seconds"] for r in records]
    beside = train(workdir / "async_steady", "async_rl", "Steady", CALIBRATION, args)
    command = [sys.executable, "async_speeds.py", f"--run={steady}", f"--out={out}"]
    environ = {**os.environ, "PYTHONPATH": search_path()}
    subprocess.run(command, cwd=ROOT / "benchmarks", env=environ, check=True)
    speeds = json.loads(out.read_text())
    return Measured(
        seed=args.seed,
        turns=speeds["turns"],
        rollout_seconds=statistics.median(rollouts),
        rested_seconds=statistics.median(rested),
        step_seconds=speeds["step_seconds"],
        handed_seconds=statistics.mean(map(handed_seconds, beside)),
        max_staleness=args.max_staleness,
        engine_idle=_sum(beside, ENGINE_IDLE) / _sum(beside, "perf/step_seconds"),
        contention=simulator.Contention(step=speeds["step"], draw=speeds["draw"]),
    )


def predict(
    measured: Measured, max_staleness: int, num_steps: int
) -> simulator.Prediction:
    """Returns what the simulator says of a run, with the seconds that its tools take.

    Args:
      measured: before the run.
      max_staleness: of the run; 0 is the synchronous one, whose machine rests while
        the tools work.
      num_steps: of it; the first ones are simulated, but not counted.
    """
    train_seconds, pace = measured.rested_seconds, _pace(measured)
    if max_staleness:
        train_seconds, pace = measured.trainer_seconds, _pace_beside(measured, pace)
    most = num_steps - SKIPPED
    return _run(measured, pace, train_seconds, max_staleness, most, False)


def _pace(measured: Measured) -> float:
    """Returns the pace with which rollouts with steady tools take as long as they did.

    They wait for the tools, whatever the pace.
    """
    train_seconds = measured.rested_seconds

    def rollout(pace: float) -> float:
        counted = CALIBRATION - SKIPPED
        found = _run(measured, pace, train_seconds, 0, counted, True)
        return found.seconds / counted - train_seconds

    pace, waited = 1e-4, rollout(1e-12)
    for _ in range(8):
        pace *= (measured.rollout_seconds - waited) / (rollout(pace) - waited)
    return pace


def _pace_beside(measured: Measured, pace: float) -> float:
    """Returns the pace with which an engine of an asynchronous run idles as it did.

    Its turns begin one by one, while episodes are written and steps run.

    Args:
      measured: with the asynchronous run with steady tools.
      pace: of the synchronous one; the result is not below it.
    """
    low, high = pace, 8 * pace
    for _ in range(20):
        middle = math.sqrt(low * high)
        found = _run(
            measured,
            middle,
            measured.trainer_seconds,
            measured.max_staleness,
            CALIBRATION - SKIPPED,
            True,
        )
        is_slower = found.engine_idle < measured.engine_idle
        low, high = (low, middle) if is_slower else (middle, high)
    return low


def _run(
    measured: Measured,
    pace: float,
    train_seconds: float,
    max_staleness: int,
    num_steps: int,
    is_steady: bool,
) -> simulator.Prediction:
    """Simulates a run of steps that count, after the skipped ones."""
    tasks = slow_tools.Slow()

    def wait(group: int, number: int, turn: int) -> float:
        if is_steady:
            return slow_tools.STEADY
        id = tasks.task("train", measured.seed, group).id
        return slow_tools.seconds_of(id, number, turn)

    def episode(group: int, number: int) -> list[simulator.Turn]:
        turns = measured.turns[(group * MEMBERS + number) % len(measured.turns)]
        return [
            simulator.Turn(tokens, wait(group, number, turn))
            for turn, tokens in enumerate(turns)
        ]

    speeds = simulator.Speeds(
        num_engines=1,
        slots=SLOTS,
        step_seconds=lambda n: pace * (16 + n),
        train_seconds=lambda tokens: train_seconds,
        publish_seconds=0.0,
        contention=measured.contention,
    )
    settings = simulator.Settings(
        batch_size=GROUPS,
        group_size=MEMBERS,
        max_staleness=max_staleness,
        num_concurrent=2 * SLOTS,
        num_steps=num_steps,
        num_skipped=SKIPPED,
    )
    return simulator.predict(episode, speeds, settings)


def handed_seconds(record: dict) -> float:
    """Returns those of a step that are neither its update nor waiting for groups."""
    return record["perf/rollout_seconds"] - record["actors/trainer_waited_seconds"]


def _sum(records: list[dict], name: str) -> float:
    return sum(record[name] for record in records)


def search_path() -> str:
    """Returns the PYTHONPATH of the programs that this one starts."""
    return f"{ROOT}:{ROOT}/benchmarks:{os.environ.get('PYTHONPATH', '')}"


def main() -> None:
    """Parses flags, makes the runs and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--init_from", type=pathlib.Path, required=True)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--max_staleness", type=int, default=4)
    parser.add_argument("--engines", type=int, default=0, help="servers; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="of runs and of waiting")
    args = parser.parse_args()
    os.environ[slow_tools.SEED] = str(args.seed)
    args.init_from, workdir = args.init_from.resolve(), args.workdir.resolve()
    workdir.mkdir(parents=True)
    measured = measure(workdir, args)
    print(f"Measured before: {dataclasses.replace(measured, turns=[])}")
    stages = {"rl": 0, "async_rl": args.max_staleness}
    predicted = {
        stage: predict(measured, stages[stage], args.steps) for stage in stages
    }
    for stage, said in predicted.items():
        print(f"Predicted for {stage}: {said}", flush=True)
    rows = {
        stage: (said, train(workdir / stage, stage, "Slow", args.steps, args))
        for stage, said in predicted.items()
    }
    print(
        "\n| stage | seconds | predicted | error | staleness | idle: trainer | engine |"
    )
    print("|---|---|---|---|---|---|---|")
    for stage, (said, found) in rows.items():
        seconds = _sum(found, "perf/step_seconds")
        oldest = max(r["rollout/staleness_max"] for r in found)
        idle = _sum(found, "perf/rollout_seconds") / seconds
        engine = "unknown"  # in stage rl
        if ENGINE_IDLE in found[0]:
            engine = f"{_sum(found, ENGINE_IDLE) / seconds:.0%}"
        print(
            f"| {stage} | {seconds:.1f} | {said.seconds:.1f} | "
            f"{said.seconds / seconds - 1:+.0%} | {oldest} | "
            f"{idle:.0%} ({said.train_idle:.0%} predicted) | "
            f"{engine} ({said.engine_idle:.0%} predicted) |"
        )
    totals = [_sum(found, "perf/step_seconds") for _, found in rows.values()]
    print(f"\n{totals[0] / totals[1]:.2f} times as fast, on {os.cpu_count()} cores")
    pushes = [*map(handed_seconds, rows["async_rl"][1])]
    print(f"{sum(pushes):.1f} s until engines had weights, {max(pushes):.1f} s at most")


if __name__ == "__main__":
    main()
