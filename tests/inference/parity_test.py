"""Checks that the engine draws from the log-probs that training computes.

Selected keys and experts are equal, whatever the engine's memory, chunks and company.
The quick tests skip LLVM's optimizations, which leave XLA's fusions as they are.
"""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax.inference import engine, programs, rounds, scoring, steps
from glm5_jax.inference.limits import Limits
from glm5_jax.model import cached, invariance, moe, transformer
from glm5_jax.model import selection as selection_lib
from glm5_jax.model.attention import dsa, dsa_cached
from tests import environment
from tests.inference import engine_test
from tests.model import tiny

FLOAT32 = dataclasses.replace(engine_test.ONE_LAYER, index_topk=8)
BFLOAT16 = dataclasses.replace(FLOAT32, dtype="bfloat16", batch_invariant=True)
DRAFTING = dataclasses.replace(BFLOAT16, num_nextn_predict_layers=1)
LAST_DIGIT = 2e-6  # of a log-prob: two programs subtract the same float32 logits
NUM_TOKENS = 20


def whole_rows(params, config, rows):
    """Returns -log p of the next tokens, and the experts, of rows read at once."""

    def experts(params, config, tokens):
        out = transformer.forward(params, config, tokens)
        return cached.chosen_experts(config, out.aux, tokens.shape)

    compiled = invariance.jit(experts, static_argnames="config")
    scored = scoring.score(params, config, scoring.rows_of_tokens(rows, config))
    return scored, np.asarray(compiled(params, config, rows))


class ParityTest(parameterized.TestCase):
    def test_scoring_finds_the_drawn_tokens(self):
        self.check(num_slots=4, chunk=16)

    @pytest.mark.slow  # 10 s
    def test_of_a_single_slot(self):
        self.enterContext(environment.optimized())
        self.check(num_slots=1, chunk=16)

    @pytest.mark.slow  # 15 s
    def test_of_few_slots_among_many(self):
        self.enterContext(environment.optimized())
        self.check(num_slots=64, chunk=24)

    @pytest.mark.slow  # 15 s
    def test_with_drafts(self):
        self.enterContext(environment.optimized())
        limits = Limits(num_drafts=3, adapts_drafts=False)
        self.check(DRAFTING, num_slots=4, chunk=24, limits=limits)

    def check(self, config=BFLOAT16, **options):
        requests = engine_test.make_requests(5, 19, 2, 33, 7, 28, n=NUM_TOKENS)
        options |= {"capacity": 64, "num_steps": 5, "with_experts": True}
        params = tiny.params(config)
        machine = engine.Engine(params, config, **options)
        done = engine_test.run_all(machine, requests)
        rows = np.zeros((len(requests), 64), np.int32)
        for r in requests:
            ids = [*r.prompt, *done[r.id].tokens]
            rows[r.id, : len(ids)] = ids
        scored, experts = whole_rows(params, config, rows)
        for r in requests:
            first, last = len(r.prompt) - 1, len(r.prompt) + NUM_TOKENS - 1
            gap = np.abs(scored[r.id, first:last] + done[r.id].logprobs)
            self.assertLess(gap.max(), LAST_DIGIT, r.id)
            replayed = experts[:, r.id, :last].swapaxes(0, 1)
            np.testing.assert_array_equal(
                np.sort(done[r.id].experts), np.sort(replayed)
            )


CAPACITY = 64  # keys, of which a set is two numbers of 32 bits
LOGPROB_ATOL, MEAN_GAP = 1e-5, 2e-2  # in float32; in bfloat16
NUM_PAGES = 9  # of 8 tokens: for one whole sequence and a part of another
CASES = [
    (f"{config.dtype}_{memory}_{chunk}", config, memory, chunk)
    for config in (FLOAT32, BFLOAT16)
    for memory in ("slots", "pages")
    for chunk in (1, 16, CAPACITY)
]
QUICK = {"float32_pages_1", "bfloat16_pages_16"}


@contextlib.contextmanager
def selections_recorded():
    """Lets each record of a token's experts end with the set of its selected keys.

    Sets are traced beside the experts, through all that an engine does with them.
    """
    last = []
    attended, attend = dsa.SparseLatentAttention._attended, dsa_cached._attend
    moe_, no_experts = moe.moe, cached.no_experts

    def of_list(selection):
        keys = jnp.arange(CAPACITY)[None, None, None]
        return (selection.indices[..., None] == keys).any(-2)

    def in_rows(self, params, x, *args):
        found = attended(self, params, x, *args)
        match found.index.selection:
            case selection_lib.Listed() as selection:
                last[:] = [of_list(selection)]
            case selection_lib.Mask(keep):
                last[:] = [jnp.swapaxes(keep, -1, -2)]
            case _:  # no more keys than are selected: all that a token may see
                size = x.shape[1]
                last[:] = [jnp.tril(jnp.ones((len(x), size, size), bool))]
        return found

    def in_cache(reader, *args):
        last[:] = [of_list(reader.shared)]
        return attend(reader, *args)

    def with_set(*args):
        out, routing = moe_(*args)
        keep = jnp.pad(last[0], [(0, 0), (0, 0), (0, CAPACITY - last[0].shape[-1])])
        powers = jnp.left_shift(jnp.uint32(1), jnp.arange(32, dtype=jnp.uint32))
        bits = keep.reshape(*keep.shape[:2], 2, 32).astype(jnp.uint32)
        words = jnp.einsum("BTwb,b->BTw", bits, powers)
        words = jax.lax.bitcast_convert_type(words, jnp.int32)
        experts = jnp.concatenate([jnp.sort(routing.experts), words], axis=-1)
        return out, routing._replace(experts=experts)

    def wider(*args):
        return jnp.pad(no_experts(*args), [(0, 0)] * 3 + [(0, 2)])

    with (
        mock.patch.object(dsa.SparseLatentAttention, "_attended", in_rows),
        mock.patch.object(dsa_cached, "_attend", in_cache),
        mock.patch.object(moe, "moe", with_set),
        mock.patch.object(cached, "no_experts", wider),
    ):
        read = programs._compiled(
            _named_anew(steps.prefill),
            static_argnames=("config", "is_fresh", "with_experts"),
        )
        draw = programs._compiled(
            _named_anew(steps.decode),
            static_argnames=("config", "num_steps", "with_experts"),
        )
        speculate = programs._compiled(
            _named_anew(rounds.decode),
            static_argnames=("config", "settings", "with_experts"),
        )
        with (
            mock.patch.object(programs, "prefill", read),
            mock.patch.object(programs, "decode", draw),
            mock.patch.object(programs, "speculate", speculate),
        ):
            yield


