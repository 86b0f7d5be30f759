"""Checks which request gets a slot, without arrays, so thousands of turns are fast."""

import random
import time
from unittest import mock

from absl.testing import parameterized

from glm5_jax.inference import parts, prefixes, scheduler
from glm5_jax.inference.requests import Request
from tests import environment

CHUNK = 2048


class Conversations:
    """Episodes of several turns on a scheduler, with made-up tokens."""

    def __init__(self, num_slots, num_concurrent, late=0, keep=0, num_turns=6):
        self.machine = scheduler.Scheduler(num_slots, CHUNK)
        self.rng, self.late, self.keep = random.Random(0), late, keep
        self.num_turns, self.num_started, self.num_ids = num_turns, 0, 0
        self.num_read = self.num_new = 0
        self.live, self.answers = {}, []
        for _ in range(num_concurrent):
            self.start(5 * num_slots)

    def new(self, size):
        self.num_ids += size
        self.num_new += size
        return list(range(self.num_ids - size, self.num_ids))

    def start(self, limit):
        if self.num_started < limit:
            self.num_started += 1
            self.submit(self.num_started, 0, self.new(400))

    def submit(self, episode, turn, prompt):
        id = episode * self.num_turns + turn
        keep = self.keep if turn + 1 < self.num_turns else 0
        size = self.rng.randint(50, 150)
        self.live[id] = episode, turn
        self.machine.submit(Request(id, prompt, size, keep=keep))

    def run(self):
        """Returns the tokens that were read for each new one of the prompts."""
        clock, limit = 0, 5 * len(self.machine.slots)
        while self.live or self.answers:
            clock += 1
            due = [answer for answer in self.answers if answer[0] <= clock]
            self.answers = [answer for answer in self.answers if answer[0] > clock]
            for _, *what in due:
                self.submit(*what)
            dispatch = self.machine.plan(0)
            for work in self.dispatch(dispatch) if dispatch else ():
                request, tokens = work.request, work.completion.tokens
                self.machine.release(request.id, request.keep)
                episode, turn = self.live.pop(request.id)
                if turn + 1 == self.num_turns:
                    self.start(limit)
                    continue
                prompt = [*work.prompt, *tokens, *self.new(100)]
                self.answers.append((clock + self.late, episode, turn + 1, prompt))
        return self.num_read / self.num_new

    def dispatch(self, dispatch):
        """Runs a dispatch; returns the requests that finished."""
        drawn = []
        for part in dispatch.parts:
            left = part.work.request.max_new_tokens - part.num_drawn
            size = min(16 if dispatch.kind == "decode" else 1, left) * part.is_last
            self.num_ids += size
            drawn.append(list(range(self.num_ids - size, self.num_ids)))
            self.num_read += len(part.tokens) * (dispatch.kind != "decode")
            part.work.completion.tokens.extend(drawn[-1])
        self.machine.advance(dispatch, drawn, 0)
        works = [part.work for part in dispatch.parts]
        sizes = [work.request.max_new_tokens for work in works]
        pairs = zip(works, sizes, strict=True)
        return [w for w, size in pairs if len(w.completion.tokens) == size]


