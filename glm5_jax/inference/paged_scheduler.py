"""A scheduler whose sequences share pages of the cache.

Requests are admitted in order. A request begins with the pages of its longest known
prefix and takes further pages as it grows. A prompt that another slot is just reading
waits for it, so that a group of rollouts reads its prompt once. If pages run out, the
request that was submitted last is preempted: it waits in front of all others and reads
its tokens again, of which the pages in the tree are kept if they are not needed.

Pages are counted in several places. If ctrl-C comes in between, the next plan makes all
of them free, and running requests read their tokens again.
"""

import collections
import dataclasses
from collections.abc import Sequence

from glm5_jax.inference import pages as pages_lib
from glm5_jax.inference import prefixes, scheduler
from glm5_jax.inference.limits import Limits


class PagedScheduler(scheduler.Scheduler):
    """Decides what each dispatch does, and which pages each sequence has."""

    def __init__(
        self,
        num_slots: int,
        chunk: int,
        num_devices: int,
        limits: Limits,
        num_steps: int,
    ) -> None:
        """Makes free slots and free pages, equally many on each device.

        Args:
          num_slots: number of slots.
          chunk: tokens of one prompt that are read at once.
          num_devices: devices with slots of their own.
          limits: of the pages and dispatches.
          num_steps: most tokens of a sequence that a dispatch draws.
        """
        super().__init__(
            num_slots, chunk, num_devices, prefill_tokens=limits.prefill_tokens
        )
        self._num_steps, self._limits = num_steps, limits
        self._num_devices = num_devices
        self._version: int | None = None  # of the weights that read the trees' pages
        self.page_size = limits.page_size
        self.pools = self._new_pools()

    def _next(self, version: int) -> scheduler.Dispatch | None:
        """Returns the next dispatch, all of whose parts have the pages they need."""
        self._renew(version)
        while (todo := super()._next(version)) is not None:
            for part in sorted(todo.parts, key=lambda part: part.work.order):
                self._provide(part)
            # Some parts may have lost their slots to older requests.
            todo.parts[:] = [p for p in todo.parts if p.slot.work is p.work]
            if todo.parts:
                return todo
        return None

    def advance(
        self, dispatch: scheduler.Dispatch, drawn: list[list[int]], version: int
    ) -> None:
        """Records that a dispatch was done, and shares the pages that it filled."""
        with self._change() as is_torn:
            super().advance(dispatch, drawn, version)
            for part in dispatch.parts:
                slot = part.slot
                # Else it has ended, or several versions have read it.
                is_shared = slot.version == version == self._version
                if slot.work is part.work and is_shared and not is_torn:
                    self._share(slot)

    def release(self, id: int, keep: int = 0) -> scheduler.Slot | None:
        """Removes a request and its use of pages; `keep` changes nothing."""
        with self._change() as is_torn:
            slot = super().release(id, keep)
            if slot is not None and not is_torn:
                self._vacate(slot)
        return slot

    def forget(self) -> None:
        """Makes all pages free, after the cache was lost."""
        super().forget()
        self.pools = self._new_pools()
        for slot in self.slots:
            slot.pages, slot.nodes, slot.pieces = [], [], []

    def num_known(self, prompt: Sequence[int]) -> int:
        """Returns the tokens of a prompt that are in pages of one device."""
        return self.page_size * max(len(pool.match(prompt[:-1])) for pool in self.pools)

    def known(self, tokens: Sequence[int], version: int) -> list[pages_lib.Node]:
        """Returns the pages of the first device that spell a text from its start.

        Args:
          tokens: whole pages.
          version: of the weights that must have read them.
        """
        with self._change() as is_torn:
            if is_torn:
                return []
            self._renew(version)
            return self.pools[0].match(tokens)

    def adopt(
        self, tokens: Sequence[int], first: int, version: int
    ) -> tuple[int, list[pages_lib.Node]]:
        """Makes nodes in host memory, as `Pool.adopt`; the caller writes their rows."""
        with self._change() as is_torn:
            if is_torn:
                return 0, []
            self._renew(version)
            return self.pools[0].adopt(tokens, first)

    def _renew(self, version: int) -> None:
        """Empties the trees if other weights will read from now on."""
        if version != self._version:
            self._version = version
            for pool in self.pools:
                pool.renew()

    def _mend(self) -> None:
        """Makes all pages free, and gives each request a slot or a place in line."""
        self.forget()
        super()._mend()

    @property
    def num_free_pages(self) -> int:
        """Returns the pages of all devices that no sequence uses."""
        return sum(pool.num_available for pool in self.pools)

    def _admit(self, version: int) -> None:
        """Assigns free slots to waiting requests, in order, while pages suffice."""
        self._new = []
        places = _Places(self)
        for id in [*self._waiting]:
            if not places.free:
                return
            work = self._waiting[id]
            text = [*work.prompt, *work.completion.tokens]
            # The last token is always read, as the next one is drawn from it.
            found = {d: self.pools[d].match(text[:-1]) for d in places.free}
            if places.is_being_read(work, found):
                continue
            device = min(found, key=lambda d: (-len(found[d]), places.taken[d], d))
            nodes, pool = found[device], self.pools[device]
            pool.hold(nodes)
            num_hosted = sum(node.host >= 0 for node in nodes)
            needed = self._pages_of(len(text) + 1) - len(nodes) + num_hosted
            left = pool.num_available - places.reserved[device]
            # A page for each running request lets them go on without preemptions.
            if places.taken[device] and left < needed + places.taken[device]:
                pool.let_go(nodes)
                return
            pool.restore(nodes)
            places.reserved[device] += needed - num_hosted
            slot = places.free[device][0]
            self._occupy(slot, work, nodes, version)
            del self._waiting[id]
            places.take(slot)

    def _occupy(
        self,
        slot: scheduler.Slot,
        work: scheduler.Work,
        nodes: list[pages_lib.Node],
        version: int,
    ) -> None:
        """Assigns a slot that begins with the pages of these nodes."""
        size, completion = self._limits.page_size, work.completion
        tokens = [token for node in nodes for token in node.key]
        slot.nodes, slot.pages = nodes, [node.page for node in nodes]
        pieces = [(i * size, node.experts) for i, node in enumerate(nodes)]
        slot.pieces = [piece for piece in pieces if piece[1] is not None]
        slot.tokens, slot.last, slot.version = tokens, None, version
        if not work.was_preempted:
            completion.num_cached = len(tokens)
        slot.work = work

    def _share(self, slot: scheduler.Slot) -> None:
        """Puts the full pages of a slot into the tree."""
        size = self.page_size
        for i in range(len(slot.nodes), len(slot.tokens) // size):
            tokens = slot.tokens[i * size : (i + 1) * size]
            node = self.pools[slot.device].add(slot.nodes, tokens, slot.pages[i])
            slot.nodes.append(node)
            slot.pages[i] = node.page

    def _provide(self, part: scheduler.Part) -> None:
        """Gives a part's slot the pages that it needs; preempts slots if none is left.

        The part's own slot may be the one. The request that was submitted first gets
        all its pages, so that some request always proceeds.
        """
        slot, pool = part.slot, self.pools[part.slot.device]
        num_new = len(part.tokens)
        if slot.is_decoding:
            left = part.work.request.max_new_tokens - part.num_drawn
            num_new = min(self._num_steps, left)
        needed = self._pages_of(part.start + num_new)
        while slot.work is part.work and len(slot.pages) < needed:
            page = pool.take()
            if page is None:
                self._preempt(slot.device)
            else:
                slot.pages.append(page)

    def _preempt(self, device: int) -> None:
        """Takes the slot of the device's request that was submitted last."""
        running = [
            (slot.work.order, slot.work, slot)
            for slot in self.slots
            if slot.work is not None and slot.device == device
        ]
        _, work, slot = max(running, key=lambda entry: entry[0])
        slot.work = slot.last = None
        self._vacate(slot)
        work = dataclasses.replace(work, was_preempted=True)
        self.works[work.request.id] = self._waiting[work.request.id] = work
        self._waiting.move_to_end(work.request.id, last=False)
        self.num_preempted += 1

    def _vacate(self, slot: scheduler.Slot) -> None:
        """Ends a slot's use of its pages."""
        pool = self.pools[slot.device]
        owned = slot.pages[len(slot.nodes) :]
        pool.let_go(slot.nodes)
        pool.give_back(owned)
        slot.tokens, slot.pages, slot.nodes, slot.pieces = [], [], [], []

    def _pages_of(self, num_tokens: int) -> int:
        """Returns the pages of a sequence of this many tokens."""
        return -(-num_tokens // self._limits.page_size)

    def _new_pools(self) -> list[pages_lib.Pool]:
        """Returns a pool of free pages for each device."""
        limits = self._limits
        sizes = limits.num_pages // self._num_devices, limits.page_size
        pools = [
            pages_lib.Pool(*sizes, limits.host_pages) for _ in range(self._num_devices)
        ]
        self.moves = pools[0].moves  # others have no host memory
        return pools


class _Places:
    """The free slots during an admission, and what the others still read."""

    def __init__(self, machine: PagedScheduler) -> None:
        """Looks at every slot once."""
        self._first = prefixes.WORD * machine.page_size  # bytes of a first page
        self._size = machine.page_size
        self.free: dict[int, list[scheduler.Slot]] = {}
        self.taken: collections.Counter[int] = collections.Counter()
        self.reserved: collections.Counter[int] = collections.Counter()
        self._reading: dict[bytes, scheduler.Slot] = {}  # by their first pages
        for slot in machine.slots:
            if slot.work is None:
                self.free.setdefault(slot.device, []).append(slot)
            else:
                self._note(slot)
                if slot.is_reading:
                    text = len(slot.work.prompt) + len(slot.work.completion.tokens) + 1
                    missing = -(-text // self._size) - len(slot.pages)
                    self.reserved[slot.device] += missing

    def take(self, slot: scheduler.Slot) -> None:
        """Notes that a slot has got a request."""
        self.free[slot.device].remove(slot)
        if not self.free[slot.device]:
            del self.free[slot.device]
        self._note(slot)

    def is_being_read(
        self, work: scheduler.Work, found: dict[int, list[pages_lib.Node]]
    ) -> bool:
        """Returns whether a slot is reading pages with which the prompt begins.

        Args:
          work: that waits.
          found: nodes of each device with a free slot, with which the prompt begins.
        """
        slot = self._reading.get(work.text[: self._first])
        if slot is None or slot.work is None or slot.device not in found:
            return False
        common = prefixes.common(work.text, slot.work.text)
        shared = min(common, len(work.prompt) - 1) // self._size
        return shared > len(found[slot.device])

    def _note(self, slot: scheduler.Slot) -> None:
        """Counts a request, and what it reads."""
        assert slot.work is not None
        self.taken[slot.device] += 1
        if slot.is_reading:
            self._reading.setdefault(slot.work.text[: self._first], slot)
