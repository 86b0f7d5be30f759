"""Plays a thousand episodes at once in real shells, with a scripted model over HTTP.

    python benchmarks/episodes_at_once.py [--at_once=1000] [--steps=6] [--seconds=1.0]

The model is a server of its own process: it answers vLLM's /inference/v1/generate with
the turns of a task's solution, or of a wrong attempt, after a time that is lognormal
with the given mean. The orchestrator, its queue and the client are those of training;
the trainer is a loop that takes a step's groups and tells the server a version, which
the tokens then name. Prints the
ledger, which must close after every step, the shares of the tasks, and what is left.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time

import aiohttp
from aiohttp import web

from glm5_jax import environments
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.environments import proofs, tool_calls
from glm5_jax.rl import episodes
from glm5_jax.rl.actors import groups as groups_lib
from glm5_jax.rl.actors import journal, orchestrator, remote
from glm5_jax.rl.actors import lag as lag_lib

TASKS = "2*terminal:column_sums+terminal:git_merge+terminal:json_filter"
SHARES = {"column_sums": 0.5, "git_merge": 0.25, "json_filter": 0.25}
GROUP_SIZE, GROUPS_A_STEP, MAX_STALENESS = 8, 64, 2
MAX_TURNS = 8
PORT = 8917
URL = f"http://127.0.0.1:{PORT}"
VERSION = "/version"  # takes the number of the weights from now on
CAPACITY = 65_536  # tokens, which are bytes


def template() -> templates.Template:
    """Returns the chat template."""
    return templates.Template(tokenizer_lib.named("byte_chat"), "glm5", False, False)


class Script:
    """The turns of every episode, by the number that its requests carry as a seed."""

    def __init__(self, seconds: float) -> None:
        """Answers after `seconds` on average."""
        self._taskset, self._template = environments.make(TASKS), template()
        self._seconds, self._rng, self._version = seconds, random.Random(0), 0

    async def publish(self, request: web.Request) -> web.Response:
        """Takes the version of tokens from now on."""
        self._version = int(await request.text())
        return web.Response()

    async def answer(self, request: web.Request) -> web.Response:
        """Returns a turn of an episode in the form of vLLM."""
        body = await request.json()
        episode, turn = divmod(body["sampling_params"]["seed"], MAX_TURNS)
        task = self._taskset.task("train", 0, episode // GROUP_SIZE)
        attempts = proofs.attempts_of(self._taskset, task)
        assert attempts is not None
        chosen = (attempts.right, *attempts.wrong)[episode % (1 + len(attempts.wrong))]
        turns = [tool_calls.turn("shell", command="ls -l"), *chosen]
        said = {"role": "user", "content": ""}
        shown = self._template.render([said, turns[turn]], end=True)
        tokens = [t for t, m in zip(shown.tokens, shown.mask, strict=True) if m]
        spread = 0.8
        mean = math.log(self._seconds) - spread**2 / 2
        version = self._version
        await asyncio.sleep(self._rng.lognormvariate(mean, spread))
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": [{"logprob": -0.1}] * len(tokens)},
            "finish_reason": "stop",
            "weight_versions": [version] * len(tokens),
            "cache_versions": [version] * len(tokens),
        }
        return web.json_response({"choices": [choice]})


def serve(seconds: float) -> None:
    """Runs the server."""
    app, script = web.Application(client_max_size=2**26), Script(seconds)
    app.router.add_post(remote.GENERATE, script.answer)
    app.router.add_post(VERSION, script.publish)
    web.run_app(app, host="127.0.0.1", port=PORT, print=None)


async def learn(
    played: orchestrator.Orchestrator, session: aiohttp.ClientSession, num_steps: int
) -> list[dict]:
    """Takes the groups of steps; returns the ledger after each."""
    ledgers = []
    for step in range(num_steps):
        await played.take(120.0)
        async with session.post(URL + VERSION, data=str(step + 1)) as response:
            response.raise_for_status()
        played.published(step + 1)
        played.groups.commit(step + 1)
        ledger = played.groups.ledger()
        parts = [v for k, v in ledger.items() if k != "begun"]
        assert ledger["begun"] == sum(parts), ledger
        ledgers.append(ledger)
    return ledgers


@dataclasses.dataclass
class Most:
    """The most of everything, and all processes that were seen."""

    episodes: int = 0
    processes: int = 0
    boxes_mib: int = 0
    files_mib: int = 0  # of what is under way
    seen: set[tuple[int, str]] = dataclasses.field(default_factory=set)


def size_of(folder: pathlib.Path) -> int:
    """Returns the bytes of the files in a folder, which others may delete meanwhile."""
    size = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def descendants() -> set[tuple[int, str]]:
    """Returns the processes that this one started, by id and time of birth."""
    parents, births = {}, {}
    for pid in alive():
        try:
            stat = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        except OSError:
            continue
        fields = stat.split()
        parents[pid], births[pid] = int(fields[1]), fields[19]
    found: set[int] = {os.getpid()}
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return {(pid, births[pid]) for pid in found - {os.getpid()} if pid in births}


def alive() -> list[int]:
    """Returns the ids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def memory(pids: list[int]) -> int:
    """Returns the bytes that processes take, each share of common pages once."""
    size = 0
    for pid in pids:
        try:
            lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        size += sum(1024 * int(x.split()[1]) for x in lines if x.startswith("Pss:"))
    return size


