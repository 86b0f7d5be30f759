"""Speculative decoding draws what the engine draws without drafts."""

import dataclasses
import functools
import time
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.inference import engine, programs, steps
from glm5_jax.inference.limits import Limits
from tests import environment
from tests.inference import engine_test, failure_test, fewer_programs, pages_test
from tests.model import tiny

CONFIG = dataclasses.replace(pages_test.CONFIG, num_nextn_predict_layers=1)
DRAFTS = {"num_drafts": 3, "adapts_drafts": False}
PAGES = {"num_pages": 8, "page_size": 8}  # so few that requests are preempted


@functools.cache
def params():
    return tiny.params(CONFIG)


def make_engine(config=CONFIG, **limits):
    limits = Limits(with_adjustments=True, **limits)
    with fewer_programs.of_all_rows():
        return engine.Engine(params(), config, **engine_test.ENGINE, limits=limits)


def make_requests():
    """Makes requests that end in all ways, within a round and at its end."""
    changes = [
        {"temperature": 0.0},
        {"top_p": 0.8, "max_new_tokens": 17},
        {"temperature": 0.0, "max_new_tokens": 1},
        {"frequency_penalty": 1.5, "logit_bias": {7: 3.0}, "num_alternatives": 2},
        {"stop_ids": frozenset(range(0, 96, 13))},
        {"temperature": 0.0, "presence_penalty": 2.0, "max_new_tokens": 16},
        {"top_k": 5, "max_new_tokens": 2},
    ]
    return [
        dataclasses.replace(request, **change)
        for request, change in zip(pages_test.make_requests(), changes, strict=True)
    ]


@functools.cache
def wanted():
    """Returns what an engine without drafts draws, which needs few programs."""
    options = {**engine_test.ENGINE, "num_slots": 1}
    limits = Limits(with_adjustments=True)
    machine = engine.Engine(params(), CONFIG, **options, limits=limits)
    return engine_test.run_all(machine, make_requests())


@functools.cache
def drafting():
    """Returns an engine with drafts and pages."""
    return make_engine(**DRAFTS, **PAGES)


