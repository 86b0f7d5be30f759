"""Checks that failed dispatches and bad requests lose no work of other requests."""

import functools
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.inference import engine, programs
from tests import environment
from tests.inference import engine_test
from tests.model import tiny

MODEL, ENGINE = engine_test.ONE_LAYER, engine_test.ENGINE


class Fault:
    """A program that raises in its n-th call, before or after it takes the cache."""

    def __init__(self, program, at, error, takes_cache):
        self.program, self.left = program, at
        self.error, self.takes_cache = error, takes_cache

    def __call__(self, *args, **options):
        self.left -= 1
        if self.left == 0:
            if self.takes_cache:
                self.program(*args, **options)  # its results are lost
            raise self.error
        return self.program(*args, **options)


@functools.cache
def params():
    return tiny.params(MODEL)


def make_engine(**changes):
    return engine.Engine(params(), MODEL, **(ENGINE | changes))


def make_requests():
    """Makes more requests than slots, short and long, with all kinds of sampling."""
    requests = engine_test.make_requests(5, 30, 2, 11, 7)
    return [*requests, engine.Request(9, [3] * 26, 9, temperature=0.0)]


@functools.cache
def wanted():
    return engine_test.run_all(make_engine(), make_requests())


def drain(machine):
    """Returns the completions, and the errors that steps raised before them."""
    done, errors = {}, []
    for _ in range(100):
        if not machine.num_pending:
            return done, errors
        try:
            done |= machine.step()
        except (RuntimeError, KeyboardInterrupt) as error:
            errors.append(error)
    raise AssertionError(f"requests {[*machine.running]} never finish")


class FailureTest(parameterized.TestCase):
    def check(self, done):
        self.assertEqual(done.keys(), wanted().keys())
        for id, completion in wanted().items():
            self.assertEqual(done[id].tokens, completion.tokens, id)
            self.assertEqual(done[id].finish_reason, completion.finish_reason)
            self.assertEqual(done[id].versions, completion.versions)
            np.testing.assert_allclose(
                done[id].logprobs,
                completion.logprobs,
                atol=engine_test.LOGPROB_ATOL,
                rtol=0,
            )
            np.testing.assert_array_equal(
                np.sort(done[id].experts), np.sort(completion.experts)
            )

    @parameterized.product(
        where=(("prefill", 1), ("prefill", 2), ("decode", 1), ("decode", 3)),
        error=(RuntimeError("RESOURCE_EXHAUSTED"), KeyboardInterrupt()),
        takes_cache=(False, True),
    )
    def test_every_request_finishes_as_without_it(self, where, error, takes_cache):
        name, at = where
        machine = make_engine()
        for request in make_requests():
            machine.submit(request)
        fault = Fault(getattr(programs, name), at, error, takes_cache)
        with mock.patch.object(programs, name, fault):
            done, errors = drain(machine)
        self.assertEqual(errors, [error])
        self.check(done)

    def test_ctrl_c_while_tokens_are_put_down(self):
        """After an interrupt at any line, the next step repeats the bookkeeping."""
        num_errors = 0
        for seed in range(10):
            num_errors += self.check_with_interrupts(np.random.default_rng(seed))
        self.assertGreater(num_errors, 100)

    def check_with_interrupts(self, rng):
        """Returns the number of interrupts that a run survived."""
        machine = make_engine()
        for request in make_requests():
            machine.submit(request)
        scheduler = machine._scheduler

        def interrupted(call, *args):
            if rng.random() < 0.25:
                raise KeyboardInterrupt
            result = call(*args)
            if rng.random() < 0.25:
                raise KeyboardInterrupt
            return result

        for name in ("advance", "release"):
            call = functools.partial(interrupted, getattr(scheduler, name))
            setattr(scheduler, name, call)
        done, errors = drain(machine)
        self.check(done)
        return len(errors)

    def test_after_a_failure_requests_can_be_aborted_and_submitted(self):
        machine = make_engine()
        first, *others = make_requests()
        for request in others:
            machine.submit(request)
        machine.step()
        fault = Fault(programs.decode, 1, RuntimeError("lost"), True)
        with (
            mock.patch.object(programs, "decode", fault),
            self.assertRaises(RuntimeError),
        ):
            while True:
                machine.step()
        aborted = machine.abort(others[0].id)
        size = len(aborted.tokens)
        self.assertEqual(aborted.tokens, wanted()[others[0].id].tokens[:size])
        machine.submit(first)
        machine.submit(others[0])
        self.check(drain(machine)[0])


