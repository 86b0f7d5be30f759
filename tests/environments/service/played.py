"""A service of environments in a thread, at a real socket, and requests to it."""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import pathlib
import threading
import time

from glm5_jax.environments import protocol
from glm5_jax.environments.service import command, live
from glm5_jax.http_server import listening
from tests import quick_servers  # noqa: F401  they end at once

SECRET = "pelican-4711"  # of every task: its answer, and what its crashes say


class Talk:
    """Tasks whose environments do what the model says."""

    name = "talk"

    def __init__(self):
        self.num_open = 0

    def task(self, split, seed, index):
        said = ({"role": "user", "content": f"{split} {seed} {index}"},)
        tool = {"type": "function", "function": {"name": "t", "parameters": {}}}
        key = f"{split}/{seed}/{index}"
        return protocol.Task(key, said, SECRET, (tool,), tag="t", pays_when_cut=True)

    def environment(self):
        return _Talk(self)

    def demonstration(self, task):
        return [*task.messages, {"role": "assistant", "content": SECRET}]


class Twice(Talk):
    """Every task comes twice, under two names."""

    def task(self, split, seed, index):
        made = super().task(split, seed, index)
        said = super().task(split, seed, index // 2).messages
        return dataclasses.replace(made, messages=said)


class Unsolved(Talk):
    """Nobody knows what solves its tasks."""

    def demonstration(self, task):
        return None


class _Talk:
    def __init__(self, taskset):
        self.taskset = taskset

    async def reset(self, task):
        self.taskset.num_open += 1
        self.task = task
        return task.messages

    async def step(self, message):
        word = message["content"]
        if word == "slow":
            await asyncio.sleep(60)
        if word == "crash":
            raise KeyError(self.task.answer)
        if word == "no reward":
            raise protocol.RewardError(self.task.answer)
        if word == "nan":
            return _last(float("nan"))
        if word == self.task.answer:
            return _last(1.0)
        if word == "end":
            return _last(0.0)
        new = ({"role": "tool", "content": f"not {word}"},)
        info = {"answer": self.task.answer}
        return protocol.StepResult(new, None, False, False, info)

    async def close(self):
        self.taskset.num_open -= 1


def _last(total):
    reward = protocol.Reward(total, {"correct": total, "brevity": 0.5})
    return protocol.StepResult((), reward, True, False, {"answer": SECRET})


class Server:
    """A service in a thread; its attributes are the service, its URL and its port."""

    def __init__(self, taskset, port=0, **settings):
        limits = {
            name: settings.pop(name)
            for name in ("max_episodes", "call_seconds", "idle_seconds")
            if name in settings
        }
        settings = command.Settings(
            limits=live.Limits(**limits), **{"drain_seconds": 5.0, **settings}
        )
        self.service = command.Service(taskset, settings)
        self._listener = listening.bind("127.0.0.1", port)
        self._listener.listen()  # a request may come before the thread is ready
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        with contextlib.closing(self._listener):
            asyncio.run(self.service.run(self._listener))

    @property
    def episodes(self):
        return self.service.episodes

    def stop(self):
        """Ends the service; episodes that were left are an error of a test."""
        self.service.episodes.drain()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def ask(self, method, path, body=None, headers=None):
        """Returns status and JSON of an answer."""
        return ask(self.port, method, path, body, headers)

    def shorten_idleness(self, path, seconds):
        """Ends an episode so long after this request, the last one for it."""
        limits = self.episodes._limits
        self.episodes._limits = dataclasses.replace(limits, idle_seconds=seconds)
        return self.ask("GET", path)

    def begin(self, index=0):
        """Begins an episode; returns its path."""
        place = {"split": "train", "seed": 0, "index": index}
        status, told = self.ask("POST", "/v1/episodes", place)
        assert status == 201, told
        return f"/v1/episodes/{told['episode']}"

    def say(self, path, word):
        """Makes a step with a text."""
        message = {"role": "assistant", "content": word}
        return self.ask("POST", f"{path}/step", {"message": message})


def ask(port, method, path, body=None, headers=None):
    """Returns status and JSON of an answer; a body may be bytes."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(link):
        data = body if isinstance(body, bytes) or body is None else json.dumps(body)
        link.request(
            method, path, data, {"Content-Type": "application/json", **(headers or {})}
        )
        found = link.getresponse()
        text = found.read()
    is_json = "json" in (found.getheader("Content-Type") or "")
    return found.status, json.loads(text) if is_json else text.decode()


def children():
    """Returns the processes that this one's threads have started."""
    found = set()
    for path in pathlib.Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= {int(word) for word in path.read_text().split()}
    return found


def until(holds, seconds=20.0):
    """Waits for a condition."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)