class SpeculationTest(parameterized.TestCase):
    def check(self, found):
        self.assertEqual(found.keys(), wanted().keys())
        for id, want in wanted().items():
            self.assertEqual(found[id].tokens, want.tokens)
            self.assertEqual(found[id].finish_reason, want.finish_reason)
            for name in ("logprobs", "raw_logprobs"):
                np.testing.assert_allclose(
                    getattr(found[id], name),
                    getattr(want, name),
                    atol=engine_test.LOGPROB_ATOL,
                    rtol=0,
                )
            ids = [[id for id, _ in x] for x in found[id].alternatives]
            self.assertEqual(ids, [[id for id, _ in x] for x in want.alternatives])
            np.testing.assert_array_equal(
                np.sort(found[id].experts), np.sort(want.experts)
            )

    def test_preempted_requests_draw_what_they_draw_without_drafts(self):
        machine = drafting()
        before = machine.drafter.acceptance
        self.check(engine_test.run_all(machine, make_requests()))
        self.assertGreater(machine.num_preempted, 0)
        self.assertEqual(machine.num_free_pages, PAGES["num_pages"])
        after = machine.drafter.acceptance
        kept = np.subtract(after.accepted, before.accepted)
        judged = np.subtract(after.judged, before.judged)
        self.assertGreater(kept[0], 5)  # a round differs from a step
        self.assertLess(kept[0], 0.9 * judged[0])
        self.assertTrue(np.all(np.diff(kept) <= 0) and np.all(np.diff(judged) <= 0))
        rounds = after.rounds - before.rounds
        self.assertEqual(rounds, judged[0])
        self.assertLess(rounds, sum(len(c.tokens) - 1 for c in wanted().values()))

    def test_a_model_that_knows_nothing_keeps_every_draft(self):
        """Drafts and tokens are drawn with the same noise, here from equal logits."""
        machine, head = drafting(), params()["lm_head"]
        blind = params() | {"lm_head": np.zeros_like(head)}
        machine.publish(blind, machine.version + 1)
        self.addCleanup(lambda: machine.publish(params(), machine.version + 1))
        before = machine.drafter.acceptance
        engine_test.run_all(machine, engine_test.make_requests(5, 11, n=11))
        after = machine.drafter.acceptance
        kept = np.subtract(after.accepted, before.accepted)
        judged = np.subtract(after.judged, before.judged)
        # Two requests draw 1 token behind their prompts, then 4, 4 and 2.
        self.assertEqual(after.rounds - before.rounds, 2 * 3)
        self.assertEqual(judged.tolist(), [2 * 3, 2 * 3, 2 * 2])
        self.assertEqual(kept.tolist(), judged.tolist())

    def test_logprobs_and_experts_are_those_of_training(self):
        requests = engine_test.make_requests(*pages_test.PROMPTS)
        done = engine_test.run_all(drafting(), requests)
        tokens = np.zeros((len(requests), 48), np.int32)
        for r in requests:
            tokens[r.id, : len(r.prompt) + 12] = [*r.prompt, *done[r.id].tokens]
        logits, experts = engine_test.with_choices(params(), CONFIG, tokens)
        logprobs = np.asarray(jax.nn.log_softmax(logits))
        for r in requests:
            places = np.arange(len(r.prompt) - 1, len(r.prompt) + 11)
            np.testing.assert_allclose(
                done[r.id].logprobs,
                logprobs[r.id, places, done[r.id].tokens],
                atol=engine_test.LOGPROB_ATOL,
                rtol=0,
            )
            read = np.asarray(experts)[:, r.id, : places[-1] + 1].swapaxes(0, 1)
            np.testing.assert_array_equal(np.sort(done[r.id].experts), np.sort(read))

    def test_new_weights_a_lost_cache_and_aborted_requests_change_nothing(self):
        """The new weights are equal; they make an engine read drafts' rows anew."""
        machine, done = drafting(), {}
        for request in [*make_requests(), engine.Request(99, [1, 2, 3], 40)]:
            machine.submit(request)
        version = machine.version
        for event in (
            lambda: machine.publish(params(), version + 1),
            lambda: machine.abort(99),
            machine.clear_cache,
        ):
            done |= machine.step()
            done |= machine.step()
            event()
        done |= engine_test.run_all(machine, [])
        self.check(done)
        versions = {v for completion in done.values() for v in completion.versions}
        self.assertEqual(versions, {version, version + 1})

    @parameterized.product(at=(1, 3), takes_cache=(False, True))
    def test_a_dispatch_of_rounds_that_fails_changes_nothing(self, at, takes_cache):
        """It draws, judges and loses nothing, with or without the cache."""
        machine, error = drafting(), RuntimeError("RESOURCE_EXHAUSTED")
        for request in make_requests():
            machine.submit(request)
        fault = failure_test.Fault(programs.speculate, at, error, takes_cache)
        record = mock.Mock(wraps=machine.drafter.record)
        with (
            mock.patch.object(programs, "speculate", fault),
            mock.patch.object(machine.drafter, "record", record),
        ):
            done, errors = failure_test.drain(machine)
        self.assertEqual(errors, [error])
        self.check(done)
        num_dispatches = at - fault.left
        self.assertEqual(record.call_count, num_dispatches - 1)
        self.assertEqual(machine.num_free_pages, PAGES["num_pages"])

    def test_rounds_are_measured(self):
        """A drafter is told what each dispatch took, by the rows of its program."""
        machine, began = drafting(), time.perf_counter()
        with mock.patch.object(machine.drafter, "record") as record:
            engine_test.run_all(machine, make_requests()[:1])
        self.assertNotEmpty(record.call_args_list)
        total = sum(call.args[3] for call in record.call_args_list)
        self.assertBetween(total, 1e-6, time.perf_counter() - began)
        for call in record.call_args_list:
            self.assertEqual(call.args[:2], (4, 3))

    def test_dispatches_draw_num_steps_tokens_if_half_of_the_drafts_are_kept(self):
        """Five tokens: 5 rounds of 1; 4 of up to 2; 2 of up to 4; 2 of up to 8."""
        for number, most in ((0, 5), (1, 4 * 2), (3, 2 * 4), (7, 2 * 8)):
            machine = make_engine(num_drafts=number, adapts_drafts=False)
            self.assertEqual(machine._runner.most_drawn, most)

    def test_new_weights_end_an_alarm(self):
        """Their drafts are judged anew."""
        machine = make_engine(**DRAFTS)
        judged = np.full((1, 3), 300, np.int32)
        tally = steps.Tally(judged[:, 0], judged, 0 * judged)
        machine.drafter.record(4, 3, tally, 1.0)
        self.assertTrue(machine.drafter.acceptance.is_low)
        machine.publish(params(), 1)
        self.assertFalse(machine.drafter.acceptance.is_low)

    @pytest.mark.slow
    def test_each_number_of_drafts_and_slots_without_pages(self):
        for number in (0, 1, 2, 7):
            machine = make_engine(num_drafts=max(number, 1), adapts_drafts=False)
            machine.drafter.numbers = [number]
            self.check(engine_test.run_all(machine, make_requests()))

    @pytest.mark.slow
    def test_an_engine_that_adapts_draws_the_same(self):
        machine = make_engine(num_drafts=3)
        for _ in range(6):
            self.check(engine_test.run_all(machine, make_requests()))
        self.assertLess(len(machine.drafter._sizes[4].seconds), 4)

    @pytest.mark.slow
    def test_by_rejection_greedy_requests_draw_the_same(self):
        machine = make_engine(**DRAFTS, acceptance="rejection")
        found = engine_test.run_all(machine, make_requests())
        for request in make_requests():
            self.assertLen(found[request.id].logprobs, len(found[request.id].tokens))
            if request.temperature == 0:
                want = wanted()[request.id].tokens
                self.assertEqual(found[request.id].tokens, want)

    def test_models_that_cannot_draft(self):
        none = dataclasses.replace(CONFIG, num_nextn_predict_layers=0)
        for config, limits, message in (
            (none, DRAFTS, "num_nextn_predict_layers=0"),
            (CONFIG, {"num_drafts": 8}, "num_drafts must be at most 7, got 8"),
            (CONFIG, {"num_drafts": -1}, "num_drafts must not be negative"),
            (CONFIG, {"acceptance": "rejection"}, "rejection needs num_drafts above 0"),
        ):
            with self.assertRaisesRegex(config_lib.InputError, message):
                make_engine(config, **limits)


if __name__ == "__main__":
    environment.main()
