"""Checks that sequences share pages of the cache without anyone noticing."""

import dataclasses

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.inference import engine, pages
from glm5_jax.inference.limits import Limits
from glm5_jax.inference.requests import Request
from glm5_jax.model import cached
from tests import environment
from tests.inference import engine_test, fake_devices
from tests.model import tiny


class SchedulerTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(fake_devices.installed())

    def run_all(self, num_slots, num_pages, requests):
        """Returns the engine, the completions and the numbers of tokens read."""
        machine = fake_devices.make_engine(num_slots, num_pages)
        found = engine_test.run_all(machine, requests)
        self.assertEqual(machine.num_free_pages, num_pages)
        return machine, found, machine._runner.num_read

    def test_a_group_reads_its_prompt_once(self):
        prompt = [*range(1, 35)]
        requests = [Request(i, prompt, 7) for i in range(8)]
        _, found, num_read = self.run_all(8, 100, requests)
        self.assertEqual(sum(num_read), 34 + 7 * 2)  # 32 tokens are whole pages
        cached = [found[i].num_cached for i in range(8)]
        self.assertEqual(cached, [0] + [32] * 7)

    def test_a_next_turn_reads_only_its_new_tokens(self):
        request = Request(0, [*range(1, 10)], 8)
        machine, found, num_read = self.run_all(2, 100, [request])
        num_read.clear()
        text = [*request.prompt, *found[0].tokens]  # 16 of 17 were computed
        engine_test.run_all(machine, [Request(1, [*text, 5, 6], 3)])
        self.assertEqual(sum(num_read), len(text) + 2 - 16)

    def test_an_emptied_cache_has_no_prompt(self):
        request = Request(0, [*range(1, 35)], 7)
        machine, _, _ = self.run_all(2, 100, [request])
        for id, num_cached in ((1, 32), (2, 0)):
            if not num_cached:
                machine.clear_cache()
            again = dataclasses.replace(request, id=id)
            found = engine_test.run_all(machine, [again])
            self.assertEqual(found[id].num_cached, num_cached)

    def test_a_preempted_request_counts_no_pages_of_its_own_as_cached(self):
        prompts = [*range(1, 9)], [*range(11, 16)]
        requests = [Request(i, prompt, 52) for i, prompt in enumerate(prompts)]
        machine, found, _ = self.run_all(2, 20, requests)
        self.assertGreater(machine.num_preempted, 0)
        self.assertEqual([found[i].num_cached for i in range(2)], [0, 0])
        self.assertLen(found[1].tokens, 52)

    def test_a_preempted_request_resumes_before_later_ones_begin(self):
        """Else each request that comes could keep it waiting."""
        prompts = [*range(1, 9)], [*range(11, 16)], [*range(21, 26)]
        machine = fake_devices.make_engine(2, 20)
        for id, prompt in enumerate(prompts):
            machine.submit(Request(id, prompt, 52))
        while not machine.num_preempted:
            machine.step()
        self.assertEqual([*machine._scheduler._waiting], [1, 2])


