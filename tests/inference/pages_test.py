"""Checks that sequences share pages of the cache without anyone noticing."""

import dataclasses
import random

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.inference import engine, paged_scheduler, pages
from glm5_jax.inference.limits import Limits
from glm5_jax.inference.requests import Request
from glm5_jax.model import cached
from tests import environment
from tests.inference import engine_test
from tests.model import tiny

SIZE = 4  # tokens of a page of the models below
NUM_STEPS, CHUNK = 5, 16


class Device:
    """A cache whose rows are the tokens that they were computed from."""

    def __init__(self, num_slots, num_pages):
        limits = Limits(num_pages=num_pages, page_size=SIZE, prefill_tokens=40)
        self.machine = paged_scheduler.PagedScheduler(
            num_slots, CHUNK, 1, limits, NUM_STEPS
        )
        self.rows = {}  # by page and row: all tokens up to this one
        self.num_read, self.version = 0, 0

    def step(self):
        """Runs a dispatch as steps.py would; returns whether there was one."""
        todo = self.machine.plan(self.version)
        if todo is None:
            return False
        drawn = []
        for part in todo.parts:
            slot, request = part.slot, part.work.request
            left = request.max_new_tokens - part.num_drawn
            self.check(slot.pages, slot.tokens)
            size = min(NUM_STEPS, left) if todo.kind == "decode" else int(part.is_last)
            new = [token_of(request.id, part.num_drawn + i) for i in range(size)]
            self.num_read += len(part.tokens) * (todo.kind != "decode")
            self.write(slot, [*slot.tokens, *part.tokens, *new[:-1]], part.start)
            part.work.completion.tokens[part.num_drawn :] = new
            drawn.append(new)
        self.machine.advance(todo, drawn, self.version)
        for part in todo.parts:
            request = part.work.request
            if len(part.work.completion.tokens) == request.max_new_tokens:
                self.machine.release(request.id)
        return True

    def write(self, slot, text, start):
        shared = {node.page for node in slot.nodes}
        for i in range(start, len(text)):
            page = slot.pages[i // SIZE]
            assert page not in shared, "a page of the tree is written"
            self.rows[page, i % SIZE] = tuple(text[: i + 1])

    def check(self, held, tokens):
        """Checks the rows of a sequence."""
        for i in range(len(tokens)):
            found = self.rows[held[i // SIZE], i % SIZE]
            assert found == tuple(tokens[: i + 1]), "another sequence's row"


def token_of(id, position):
    return 1000 + (id * 7919 + position) % 97


class SchedulerTest(parameterized.TestCase):
    @parameterized.product(seed=(0, 1, 2, 3), num_pages=(12, 20, 100))
    def test_sequences_keep_their_rows_whatever_happens(self, seed, num_pages):
        """No page leaks, and every request draws all its tokens."""
        rng, device = random.Random(seed), Device(5, num_pages)
        machine, live, done = device.machine, {}, 0
        for step in range(150):
            for _ in range(rng.randint(0, 2) * (step < 110)):
                id = done = done + 1
                prompt = [rng.randint(1, 2)] * rng.randint(1, 20)
                prompt += [rng.randint(1, 3) for _ in range(rng.randint(0, 12))]
                live[id] = Request(id, prompt, rng.randint(1, 12))
                live[id] = machine.submit(live[id])
            act = rng.random()
            if act < 0.05 and live:
                id = rng.choice([*live])
                machine.release(id)
                del live[id]
            elif act < 0.08:
                device.version += 1
            elif act < 0.1:
                machine.forget()
                device.rows.clear()
            device.step()
        while device.step():
            pass
        for id, work in live.items():
            want = [token_of(id, i) for i in range(work.request.max_new_tokens)]
            self.assertEqual(work.completion.tokens, want)
        self.assertEmpty(machine.works)
        self.assertEqual(machine.num_free_pages, num_pages)
        if num_pages == 12:
            self.assertGreater(machine.num_preempted, 0)

    def test_a_group_reads_its_prompt_once(self):
        device = Device(8, 100)
        prompt = [*range(1, 35)]
        works = [device.machine.submit(Request(i, prompt, 7)) for i in range(8)]
        while device.step():
            pass
        self.assertEqual(device.num_read, 34 + 7 * 2)  # 32 tokens are whole pages
        self.assertEqual([w.completion.num_cached for w in works], [0] + [32] * 7)

    def test_a_next_turn_reads_only_its_new_tokens(self):
        device = Device(2, 100)
        work = device.machine.submit(Request(0, [*range(1, 10)], 8))
        while device.step():
            pass
        device.num_read = 0
        text = [*range(1, 10), *work.completion.tokens]  # 16 of 17 were computed
        device.machine.submit(Request(1, [*text, 5, 6], 3))
        while device.step():
            pass
        self.assertEqual(device.num_read, len(text) + 2 - 16)

    def test_a_preempted_request_counts_no_pages_of_its_own_as_cached(self):
        device = Device(2, 6)
        prompts = ([*range(1, 9)], [*range(11, 16)])
        works = [
            device.machine.submit(Request(i, prompt, 12))
            for i, prompt in enumerate(prompts)
        ]
        while device.step():
            pass
        self.assertGreater(device.machine.num_preempted, 0)
        self.assertEqual([work.completion.num_cached for work in works], [0, 0])
        self.assertLen(works[1].completion.tokens, 12)

    def test_the_least_recently_used_leaf_goes_first(self):
        pool = pages.Pool(4, 1)
        a, b = (pool.add([], [token], pool.take()) for token in (1, 2))
        leaf = pool.add([a], [3], pool.take())
        pool.let_go([b])
        pool.let_go([a, leaf])
        self.assertEqual(pool.match([1, 3, 9]), [a, leaf])
        taken = [pool.take() for _ in range(5)]
        self.assertEqual(taken[1:], [b.page, leaf.page, a.page, None])


# One layer, with an indexer and experts, compiles fastest.
CONFIG = dataclasses.replace(
    engine_test.TINY, num_hidden_layers=1, first_k_dense_replace=0
)
PROMPTS = (5, 19, 19, 30, 2, 11, 19)


def make_requests():
    """Makes requests, some of whose prompts begin alike, more than there are slots."""
    requests = engine_test.make_requests(*PROMPTS)
    prompt = requests[3].prompt
    alike = [dataclasses.replace(r, prompt=prompt[: len(r.prompt)]) for r in requests]
    return [r if r.id in (0, 4) else a for r, a in zip(requests, alike, strict=True)]


class EngineTest(parameterized.TestCase):
    def check(self, config, num_pages, options=engine_test.ENGINE):
        """Compares pages with slots; returns the engine with pages."""
        params, options = tiny.params(config), dict(options)
        limits = Limits(num_pages=num_pages, page_size=8)
        machine = engine.Engine(params, config, **options, limits=limits)
        found = engine_test.run_all(machine, make_requests())
        slots = engine.Engine(params, config, **options)
        for id, want in engine_test.run_all(slots, make_requests()).items():
            self.assertEqual(found[id].tokens, want.tokens)
            np.testing.assert_allclose(
                found[id].logprobs, want.logprobs, atol=engine_test.LOGPROB_ATOL, rtol=0
            )
            np.testing.assert_array_equal(
                np.sort(found[id].experts), np.sort(want.experts)
            )
        self.assertEqual(machine._scheduler.num_free_pages, num_pages)
        return machine, found

    def test_preempted_requests_draw_what_they_draw_alone(self):
        """Their log-probs and experts are those of training."""
        params, limits = tiny.params(CONFIG), Limits(num_pages=8, page_size=8)
        machine = engine.Engine(params, CONFIG, **engine_test.ENGINE, limits=limits)
        found = engine_test.run_all(machine, make_requests())
        num_preempted = machine._scheduler.num_preempted
        self.assertGreater(num_preempted, 0)
        self.assertEqual(machine._scheduler.num_free_pages, 8)
        tokens = np.zeros((len(PROMPTS), 48), np.int32)
        for request in make_requests():
            (alone,) = engine_test.run_all(machine, [request]).values()
            self.assertEqual(found[request.id].tokens, alone.tokens)
            text = [*request.prompt, *alone.tokens]
            tokens[request.id, : len(text)] = text
        self.assertEqual(machine._scheduler.num_preempted, num_preempted)
        logits, experts = engine_test.with_choices(params, CONFIG, tokens)
        logprobs = np.asarray(jax.nn.log_softmax(logits))
        for request in make_requests():
            done, size = found[request.id], len(request.prompt)
            last = size + len(done.tokens) - 1
            np.testing.assert_allclose(
                done.logprobs,
                logprobs[request.id, np.arange(size - 1, last), done.tokens],
                atol=engine_test.LOGPROB_ATOL,
                rtol=0,
            )
            want = np.asarray(experts)[:, request.id, :last].swapaxes(0, 1)
            np.testing.assert_array_equal(np.sort(done.experts), np.sort(want))

    @pytest.mark.slow
    def test_equals_slots_with_shared_prefixes(self):
        machine, found = self.check(engine_test.TINY, 64)
        self.assertEqual(machine._scheduler.num_preempted, 0)
        self.assertEqual((found[1].num_cached, found[2].num_cached), (0, 16))

    @parameterized.parameters("dense", "windows")
    @pytest.mark.slow
    def test_variants_equal_slots(self, name):
        self.check(engine_test.VARIANTS[name], 8)

    def test_pages_must_fit(self):
        for changes, message in (
            ({"num_pages": 7}, "at least the 8 pages of one sequence of 64"),
            ({"num_pages": -1}, "num_pages must not be negative"),
            ({"page_size": 0}, "page_size must be at least 1"),
        ):
            with self.assertRaisesRegex(config_lib.InputError, message):
                limits = Limits(**({"num_pages": 64, "page_size": 8} | changes))
                engine.Engine({}, CONFIG, **engine_test.ENGINE, limits=limits)


class CacheTest(parameterized.TestCase):
    def test_choices_and_hidden_states_are_those_of_rows_that_lie_together(self):
        """Reads twelve tokens at once, then one more."""
        params, batch, capacity, size = tiny.params(CONFIG), 2, 18, 4
        rng = np.random.default_rng(0)
        tokens = jax.numpy.asarray(rng.integers(1, CONFIG.vocab_size, (batch, 13)))
        table = rng.permutation(12)[:10].reshape(batch, 5)

        @jax.jit
        def run(params, tokens, table):
            sizes = None if table is None else (12, size)
            cache = cached.empty(CONFIG, batch, capacity, sizes)
            cache, found = dataclasses.replace(cache, table=table), []
            for first, last in ((0, 12), (12, 13)):
                hidden, cache, choices = cached.decode(
                    params, CONFIG, cache, tokens[:, first:last]
                )
                found.append((hidden, choices))
            return found

        together = run(params, tokens, None)
        paged = run(params, tokens, jax.numpy.asarray(table))
        for (a, chosen), (b, other) in zip(together, paged, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
            jax.tree.map(np.testing.assert_array_equal, chosen, other)


if __name__ == "__main__":
    environment.main()
