"""Draws episodes of a kind of task: turns, tokens and the seconds of tools.

Every size is lognormal: a median, and the standard deviation of its logarithm. GLM-5's
report gives none of them, so KINDS holds assumptions, and SOURCES says beside which
published figures they were chosen. Limits are those of the config.
"""

import dataclasses
import functools
import math
import random
from collections.abc import Mapping, Sequence

from glm5_jax import config as config_lib
from glm5_jax.rl.actors import simulator

NUM_DRAWN = 256  # episodes whose means a summary gives
# The largest sizes that flags give: draws beyond them leave the range of floats.
MOST_MEDIAN, MOST_SPREAD = 1e12, 10.0


@dataclasses.dataclass(frozen=True)
class Size:
    """A lognormal size."""

    median: float | int
    spread: float | int  # standard deviation of the logarithm; 0: always the median

    def draw(self, rng: random.Random) -> float:
        """Returns a size."""
        return self.median * math.exp(self.spread * rng.gauss(0.0, 1.0))

    def __str__(self) -> str:
        """Returns it as the flags take it."""
        return f"{self.median:g}:{self.spread:g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """The episodes of a kind of task."""

    prompt: Size  # tokens before the first turn
    turns: Size  # of the model
    drawn: Size  # tokens that the model draws in a turn
    observed: Size  # tokens that a tool's answer adds
    tool_seconds: Size  # of an answer, and of the reward after the last turn


KINDS = {
    "reasoning": Kind(
        prompt=Size(300, 0.7),
        turns=Size(1, 0),
        drawn=Size(12_000, 0.7),
        observed=Size(0, 0),
        tool_seconds=Size(0.1, 0.5),
    ),
    "coding": Kind(
        prompt=Size(3_000, 0.5),
        turns=Size(40, 0.5),
        drawn=Size(400, 0.8),
        observed=Size(800, 1.0),
        tool_seconds=Size(2.0, 1.3),
    ),
    "search": Kind(
        prompt=Size(500, 0.5),
        turns=Size(25, 0.7),
        drawn=Size(800, 0.8),
        observed=Size(1_500, 0.8),
        tool_seconds=Size(1.5, 0.8),
    ),
    "terminal": Kind(
        prompt=Size(2_000, 0.5),
        turns=Size(30, 0.6),
        drawn=Size(350, 0.8),
        observed=Size(700, 1.0),
        tool_seconds=Size(3.0, 1.3),
    ),
}
SOURCES = {
    "reasoning": "one turn, as in section 3.2. 12,000 tokens: DeepSeek-R1's mean on "
    "AIME, and half of R1-0528's 23,000 (its model card). The rest is assumed.",
    "coding": "SkyRL-Agent (arXiv 2511.16108) allows 100 steps and 40K tokens; "
    "GLM-5's evaluation of SWE-bench 200K (appendix B). All medians are assumed.",
    "search": "ASearcher (arXiv 2508.07976) allows 128 turns, and saw more than 40 "
    "turns and 150K drawn tokens late in training. All medians are assumed.",
    "terminal": "GLM-5's evaluation of Terminal-Bench 2 (appendix B) allows two hours "
    "with 8,192 tokens a turn and 128K of context. All medians are assumed.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The longest episodes of a run."""

    turns: int
    turn_tokens: int  # that the model draws in a turn
    row_tokens: int  # of a whole episode

    @classmethod
    def of(cls, config: config_lib.TrainConfig) -> "Limits":
        """Returns those of a config."""
        return cls(
            turns=config.rl.max_turns,
            turn_tokens=config.rl.max_new_tokens,
            row_tokens=config.data.sequence_length,
        )


@dataclasses.dataclass(frozen=True)
class Episode:
    """An episode's turns, and the tokens that the engine reads before each of them."""

    turns: tuple[simulator.Turn, ...]
    read: tuple[int, ...]

    @property
    def drawn(self) -> int:
        """Returns the tokens that the model draws."""
        return sum(turn.tokens for turn in self.turns)

    @property
    def length(self) -> int:
        """Returns the tokens of its row."""
        return self.drawn + sum(self.read)


