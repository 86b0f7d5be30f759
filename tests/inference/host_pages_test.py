"""Pages that went to host memory and come back are the same, bit for bit."""

import collections
import dataclasses
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax.inference import host_pages, steps
from glm5_jax.inference.limits import Limits
from glm5_jax.inference.pages import Move, Node
from tests import environment
from tests.inference import engine_test

PAGES, SIZE, HOSTED = 12, 2, 11
LIMITS = Limits(num_pages=PAGES, page_size=SIZE, host_pages=HOSTED)


def make_state():
    """Returns a state whose pages are all different."""
    state = steps.empty(engine_test.COUNTED, 1, PAGES * SIZE, 1, (PAGES, SIZE))
    entries = {
        name: jnp.asarray(np.arange(x.size).reshape(x.shape), x.dtype)
        for name, x in state.cache.entries.items()
    }
    cache = dataclasses.replace(state.cache, entries=entries)
    return dataclasses.replace(state, cache=cache)


def read(state):
    return {name: np.asarray(x) for name, x in state.cache.entries.items()}


class HostPagesTest(parameterized.TestCase):
    def test_moves_are_made_in_their_order(self):
        """As a loop does; ten pages are more than one copy moves."""
        there = [Move(True, page, 10 - page) for page in range(10)]
        swapped = [Move(False, 4, 10), Move(False, 0, 6), Move(True, 4, 0)]
        moves = [*there, *swapped, Move(False, 11, 0), Move(False, 10, 0)]
        machine, state = host_pages.HostPages(LIMITS), make_state()
        want, hosted = {k: x.copy() for k, x in read(state).items()}, {}
        for name, x in want.items():
            for move in moves:
                if move.to_host:
                    hosted[name, move.host] = x[:, move.page].copy()
                else:
                    x[:, move.page] = hosted[name, move.host]
        queue = collections.deque(moves)
        state = machine.move(queue, state)
        self.assertEmpty(queue)
        self.assertEqual(machine.num_restored, 4)
        for name, x in read(state).items():
            np.testing.assert_array_equal(x, want[name])

    def test_one_copy_moves_eight_pages(self):
        machine, state = host_pages.HostPages(LIMITS), make_state()
        for number, wanted in ((8, 1), (9, 2)):
            moves = collections.deque(Move(True, i, i) for i in range(number))
            read_pages = host_pages._read
            with mock.patch.object(host_pages, "_read", wraps=read_pages) as spy:
                machine.move(moves, state)
            self.assertEqual(spy.call_count, wanted)

    def test_copies_of_pages_wherever_they_are(self):
        machine, state = host_pages.HostPages(LIMITS), make_state()
        want = read(state)
        moves = collections.deque([Move(True, 3, 0), Move(True, 5, 1)])
        state = machine.move(moves, state)
        places = [(7, -1), (-1, 1), (0, -1), (-1, 0), *((i, -1) for i in range(1, 10))]
        nodes = [Node(page, host=host) for page, host in places]
        pages = [7, 5, 0, 3, *range(1, 10)]
        for number in (13, 3, 2, 0):
            found = machine.copied(nodes[:number], state.cache.entries)
            for name, x in found.items():
                np.testing.assert_array_equal(x, want[name][:, pages[:number]])

    def test_rows_of_another_engine(self):
        state, source = make_state(), host_pages.HostPages(LIMITS)
        rows = source.copied([Node(2), Node(4)], state.cache.entries)
        target = host_pages.HostPages(LIMITS)
        target.reserve(rows)
        target.put([9, 0], rows)
        moves = collections.deque([Move(False, 6, 9), Move(False, 8, 0)])
        want = read(state)
        for name, x in read(target.move(moves, state)).items():
            np.testing.assert_array_equal(x[:, [6, 8]], want[name][:, [2, 4]])

    def test_memory_that_is_missing_is_noticed_before_the_first_copy(self):
        limits = dataclasses.replace(LIMITS, host_pages=2**31 - 1)
        rows = {"vast": np.zeros((1, 1, 2**20), np.float32)}
        with self.assertRaises(MemoryError):
            host_pages.HostPages(limits).reserve(rows)


if __name__ == "__main__":
    environment.main()
