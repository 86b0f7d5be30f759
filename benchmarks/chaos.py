"""A run of asynchronous RL under faults beside the same run without them.

    python -m glm5_jax.train --config=configs/small_sft_reverse.py --workdir=runs/sft
    python benchmarks/chaos.py --init_from=runs/sft --workdir=runs/chaos

Both play configs/small_async_reverse.py with two servers. In one of them
- after a tenth of the steps one of the two servers is killed, if both are there,
- 5% of the episodes crash, and 1% are paid nonsense (benchmarks/chaos_world.py),
- the trainer is killed three times, and the same command resumes.

Prints a table, and exits with 1 if the success under faults is outside the other's 95%
interval, a group was lost or learnt from twice, or a process was left behind. Typed
again, the command goes on where it was; --report_only reads what is there.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

from glm5_jax.rl import episode_files, episodes
from glm5_jax.training.reporting import metrics

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = f"{ROOT}/configs/small_async_reverse.py"
SERVER = "--num_replicas=0"  # in the command of a server
KILLED_STEPS = 0.1  # share of the steps after which a server is killed
NUM_TRAINER_KILLS = 3
POLL_SECONDS = 0.2
END_SECONDS = 30.0  # for the children of a trainer that was killed


def main() -> int:
    """Makes the runs that are missing, and compares them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--init_from", required=True, help="the SFT that both start at")
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--report_only", action="store_true")
    args = parser.parse_args()
    workdir = args.workdir.resolve()
    calm, chaos = workdir / "calm", workdir / "chaos"
    workdir.mkdir(parents=True, exist_ok=True)
    if not args.report_only:
        if not (calm / "summary.json").exists():
            subprocess.run(command(args, calm), cwd=ROOT, check=True)
        if not (chaos / "summary.json").exists():
            disturb(args, chaos)
    faults = report(calm, chaos)
    for fault in faults:
        print(f"FAULT: {fault}")
    return int(bool(faults))


def command(args: argparse.Namespace, workdir: pathlib.Path) -> list[str]:
    """Returns the command of a run; in the folder `chaos` its world has faults."""
    world = ["--config.rl.environment=chaos_world:Chaos"]
    return [
        *(sys.executable, "-m", "glm5_jax.train", f"--config={CONFIG}"),
        *(f"--workdir={workdir}", f"--config.init_from={args.init_from}"),
        *(f"--config.seed={args.seed}", f"--config.num_steps={args.steps}"),
        *("--config.checkpoint_every=25", "--config.rl.num_engines=2"),
        *(world if workdir.name == "chaos" else []),
    ]


def disturb(args: argparse.Namespace, workdir: pathlib.Path) -> None:
    """Makes the run under faults; starts it again after each kill of the trainer."""
    rng = random.Random(args.seed)
    steps = range(1, args.steps)
    of_servers = set(rng.sample(steps, round(KILLED_STEPS * args.steps)))
    of_trainer = sorted(rng.sample(steps, NUM_TRAINER_KILLS))
    log = workdir.with_name("faults.jsonl")
    seen = [json.loads(line) for line in _lines(log)]
    done = {(fault["kind"], fault["step"]) for fault in seen}
    of_servers -= {step for kind, step in done if kind != "trainer"}
    of_trainer = [step for step in of_trainer if ("trainer", step) not in done]
    path = f"{ROOT}:{ROOT}/benchmarks:{os.environ.get('PYTHONPATH', '')}"
    world_log = str(workdir.with_name("world.log"))
    environ = {**os.environ, "PYTHONPATH": path, "CHAOS_LOG": world_log}
    while True:
        run = subprocess.Popen(command(args, workdir), cwd=ROOT, env=environ)
        while run.poll() is None:
            step = last_step(workdir)
            if of_trainer and step >= of_trainer[0]:
                children = children_of(run.pid)
                run.kill()
                run.wait()
                left = wait_for_end(children)
                _log(log, kind="trainer", step=of_trainer.pop(0), at=step, left=left)
                break
            for due in [due for due in of_servers if due <= step]:
                of_servers.remove(due)
                servers = children_of(run.pid, SERVER)
                if len(servers) == 2:
                    os.kill(rng.choice(servers), signal.SIGKILL)
                kind = "server" if len(servers) == 2 else "skipped"
                _log(log, kind=kind, step=due, at=step)
            time.sleep(POLL_SECONDS)
        else:
            if run.returncode:
                sys.exit(f"{workdir} ended with {run.returncode}; see above.")
            return