@dataclasses.dataclass(frozen=True)
class Summary:
    """Means over episodes."""

    drawn: float  # tokens of an episode
    length: float  # of its row
    turns: float
    tool_seconds: float
    context: float  # tokens in the cache where a token is drawn
    read: float  # tokens that the engine reads for a drawn one

    @property
    def share_drawn(self) -> float:
        """Returns the share of a row's tokens that the model drew."""
        return self.drawn / self.length


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The tasks of a run: kinds with their shares of the groups."""

    kinds: Mapping[str, Kind]
    shares: Sequence[tuple[str, float]]  # of parts, which may be of the same kind
    limits: Limits
    seed: int = 0
    reread: float = 0.0  # share of an episode's cache that is lost between two turns

    def part(self, group: int) -> int:
        """Returns the place of a group's part among the shares."""
        of_group = random.Random(f"{self.seed}/{group}")
        shares = [share for _, share in self.shares]
        return of_group.choices(range(len(shares)), shares)[0]

    def episode(self, group: int, number: int) -> Episode:
        """Draws an episode; a group is of one kind.

        Args:
          group: index of its group.
          number: of the episode in its group.
        """
        kind, _ = self.shares[self.part(group)]
        return _draw(
            self.kinds[kind],
            self.limits,
            random.Random(f"{self.seed}/{group}/{number}"),
        )

    def turns(self, group: int, number: int) -> Sequence[simulator.Turn]:
        """Returns the turns of an episode, as the simulator asks for them."""
        return self.episode(group, number).turns

    @functools.cached_property
    def summary(self) -> Summary:
        """The means of NUM_DRAWN episodes, each of a group of its own."""
        found = [self.episode(group, 0) for group in range(NUM_DRAWN)]
        drawn = sum(episode.drawn for episode in found)
        # Tokens before each turn, and those of its context as its tokens are drawn.
        read, context = 0.0, 0.0
        for episode in found:
            length = 0
            for turn, more in zip(episode.turns, episode.read, strict=True):
                read += more + self.reread * length
                length += more
                context += turn.tokens * (length + turn.tokens / 2)
                length += turn.tokens
        number = len(found)
        return Summary(
            drawn=drawn / number,
            length=sum(episode.length for episode in found) / number,
            turns=sum(len(episode.turns) for episode in found) / number,
            tool_seconds=sum(t.seconds for e in found for t in e.turns) / number,
            context=context / drawn,
            read=read / drawn,
        )


def parse_size(flag: str, text: str) -> Size:
    """Reads "MEDIAN" or "MEDIAN:SPREAD".

    Raises:
      InputError: it is neither, or a number is negative or too large to draw.
    """
    try:
        median, spread = (float(x) for x in (*text.split(":"), "0")[:2])
    except ValueError:
        median = spread = -1.0
    is_drawable = 0 <= median <= MOST_MEDIAN and 0 <= spread <= MOST_SPREAD
    if not is_drawable or text.count(":") > 1:
        raise config_lib.InputError(
            f"--{flag} must be MEDIAN or MEDIAN:SPREAD, two numbers that are not "
            f"negative, up to {MOST_MEDIAN:g} and {MOST_SPREAD:g}, e.g. "
            f"--{flag}=40:0.5, got {text!r}."
        )
    return Size(median, spread)


def parse_shares(text: str) -> list[tuple[str, float]]:
    """Reads "coding" or "coding:2,search:1", a kind and a share for each part.

    Raises:
      InputError: a kind is not one of KINDS, or a share is not positive.
    """
    shares = []
    for part in text.split(","):
        name, _, given = part.strip().partition(":")
        try:
            share = float(given or 1)
        except ValueError:
            share = 0.0
        shares.append((name, share))
        if name not in KINDS or not 0 < share < math.inf:
            raise config_lib.InputError(
                f"--tasks must name kinds of {', '.join(KINDS)}, each perhaps with its "
                f"share of the groups, e.g. --tasks=coding:2,search:1, got {text!r}."
            )
    return shares


def _draw(kind: Kind, limits: Limits, rng: random.Random) -> Episode:
    """Draws an episode, which ends where its row is full."""
    num_turns = min(max(round(kind.turns.draw(rng)), 1), limits.turns)
    room = limits.row_tokens
    turns, read = [], []
    for i in range(num_turns):
        new = (kind.observed if i else kind.prompt).draw(rng)
        more = min(round(new), room - 1)  # a token at least is drawn
        most = min(limits.turn_tokens, room - more)
        tokens = min(max(round(kind.drawn.draw(rng)), 1), most)
        turns.append(simulator.Turn(tokens, kind.tool_seconds.draw(rng)))
        read.append(more)
        room -= more + tokens
        if room < 1:
            break
    return Episode(tuple(turns), tuple(read))
