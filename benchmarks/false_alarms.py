"""Counts what the monitor of asynchronous RL says of rewards that are right.

    python benchmarks/false_alarms.py RUN RUN
    python benchmarks/false_alarms.py --tasksets=gcd,algebra --num_tasks=1000

Of runs it reads the episodes that they have kept, in the order of their steps. Of
tasksets it takes a policy that solves every task, and so gives the same answer as often
as it is right. Canaries are played to the real environments, one of a kind for every
group (rl.canary_every=1). Every alarm is a false one, and is logged. Prints a Markdown
table: the last columns are the most that metrics of that name were.
"""

import argparse
import asyncio
import collections
import json
import pathlib
import unittest.mock
from collections.abc import Iterator, Sequence

from absl import logging

from glm5_jax import environments
from glm5_jax.environments import proofs, protocol
from glm5_jax.rl import episode_files, gateway
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl.actors import failing, monitor

COLUMNS = "same_answer", "wrong_paid", "borrowed_paid"
Group = Sequence[episodes_lib.Episode]


class Pauses(failing.Failing):
    """Counts quarantines, and lets every tag be played on."""

    def __init__(self) -> None:
        """Begins without one."""
        super().__init__()
        self.counts = collections.Counter[str]()

    def pause(self, tag: str) -> bool:
        """Counts one."""
        self.counts[tag] += 1
        return True


def main() -> None:
    """Parses flags and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=pathlib.Path)
    parser.add_argument("--tasksets", default="", help="names, joined by commas")
    parser.add_argument("--num_tasks", type=int, default=1000)
    args = parser.parse_args()
    print("| of | tag | groups | changes | quarantines | " + " | ".join(COLUMNS) + " |")
    print("|" + " --- |" * (5 + len(COLUMNS)))
    for run in args.runs:
        settings = json.loads((run / "config.json").read_text("utf-8"))["rl"]
        taskset = environments.make(settings["environment"])
        asyncio.run(watch(run.name, taskset, kept(run)))
    for name in filter(None, args.tasksets.split(",")):
        taskset = environments.make(name)
        asyncio.run(watch(name, taskset, solved(taskset, args.num_tasks)))


def kept(run: pathlib.Path) -> Iterator[Group]:
    """Yields the groups of a run, those that no step took too."""
    for step in episode_files.numbers(run):
        read = episode_files.read(run, step)
        yield from read.groups
        others = collections.defaultdict(list)
        for episode in read.unused:
            others[episode.group].append(episode)
        yield from others.values()


def solved(taskset: protocol.Taskset, num_tasks: int) -> Iterator[Group]:
    """Yields groups of one episode, which is right; tasks without one are left out."""
    split = protocol.splits(taskset)[0]
    for index in range(num_tasks):
        task = taskset.task(split, 0, index)
        known = proofs.attempts_of(taskset, task)
        if known is not None:
            yield [_episode(task, index, known.right)]


def _episode(
    task: protocol.Task, group: int, turns: proofs.Turns
) -> episodes_lib.Episode:
    return episodes_lib.Episode(
        task=task,
        group=group,
        samples=[gateway.Sample([], [], [], [])],
        reward=protocol.Reward(1.0),
        label=protocol.Label.OK,
        num_turns=len(turns),
        num_forks=0,
        transcript=[*task.messages, *turns],
        reason="",
        num_drift_tokens=0,
        num_truncated=0,
        close_error="",
    )


async def watch(name: str, taskset: protocol.Taskset, groups: Iterator[Group]) -> None:
    """Lets the monitor see groups; prints what it said."""
    context = unittest.mock.Mock(taskset=taskset)
    context.settings.call_timeout = context.settings.episode_timeout = 60.0
    pauses, settings = Pauses(), monitor.Settings(canary_every=1, quarantine="pause")
    made = monitor.Monitor(context, pauses, settings)
    counts, changes = collections.Counter[str](), collections.Counter[str]()
    sums = collections.defaultdict[str, list[float]](list)
    warning = logging.warning

    def warned(text: str, tag: str, *values: object) -> None:
        changes[tag] += "have changed" in text
        warning(text, tag, *values)

    with unittest.mock.patch.object(logging, "warning", warned):
        playing = asyncio.create_task(made.run())
        for group in groups:
            tag = group[0].task.tag
            made.note(group)
            await made.settle()
            counts[tag] += 1
            for key, value in made.figures().items():
                sums[key].append(value)
        playing.cancel()
    for tag in sorted(counts):
        shown = (sums.get(f"monitor/{c}/{tag or 'untagged'}") for c in COLUMNS)
        most = (f"{max(values):.0%}" if values else "-" for values in shown)
        row = [name, tag, counts[tag], changes[tag], pauses.counts[tag], *most]
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()