def report(calm: pathlib.Path, chaos: pathlib.Path) -> list[str]:
    """Prints the table, and returns what should not be."""
    faults = []
    records = {
        folder: metrics.read(folder / "metrics.jsonl") for folder in (calm, chaos)
    }
    ends = {folder: _summary(folder) for folder in records}
    low, high = (ends[calm][f"eval/success_{side}"] for side in ("low", "high"))
    if not low <= ends[chaos]["eval/success"] <= high:
        faults.append(f"success under faults is outside {low:.1%} to {high:.1%}")
    seen = [json.loads(line) for line in _lines(chaos.with_name("faults.jsonl"))]
    faults += [
        f"process {pid} outlived its trainer" for f in seen for pid in f.get("left", ())
    ]
    for folder, run in records.items():
        faults += [f"{folder.name}: {fault}" for fault in lost_groups(folder, run)]
    kinds = collections.Counter(fault["kind"] for fault in seen)
    world = collections.Counter(_lines(chaos.with_name("world.log")))
    print("| | success | 95% interval | seconds | staleness | restarted | invalid |")
    print("|---|---|---|---|---|---|---|")
    for folder, run in records.items():
        end, last = ends[folder], run[-1]
        cells = (
            folder.name,
            f"{end['eval/success']:.1%}",
            f"{end['eval/success_low']:.1%} to {end['eval/success_high']:.1%}",
            f"{sum(r['perf/step_seconds'] for r in run):.0f}",
            f"{max(r['rollout/staleness_max'] for r in run):.0f}",
            f"{last.get('groups/restarted', 0):.0f}",
            f"{last.get('groups/dropped_invalid', 0):.0f}",
        )
        print("| " + " | ".join(cells) + " |")
    print(f"killed: {dict(kinds)}; episodes: {dict(world)}")
    return faults


def lost_groups(folder: pathlib.Path, run: list[dict]) -> list[str]:
    """Returns how a run's groups fail to be each taken by one step or dropped once."""
    faults = []
    for record in run:
        ledger = {k: v for k, v in record.items() if k.startswith("groups/")}
        if ledger.pop("groups/begun") != sum(ledger.values()):
            faults.append(f"the ledger of step {record['step']} does not close")
    taken: collections.Counter[int] = collections.Counter()
    for number in episode_files.numbers(folder):
        step = episode_files.read(folder, number)
        taken.update({_index(group[0]) for group in step.groups})
    faults += [f"group {i} was learnt from twice" for i, n in taken.items() if n > 1]
    last = {k.removeprefix("groups/"): v for k, v in run[-1].items()}
    learnt = last["done"] + last["in_flight"]
    if len(taken) != learnt:
        faults.append(f"{len(taken)} groups were learnt from, the ledger has {learnt}")
    # Indices are given in order; a group that begins again keeps its own.
    given = last["begun"] - last.get("restarted", 0)
    dropped = sum(v for k, v in last.items() if k.startswith("dropped_"))
    found = len(taken) + dropped + last["running"] + last["ready"]
    if found != given:
        faults.append(f"{given} groups were given an index, {found} are known")
    return faults


def children_of(pid: int, word: str = "") -> list[int]:
    """Returns the processes below another one whose command has a word."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except (OSError, ValueError):
            continue
        if parent == pid:
            found += [int(entry.name)] if not word or word in words else []
            found += children_of(int(entry.name), word)
    return found


def wait_for_end(pids: list[int]) -> list[int]:
    """Returns the processes that are still there after END_SECONDS."""
    end = time.monotonic() + END_SECONDS
    while time.monotonic() < end:
        pids = [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]
        if not pids:
            break
        time.sleep(POLL_SECONDS)
    return pids


def last_step(workdir: pathlib.Path) -> int:
    """Returns the last step in a run's metrics; 0 before the first."""
    path = workdir / "metrics.jsonl"
    records = metrics.read(path) if path.exists() else []
    return records[-1]["step"] if records else 0


def _index(episode: episodes.Episode) -> int:
    return int(episode.task.id.rpartition("/")[2])


def _summary(folder: pathlib.Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _log(path: pathlib.Path, **fault: object) -> None:
    print(f"chaos: {fault}", flush=True)
    with path.open("a") as file:
        file.write(json.dumps(fault) + "\n")


if __name__ == "__main__":
    sys.exit(main())
