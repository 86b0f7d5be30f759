"""The sizes of a run's batches, which may grow at its beginning, and their tokens."""

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

Changes = tuple[tuple[float, ...], ...]


class Batches(NamedTuple):
    """The number of rows of each step: constant within a phase, larger in the next.

    The rows of a step are numbered: step s has rows_before(s) to rows_before(s + 1) - 1
    of an endless sequence. They depend on s alone, so that a run resumes at any step.

    Attributes:
        sizes: rows of a step in each phase.
        firsts: first step of each phase, counted from 0.
        sequence_length: tokens of a row.
    """

    sizes: tuple[int, ...]
    firsts: tuple[int, ...]
    sequence_length: int

    @property
    def is_constant(self) -> bool:
        """Returns whether all batches have the same size."""
        return len(self.sizes) == 1

    @property
    def tokens_of_last(self) -> int:
        """Returns the tokens of a batch of the last phase."""
        return self.sizes[-1] * self.sequence_length

    def size(self, step: int) -> int:
        """Returns the rows of a step."""
        return self.sizes[bisect.bisect_right(self.firsts, step) - 1]

    def rows_before(self, step: int) -> int:
        """Returns the rows of all steps before a step."""
        ends = (*self.firsts[1:], step)
        phases = zip(self.sizes, self.firsts, ends, strict=True)
        return sum(
            size * (min(end, step) - first)
            for size, first, end in phases
            if first < step
        )

    def tokens_before(self, step: int) -> int:
        """Returns the tokens of all steps before a step, padding included."""
        return self.rows_before(step) * self.sequence_length

    def steps_for(self, tokens: float | int) -> int:
        """Returns the fewest steps that together have at least so many tokens."""
        phase = sum(self.tokens_before(first) < tokens for first in self.firsts[1:])
        first = self.firsts[phase]
        rest = max(tokens - self.tokens_before(first), 0)
        return first + math.ceil(rest / (self.sizes[phase] * self.sequence_length))


def growing(
    sizes: Sequence[int], last: int, tokens: float, sequence_length: int
) -> Batches:
    """Returns batches that have each of some sizes for an equal share of tokens.

    Args:
        sizes: rows of a step in each phase before the last.
        last: rows of a step after these phases.
        tokens: tokens of these phases together.
        sequence_length: tokens of a row.
    """
    batches = Batches((last,), (0,), sequence_length)
    for phase, size in enumerate(sizes):
        before = Batches((*sizes[:phase], size), batches.firsts, sequence_length)
        end = before.steps_for(tokens * (phase + 1) / len(sizes))
        firsts = (*batches.firsts, end)
        batches = Batches((*sizes[: phase + 1], last), firsts, sequence_length)
    return batches


def changes_rule(name: str, changes: Changes) -> tuple[bool, str]:
    """Returns the rule that a value changes at ascending tokens, to none below 0."""
    tokens = [pair[0] for pair in changes if len(pair) == 2]
    return (
        len(tokens) == len(changes)
        and all(a < b for a, b in itertools.pairwise((0, *tokens)))
        and all(pair[-1] >= 0 for pair in changes),
        f"{name} must be pairs of tokens, ascending from above 0, and a value that is "
        f"not negative, e.g. ((15e12, 0.1),); got {changes}.",
    )
