"""Compares ways to choose a replica, by a simulation of agents' conversations.

    python benchmarks/routing_sessions.py

Agents hold conversations of many turns: a turn's prompt is all that was said before and
something new. A replica reads what is not in its cache, which holds a number of tokens
and forgets the conversation that was idle for longest. Requests are answered side by
side; a request takes as long as what it reads and draws. Half of the way a replica
joins. Nothing is timed: the same seed gives the same table on any machine.
"""

import argparse
import collections
import dataclasses
import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping

from glm5_jax.serving.router import balance

READ_RATE, DRAW_RATE = 4000.0, 40.0  # tokens a second of one request
Choose = Callable[[str, Mapping[str, int]], str]


class Cache:
    """Tokens of conversations at one replica."""

    def __init__(self, room: int) -> None:
        """Begins empty."""
        self._room, self._used = room, 0
        self._held: collections.OrderedDict[str, int] = collections.OrderedDict()

    def read(self, session: str, prompt: int, whole: int) -> int:
        """Returns the tokens of a prompt that are read; holds the whole afterwards."""
        held = self._held.pop(session, 0)
        self._held[session] = whole
        self._used += whole - held
        while self._used > self._room and len(self._held) > 1:
            _, dropped = self._held.popitem(last=False)
            self._used -= dropped
        return prompt - held


@dataclasses.dataclass
class Session:
    """A conversation."""

    name: str
    num_tokens: int  # that were said
    turns_left: int


@dataclasses.dataclass(frozen=True)
class Result:
    """What a way to choose costs.

    Attributes:
      read: tokens read, as a multiple of the new ones.
      peak: 99th percentile of the busiest replica's load over the mean.
      moved: share of the conversations whose first request after the new replica came
        went to another replica than their last one before.
    """

    read: float
    peak: float
    moved: float


def simulate(
    choose: Choose, join: Callable[[str], None], options: argparse.Namespace
) -> Result:
    """Runs all conversations to their ends."""
    rng = random.Random(options.seed)
    names = [f"http://10.0.0.{i}:8000" for i in range(options.replicas + 1)]
    loads = dict.fromkeys(names[:-1], 0)
    caches = {name: Cache(options.cache) for name in names}
    numbers = itertools.count()
    events: list[tuple[float, int, str, Session]] = []

    def begin(now: float) -> None:
        index = next(numbers)
        session = Session(f"s{index}", 1500, rng.randint(4, 40))
        heapq.heappush(events, (now, index, "", session))

    for _ in range(options.sessions):
        begin(rng.expovariate(1 / 30))
    read = new = 0
    peaks: list[float] = []
    last: dict[str, str] = {}
    before: dict[str, str] = {}
    moved: list[bool] = []
    for step in range(2 * options.requests):
        now, _, name, session = heapq.heappop(events)
        if name:  # an answer ends
            loads[name] -= 1
            session.turns_left -= 1
            if session.turns_left:
                pause = rng.lognormvariate(0.5, 1.0)
                heapq.heappush(events, (now + pause, next(numbers), "", session))
            else:
                begin(now)
            continue
        if step >= options.requests and names[-1] not in loads:
            join(names[-1])
            loads[names[-1]] = 0
            before = dict(last)
        name = choose(session.name, loads)
        if session.name in before:
            moved.append(before.pop(session.name) != name)
        last[session.name] = name
        loads[name] += 1
        said, answer = rng.randint(50, 800), rng.randint(30, 500)
        prompt = session.num_tokens + said
        is_first = session.num_tokens == 1500
        amount = caches[name].read(session.name, prompt, prompt + answer)
        read += amount
        new += said + 1500 * is_first
        session.num_tokens = prompt + answer
        peaks.append(max(loads.values()) * len(loads) / sum(loads.values()))
        end = now + amount / READ_RATE + answer / DRAW_RATE
        heapq.heappush(events, (end, next(numbers), name, session))
    return Result(
        read / new, statistics.quantiles(peaks, n=100)[98], statistics.mean(moved)
    )


def ways(number: int) -> Iterator[tuple[str, Choose, Callable[[str], None]]]:
    """Yields the ways to choose, each by name."""
    turns = itertools.count()
    yield (
        "in turn",
        lambda _, loads: [*loads][next(turns) % len(loads)],
        lambda _: None,
    )
    yield (
        "the least busy one",
        lambda _, loads: min(loads, key=loads.__getitem__),
        lambda _: None,
    )
    for text, bound in (
        ("ring without a bound", balance.Bound(factor=1e9)),
        ("ring with a bound (the router)", balance.Bound()),
    ):
        made = balance.Balance(bound)
        for index in range(number):
            made.ring.add(f"http://10.0.0.{index}:8000")
        yield text, made.choose, made.ring.add


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=64, help="at the same time")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--cache", type=int, default=400_000, help="tokens a replica")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| | tokens read / new ones | busiest / mean, p99 | moved as one joins |")
    print("|---|---|---|---|")
    for name, choose, join in ways(options.replicas):
        found = simulate(choose, join, options)
        print(f"| {name} | {found.read:.2f} | {found.peak:.2f} | {found.moved:.0%} |")


if __name__ == "__main__":
    main()
