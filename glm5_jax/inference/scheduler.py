"""Who is read and who is decoded next: a state machine without any array.

Requests wait in order. A free slot takes the first of them; its prompt is read in parts
of at most a chunk, and then the slot decodes until the sequence ends. What a slot holds
stays there until it is taken again: a prompt that goes on from it, as the next turn of
a conversation does, is read from where it is new.

`plan` says what to do and `advance` puts down that it was done. Each may be called
again where an exception or ctrl-C cut it short, with the same result.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Literal

from glm5_jax.inference.requests import Completion, Request


@dataclasses.dataclass(frozen=True)
class Work:
    """A request under way."""

    request: Request
    prompt: list[int]  # of the request
    completion: Completion  # what it has so far


@dataclasses.dataclass
class Slot:
    """Room for one sequence."""

    index: int
    device: int = 0  # of those that have different slots
    work: Work | None = None  # None: free
    tokens: list[int] = dataclasses.field(default_factory=list)  # read, in the cache
    last: int | None = None  # drawn, and not read yet
    version: int = -1  # of the weights that read the oldest of the tokens
    last_used: int = -1

    @property
    def is_reading(self) -> bool:
        """Whether tokens are still to be read before the next one is drawn."""
        return self.work is not None and self.last is None

    @property
    def is_decoding(self) -> bool:
        """Whether it draws tokens."""
        return self.work is not None and self.last is not None


@dataclasses.dataclass(frozen=True)
class Part:
    """Tokens that a slot reads behind `start` others."""

    slot: Slot
    work: Work
    start: int
    tokens: Sequence[int]
    is_last: bool  # a token is drawn behind them
    num_drawn: int  # tokens of the completion so far


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """What the device does next, for some slots."""

    kind: Literal["fresh", "behind", "decode"]  # first parts; later ones; draws
    parts: list[Part]


class Scheduler:
    """Decides what each dispatch does.

    Attributes:
        slots: all of them.
        works: requests that have not finished, by id, in order.
        chunk: tokens of one prompt that are read at once.
    """

    def __init__(self, num_slots: int, chunk: int, num_devices: int = 1) -> None:
        """All slots are free; each device has as many, one after the other."""
        own = num_slots // num_devices
        self.slots = [Slot(i, i // own) for i in range(num_slots)]
        self.works: dict[int, Work] = {}
        self.chunk = chunk
        self._clock = 0
        self._has_left_some = False  # the last dispatch read, and not all of it

    def submit(self, request: Request) -> None:
        """Lets a request wait for a slot."""
        prompt = [int(token) for token in request.prompt]
        self.works[request.id] = Work(request, prompt, Completion([], [], None))

    def release(self, id: int) -> Slot | None:
        """Takes a request out; what its slot holds stays until another takes it."""
        found = None
        for slot in self.slots:
            if slot.work is not None and slot.work.request.id == id:
                self._clock += 1
                slot.last_used, slot.last, found = self._clock, None, slot
                slot.work = None
        self.works.pop(id, None)
        return found

    def forget(self) -> None:
        """Reads all that was read again, as the cache is empty."""
        for slot in self.slots:
            slot.tokens, slot.last = [], None

    def plan(self, version: int) -> Dispatch | None:
        """Says what to do now; waiting requests get free slots, nothing counts as read.

        Reading goes first, as slots that decode are then more; but a prompt of many
        chunks lets the others decode in between.

        Args:
          version: of the weights that will do it.
        """
        decoding = [slot for slot in self.slots if slot.is_decoding]
        if not (self._has_left_some and decoding):
            self._admit(version)
            reading = [slot for slot in self.slots if slot.is_reading]
            if reading:
                is_fresh = not reading[0].tokens
                same = [slot for slot in reading if (not slot.tokens) == is_fresh]
                parts = [self._part(slot) for slot in same]
                return Dispatch("fresh" if is_fresh else "behind", parts)
        parts = [self._part(slot) for slot in decoding]
        return Dispatch("decode", parts) if parts else None

    def advance(self, dispatch: Dispatch, drawn: list[list[int]], version: int) -> None:
        """Puts down that a dispatch was done.

        Args:
          dispatch: of `plan`.
          drawn: tokens, of each part.
          version: of the weights that did it.
        """
        for part, ids in zip(dispatch.parts, drawn, strict=True):
            slot, read = part.slot, [*part.tokens, *ids[:-1]]
            slot.tokens[part.start :] = read
            if part.start == 0:
                slot.version = version
            if ids:
                slot.last = ids[-1]
        is_reading = dispatch.kind != "decode"
        are_last = all(part.is_last for part in dispatch.parts)
        self._has_left_some = is_reading and not are_last

    def _admit(self, version: int) -> None:
        """Gives waiting requests the free slots, in order, to all devices alike."""
        busy = [slot for slot in self.slots if slot.work is not None]
        taken = collections.Counter(slot.device for slot in busy)
        running = {slot.work.request.id for slot in busy if slot.work is not None}
        waiting = [work for id, work in self.works.items() if id not in running]
        free = [slot for slot in self.slots if slot.work is None]
        for work in waiting[: len(free)]:
            kept = {slot.index: _kept(slot, work.prompt, version) for slot in free}

            def rank(s: Slot, kept: dict[int, int] = kept) -> tuple[int, ...]:
                return kept[s.index], -taken[s.device], -s.last_used, -s.index

            slot = max(free, key=rank)
            free.remove(slot)
            taken[slot.device] += 1
            del slot.tokens[kept[slot.index] :]
            slot.last, slot.work = None, work

    def _part(self, slot: Slot) -> Part:
        """What a slot does next."""
        work, start = slot.work, len(slot.tokens)
        assert work is not None
        num_drawn = len(work.completion.tokens)
        if slot.last is not None:
            return Part(slot, work, start, [slot.last], True, num_drawn)
        text = [*work.prompt, *work.completion.tokens] if num_drawn else work.prompt
        end = min(start + self.chunk, len(text))
        return Part(slot, work, start, text[start:end], end == len(text), num_drawn)


def _kept(slot: Slot, prompt: Sequence[int], version: int) -> int:
    """How many leading tokens of the prompt a slot holds, if that saves half.

    The last one is read in any case, as the next is drawn from what it gives.
    """
    if slot.version != version:
        return 0
    size = min(len(prompt) - 1, _common(slot.tokens, prompt))
    return size if 2 * size >= len(prompt) else 0


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    size = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        size += 1
    return size
