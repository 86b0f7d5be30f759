"""Decides what each dispatch does: a state machine without arrays.

Requests wait in order. A free slot takes the first of them; its prompt is read in parts
of at most a chunk, then the slot decodes until the sequence ends. A slot keeps its
tokens until its next request. A prompt that extends them, such as a conversation's next
turn, is admitted first, to this slot, and only its new tokens are read.

`plan` returns what to do and `advance` records that it was done. Either can be called
again after an exception or ctrl-C, with the same result: each method notes while it
works that things are half done, and the next plan puts them right.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

from glm5_jax.inference import constraints, prefixes
from glm5_jax.inference import pages as pages_lib
from glm5_jax.inference.requests import Completion, Request

MAX_PASSED = 64  # next turns per slot that may overtake the oldest request


@dataclasses.dataclass(frozen=True)
class Work:
    """A request under way."""

    request: Request
    prompt: list[int]  # prompt and, on a restart, drawn tokens
    text: bytes  # the prompt, encoded
    completion: Completion  # so far
    order: int  # among all requests that were submitted
    was_preempted: bool = False  # and waits again, with pages
    tracker: constraints.Tracker | None = None  # of the request's constraint


@dataclasses.dataclass
class Slot:
    """The place of one sequence."""

    index: int
    device: int  # device that holds it
    work: Work | None = None  # None: free
    tokens: list[int] = dataclasses.field(default_factory=list)  # in the cache
    last: int | None = None  # drawn, not yet in the cache
    version: int = -1  # of the weights that read its oldest token
    last_used: int = -1
    kept_until: int = 0  # dispatch until which it waits for a next turn
    text: bytes = b""  # encoded tokens of a free slot, once needed
    pieces: list = dataclasses.field(default_factory=list)  # results.Pieces
    # With pages (paged_scheduler.py): those of the sequence in order, and the nodes of
    # the tree that the first of them belong to.
    pages: list[int] = dataclasses.field(default_factory=list)
    nodes: list[pages_lib.Node] = dataclasses.field(default_factory=list)

    @property
    def is_reading(self) -> bool:
        """Returns whether tokens remain to be read before the next one is drawn."""
        return self.work is not None and self.last is None

    @property
    def is_decoding(self) -> bool:
        """Returns whether it draws tokens."""
        return self.work is not None and self.last is not None


@dataclasses.dataclass(frozen=True)
class Part:
    """Tokens that a slot reads, from position `start` on."""

    slot: Slot
    work: Work
    start: int
    tokens: Sequence[int]
    is_last: bool  # a token is drawn after them
    num_drawn: int  # tokens of the completion so far


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """The next work of the devices, for some slots."""

    kind: Literal["fresh", "behind", "decode"]  # first parts; later ones; draws
    parts: list[Part]
    is_all: bool = True  # whether it is all the work of its kind
    num_tokens: int = 0  # that a device reads, padding included


class Scheduler:
    """Decides what each dispatch does.

    Attributes:
        slots: all of them.
        works: requests that have not finished, by id, in order.
        chunk: tokens of one prompt that are read at once.
        prefill_tokens: tokens that a device reads before running sequences draw again.
    """

    def __init__(
        self,
        num_slots: int,
        chunk: int,
        num_devices: int = 1,
        *,
        prefill_tokens: int,
        can_set_back: bool = True,
    ) -> None:
        """Makes free slots, equally many on each device.

        Args:
          num_slots: number of slots.
          chunk: tokens of one prompt that are read at once.
          num_devices: devices with slots of their own.
          prefill_tokens: tokens that a device reads before running sequences draw
            again. A dispatch reads at least one part of a prompt.
          can_set_back: whether a slot can keep a part of its tokens. A state cannot be
            set back, so that there a prompt only continues all of a slot's tokens.
        """
        own = num_slots // num_devices
        self.slots = [Slot(i, i // own) for i in range(num_slots)]
        self.works: dict[int, Work] = {}
        self.chunk, self._can_set_back = chunk, can_set_back
        self.prefill_tokens = prefill_tokens
        self._orders, self._clock = itertools.count(), itertools.count()
        # Dispatches; next turns that overtook the oldest request; tokens that a device
        # has read since it last drew; with pages, requests that lost theirs.
        self._num_done = self._num_passed = self._num_read = self.num_preempted = 0
        # With pages, the copies to make before the next dispatch, in their order.
        self.moves: collections.deque[pages_lib.Move] = collections.deque()
        self._waiting: collections.OrderedDict[int, Work] = collections.OrderedDict()
        self._new: list[int] = []  # requests not yet matched with slots
        # The last dispatch left prompts unread; an interrupt left things half done.
        self._has_left_some = self._is_torn = False

    @property
    def num_free_pages(self) -> int:
        """Returns 0: sequences own the rows of their slots."""
        return 0

    def num_known(self, prompt: Sequence[int]) -> int:
        """Returns 0: no pages hold the beginning of a prompt."""
        return 0

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests that have no slot yet."""
        return len(self._waiting)

    @property
    def num_readable(self) -> int:
        """Returns the tokens that a device may read in the next dispatch."""
        return max(self.prefill_tokens - self._num_read, 0)

    def submit(self, request: Request) -> Work:
        """Queues a request."""
        prompt = [int(token) for token in request.prompt]
        text, completion = prefixes.encoded(prompt), Completion([], [], None)
        work = Work(request, prompt, text, completion, next(self._orders))
        if request.constraint is not None:
            tracker = constraints.Tracker(request.constraint)
            work = dataclasses.replace(work, tracker=tracker)
        with self._change():
            self.works[request.id] = self._waiting[request.id] = work
            self._new.append(request.id)
        return work

    def release(self, id: int, keep: int = 0) -> Slot | None:
        """Removes a request; its slot keeps the tokens until the next request.

        Args:
          id: of the request.
          keep: number of dispatches for which only a next turn may take the slot.
        """
        found = None
        with self._change():
            self.works.pop(id, None)
            self._waiting.pop(id, None)
            for slot in self.slots:
                if slot.work is not None and slot.work.request.id == id:
                    slot.last_used, slot.last, found = next(self._clock), None, slot
                    slot.kept_until = self._num_done + keep
                    slot.work = None
        return found

    def forget(self) -> None:
        """Marks all tokens as unread, after the cache was lost."""
        for slot in self.slots:
            slot.tokens, slot.text, slot.last = [], b"", None

    def plan(self, version: int) -> Dispatch | None:
        """Admits waiting requests to free slots and returns the next dispatch.

        Reading comes before decoding, so that more slots decode together. But between
        two chunks of a long prompt, and once prefill_tokens have been read, the other
        slots decode. The oldest request comes first, so that none waits for ever.

        Args:
          version: of the weights that will run the dispatch.
        """
        if self._is_torn:
            self._mend()
        with self._change():
            return self._next(version)

    def _next(self, version: int) -> Dispatch | None:
        """Returns the next dispatch, as `plan` does."""
        decoding = [slot for slot in self.slots if slot.is_decoding]
        if not decoding:
            self._num_read = 0  # nobody waits
        is_due = self._has_left_some or self._num_read >= self.prefill_tokens
        if not (is_due and decoding):
            self._admit(version)
            reading = [self._part(slot) for slot in self.slots if slot.is_reading]
            if reading:
                reading.sort(key=lambda part: part.work.order)
                is_fresh = reading[0].start == 0
                parts = [part for part in reading if (part.start == 0) == is_fresh]
                return Dispatch("fresh" if is_fresh else "behind", parts)
        parts = [self._part(slot) for slot in decoding]
        return Dispatch("decode", parts) if parts else None

    def advance(self, dispatch: Dispatch, drawn: list[list[int]], version: int) -> None:
        """Records that a dispatch was done.

        Args:
          dispatch: of `plan`.
          drawn: tokens drawn for each part.
          version: of the weights that ran the dispatch.
        """
        with self._change():
            for part, ids in zip(dispatch.parts, drawn, strict=True):
                slot, read = part.slot, [*part.tokens, *ids[:-1]]
                if slot.work is not part.work:
                    continue  # it has ended: this is a repetition
                slot.tokens[part.start :] = read
                if part.start == 0:
                    slot.version = version
                if ids:
                    slot.last = ids[-1]
            is_reading = dispatch.kind != "decode"
            is_done = dispatch.is_all and all(part.is_last for part in dispatch.parts)
            self._has_left_some = is_reading and not is_done
            self._num_read = self._num_read + dispatch.num_tokens if is_reading else 0
            self._num_done += 1

    @contextlib.contextmanager
    def _change(self) -> Iterator[bool]:
        """Notes that things are half done; yields whether they were before."""
        was_torn, self._is_torn = self._is_torn, True
        yield was_torn
        self._is_torn = was_torn  # after an exception it stays True

    def _mend(self) -> None:
        """Gives each request either a slot or a place in the queue, in order."""
        busy = set()
        for slot in self.slots:
            if slot.work is not None:
                id = slot.work.request.id
                if self.works.get(id) is slot.work:
                    busy.add(id)
                else:
                    slot.work = slot.last = None
        waiting = {id: work for id, work in self.works.items() if id not in busy}
        self._waiting = collections.OrderedDict(waiting)
        self._new = [*self._waiting]
        self._is_torn = False

    def _admit(self, version: int) -> None:
        """Assigns free slots to waiting requests.

        Next turns come first, each to its own slot; then the others in order, spread
        over the devices. A held slot is assigned to others only if all would idle.
        """
        busy = [slot for slot in self.slots if slot.work is not None]
        free = {slot.index: slot for slot in self.slots if slot.work is None}
        if not (self._waiting and free):
            return
        for slot in free.values():
            slot.text = slot.text or prefixes.encoded(slot.tokens)
        taken = collections.Counter(slot.device for slot in busy)
        places = _Places(free, version, taken, self._can_set_back)
        is_fair = self._num_passed < MAX_PASSED * len(self.slots)
        for id in self._new:
            work = self._waiting.get(id)
            if is_fair and work is not None and places.continues(work):
                del self._waiting[id]
                self._num_passed += 1
        self._new = []
        if busy:
            places.leave([s for s in free.values() if s.kept_until > self._num_done])
        while self._waiting and places.free:
            id, work = next(iter(self._waiting.items()))
            places.give(work)
            del self._waiting[id]
            self._num_passed = 0
        if not self._waiting:
            self._num_passed = 0

    def _part(self, slot: Slot) -> Part:
        """Returns the next part of a slot."""
        work, start = slot.work, len(slot.tokens)
        assert work is not None
        num_drawn = len(work.completion.tokens)
        if slot.last is not None:
            return Part(slot, work, start, [slot.last], True, num_drawn)
        text = [*work.prompt, *work.completion.tokens] if num_drawn else work.prompt
        end = min(start + self.chunk, len(text))
        return Part(slot, work, start, text[start:end], end == len(text), num_drawn)


