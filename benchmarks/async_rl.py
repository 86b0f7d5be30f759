"""Asynchronous against synchronous RL with slow tools, beside the simulator.

    python benchmarks/async_rl.py --init_from=runs/sft --workdir=DIR --steps=60

The calculator's recipe with small batches, at equal numbers of steps, groups and
episodes. A call of its tool takes 0.05 to 2 s (benchmarks/slow_tools.py). First a short
run without waiting gives the machine's speeds and the lengths of turns. From these the
simulator predicts both runs; then they are made. Prints a table: seconds of the steps
after the first 20, which compile, beside the prediction.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys

import slow_tools

from glm5_jax.rl.actors import simulator

ROOT = pathlib.Path(__file__).parent.parent
CALIBRATION = 30  # steps
SKIPPED = 20  # steps: an engine compiles programs for every number of rows
GROUPS, MEMBERS, SLOTS = 4, 8, 32
TOKENS_PER_CHARACTER = 0.5  # of a turn as the log counts it: tool calls are escaped


def train(
    workdir: pathlib.Path, stage: str, tools: str, steps: int, args: argparse.Namespace
) -> list[dict]:
    """Makes a run; returns its lines of metrics without the first ones."""
    engines = args.engines if stage == "async_rl" else 0
    command = [
        *(sys.executable, "-m", "glm5_jax.train"),
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
    path = f"{ROOT}:{ROOT}/benchmarks:{os.environ.get('PYTHONPATH', '')}"
    log = workdir.with_suffix(".turns")
    environ = {**os.environ, "PYTHONPATH": path, slow_tools.LOG: str(log)}
    subprocess.run(command, cwd=ROOT, env=environ, check=True)
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][SKIPPED:]


def predict(
    records: list[dict], log: pathlib.Path, max_staleness: int, steps: int
) -> simulator.Prediction:
    """Returns what the simulator says of a run with slow tools.

    Args:
      records: metrics of the run without waiting.
      log: its turns.
      max_staleness: of the run to predict; 0 is the synchronous one.
      steps: of it.
    """
    played = [json.loads(line) for line in log.read_text().splitlines()]
    train_seconds = statistics.median(
        r["perf/step_seconds"] - r["perf/rollout_seconds"] for r in records
    )
    rollout = statistics.median(r["perf/rollout_seconds"] for r in records)
    rng = random.Random(os.environ[slow_tools.SEED])
    chosen: dict[tuple[int, int], list] = {}

    def turns(group: int, number: int) -> list:
        return chosen.setdefault((group, number), rng.choice(played))

    def run(
        pace: float, is_slow: bool, staleness: int, count: int
    ) -> simulator.Prediction:
        def episode(group: int, number: int) -> list[simulator.Turn]:
            return [
                simulator.Turn(
                    max(round(size * TOKENS_PER_CHARACTER), 1),
                    slow_tools.seconds_of(f"{group}/{number}/{i}") if is_slow else 0.0,
                )
                for i, (size, _) in enumerate(turns(group, number))
            ]

        speeds = simulator.Speeds(
            num_engines=1,
            slots=SLOTS,
            step_seconds=lambda n: pace * (16 + n),
            train_seconds=lambda tokens: train_seconds,
            publish_seconds=0.0,
        )
        settings = simulator.Settings(
            batch_size=GROUPS,
            group_size=MEMBERS,
            max_staleness=staleness,
            num_concurrent=2 * SLOTS,
            num_steps=count,
        )
        return simulator.predict(episode, speeds, settings)

    # The pace with which the rollouts without waiting take as long as they did.
    pace = 1e-4
    for _ in range(8):
        found = run(pace, False, 0, CALIBRATION).seconds / CALIBRATION - train_seconds
        pace *= rollout / found
    return run(pace, True, max_staleness, steps)


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
    fast = workdir / "fast"
    records = train(fast, "rl", "Fast", CALIBRATION, args)
    counted = args.steps - SKIPPED
    rows = {}
    for stage, staleness in (("rl", 0), ("async_rl", args.max_staleness)):
        said = predict(records, fast.with_suffix(".turns"), staleness, counted)
        found = train(workdir / stage, stage, "Slow", args.steps, args)
        rows[stage] = said, found
    print("\n| stage | seconds | predicted | error | staleness | trainer idle |")
    print("|---|---|---|---|---|---|")
    for stage, (said, found) in rows.items():
        seconds = sum(r["perf/step_seconds"] for r in found)
        oldest = max(r["rollout/staleness_max"] for r in found)
        idle = sum(r["perf/rollout_seconds"] for r in found) / seconds
        print(
            f"| {stage} | {seconds:.1f} | {said.seconds:.1f} | "
            f"{said.seconds / seconds - 1:+.0%} | {oldest} | "
            f"{idle:.0%} ({said.train_idle:.0%} predicted) |"
        )
    totals = [sum(r["perf/step_seconds"] for r in found) for _, found in rows.values()]
    print(f"\n{totals[0] / totals[1]:.2f} times as fast, on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
