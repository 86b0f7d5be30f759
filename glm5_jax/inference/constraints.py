"""Constraints on the tokens of a request, such as a grammar, and how they are followed.

A constraint never changes; each request that has it gets a matcher of its own. A
matcher's state is a function of the tokens that the engine has committed, so that
dispatches which fail, preemption and aborted requests need no bookkeeping.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt32

WORD = 32  # tokens of a word of a mask

Mask = UInt32[np.ndarray, " words"]  # bit i % 32 of word i // 32 allows token i


class ConstraintError(ValueError):
    """Raised if a matcher cannot continue; the request then ends with an error."""


@runtime_checkable
class Matcher(Protocol):
    """The tokens that may follow a text."""

    @property
    def pause(self) -> int | None:
        """Returns the id until which one mask holds; None if each token changes it."""
        ...

    def allowed(self) -> Mask:
        """Returns the tokens that may follow, at least one.

        Raises:
          ConstraintError: the tokens are too costly to find.
        """
        ...

    def consume(self, ids: Sequence[int]) -> None:
        """Appends tokens to the text.

        Raises:
          ConstraintError: one of them was not allowed.
        """
        ...

    def rollback(self, number: int) -> None:
        """Removes the last tokens from the text; not those before the last pause."""
        ...


@runtime_checkable
class Constraint(Protocol):
    """The texts that a request may draw."""

    @property
    def vocab_size(self) -> int:
        """Returns the ids that masks have bits for, at least the model's."""
        ...

    @property
    def ends(self) -> frozenset[int]:
        """Returns the ids that end a text that is complete."""
        ...

    def start(self) -> Matcher:
        """Returns a matcher of the empty text."""
        ...


@dataclasses.dataclass(frozen=True)
class Guide:
    """Bounds on the next tokens of a request.

    Attributes:
      forced: the only tokens that are allowed next, one after the other.
      allowed: the tokens that are allowed after them.
      pause: id up to which `allowed` holds; None if it holds for a single token.
    """

    forced: tuple[int, ...]
    allowed: Mask
    pause: int | None = None

    @property
    def num_tokens(self) -> int | None:
        """Returns how many tokens the guide covers; None up to `pause`."""
        return None if self.pause is not None else len(self.forced) + 1


class Tracker:
    """Follows the tokens of one request.

    Attributes:
        error: why the matcher cannot continue, or empty.
    """

    def __init__(self, constraint: Constraint) -> None:
        """Starts before the first token."""
        self._constraint, self.error = constraint, ""
        self._matcher, self._num_read = constraint.start(), 0

    def guide(self, tokens: Sequence[int], most: int) -> Guide:
        """Returns the bounds on the tokens after these.

        Args:
          tokens: all that the request has drawn.
          most: tokens that a dispatch draws.
        """
        ends = self._constraint.ends
        try:
            if len(tokens) < self._num_read:
                self._matcher, self._num_read = self._constraint.start(), 0
            self._matcher.consume(tokens[self._num_read :])
            self._num_read = len(tokens)
            if (pause := self._matcher.pause) is not None:
                return Guide((), self._matcher.allowed(), pause)
            forced: list[int] = []
            while True:
                allowed = self._matcher.allowed()
                only = _only(allowed)
                if only is None or only in ends or len(forced) + 1 >= most:
                    break
                self._matcher.consume([only])
                forced.append(only)
            self._matcher.rollback(len(forced))
            return Guide(tuple(forced), allowed)
        except ConstraintError as error:
            self.error = self.error or str(error)
            return Guide((), mask_of(ends, self._constraint.vocab_size))


@dataclasses.dataclass(frozen=True)
class After:
    """A constraint that begins after an id, such as </think>.

    Attributes:
      inner: the constraint.
      id: after which it begins.
      forbidden: ids that may not come before it.
      may_end: whether the text may end before it.
    """

    inner: Constraint
    id: int
    forbidden: frozenset[int] = frozenset()
    may_end: bool = False

    @property
    def vocab_size(self) -> int:
        """Returns the ids that masks have bits for."""
        return self.inner.vocab_size

    @property
    def ends(self) -> frozenset[int]:
        """Returns the ids that end a text that is complete."""
        return self.inner.ends

    def start(self) -> Matcher:
        """Returns a matcher of the empty text."""
        return _AfterMatcher(self)


class _AfterMatcher:
    """A matcher of `After`."""

    def __init__(self, constraint: After) -> None:
        """Starts before the first token."""
        ends = frozenset() if constraint.may_end else constraint.ends
        self._free = ~mask_of(constraint.forbidden | ends, constraint.vocab_size)
        self._constraint = constraint
        self._inner: Matcher | None = None

    @property
    def pause(self) -> int | None:
        """Returns the id until which one mask holds."""
        return self._constraint.id if self._inner is None else self._inner.pause

    def allowed(self) -> Mask:
        """Returns the tokens that may follow."""
        return self._free if self._inner is None else self._inner.allowed()

    def consume(self, ids: Sequence[int]) -> None:
        """Appends tokens to the text."""
        if self._inner is None and self._constraint.id in ids:
            self._inner = self._constraint.inner.start()
            ids = ids[[*ids].index(self._constraint.id) + 1 :]
        if self._inner is not None:
            self._inner.consume(ids)

    def rollback(self, number: int) -> None:
        """Removes the last tokens from the text."""
        if self._inner is not None:
            self._inner.rollback(number)


def mask_of(ids: frozenset[int], vocab_size: int) -> Mask:
    """Returns a mask that allows these ids alone."""
    mask = np.zeros(num_words(vocab_size), np.uint32)
    for id in ids:
        mask[id // WORD] |= np.uint32(1 << id % WORD)
    return mask


def num_words(vocab_size: int) -> int:
    """Returns the words of a mask."""
    return -(-vocab_size // WORD)


def _only(mask: Mask) -> int | None:
    """Returns the only id that a mask allows, or None."""
    places = np.flatnonzero(mask)
    if len(places) != 1:
        return None
    word = int(mask[places[0]])
    is_single = word & (word - 1) == 0
    return int(places[0]) * WORD + word.bit_length() - 1 if is_single else None