class _Places:
    """The free slots during an admission."""

    def __init__(
        self,
        free: dict[int, Slot],
        version: int,
        taken: collections.Counter,
        can_set_back: bool,
    ) -> None:
        """Takes slots by index, and the number of requests on each device."""
        self.free, self._taken, self._can_set_back = dict(free), taken, can_set_back
        held = {i: s.text for i, s in free.items() if s.text and s.version == version}
        self._texts, self._held = prefixes.Texts(held), held

    def leave(self, slots: Sequence[Slot]) -> None:
        """Withholds these slots."""
        for slot in slots:
            if self.free.pop(slot.index, None) and slot.index in self._held:
                self._texts.remove(self._held.pop(slot.index), slot.index)

    def continues(self, work: Work) -> bool:
        """Assigns the slot whose whole text the prompt extends, if there is one."""
        size, found = self._kept(work)
        whole = [slot for slot in found if size and len(slot.tokens) == size]
        if whole:
            self._put(work, max(whole, key=lambda slot: slot.last_used), size)
        return bool(whole)

    def give(self, work: Work) -> None:
        """Assigns the slot that saves most reading; ties go to the least used."""
        size, found = self._kept(work)

        def rank(slot: Slot) -> tuple[int, ...]:
            return self._taken[slot.device], slot.last_used, slot.index

        self._put(work, min(found, key=rank), size)

    def _kept(self, work: Work) -> tuple[int, list[Slot]]:
        """Returns the tokens of the prompt that a slot already holds, and the slot.

        Fewer than half count as none. The last token of a prompt is always read, since
        the next one is drawn from its output.
        """
        size, found = self._texts.nearest(work.text)
        size = min(size, len(work.prompt) - 1)
        slots = [self.free[i] for i in found]
        if not self._can_set_back:
            slots = [slot for slot in slots if len(slot.tokens) == size]
        if slots and size and 2 * size >= len(work.prompt):
            return size, slots
        return 0, list(self.free.values())

    def _put(self, work: Work, slot: Slot, size: int) -> None:
        """Assigns a slot that already holds `size` tokens of the prompt."""
        self.leave([slot])
        self._taken[slot.device] += 1
        slot.text, slot.last = b"", None
        del slot.tokens[size:]
        work.completion.num_cached = size
        slot.work = work
