"""Who is read and who is decoded next: a state machine without any array.

Requests wait in order. A free slot takes the first of them; its prompt is read in parts
of at most a chunk, and then the slot decodes until the sequence ends. What a slot holds
stays there until it is taken again: a prompt that goes on from it, as the next turn of
a conversation does, is read from where it is new.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Literal

from glm5_jax.inference.requests import Request


@dataclasses.dataclass
class Slot:
    """Room for one sequence."""

    index: int
    device: int = 0  # of those that have different slots
    request: Request | None = None  # None: free
    tokens: list[int] = dataclasses.field(default_factory=list)  # read, in the cache
    last: int | None = None  # drawn, and not read yet
    version: int = -1  # of the weights that read the oldest of the tokens
    last_used: int = -1

    @property
    def is_reading(self) -> bool:
        """Whether a part of its prompt is still to be read."""
        return self.request is not None and len(self.tokens) < len(self.request.prompt)

    @property
    def is_decoding(self) -> bool:
        """Whether it draws tokens."""
        return self.request is not None and not self.is_reading


@dataclasses.dataclass(frozen=True)
class Part:
    """Tokens of a prompt that a slot reads behind `start` others."""

    slot: Slot
    start: int
    tokens: Sequence[int]
    is_last: bool


Dispatch = list[Part] | Literal["decode"] | None


class Scheduler:
    """Decides what each dispatch does.

    Attributes:
        slots: all of them.
        waiting: requests that have none yet.
        version: of the weights that are used now.
        chunk: tokens of one prompt that are read at once.
    """

    def __init__(self, num_slots: int, chunk: int, num_devices: int = 1) -> None:
        """All slots are free; each device has as many, one after the other."""
        own = num_slots // num_devices
        self.slots = [Slot(i, i // own) for i in range(num_slots)]
        self.waiting: collections.deque[Request] = collections.deque()
        self.version = 0
        self.chunk = chunk
        self._clock = 0
        self._has_left_some = False  # the last dispatch read, and not all of it

    def submit(self, request: Request) -> None:
        """Lets a request wait for a slot."""
        self.waiting.append(request)

    def abort(self, id: int) -> Slot | None:
        """Takes a request back; returns the slot that it had."""
        self.waiting = collections.deque(r for r in self.waiting if r.id != id)
        for slot in self.slots:
            if slot.request is not None and slot.request.id == id:
                self.release(slot)
                return slot
        return None

    def release(self, slot: Slot) -> None:
        """Frees a slot; what it holds stays until another request takes it."""
        self._clock += 1
        slot.request, slot.last, slot.last_used = None, None, self._clock

    def next(self) -> Dispatch:
        """What to do now. The parts that are returned count as read.

        Reading goes first, as slots that decode are then more; but a prompt of many
        chunks lets the others decode in between.
        """
        is_anyone_decoding = any(slot.is_decoding for slot in self.slots)
        if self._has_left_some and is_anyone_decoding:
            self._has_left_some = False
            return "decode"
        self._admit()
        reading = [slot for slot in self.slots if slot.is_reading]
        if not reading:
            return "decode" if is_anyone_decoding else None
        is_fresh = not reading[0].tokens
        parts = [self._part(slot) for slot in reading if (not slot.tokens) == is_fresh]
        for part in parts:
            part.slot.tokens.extend(part.tokens)
        self._has_left_some = not all(part.is_last for part in parts)
        return parts

    def _admit(self) -> None:
        """Gives waiting requests the free slots, in order, to all devices alike."""
        taken = collections.Counter(
            slot.device for slot in self.slots if slot.request is not None
        )
        free = [slot for slot in self.slots if slot.request is None]
        while self.waiting and free:
            request = self.waiting.popleft()
            kept = {slot.index: self._kept(slot, request.prompt) for slot in free}

            def rank(s: Slot, kept: dict[int, int] = kept) -> tuple[int, ...]:
                return kept[s.index], -taken[s.device], -s.last_used, -s.index

            slot = max(free, key=rank)
            free.remove(slot)
            taken[slot.device] += 1
            slot.request = request
            del slot.tokens[kept[slot.index] :]
            if not slot.tokens:
                slot.version = self.version

    def _kept(self, slot: Slot, prompt: Sequence[int]) -> int:
        """How many leading tokens of the prompt a slot holds, if that saves half.

        The last one is read in any case, as the next is drawn from what it gives.
        """
        if slot.version != self.version:
            return 0
        size = min(len(prompt) - 1, _common(slot.tokens, prompt))
        return size if 2 * size >= len(prompt) else 0

    def _part(self, slot: Slot) -> Part:
        assert slot.request is not None
        start, prompt = len(slot.tokens), slot.request.prompt
        end = min(start + self.chunk, len(prompt))
        return Part(slot, start, prompt[start:end], end == len(prompt))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    size = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        size += 1
    return size