class ConversationsTest(parameterized.TestCase):
    @parameterized.parameters((16, 0, 0), (32, 0, 0), (16, 4, 4), (32, 4, 4))
    def test_a_turn_does_not_read_its_prefix_again(self, concurrent, late, keep):
        """Covers twice as many conversations as slots, and late answers."""
        self.assertLess(Conversations(16, concurrent, late, keep).run(), 1.1)

    def test_an_abandoned_slot_is_given_to_another_request(self):
        machine = scheduler.Scheduler(2, CHUNK)
        machine.submit(Request(0, [1] * 20, 1, keep=3))
        machine.submit(Request(1, [2] * 20, 99))
        first = machine.plan(0)
        machine.advance(first, [[5], [5]], 0)
        machine.release(0, keep=3)
        machine.submit(Request(2, [3] * 20, 1))
        kinds = []
        while machine.works[2] not in [slot.work for slot in machine.slots]:
            dispatch = machine.plan(0)
            kinds.append(dispatch.kind)
            machine.advance(dispatch, [[6] for _ in dispatch.parts], 0)
        self.assertEqual(kinds, ["decode", "decode", "decode", "fresh"])

    def test_a_kept_slot_never_makes_a_request_wait(self):
        machine = scheduler.Scheduler(1, CHUNK)
        machine.submit(Request(0, [1] * 20, 1, keep=9))
        machine.advance(machine.plan(0), [[5]], 0)
        machine.release(0, keep=9)
        machine.submit(Request(1, [2] * 20, 1))
        self.assertEqual(machine.plan(0).kind, "fresh")

    @mock.patch.object(scheduler, "MAX_PASSED", 3)
    def test_a_waiting_request_is_overtaken_a_bounded_number_of_times(self):
        machine = scheduler.Scheduler(1, CHUNK)
        machine.submit(Request(0, [1] * 20, 1))
        for turn in range(1, 9):
            dispatch = machine.plan(0)
            work = dispatch.parts[0].work
            if work.prompt == [2] * 20:
                break
            machine.advance(dispatch, [[5]], 0)
            machine.release(work.request.id)
            if turn == 1:
                machine.submit(Request(100, [2] * 20, 1))
            machine.submit(Request(turn, [*work.prompt, 5], 1))
        self.assertEqual(turn, 5)  # after the first turn and three that overtook it


class StallTest(parameterized.TestCase):
    @parameterized.product(budget=(100, 400, 2000), chunk=(48, 128))
    def test_decoding_waits_for_a_bounded_number_of_tokens(self, budget, chunk):
        """One sequence draws while short and long prompts never stop coming."""
        rng = random.Random(0)
        machine = scheduler.Scheduler(8, chunk, prefill_tokens=budget)
        shapes, waited, longest, num_draws = parts.Shapes(8, 1, chunk), 0, 0, 0
        machine.submit(Request(0, [5] * 9, 10**6))
        for step in range(1, 400):
            for id in range(2 * step, 2 * step + 2):
                size = rng.choice((3, 40, 3000))
                machine.submit(Request(id, [id + 7] * size, 1))
            todo = machine.plan(0)
            if todo.kind == "decode":
                waited, num_draws = 0, num_draws + 1
            else:
                todo = shapes.within(todo, machine.num_readable)
                if num_draws:
                    waited += todo.num_tokens
            longest = max(longest, waited)
            machine.advance(todo, [[4] * part.is_last for part in todo.parts], 0)
            for part in todo.parts:
                if part.is_last and part.work.request.id:
                    machine.release(part.work.request.id)
        self.assertGreater(num_draws, 20)
        self.assertLess(longest, budget + chunk)


class PrefixesTest(parameterized.TestCase):
    def test_equals_a_loop(self):
        rng = random.Random(0)

        def common(a, b):
            pairs = enumerate(zip(a, b, strict=False))
            return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))

        for _ in range(200):
            texts = {i: rng.choices((0, 1, 300, 2**31 - 1), k=6) for i in range(9)}
            texts = {i: text[: rng.randint(0, 6)] for i, text in texts.items()}
            found = prefixes.Texts({i: prefixes.encoded(t) for i, t in texts.items()})
            gone = rng.randrange(9)
            found.remove(prefixes.encoded(texts.pop(gone)), gone)
            prompt = rng.choices((0, 1, 300, 2**31 - 1), k=5)
            sizes = {i: common(text, prompt) for i, text in texts.items()}
            longest = max(sizes.values())
            size, keys = found.nearest(prefixes.encoded(prompt))
            self.assertEqual(size, longest)
            wanted = [i for i, n in sizes.items() if n == longest]
            self.assertCountEqual(keys, wanted)

    def test_many_slots_with_a_common_prefix_are_fast(self):
        """0.07 s; a comparison of every pair, token by token, took 4 s."""
        machine, shared = scheduler.Scheduler(256, CHUNK), [*range(2000)]
        for slot in machine.slots:
            slot.tokens, slot.version = [*shared, slot.index], 0
        for i in range(256):
            machine.submit(Request(i, [*shared, 10**6 + i], 10))
        began = time.process_time()
        dispatch = machine.plan(0)
        self.assertLess(time.process_time() - began, 1)
        self.assertEqual([len(part.tokens) for part in dispatch.parts], [1] * 256)


if __name__ == "__main__":
    environment.main()
