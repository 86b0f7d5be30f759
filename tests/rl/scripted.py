"""An engine with scripted answers, for fast tests of its callers."""

import contextlib
from collections.abc import Callable, Sequence

from glm5_jax import config
from glm5_jax.inference import drafter, engine, requests, service
from glm5_jax.rl import rollouts

VERSION = 3


class ScriptedEngine(engine.Engine):
    """Answers each request with ids that depend only on it, one token a step."""

    dispatch, version, num_waiting, num_free_slots = None, VERSION, 0, 0
    num_free_pages = num_preempted = num_restored = 0

    def __init__(
        self,
        answer: Callable[[requests.Request], Sequence[int]],
        num_slots: int = 4,
        capacity: int = 512,
    ) -> None:
        """Keeps `answer`, which returns a turn's ids before the length limit."""
        self.capacity, self.config = capacity, config.ModelConfig()
        self.drafter = drafter.Drafter(0, False)
        self.max_running = 0  # most requests decoded at once
        self.num_aborted = 0
        self._answer, self._num_slots = answer, num_slots
        self._requests: dict[int, requests.Request] = {}
        self._running: dict[int, requests.Completion] = {}

    @property
    def num_pending(self) -> int:
        return len(self._running)

    def check(self, request: requests.Request) -> None:
        pass

    def submit(self, request: requests.Request) -> requests.Completion:
        assert request.id not in self._running, "an id is given once"
        assert len(request.prompt) + request.max_new_tokens <= self.capacity
        self._requests[request.id] = request
        completion = self._running[request.id] = requests.Completion([], [], None)
        return completion

    def step(self) -> list[tuple[int, requests.Completion]]:
        now = list(self._running.items())[: self._num_slots]
        self.max_running = max(self.max_running, len(now))
        finished = []
        for id, completion in now:
            request = self._requests[id]
            token = self._answer(request)[len(completion.tokens)]
            completion.tokens.append(token)
            completion.logprobs.append(logprob(id, len(completion.tokens)))
            completion.versions.append(VERSION)
            if token in request.stop_ids:
                completion.finish_reason = "stop"
            elif len(completion.tokens) == request.max_new_tokens:
                completion.finish_reason = "length"
            if completion.finish_reason:
                finished.append((id, self._running.pop(id)))
        return finished

    def abort(self, id: int) -> requests.Completion:
        self.num_aborted += 1
        return self._running.pop(id)


def collect(engine, *args, **how):
    """Returns the episodes of `rollouts.collect` with an engine of its own."""
    with contextlib.closing(service.Service(engine)) as served:
        return rollouts.collect(served, *args, **how)


def logprob(id: int, position: int) -> float:
    """Returns a log-prob that no other token has, to tell where a token comes from."""
    return -float(1000 * id + position)
