"""Proves tasks of every world, one at a time, and prints what each task takes.

    python benchmarks/worlds.py [--num_tasks=3] [--swe=FOLDER] [--harbor=FOLDER]

A row of a Markdown table for each world, as soon as it is done: tasks that are proven,
episodes, seconds a task, those of CPU (with a share of the start, without Chromium's,
whose end nobody waits for), and the most memory of the processes that were started and
of the one that proves. Each world is a `validate` of its own with one task at a time,
so that no memory is another task's. --only=NAME,NAME takes some; one that this machine
cannot play has its reason instead of figures. --swe, --swe_chain and --harbor take
folders that `mine` and `export` made.
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import tempfile

NAMES = (
    "terminal",
    "business",
    "frontend",
    "frontend:react",
    "frontend:vue",
    "search:foldoc",
    "code",
    "humaneval",
    "algebra",
    "python:chain_sum:4",
    "bfcl",
    "miniwob",
    "slides",
)
HEAD = """\
| world | proven, of | episodes | seconds: median, most | CPU | MB: processes, own |
|---|---|---|---|---|---|"""


def proven(name: str, num_tasks: int, num_repeats: int) -> str:
    """Returns the row of a world."""
    before = _cpu_seconds()
    command = [sys.executable, "-m", "glm5_jax.environments", "validate", name]
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "proofs.jsonl"  # all tasks are played
        flags = f"--num_tasks={num_tasks}", f"--num_repeats={num_repeats}"
        done = subprocess.run(
            [*command, *flags, "--num_at_once=1", f"--out={out}"],
            capture_output=True,
            text=True,
            check=False,
        )
    sys.stderr.write(done.stderr)
    shown = name.partition(":/")[0]  # a folder of this machine says nothing
    if not done.stdout.startswith("{"):
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return f"| `{shown}` | {reason} | | | | |"
    found = json.loads(done.stdout)
    cpu = (_cpu_seconds() - before) / found["tasks"]
    return (
        f"| `{shown}` | {found['proven']} of {found['tasks']} | {found['episodes']} | "
        f"{found['seconds_a_task_median']:.3g}, {found['seconds_a_task_most']:.3g} | "
        f"{cpu:.3g} | "
        f"{found['megabytes_most']:.0f}, {found['own_megabytes_most']:.0f} |"
    )


def _cpu_seconds() -> float:
    """Returns what ended processes of this one took, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_tasks", type=int, default=3)
    parser.add_argument("--num_repeats", type=int, default=10)
    parser.add_argument("--only", default=",".join(NAMES))
    kinds = ("swe", "swe_chain", "harbor")
    for kind in kinds:
        parser.add_argument(f"--{kind}", metavar="FOLDER", default="")
    given = parser.parse_args()
    folders = [f"{kind}:{path}" for kind in kinds if (path := getattr(given, kind))]
    print(HEAD, flush=True)
    for name in [*filter(None, given.only.split(",")), *folders]:
        print(proven(name, given.num_tasks, given.num_repeats), flush=True)


if __name__ == "__main__":
    main()
