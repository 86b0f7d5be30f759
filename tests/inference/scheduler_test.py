"""Checks which request gets a slot, without arrays, so thousands of turns are fast."""

import dataclasses
import random
import time

from absl.testing import parameterized

from glm5_jax.inference import parts, prefixes, scheduler
from glm5_jax.inference.requests import Request
from tests import environment
from tests.inference import fake_devices

CHUNK = 2048


def make(num_slots, chunk=CHUNK, num_devices=1, prefill_tokens=10**6, **options):
    return scheduler.Scheduler(
        num_slots, chunk, num_devices, prefill_tokens=prefill_tokens, **options
    )


def draw(machine, dispatch, token=5):
    """Records a dispatch that drew a token wherever one is due."""
    drawn = [[token] * part.is_last for part in dispatch.parts]
    machine.advance(dispatch, drawn, 0)


def answer(machine, request):
    """Lets a request read its prompt and draw one token."""
    machine.submit(request)
    draw(machine, machine.plan(0))
    machine.release(request.id)


class Conversations:
    """Episodes of several turns on a scheduler, with made-up tokens."""

    def __init__(self, num_slots, num_concurrent, late=0, keep=0, num_turns=6):
        self.machine = make(num_slots)
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
        machine = make(2)
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
        machine = make(1)
        machine.submit(Request(0, [1] * 20, 1, keep=9))
        machine.advance(machine.plan(0), [[5]], 0)
        machine.release(0, keep=9)
        machine.submit(Request(1, [2] * 20, 1))
        self.assertEqual(machine.plan(0).kind, "fresh")

    @parameterized.parameters(1, 2)
    def test_a_waiting_request_is_overtaken_64_times_a_slot(self, num_slots):
        """Each turn is followed by the next at once; two conversations wait."""
        machine, order, num_ids = make(num_slots), [], 3 * num_slots
        for episode in range(num_slots):
            machine.submit(Request(episode, [10 + episode] * 20, 1))
        for step in range(200):
            dispatch = machine.plan(0)
            draw(machine, dispatch)
            order += [part.work.prompt[0] - 10 for part in dispatch.parts]
            for part in dispatch.parts:
                machine.release(part.work.request.id)
            if step == 0:
                for episode in range(num_slots, 3 * num_slots):
                    machine.submit(Request(episode, [10 + episode] * 20, 1))
            for part in dispatch.parts:
                machine.submit(Request(num_ids, [*part.work.prompt, 5], 1))
                num_ids += 1
        turns = 65 * num_slots  # a first turn of each slot's, and 64 that overtook
        for first in range(3):
            found = order[first * turns : (first + 1) * turns]
            wanted = range(first * num_slots, (first + 1) * num_slots)
            self.assertEqual({*found}, {*wanted})

    def test_a_turn_after_one_token_overtakes_too(self):
        machine = make(1)
        answer(machine, Request(0, [8], 1))
        machine.submit(Request(1, [9, 9, 9], 1))
        machine.submit(Request(2, [8, 5], 1))
        (part,) = machine.plan(0).parts
        self.assertEqual((part.work.request.id, part.start), (2, 1))

    def test_a_turn_that_came_before_its_slot_was_free_overtakes_too(self):
        machine = make(1)
        machine.submit(Request(0, [8] * 4, 9))
        draw(machine, machine.plan(0))
        machine.submit(Request(1, [9, 9, 9], 1))
        machine.submit(Request(2, [*[8] * 4, 5, 7], 1))
        self.assertEqual(machine.plan(0).kind, "decode")
        machine.release(0)
        (part,) = machine.plan(0).parts
        self.assertEqual((part.work.request.id, part.start), (2, 4))


TEXT = [*range(1, 11)]  # nine tokens that were read and, with the last, drawn


class SlotsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("next_turn", [*TEXT[:9], 5, 7], 9),
        ("another_answer", [*TEXT[:9], 6, 7], 9),
        ("same_prompt", TEXT[:9], 8),
        ("shorter_prompt", TEXT[:5], 4),
        ("half", [*TEXT[:5], 50, 51, 52, 53, 54], 5),
        ("less_than_half", [*TEXT[:5], 50, 51, 52, 53, 54, 55], 0),
        ("another", [50, 51], 0),
    )
    def test_a_prompt_keeps_the_tokens_that_it_shares_with_the_slot(self, prompt, size):
        """Its last token is read in any case, as the next one is drawn from it."""
        machine = make(1)
        answer(machine, Request(0, TEXT[:9], 1))
        work = machine.submit(Request(1, prompt, 1))
        self.assertEqual(work.completion.num_cached, 0)  # while it waits
        (part,) = machine.plan(0).parts
        self.assertEqual((part.start, part.tokens), (size, prompt[size:]))
        self.assertEqual(work.completion.num_cached, size)

    def test_tokens_that_other_weights_read_are_read_again(self):
        machine = make(1)
        answer(machine, Request(0, TEXT, 1))
        machine.submit(Request(1, [*TEXT, 5, 7], 1))
        (part,) = machine.plan(1).parts
        self.assertEqual((part.start, len(part.tokens)), (0, 12))

    def test_a_lost_cache_is_read_again_with_the_drawn_tokens(self):
        machine = make(1)
        work = machine.submit(Request(0, TEXT, 9))
        draw(machine, machine.plan(0))
        work.completion.tokens.append(5)
        machine.forget()
        (part,) = machine.plan(0).parts
        self.assertEqual((part.start, part.tokens), (0, [*TEXT, 5]))
        self.assertTrue(part.is_last)

    def test_an_unused_slot_is_taken_before_one_with_a_text(self):
        machine = make(2)
        answer(machine, Request(0, TEXT, 1))
        answer(machine, Request(1, [50] * 9, 1))
        machine.submit(Request(2, [*TEXT, 5, 7], 1))
        (part,) = machine.plan(0).parts
        self.assertEqual(part.start, 10)

    def test_the_slot_that_was_used_last_is_taken_last(self):
        machine = make(2)
        for id, token in enumerate((11, 12, 13, 14)):
            answer(machine, Request(id, [token] * 9, 1))
        self.assertEqual([slot.tokens[0] for slot in machine.slots], [13, 14])
        answer(machine, Request(4, [*[13] * 9, 5], 1))
        answer(machine, Request(5, [15] * 9, 1))
        self.assertEqual([slot.tokens[0] for slot in machine.slots], [13, 15])

    def test_no_slot_is_kept_unless_a_request_asks_for_it(self):
        """Neither that of an aborted request nor that of one that ended."""
        machine = make(2)
        requests = [Request(id, [11 + id] * 9, 9) for id in range(4)]
        for request in requests[:2]:
            machine.submit(request)
        draw(machine, machine.plan(0))
        for request, keep in zip(requests, ((), (requests[2].keep,)), strict=False):
            machine.release(request.id, *keep)
            machine.submit(requests[request.id + 2])
            self.assertEqual(machine.plan(0).kind, "fresh")
            draw(machine, machine.plan(0))

    def test_aborted_requests_are_gone(self):
        machine = make(1)
        for id in range(2):
            machine.submit(Request(id, [11 + id] * 9, 9))
        machine.plan(0)
        self.assertEqual(([*machine.works], machine.num_waiting), ([0, 1], 1))
        self.assertIs(machine.release(0), machine.slots[0])
        self.assertIsNone(machine.release(1))
        self.assertEqual((machine.works, machine.num_waiting), ({}, 0))
        self.assertIsNone(machine.plan(0))

    def test_a_dispatch_that_failed_is_planned_again_with_those_that_came(self):
        machine = make(2)
        machine.submit(Request(0, TEXT, 1))
        self.assertLen(machine.plan(0).parts, 1)
        machine.submit(Request(1, TEXT, 1))
        self.assertLen(machine.plan(0).parts, 2)

    def test_requests_go_to_the_device_with_fewest(self):
        machine = make(8, num_devices=2)
        for id in range(4):
            machine.submit(Request(id, [11 + id] * 9, 9))
        draw(machine, machine.plan(0))
        busy = [slot for slot in machine.slots if slot.work is not None]
        self.assertEqual([slot.device for slot in busy], [0, 0, 1, 1])
        for slot in busy[2:]:
            machine.release(slot.work.request.id)
        for id in range(4, 6):
            machine.submit(Request(id, [11 + id] * 9, 9))
        devices = [part.slot.device for part in machine.plan(0).parts]
        self.assertEqual(devices, [1, 1])

    def test_slots_have_no_pages(self):
        machine = make(1)
        answer(machine, Request(0, TEXT, 1))
        self.assertEqual((machine.num_free_pages, machine.num_known(TEXT)), (0, 0))