def left(most: Most, folder: str) -> dict[str, int]:
    """Counts processes that were seen and live, folders of boxes, and their mounts."""
    births = set()
    for pid, birth in most.seen:
        try:
            stat = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
            births |= {(pid, birth)} if stat.split()[19] == birth else set()
        except OSError:
            pass
    mounts = pathlib.Path("/proc/mounts").read_text().count(folder)
    return {
        "processes": len(births),
        "folders": len(os.listdir(folder)),
        "mounts": mounts,
    }


async def watch(
    made: orchestrator.Orchestrator, most: Most, folder: pathlib.Path
) -> None:
    """Keeps the most episodes, bytes of files, and processes that come from here."""
    while True:
        await asyncio.sleep(2.0)
        most.episodes = max(most.episodes, made.places.num_under_way)
        most.files_mib = max(most.files_mib, size_of(folder) // 2**20)
        found = await asyncio.to_thread(descendants)
        most.seen |= found
        size = await asyncio.to_thread(memory, [pid for pid, _ in found])
        most.processes = max(most.processes, len(found))
        most.boxes_mib = max(most.boxes_mib, size // 2**20)


async def play(at_once: int, num_steps: int, seconds: float, most: Most) -> dict:
    """Returns the figures of a run."""
    taskset = environments.make(TASKS)
    settings = episodes.Settings(
        max_new_tokens=4096, max_turns=MAX_TURNS, num_concurrent=at_once
    )
    found: collections.Counter[str] = collections.Counter()

    def jobs(index: int) -> list[episodes.Job]:
        task = taskset.task("train", 0, index)
        found[task.id.split("/")[1]] += GROUP_SIZE
        first = index * GROUP_SIZE
        return [
            episodes.Job(task, index, MAX_TURNS * number)
            for number in range(first, first + GROUP_SIZE)
        ]

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        late = max(120.0, 12 * seconds)  # no answer takes so long
        engine = remote.Remote(session, URL, CAPACITY, seconds=late)
        context = episodes.Context(engine, taskset, template(), settings)
        groups = groups_lib.Groups(GROUPS_A_STEP, MAX_STALENESS)
        kept, lag = pathlib.Path(tempfile.mkdtemp(dir="/var/tmp")), lag_lib.Lag()
        made = orchestrator.Orchestrator(
            context, jobs, groups, drop_equal=False, journal=journal.Journal(kept)
        )
        running = asyncio.create_task(made.run())
        watching = asyncio.create_task(watch(made, most, kept))
        measuring = asyncio.create_task(lag.measure())
        began = time.perf_counter()
        ledgers = await learn(made, session, num_steps)
        seconds = time.perf_counter() - began
        episodes_played = made.played().episodes
        tasks = {running, watching, measuring}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        shutil.rmtree(kept)
    labels = collections.Counter(episode.label.name for episode in episodes_played)
    paid = sum(e.reward.total == 1.0 for e in episodes_played if e.reward)
    total = sum(found.values())
    shares = {name: round(count / total, 4) for name, count in found.items()}
    assert all(abs(shares[n] / share - 1) < 0.05 for n, share in SHARES.items()), shares
    return {
        "episodes": len(episodes_played),
        "labels": dict(labels),
        "paid": paid,
        "most_at_once": most.episodes,
        "seconds": round(seconds, 1),
        "episodes_a_second": round(len(episodes_played) / seconds, 1),
        "boxes_mib": most.boxes_mib,
        "processes": most.processes,
        "files_mib": most.files_mib,
        "lag_seconds": round(lag.longest, 3),
        "own_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "shares": shares,
        "ledger": ledgers[-1],
    }


def main() -> None:
    """Starts the server, plays, and prints the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--at_once", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--serve", action="store_true")
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(arguments.seconds)
    script = [sys.executable, __file__, "--serve"]
    server = subprocess.Popen([*script, f"--seconds={arguments.seconds}"])
    most = Most()
    folder = tempfile.tempdir = tempfile.mkdtemp()
    os.chmod(folder, 0o755)  # boxes may be another user's
    try:
        time.sleep(3.0)
        settings = arguments.at_once, arguments.steps, arguments.seconds
        figures = asyncio.run(play(*settings, most))
    finally:
        server.terminate()
        server.wait()
    figures["left"] = left(most, folder)
    print(json.dumps(figures, indent=2))
    return None


if __name__ == "__main__":
    main()