class InterruptTest(parameterized.TestCase):
    """Ctrl-C comes between a dispatch and its bookkeeping, which the next call does."""

    def setUp(self):
        super().setUp()
        self.machine, self.request = make_engine(), make_requests()[0]
        self.machine.submit(self.request)
        late = None, KeyboardInterrupt  # the second call is after the dispatch
        with (
            mock.patch.object(self.machine, "_settle", side_effect=late),
            self.assertRaises(KeyboardInterrupt),
        ):
            self.machine.step()

    def test_an_aborted_request_has_the_token_that_was_drawn(self):
        aborted = self.machine.abort(self.request.id)
        self.assertLen(aborted.tokens, 1)
        budget = self.machine._state.plan.budget
        np.testing.assert_array_equal(budget, 0)  # no slot draws any more
        with self.assertRaisesRegex(config_lib.InputError, "0 is not running"):
            self.machine.abort(self.request.id)

    def test_the_cache_that_is_emptied_is_the_new_one(self):
        self.machine.clear_cache()
        self.machine._settle()
        self.assertTrue(self.machine._is_lost())


class VersionTest(parameterized.TestCase):
    def test_versions_increase(self):
        machine = make_engine()
        machine.publish(params(), 0)
        machine.publish(params(), 3)
        machine.publish(params(), 3)  # nothing is running: slots are emptied
        with self.assertRaisesRegex(config_lib.InputError, r"got 2 after 3\.$"):
            machine.publish(params(), 2)
        machine.submit(make_requests()[0])
        message = "version must increase .*, got 3 after 3; it may stay .* nothing runs"
        with self.assertRaisesRegex(config_lib.InputError, message):
            machine.publish(params(), 3)
        with self.assertRaisesRegex(config_lib.InputError, "version must not be neg"):
            machine.publish(params(), -1)
        self.assertEqual(machine.version, 3)

    def test_a_token_has_the_version_that_drew_it(self):
        """Publishes other weights while the device is busy."""
        other = jax.tree.map(lambda x: 2 * x, params())
        machine, decode = make_engine(), programs.decode

        def meanwhile(*args, **options):
            out = decode(*args, **options)
            machine.publish(other, machine.version + 1)
            return out

        request = engine.Request(0, [5, 6, 7], 12, temperature=0.0)
        with mock.patch.object(programs, "decode", meanwhile):
            (done,) = engine_test.run_all(machine, [request]).values()
        self.assertEqual(done.versions, [0] * 6 + [1] * 5 + [2])

    def test_prefixes_of_old_weights_are_read_again(self):
        other = jax.tree.map(lambda x: 1.5 * x, params())
        turn, long = make_requests()[1], engine.Request(7, [5, 6], 40)
        machine = make_engine()
        machine.submit(long)
        machine.submit(turn)
        done = {}
        while turn.id not in done:
            done |= machine.step()
        machine.publish(other, 1)  # while the long one runs
        prompt = [*turn.prompt, *done[turn.id].tokens, 8]
        again = engine.Request(8, prompt, 6)
        (_, found), *_ = sorted(engine_test.run_all(machine, [again]).items())[-1:]
        fresh = make_engine()
        fresh.publish(other, 1)
        (want,) = engine_test.run_all(fresh, [again]).values()
        self.assertEqual(found.tokens, want.tokens)
        np.testing.assert_allclose(
            found.logprobs, want.logprobs, atol=engine_test.LOGPROB_ATOL
        )