class PoolTest(parameterized.TestCase):
    """One token a page, and one page of the device unless a test says otherwise."""

    def test_a_page_goes_to_host_memory_and_comes_back(self):
        pool, move = pages.Pool(1, 1, num_hosted=1), pages.Move
        node = pool.add([], [7], pool.take())
        self.assertIsNone(pool.take())  # in use
        for number in range(1, 3):
            pool.let_go([node])
            self.assertEqual(pool.num_available, 1)
            pool.give_back([pool.take()])
            self.assertEqual(pool.moves[-1], move(to_host=True, page=0, host=0))
            self.assertEqual((node.host, pool.match([7])), (0, [node]))
            pool.hold([node])
            pool.restore([node])
            self.assertEqual(pool.moves[-1], move(to_host=False, page=0, host=0))
            self.assertEqual((node.page, node.host), (0, -1))
            pool.restore([node])  # changes nothing on the device
            self.assertEqual((len(pool.moves), pool.num_available), (2 * number, 0))

    def test_the_least_recently_used_leaf_goes_first(self):
        pool = pages.Pool(4, 1, 0)
        a, b = (pool.add([], [token], pool.take()) for token in (1, 2))
        leaf = pool.add([a], [3], pool.take())
        pool.let_go([b])
        pool.let_go([a, leaf])
        self.assertEqual(pool.match([1, 3]), [a, leaf])
        taken = [pool.take() for _ in range(5)]
        self.assertEqual(taken[1:], [b.page, leaf.page, a.page, None])
        self.assertEqual(pool.match([1, 3]), [])

    def test_a_page_that_two_slots_read_is_kept_once(self):
        pool = pages.Pool(3, 1, 0)
        first, second = pool.take(), pool.take()
        node = pool.add([], [7], first)
        self.assertIs(pool.add([], [7], second), node)
        self.assertEqual((node.page, node.num_users, pool.num_available), (first, 2, 2))
        pool.let_go([node])
        self.assertEqual(pool.num_available, 2)
        pool.let_go([node])
        self.assertEqual(pool.num_available, 3)

    def test_a_page_in_host_memory_that_is_read_again_frees_the_copy(self):
        pool = pages.Pool(2, 1, num_hosted=1)
        page = pool.take()
        _, (node,) = pool.adopt([7], 0)
        self.assertIs(pool.add([], [7], page), node)
        self.assertEqual((node.page, node.host), (page, -1))
        self.assertEqual(pool.match([7]), [node])
        _, (other,) = pool.adopt([8], 0)
        self.assertEqual(other.host, 0)
        self.assertEqual(pool.match([7]), [node])

    def test_a_page_in_host_memory_stays_there_if_its_user_does_not_need_it(self):
        """As when a request waits for other pages."""
        pool = pages.Pool(1, 1, num_hosted=1)
        _, (node,) = pool.adopt([7], 0)
        pool.hold([node])
        self.assertEqual(pool.adopt([8], 0), (0, []))  # no room
        pool.let_go([node])
        self.assertEqual(pool.num_available, 1)
        self.assertEqual(pool.match([7]), [node])
        _, (other,) = pool.adopt([8], 0)
        self.assertEqual((other.host, pool.match([7])), (0, []))

    def test_pages_that_older_weights_read_are_free_at_once(self):
        """Those in use are as soon as they are not; host memory takes none of them."""
        pool = pages.Pool(3, 1, num_hosted=2)
        used = pool.add([], [1], pool.take())
        child = pool.add([used], [2], pool.take())
        pool.let_go([child])
        pool.adopt([4, 5], 0)
        pool.renew()
        self.assertEqual((pool.num_available, pool.match([1])), (2, []))
        _, hosted = pool.adopt([6, 7, 8], 0)
        self.assertEqual({node.host for node in hosted}, {0, 1})
        pool.let_go([used])
        self.assertEqual(pool.num_available, 3)
        taken = [pool.take() for _ in range(4)]
        self.assertCountEqual(taken, [0, 1, 2, None])
        self.assertEmpty(pool.moves)
        self.assertEqual(pool.match([6, 7]), hosted)

    def test_a_prefix_is_matched_in_whole_pages(self):
        pool = pages.Pool(2, 3, 0)
        a = pool.add([], [1, 2, 3], pool.take())
        b = pool.add([a], [4, 5, 6], pool.take())
        for size, wanted in ((2, []), (3, [a]), (5, [a]), (6, [a, b]), (8, [a, b])):
            self.assertEqual(pool.match([*range(1, size + 1)]), wanted)
        self.assertEqual(pool.match([4, 5, 6]), [])


CONFIG = engine_test.ONE_LAYER
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

    def test_pages_come_back_from_host_memory(self):
        """The pages of two conversations do not fit; the second turns know the first.

        Other weights find none of them.
        """
        params, options = tiny.params(CONFIG), engine_test.ENGINE
        limits = Limits(num_pages=8, page_size=8, host_pages=16)
        machine = engine.Engine(params, CONFIG, **options, limits=limits)
        first = engine_test.make_requests(30, 31)
        done = {r.id: engine_test.run_all(machine, [r])[r.id] for r in first}
        turns = [
            dataclasses.replace(r, id=r.id + 2, prompt=[*r.prompt, *done[r.id].tokens])
            for r in first
        ]
        for turn in turns:
            (found,) = engine_test.run_all(machine, [turn]).values()
            self.assertEqual(found.num_cached, len(turn.prompt) // 8 * 8)
            machine_alone = engine.Engine(
                params, CONFIG, **options, limits=Limits(num_pages=8, page_size=8)
            )
            (want,) = engine_test.run_all(machine_alone, [turn]).values()
            self.assertEqual(found.tokens, want.tokens)
            np.testing.assert_allclose(
                found.logprobs, want.logprobs, atol=engine_test.LOGPROB_ATOL, rtol=0
            )
            np.testing.assert_array_equal(found.experts, want.experts)
        self.assertGreaterEqual(machine.num_restored, 5)
        machine.publish(params, 1)
        (found,) = engine_test.run_all(machine, turns[:1]).values()
        self.assertEqual(found.num_cached, 0)

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
            ({"host_pages": -1}, "host_pages must not be negative"),
            ({"num_pages": 0, "host_pages": 3}, "host_pages needs num_pages"),
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