def _named_anew(function):
    """Returns the function as another one, which jax has not compiled yet."""

    @functools.wraps(function)
    def run(*args, **options):
        return function(*args, **options)

    return run


class MatrixTest(parameterized.TestCase):
    """Requests alone and beside others, with common prefixes, preempted or not."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.enterClassContext(selections_recorded())

    @parameterized.named_parameters(case for case in CASES if case[0] in QUICK)
    def test_draws_are_those_of_training(self, config, memory, chunk):
        self.check(config, memory, chunk)

    @parameterized.named_parameters(case for case in CASES if case[0] not in QUICK)
    @pytest.mark.slow
    def test_so_are_others(self, config, memory, chunk):
        self.enterContext(environment.optimized())
        self.check(config, memory, chunk)

    @parameterized.named_parameters(
        ("float32_pages", FLOAT32, "pages", "same_noise"),
        ("float32_slots", FLOAT32, "slots", "same_noise"),
        ("bfloat16_pages", BFLOAT16, "pages", "same_noise"),
        ("bfloat16_slots", BFLOAT16, "slots", "same_noise"),
        ("bfloat16_pages_rejection", BFLOAT16, "pages", "rejection"),
    )
    @pytest.mark.slow
    def test_so_are_rounds_of_drafts(self, config, memory, acceptance):
        self.enterContext(environment.optimized())
        config = dataclasses.replace(config, num_nextn_predict_layers=1)
        self.check(config, memory, 16, num_drafts=3, acceptance=acceptance)

    def check(self, config, memory, chunk, num_drafts=0, **limits):
        num_pages = NUM_PAGES if memory == "pages" else 0
        machine = engine.Engine(
            tiny.params(config),
            config,
            num_slots=4,
            capacity=CAPACITY,
            chunk=chunk,
            num_steps=5,
            with_experts=True,
            limits=Limits(
                num_pages=num_pages,
                page_size=8,
                num_drafts=num_drafts,
                adapts_drafts=False,
                **limits,
            ),
        )
        requests = make_requests()
        done = engine_test.run_all(machine, requests)  # beside each other
        self.assertEqual(machine.num_preempted > 0, memory == "pages")
        alone = dataclasses.replace(requests[0], id=9)
        done |= engine_test.run_all(machine, [alone])  # with a known prefix
        self.assertGreater(done[9].num_cached, 0)
        self.compare(config, [*requests, alone], done)

    def compare(self, config, requests, done):
        """Compares completions with whole rows: log-probs, experts and sets."""
        rows = np.zeros((8, CAPACITY), np.int32)
        texts = [[*r.prompt, *done[r.id].tokens] for r in requests]
        for row, text in zip(rows, texts, strict=False):
            row[: len(text)] = text
        logits, choices = whole_logits(tiny.params(config), config, rows)
        logprobs = np.asarray(jax.nn.log_softmax(logits))
        gaps = []
        for row, request in enumerate(requests):
            completion = done[request.id]
            first, last = len(request.prompt) - 1, len(texts[row]) - 1
            wanted = logprobs[row, np.arange(first, last), completion.tokens]
            gaps.append(np.abs(wanted - completion.logprobs))
            chosen = np.asarray(choices)[:, row, :last].swapaxes(0, 1)
            np.testing.assert_array_equal(completion.experts, chosen)
            is_selective = np.bitwise_count(chosen[..., -2:].view(np.uint32)).sum(-1)
            self.assertEqual(is_selective.max(), config.index_topk)
        if config.dtype == "float32":
            self.assertLess(np.concatenate(gaps).max(), LOGPROB_ATOL)
        else:
            self.assertLess(np.concatenate(gaps).mean(), MEAN_GAP)


def make_requests():
    """Makes requests whose prompts begin alike, more than there are slots."""
    requests = engine_test.make_requests(30, 19, 5, 26, 11, 30, n=NUM_TOKENS)
    prompt = requests[0].prompt
    return [
        r if r.id in (2, 4) else dataclasses.replace(r, prompt=prompt[: len(r.prompt)])
        for r in requests
    ]


def whole_logits(params, config, rows):
    """Returns the logits after each token of whole rows, and its experts and set."""

    def run(params, config, tokens):
        params = transformer.cast(params, config)
        out = transformer.forward(params, config, tokens)
        chosen = cached.chosen_experts(config, out.aux, tokens.shape)
        return transformer.logits(params, config, out.hidden), chosen

    return invariance.jit(run, static_argnames="config")(params, config, rows)


if __name__ == "__main__":
    environment.main()