class RequestTest(parameterized.TestCase):
    """Bad user input is refused with the field's name, and harms no other request."""

    @parameterized.named_parameters(
        ("float_ids", "prompt", [1.5, 2], "Prompt 0 has no id: 1.5"),
        ("text_ids", "prompt", ["a"], "Prompt 0 has no id: 'a'"),
        ("truth", "prompt", [True, 2], "Prompt 0 has no id: True"),
        ("text", "prompt", "abc", "Prompt 0 must be a list of token ids, got 'abc'"),
        ("number", "prompt", 5, "Prompt 0 must be a list of token ids"),
        ("matrix", "prompt", np.ones((2, 2), int), "Prompt 0 has no id"),
        ("vast", "prompt", [2**40], "Prompt 0 has the id 1099511627776"),
        ("stop_text", "stop_ids", frozenset({"a"}), "stop_ids must be ints in 0..95"),
        ("stop_wraps", "stop_ids", frozenset({2**32 + 5}), "got 4294967301"),
        ("stop_negative", "stop_ids", frozenset({-1}), "stop_ids must be ints"),
        ("stop_beyond", "stop_ids", frozenset({96}), "stop_ids must be ints"),
        ("stop_number", "stop_ids", 5, "stop_ids must be a set of ints"),
        ("tokens_float", "max_new_tokens", 2.5, "max_new_tokens must be an int, got"),
        ("tokens_true", "max_new_tokens", True, "max_new_tokens must be an int, got"),
        ("tokens_vast", "max_new_tokens", 2**32 + 3, "max_new_tokens must be at most"),
        ("none", "temperature", None, "temperature must be finite .*, got None"),
        ("endless", "temperature", 10**400, "temperature must be finite"),
        ("hot", "temperature", 1e39, "temperature must be finite"),
        ("top_k", "top_k", 2**32 + 3, "top_k must be at most"),
        ("top_k_float", "top_k", 2.0, "top_k must be an int"),
        ("top_p", "top_p", "a", "top_p must lie in"),
        ("min_p", "min_p", float("nan"), "min_p must lie in"),
        ("id", "id", "a", "A request's id must be an int in .*, got 'a'"),
    )
    def test_refused(self, field, value, message):
        request = engine.Request(0, [3], 4)
        object.__setattr__(request, field, value)  # bypasses the run-time type checks
        machine = make_engine()
        with self.assertRaisesRegex(config_lib.InputError, message) as caught:
            machine.submit(request)
        self.assertNotIn("\n", str(caught.exception))
        self.assertEqual(machine.num_pending, 0)

    def test_a_finished_request_is_pending_until_a_step_returns_it(self):
        machine, done = make_engine(), engine.Completion([5], [0.0], "stop")
        machine._finished[7] = done  # as after ctrl-C at the end of a step
        self.assertEqual(machine.num_pending, 1)
        self.assertEqual(machine.step(), [(7, done)])
        self.assertEqual(machine.num_pending, 0)

    def test_whole_numbers_of_numpy_are_fine(self):
        request = engine.Request(4, [5, 6], 6, frozenset({5}))
        object.__setattr__(request, "prompt", np.array([5, 6, 7]))
        object.__setattr__(request, "max_new_tokens", np.int32(6))
        (done,) = engine_test.run_all(make_engine(), [request]).values()
        plain = engine.Request(4, [5, 6, 7], 6, frozenset({5}))
        (want,) = engine_test.run_all(make_engine(), [plain]).values()
        self.assertEqual(done.tokens, want.tokens)

    @parameterized.parameters(
        {"num_slots": 0},
        {"chunk": 0},
        {"num_steps": -2},
        {"seed": -1},
        {"capacity": 129},
    )
    def test_sizes_of_an_engine(self, **changes):
        (name,) = changes
        with self.assertRaisesRegex(config_lib.InputError, f"{name} must"):
            engine.Engine({}, MODEL, **(ENGINE | changes))


if __name__ == "__main__":
    environment.main()
