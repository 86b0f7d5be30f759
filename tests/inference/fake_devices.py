"""Devices without arrays, on which an engine's bookkeeping is tested quickly.

A row of their cache holds all tokens up to it, so that a row of another sequence is
noticed at once. The experts of a token are the token itself. With drafts, a dispatch is
rounds that keep some of them, and the rows of the others are written too.
"""

import contextlib
import dataclasses
import sys
from unittest import mock

import jax
import numpy as np

from glm5_jax.inference import (
    engine,
    handover,
    host_pages,
    paged_scheduler,
    pages,
    results,
    runner,
    scheduler,
    steps,
    weights,
)
from glm5_jax.inference.limits import Limits
from tests.inference import engine_test

MODEL = engine_test.COUNTED
DRAFTING = dataclasses.replace(MODEL, num_nextn_predict_layers=1)
REJECTED = -7  # what a row of a rejected draft ends with
PAGE_SIZE, CAPACITY, CHUNK, NUM_STEPS, PREFILL_TOKENS = 4, 64, 16, 5, 40
MAX_PREFILLS = PREFILL_TOKENS // 16 + 1  # between two draws; each reads 16 or more
BOOKKEEPING = {
    module.__file__ for module in (engine, paged_scheduler, pages, results, scheduler)
}


@dataclasses.dataclass(frozen=True)
class FakeRunner(runner.Runner):
    """Checks every dispatch, and may fail in the next ones."""

    rows: dict = dataclasses.field(default_factory=dict)  # of the cache
    # For each of the next dispatches: None, or whether it takes the cache as it fails.
    faults: list = dataclasses.field(default_factory=list)
    programs: set = dataclasses.field(default_factory=set)  # that ran
    waited: list = dataclasses.field(default_factory=list)  # prefills since a draw
    num_read: list = dataclasses.field(default_factory=list)  # tokens of prompts

    def empty(self):
        """Returns a state without sequences."""
        self.rows.clear()
        return small_state(self.shapes.num_slots)

    def run(self, todo, state, weights):
        """Computes what the devices would; checks what they read."""
        fault = self.faults.pop(0) if self.faults else None
        if fault is False:
            raise RuntimeError("injected")
        is_decode, number = todo.kind == "decode", 0
        width = NUM_STEPS if is_decode else 1
        if is_decode and self.drafter.is_on:
            number = self.drafter.choose(len(todo.parts))
            width = self._rounds(number).most_drawn
        self._note(todo, number)
        num_parts, longest = len(todo.parts), max(len(p.tokens) for p in todo.parts)
        ids = np.full((num_parts, width), -1, np.int32)
        experts = np.zeros((1, num_parts, longest + width, 1), np.int32)
        kept = [[] for _ in todo.parts]  # drafts, by round
        for row, part in enumerate(todo.parts):
            self._check(part)
            new = drawn(part, width) if part.is_last else []
            if is_decode and self.drafter.is_on:
                new, kept[row] = self._rounds_of(part, new, number)
            ids[row, : len(new)] = new
            read = [*part.tokens, *new[:-1]]
            experts[0, row, : len(read), 0] = read
            self._write(part, read, weights.version)
            self._write_rejected(part, part.start + len(read), number, weights.version)
        if fault is True:
            for array in jax.tree.leaves(state):
                array.delete()
            raise RuntimeError("injected, and the cache is lost")
        if is_decode and self.drafter.is_on:
            # More drafts take longer, so that their number changes.
            self.drafter.record(num_parts, number, tally(kept, number), 1.0 + number)
        logprobs = np.where(ids < 0, 0, -ids).astype(np.float32)
        found = steps.Drawn(ids, logprobs, experts)
        return results.Result(todo, [*range(num_parts)], state, found, weights.version)

    def _rounds_of(self, part, new, number):
        """Returns the tokens of a dispatch's rounds, and the drafts that each keeps."""
        size, kept = 0, []
        while size < len(new) and len(kept) < self._rounds(number).num_rounds:
            request, position = part.work.request, part.num_drawn + size
            accepted = (3 * request.id + position) % 5 % (number + 1)
            kept.append(min(accepted, len(new) - size))
            size += min(accepted + 1, len(new) - size)
        return new[:size], kept

    def _note(self, todo, number):
        """Checks that programs are few, and that no draw waits for many prompts."""
        if todo.kind == "decode":
            rows = self.shapes.decode_rows
            program = next(n for n in rows if n >= len(todo.parts)), number
            self.waited.clear()
        else:
            program = (todo.kind, self.shapes._shape(todo.parts))
            shapes = self.shapes.prefill_shapes(self.limits.prefill_tokens)
            assert program[1] in shapes, "a program that warm_up does not compile"
            self.waited.append(todo.num_tokens)
            self.num_read.append(sum(len(part.tokens) for part in todo.parts))
        self.programs.add(program)

    def _check(self, part):
        """Checks the rows of a sequence, and what the scheduler says of it."""
        slot, work = part.slot, part.work
        text = [*work.prompt, *work.completion.tokens]
        assert slot.tokens == text[: part.start], "the slot has another sequence"
        assert [*part.tokens] == text[part.start :][: len(part.tokens)]
        for i in range(part.start):
            found, _ = self.rows[self._place(slot, i)]
            assert found == tuple(text[: i + 1]), "another sequence's row"
        if 0 < part.start == work.completion.num_cached and not part.num_drawn:
            places = (self._place(slot, i) for i in range(part.start))
            versions = {self.rows[place][1] for place in places}
            assert versions == {slot.version}, "a prefix that other weights read"

    def _write(self, part, read, version):
        """Writes the rows of tokens."""
        slot, shared = part.slot, {node.page for node in part.slot.nodes}
        text = [*part.work.prompt, *part.work.completion.tokens][: part.start]
        for i, token in enumerate(read, part.start):
            text.append(token)
            place = self._place(slot, i)
            assert place[0] not in shared, "a page of the tree is written"
            self.rows[place] = tuple(text), version

    def _write_rejected(self, part, size, number, version):
        """Writes rows behind a sequence's end, as far as it has room for them."""
        slot, shared = part.slot, {node.page for node in part.slot.nodes}
        room = len(slot.pages) * PAGE_SIZE if self.limits.num_pages else CAPACITY
        for i in range(size, min(size + number, room)):
            place = self._place(slot, i)
            assert place[0] not in shared, "a draft is written to a page of the tree"
            self.rows[place] = (REJECTED,), version

    def _place(self, slot, i):
        """Returns the place of a sequence's row."""
        if self.limits.num_pages:
            return slot.pages[i // PAGE_SIZE], i % PAGE_SIZE
        return ("slot", slot.index), i


class FakeHostPages(host_pages.HostPages):
    """Host memory for the rows of a FakeRunner."""

    def __init__(self, limits):
        self.rows, self.num_pages, self.of_device = {}, limits.host_pages, None
        self.num_restored = 0

    def move(self, moves, state):
        while moves:
            move = moves[0]
            assert 0 <= move.host < self.num_pages
            for i in range(PAGE_SIZE):
                if move.to_host:
                    self.rows[move.host, i] = self.of_device[move.page, i]
                else:
                    self.of_device[move.page, i] = self.rows[move.host, i]
            self.num_restored += not move.to_host
            moves.popleft()
        return state

    def reserve(self, rows):
        """Takes no memory."""

    def put(self, hosts, rows):
        """Writes pages of `handed_over`."""
        numbers = next(iter(rows.values()))[0]
        for host, number in zip(hosts, numbers, strict=True):
            for i in range(PAGE_SIZE):
                text = self.text[: number * PAGE_SIZE + i + 1]
                self.rows[host, i] = tuple(text), self.version


def hand_over(machine, text, first):
    """Hands the whole pages of a text over, from page `first` on."""
    view, number = machine.view(), len(text) // PAGE_SIZE
    text = text[: number * PAGE_SIZE]
    machine._host.text, machine._host.version = text, machine.version
    experts = np.reshape(text, (1, number, PAGE_SIZE, 1))[:, first:]
    arrays = dict.fromkeys(view.entries, np.arange(number)[None, first:])
    arrays[handover.EXPERTS] = experts
    pages = handover.Pages(view.mark, machine.version, first, arrays)
    return handover.take(view, text, pages)


def token_of(request, position):
    """Returns the token that every engine draws."""
    return (request.id * 7919 + 31 * position) % 89 + 1


def drawn(part, most):
    """Returns the next tokens of a part."""
    request, new = part.work.request, []
    left = request.max_new_tokens - part.num_drawn
    for i in range(min(most, left)):
        new.append(token_of(request, part.num_drawn + i))
        if new[-1] in request.stop_ids:
            break
    return new


def tally(kept, number):
    """Returns what became of drafts: `kept` has a number for each round of a row."""
    places = np.arange(number)
    counts = [np.reshape(row, (-1, 1)) for row in kept]
    accepted = [(n > places).sum(0) for n in counts]
    judged = [np.full(number, len(row)) for row in kept]
    rounds = np.array([len(row) for row in kept])
    return steps.Tally(rounds, np.stack(judged), np.stack(accepted))


def completed(request):
    """Returns all tokens of a request."""
    tokens = [token_of(request, i) for i in range(request.max_new_tokens)]
    ends = [i for i, token in enumerate(tokens) if token in request.stop_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def small_state(num_slots):
    """Returns a state whose arrays nobody reads."""
    return steps.empty(MODEL, num_slots, 1, 1)


def make_engine(num_slots, num_pages, **limits):
    """Makes an engine on these devices, while `installed`; with drafts if asked."""
    model = DRAFTING if limits.get("num_drafts") else MODEL
    limits = {"page_size": PAGE_SIZE, "prefill_tokens": PREFILL_TOKENS} | limits
    machine = engine.Engine(
        {},
        model,
        num_slots=num_slots,
        capacity=CAPACITY,
        chunk=CHUNK,
        num_steps=NUM_STEPS,
        with_experts=True,
        limits=Limits(num_pages=num_pages, **limits),
    )
    machine._host.of_device = machine._runner.rows
    return machine


@contextlib.contextmanager
def installed():
    """Lets engines use these devices, and weights that are only a version."""

    def make(params, version, config, mesh):
        return weights.Weights(params, params, version)

    with (
        mock.patch.object(host_pages, "HostPages", FakeHostPages),
        mock.patch.object(runner, "Runner", FakeRunner),
        mock.patch.object(weights, "make", make),
    ):
        yield


def check_pages(machine):
    """Checks that each page is free, or one slot's, or in the tree, once."""
    scheduler = machine._scheduler
    if scheduler._is_torn or not machine._limits.num_pages:
        return
    (pool,) = scheduler.pools
    nodes, todo = [], [*pool._root.children.values()]
    while todo:
        nodes.append(todo.pop())
        todo += nodes[-1].children.values()
    users = {}
    for slot in scheduler.slots:
        for node in slot.nodes:
            users.setdefault(id(node), [node, 0])[1] += 1
        assert [node.page for node in slot.nodes] == slot.pages[: len(slot.nodes)]
    for node, number in users.values():
        assert node.num_users == number
        if not node.is_current:
            nodes.append(node)
    idle = [node for node in nodes if node.num_users == 0]
    assert {id(n) for n in pool._idle} == {id(n) for n in idle if n.host < 0}
    assert {id(n) for n in pool._hosted} == {id(n) for n in idle if n.host >= 0}
    hosted = [node.host for node in nodes if node.host >= 0]
    num_hosted = machine._limits.host_pages
    assert sorted([*pool._free_hosted, *hosted]) == [*range(num_hosted)]
    nodes = [node for node in nodes if node.host < 0]
    held = [page for slot in scheduler.slots for page in slot.pages[len(slot.nodes) :]]
    found = [*pool._free, *held, *(node.page for node in nodes)]
    assert sorted(found) == [*range(pool.num_pages)], "pages leaked or are held twice"


@contextlib.contextmanager
def ctrl_c(at_line):
    """Raises KeyboardInterrupt before the n-th line of the engine's bookkeeping."""
    left = [at_line]

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in BOOKKEEPING:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