class InterruptTest(parameterized.TestCase):
    def test_ctrl_c_at_any_line_loses_no_request(self):
        """Two slots, and four requests of which one has ended."""
        num_interrupts, line = 0, 0
        while num_interrupts == line:
            machine, ended, line = make(2), [], line + 1
            for id in range(3):
                machine.submit(Request(id, [11 + id] * 9, 9))
            draw(machine, machine.plan(0))
            try:
                with fake_devices.ctrl_c(line):
                    machine.submit(Request(3, [14] * 9, 9))
                    machine.release(0)
                    machine.plan(0)
            except KeyboardInterrupt:
                num_interrupts += 1
            wanted = sorted(machine.works)
            for _ in range(9):
                if (dispatch := machine.plan(0)) is None:
                    break
                works = [slot.work for slot in machine.slots if slot.work is not None]
                ids = [work.request.id for work in works]
                self.assertLen({*ids} & machine.works.keys(), len(ids))
                self.assertNotIn(0, machine._waiting)
                draw(machine, dispatch)
                for part in dispatch.parts:
                    if dispatch.kind == "decode":
                        ended.append(part.work.request.id)
                        machine.release(ended[-1])
            self.assertEqual(sorted(ended), wanted, line)
            self.assertFalse(machine._is_torn)
        self.assertGreater(num_interrupts, 30)


class StallTest(parameterized.TestCase):
    @parameterized.product(budget=(100, 400, 2000), chunk=(48, 128))
    def test_decoding_waits_for_a_bounded_number_of_tokens(self, budget, chunk):
        """One sequence draws while short and long prompts never stop coming."""
        rng = random.Random(0)
        machine = make(8, chunk, prefill_tokens=budget)
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


class OrderTest(parameterized.TestCase):
    def kinds(self, machine, number):
        """Runs dispatches; returns what each did, and for which requests."""
        found = []
        for _ in range(number):
            dispatch = machine.plan(0)
            ids = [part.work.request.id for part in dispatch.parts]
            found.append((dispatch.kind, *ids))
            draw(machine, dispatch)
        return found

    def test_others_draw_between_the_parts_of_a_long_prompt(self):
        machine = make(2, 16)
        machine.submit(Request(0, [11] * 9, 99))
        draw(machine, machine.plan(0))
        machine.submit(Request(1, [12] * 48, 99))
        wanted = [("fresh", 1), ("decode", 0), ("behind", 1), ("decode", 0)]
        wanted += [("behind", 1), ("decode", 0, 1)]
        self.assertEqual(self.kinds(machine, 6), wanted)

    def test_a_new_prompt_is_read_before_others_draw_again(self):
        machine = make(3, 16)
        for id in range(3):
            machine.submit(Request(id, [11 + id] * 16, 99))
            self.assertEqual(self.kinds(machine, 1), [("fresh", id)])
        self.assertEqual(self.kinds(machine, 1), [("decode", 0, 1, 2)])

    def test_the_oldest_request_comes_first(self):
        """It has the second slot; the first part of a younger one waits for it."""
        machine = make(2, 16)
        machine.submit(Request(0, [11] * 9, 1))
        machine.submit(Request(1, [12] * 48, 1))
        self.assertEqual(self.kinds(machine, 1), [("fresh", 0, 1)])
        machine.release(0)
        machine.submit(Request(2, [13] * 9, 1))
        wanted = [("behind", 1), ("behind", 1), ("fresh", 2)]
        self.assertEqual(self.kinds(machine, 3), wanted)

    def test_tokens_that_may_still_be_read(self):
        """Nobody waits for the first prompts; a draw allows as many as before."""
        machine, found = make(3, prefill_tokens=100), []
        self.assertEqual(machine.num_readable, 100)
        for size in (30, 70, 80):
            machine.submit(Request(size, [size] * size, 99))
            dispatch = machine.plan(0)
            found.append((dispatch.kind, machine.num_readable))
            draw(machine, dataclasses.replace(dispatch, num_tokens=size))
        self.assertEqual(found, [("fresh", 100), ("fresh", 70), ("decode", 0)])
        self.assertEqual(machine.num_readable, 100)
        self.assertEqual(machine.plan(0).kind, "fresh")


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

    def test_no_texts_have_no_prefix(self):
        found = prefixes.Texts({}).nearest(prefixes.encoded([1]))
        self.assertEqual(found, (0, []))

    def test_many_slots_with_a_common_prefix_are_fast(self):
        """0.07 s; a comparison of every pair, token by token, took 4 s."""
        machine, shared = make(256), [*range(2000)]
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
