"""Compares cached generation with full forward passes and with transformers."""

import dataclasses
import functools
import pathlib
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from glm5_jax import config as config_lib
from glm5_jax.inference import engine, weights
from glm5_jax.model import cached, transformer
from glm5_jax.weights import huggingface
from tests import environment
from tests.model import tiny

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
COMPILES = re.compile(r"Compiling jit\((prefill|decode)\)")
LOGPROB_ATOL = 1e-5  # float32 sums in another order

TINY = tiny.model(
    vocab_size=96,
    num_hidden_layers=2,
    num_nextn_predict_layers=0,
    max_position_embeddings=128,
)
# One layer, with an indexer and experts, compiles fastest.
ONE_LAYER = dataclasses.replace(TINY, num_hidden_layers=1, first_k_dense_replace=0)
VARIANTS = {
    "sparse": TINY,
    "dense": dataclasses.replace(TINY, attention="dense"),
    "windows": dataclasses.replace(
        TINY,
        layer_types=("latent_sliding", "grouped_sliding"),
        variants=tiny.SIZES_OF_VARIANTS,
    ),
}


# Most tests use the programs of one engine, and of `generate` for up to 4 prompts of
# at most 15 tokens and 17 new ones: compiling is what takes time. A chunk of 16 tokens
# is also the shortest part of a prompt.
ENGINE = {
    "num_slots": 4,
    "capacity": 64,
    "chunk": 16,
    "num_steps": 5,
    "with_experts": True,
}


def make_prompts(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(1, TINY.vocab_size, n).tolist() for n in lengths]


@functools.partial(jax.jit, static_argnums=1)
def full_logits(params, config, tokens):
    """Returns float32 logits of whole rows, computed without a cache."""
    out = transformer.forward(params, config, tokens)
    return transformer.logits(params, config, out.hidden)


@functools.partial(jax.jit, static_argnums=1)
def with_choices(params, config, tokens):
    """Returns float32 logits of whole rows, and the experts of each token."""
    out = transformer.forward(params, config, tokens)
    experts = cached.chosen_experts(config, out.aux, tokens.shape)
    return transformer.logits(params, config, out.hidden), experts


def next_logits(params, config, prompts, completions):
    """Returns the logits from which each new token of each row should be drawn."""
    rows = [p + c.tokens for p, c in zip(prompts, completions, strict=True)]
    tokens = np.zeros((len(rows), 40), np.int32)  # padding is not compared
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    logits = np.asarray(full_logits(params, config, tokens))
    starts = [len(prompt) - 1 for prompt in prompts]
    ends = [len(row) - 1 for row in rows]
    return [x[i:j] for x, i, j in zip(logits, starts, ends, strict=True)]


class GreedyTest(parameterized.TestCase):
    @parameterized.named_parameters(VARIANTS.items())
    def test_equals_argmax_of_full_forward_passes(self, config):
        params = tiny.params(config)
        prompts = make_prompts(5, 11, 15)
        done = engine.generate(
            params, config, prompts, max_new_tokens=17, temperature=0.0
        )
        for completion, logits in zip(
            done, next_logits(params, config, prompts, done), strict=True
        ):
            self.assertLen(completion.tokens, 17)
            self.assertEqual(completion.finish_reason, "length")
            # If any token were wrong, the first wrong one would fail here.
            np.testing.assert_array_equal(logits.argmax(-1), completion.tokens)
            logprobs = jax.nn.log_softmax(logits).max(-1)
            np.testing.assert_allclose(completion.logprobs, logprobs, atol=LOGPROB_ATOL)

    def test_equals_transformers(self):
        """GLM-5.2; GLM-5 continues in weights/loading_test.py."""
        folder = GOLDEN / "glm5_2"
        config = dataclasses.replace(
            huggingface.read_config(folder), dtype="float32", param_dtype="float32"
        )
        abstract = transformer.abstract_params(config)
        params = huggingface.load_params(folder, config, abstract, "float32")
        with np.load(folder / "reference.npz") as reference:
            prompts, expected = reference["input_ids"], reference["greedy_ids"]
        with mock.patch.object(weights, "MAX_UNSTACKED_LAYERS", 0):  # compiles faster
            done = engine.generate(
                params,
                config,
                prompts.tolist(),
                max_new_tokens=expected.shape[1],
                temperature=0.0,
            )
        np.testing.assert_array_equal([c.tokens for c in done], expected)

    def test_stacked_layers_decode_like_single_ones(self):
        params, prompts = tiny.params(TINY), make_prompts(5, 11, 15)
        options = {"max_new_tokens": 17, "temperature": 0.0}
        single = engine.generate(params, TINY, prompts, **options)
        with mock.patch.object(weights, "MAX_UNSTACKED_LAYERS", 0):
            stacked = engine.generate(params, TINY, prompts, **options)
        for a, b in zip(single, stacked, strict=True):
            self.assertEqual(a.tokens, b.tokens)


class UnstackedTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("few_layers", 32, "cpu", None, True),
        ("many_layers", 33, "cpu", None, False),
        ("accelerator", 32, "tpu", None, False),
        ("mesh", 32, "cpu", "mesh", False),
    )
    def test_a_lone_cpu_unstacks_few_layers(self, num_layers, platform, mesh, is_so):
        config = dataclasses.replace(TINY, num_hidden_layers=num_layers)
        with (
            mock.patch.object(weights, "_unstacked", return_value={"one": 1}),
            mock.patch.object(weights.dispatch, "platform", return_value=platform),
            mock.patch.object(weights.placement, "in_use", return_value=mesh),
        ):
            found = weights._decode_params({"stacked": 1}, config)
        self.assertEqual(found, {"one": 1} if is_so else {"stacked": 1})


class BatchTest(absltest.TestCase):
    def test_batch_equals_one_by_one(self):
        params = tiny.params(TINY)
        prompts = make_prompts(8, 9, 15)
        options = {"max_new_tokens": 17, "temperature": 0.0}
        together = engine.generate(params, TINY, prompts, **options)
        for prompt, completion in zip(prompts, together, strict=True):
            (alone,) = engine.generate(params, TINY, [prompt], **options)
            self.assertEqual(alone.tokens, completion.tokens)
            np.testing.assert_allclose(
                alone.logprobs, completion.logprobs, atol=LOGPROB_ATOL
            )

    def test_random_numbers_depend_on_request_and_seed_only(self):
        params = tiny.params(TINY)
        prompts = make_prompts(9, 15, 3)
        options = {"max_new_tokens": 17, "temperature": 1.0}
        first = engine.generate(params, TINY, prompts, **options)
        again = engine.generate(params, TINY, prompts, max_new_tokens=17)
        self.assertEqual(again, first)
        self.assertIsNone(first[0].experts)
        machine = engine.Engine(params, TINY, num_slots=4, capacity=32)
        alike = run_all(machine, make_requests(9, 15, 3, n=17))
        self.assertEqual([alike[i] for i in range(3)], first)
        fewer = engine.generate(params, TINY, prompts[:1], **options)
        self.assertEqual(fewer[0].tokens, first[0].tokens)
        other = engine.generate(params, TINY, prompts, seed=1, **options)
        self.assertNotEqual(other[0].tokens, first[0].tokens)
        thrice = engine.generate(params, TINY, prompts[:1] * 3, **options)
        self.assertNotEqual(thrice[0].tokens, thrice[1].tokens)

    def test_sampled_logprobs_are_those_of_the_full_forward_pass(self):
        params = tiny.params(TINY)
        prompts = make_prompts(7, 12, 2)
        done = engine.generate(
            params, TINY, prompts, max_new_tokens=17, temperature=0.7
        )
        for completion, logits in zip(
            done, next_logits(params, TINY, prompts, done), strict=True
        ):
            logprobs = np.asarray(jax.nn.log_softmax(logits / 0.7))
            chosen = logprobs[np.arange(17), completion.tokens]
            np.testing.assert_allclose(completion.logprobs, chosen, atol=LOGPROB_ATOL)

    def test_bfloat16_keeps_router_and_norms_in_float32(self):
        config = dataclasses.replace(TINY, dtype="bfloat16")
        params = weights.cast_params(tiny.params(config), config)
        block = params["layers_1"]["block_0"]
        self.assertEqual(block["mlp"]["gate"].dtype, jnp.float32)
        self.assertEqual(block["mlp"]["e_score_correction_bias"].dtype, jnp.float32)
        self.assertEqual(block["indexer"]["weights_proj"].dtype, jnp.float32)
        self.assertEqual(params["norm"].dtype, jnp.float32)
        self.assertEqual(params["lm_head"].dtype, jnp.bfloat16)
        self.assertEqual(block["mlp"]["experts"]["up_proj"].dtype, jnp.bfloat16)


class StopTest(parameterized.TestCase):
    def test_each_row_stops_at_its_own_stop_token(self):
        params = tiny.params(TINY)
        prompts = make_prompts(5, 11, 15)
        options = {"max_new_tokens": 17, "temperature": 0.0}
        free = engine.generate(params, TINY, prompts, **options)
        stop = free[1].tokens[14]
        stopped = engine.generate(params, TINY, prompts, stop_ids=[stop], **options)
        for a, b in zip(free, stopped, strict=True):
            if stop in a.tokens:
                size = a.tokens.index(stop) + 1
                self.assertEqual(b.tokens, a.tokens[:size])
                self.assertLen(b.logprobs, size)
                self.assertEqual(b.finish_reason, "stop")
            else:
                self.assertEqual(b, a)
        self.assertEqual(stopped[1].finish_reason, "stop")

    def test_length(self):
        """Covers a prefill alone, a part of a dispatch, and a whole dispatch."""
        machine = engine.Engine(tiny.params(TINY), TINY, num_slots=4, capacity=32)
        prompts = make_prompts(9, 9, 9)
        lengths = {1: 1, 9: 9, 17: 17}
        requests = map(engine.Request, lengths, prompts, lengths.values())
        for n, done in run_all(machine, requests).items():
            self.assertLen(done.tokens, n)
            self.assertLen(done.logprobs, n)

    def test_tokens_are_reported_as_they_come(self):
        seen = {0: [], 1: [], 2: []}
        chunks = []

        def on_tokens(index, tokens):
            seen[index] += tokens
            chunks.append(len(tokens))

        done = engine.generate(
            tiny.params(TINY),
            TINY,
            make_prompts(4, 15, 2),
            max_new_tokens=17,
            on_tokens=on_tokens,
        )
        self.assertEqual(list(seen.values()), [c.tokens for c in done])
        self.assertEqual(chunks, [1, 1, 1, 16, 16, 16])


def run_all(machine, requests):
    """Submits all requests, runs them, and returns the completions by request."""
    for request in requests:
        machine.submit(request)
    done = {}
    while machine.num_pending:
        done |= machine.step()
    return done


def make_requests(*lengths, n=12, **options):
    prompts = make_prompts(*lengths)
    return [
        engine.Request(id=i, prompt=p, max_new_tokens=n, **options)
        for i, p in enumerate(prompts)
    ]


class ContinuousBatchingTest(parameterized.TestCase):
    """Few slots, many requests and chunked prompts give the same samples as alone."""

    def test_logprobs_and_experts_are_those_of_training(self):
        self.check_against_training(ONE_LAYER)

    @parameterized.parameters(("sparse", 64, 4), ("sparse", 4, 1), ("dense", 24, 4))
    @pytest.mark.slow
    def test_logprobs_and_experts_of_other_engines(self, name, chunk, num_slots):
        options = {"chunk": chunk, "num_slots": num_slots}
        self.check_against_training(VARIANTS[name], **options)

    def check_against_training(self, config, **options):
        params = tiny.params(config)
        requests = make_requests(5, 19, 2, 11, 33, 7)
        machine = engine.Engine(params, config, **(ENGINE | options))
        done = run_all(machine, requests)
        self.assertLen(done, len(requests))
        tokens = np.zeros((len(requests), 48), np.int32)
        for r in requests:
            row = [*r.prompt, *done[r.id].tokens]
            tokens[r.id, : len(row)] = row
        logits, experts = jax.device_get(with_choices(params, config, tokens))
        logprobs = np.asarray(jax.nn.log_softmax(logits))
        for r in requests:
            first, last = len(r.prompt) - 1, len(r.prompt) + 11
            chosen = logprobs[r.id, np.arange(first, last), done[r.id].tokens]
            np.testing.assert_allclose(
                done[r.id].logprobs, chosen, atol=LOGPROB_ATOL, rtol=0
            )
            replayed = experts[:, r.id, :last].swapaxes(0, 1)
            np.testing.assert_array_equal(
                np.sort(done[r.id].experts), np.sort(replayed)
            )

    def test_samples_do_not_depend_on_slots_chunks_or_other_requests(self):
        # Alone, each prompt is one part of 24 tokens, padding included.
        params, requests = tiny.params(ONE_LAYER), make_requests(17, 24, 21, 18, 23, 20)
        alone = {}
        for request in requests:
            machine = engine.Engine(params, ONE_LAYER, num_slots=1, capacity=64, seed=3)
            alone |= run_all(machine, [request])
        machine = engine.Engine(params, ONE_LAYER, **ENGINE, seed=3)
        together = run_all(machine, requests[::-1])
        for i, completion in alone.items():
            self.assertEqual(together[i].tokens, completion.tokens)
            np.testing.assert_allclose(
                together[i].logprobs, completion.logprobs, atol=LOGPROB_ATOL
            )

    def test_a_next_turn_reads_only_its_new_tokens(self):
        params = tiny.params(ONE_LAYER)
        (first,) = make_requests(20)
        machine = engine.Engine(params, ONE_LAYER, **ENGINE)
        (turn,) = run_all(machine, [first]).values()
        ids = [*first.prompt, *turn.tokens, 5, 6]
        request = engine.Request(id=1, prompt=ids, max_new_tokens=4)
        with mock.patch.object(
            machine._scheduler, "plan", wraps=machine._scheduler.plan
        ) as spy:
            (again,) = run_all(machine, [request]).values()
            self.assertEqual(spy.call_count, 2)
        fresh = engine.Engine(params, ONE_LAYER, **ENGINE)
        (want,) = run_all(fresh, [request]).values()
        self.assertEqual(again.tokens, want.tokens)
        np.testing.assert_allclose(again.logprobs, want.logprobs, atol=LOGPROB_ATOL)
        np.testing.assert_array_equal(np.sort(again.experts), np.sort(want.experts))
        slots = [len(slot.tokens) for slot in machine._scheduler.slots]
        self.assertEqual(slots, [len(ids) + 3, 0, 0, 0])  # the slot of the first turn

    def test_every_token_says_which_weights_drew_it(self):
        params = tiny.params(ONE_LAYER)
        other = jax.tree.map(lambda x: 2 * np.asarray(x), params)
        machine = engine.Engine(params, ONE_LAYER, **ENGINE)
        for request in make_requests(5, 9, 5):
            machine.submit(request)
        done = {}
        for version in range(100):
            done |= machine.step()
            if not machine.num_pending:
                break
            machine.publish((params, other)[version % 2], version + 1)
        for completion in done.values():
            self.assertLen(completion.versions, 12)
            self.assertEqual(completion.versions, sorted(completion.versions))
        self.assertLess(done[0].versions[0], done[0].versions[-1])
        # A prefix that older weights read is not reused.
        machine.publish(params, 1000)
        request = engine.Request(9, [*make_prompts(5)[0], 1], 8)
        (after,) = run_all(machine, [request]).values()
        fresh = engine.Engine(params, ONE_LAYER, **ENGINE)
        self.assertEqual(after.tokens, run_all(fresh, [request])[9].tokens)

    def test_each_request_is_sampled_and_stopped_in_its_own_way(self):
        params = tiny.params(ONE_LAYER)
        (prompt,) = make_prompts(9)
        greedy = engine.Request(0, prompt, 12, temperature=0.0)
        machine = engine.Engine(params, ONE_LAYER, **ENGINE)
        free = run_all(machine, [greedy])[0].tokens
        requests = [
            engine.Request(1, prompt, 12, temperature=1.0, top_k=1),
            engine.Request(2, prompt, 5, temperature=0.0),
            engine.Request(3, prompt, 12, frozenset([free[7]]), temperature=0.0),
            engine.Request(4, prompt, 12, temperature=1.0, top_p=1e-6),
            engine.Request(5, prompt, 12, temperature=1.0, min_p=1.0),
        ]
        done = run_all(machine, requests)
        for i in (1, 4, 5):
            self.assertEqual(done[i].tokens, free)
            np.testing.assert_allclose(done[i].logprobs, 0, atol=LOGPROB_ATOL)
        self.assertEqual(done[2].tokens, free[:5])
        self.assertEqual(done[3].tokens, free[: free.index(free[7]) + 1])
        self.assertEqual(done[3].finish_reason, "stop")

    def test_aborted_requests_leave_the_others_alone(self):
        params, requests = tiny.params(ONE_LAYER), make_requests(5, 9, 7, 3, 4, 6)
        want = run_all(engine.Engine(params, ONE_LAYER, **ENGINE), requests)
        machine = engine.Engine(params, ONE_LAYER, **ENGINE)
        for request in requests:
            machine.submit(request)
        machine.step(), machine.step()
        part = machine.abort(0)
        self.assertEqual(part.tokens, want[0].tokens[: len(part.tokens)])
        self.assertIsNone(part.finish_reason)
        machine.abort(5)  # still waiting
        done = {}
        while machine.num_pending:
            done |= machine.step()
        self.assertEqual(sorted(done), [1, 2, 3, 4])
        for i, completion in done.items():
            self.assertEqual(completion.tokens, want[i].tokens)


# Programs are counted: the smallest model has as many as any other.
COUNTED = dataclasses.replace(
    TINY, num_hidden_layers=1, first_k_dense_replace=1, attention="dense"
)


class CompilationTest(absltest.TestCase):
    def test_programs_are_few_and_reused(self):
        config = dataclasses.replace(COUNTED, rope_theta=2e4)  # nobody else's programs
        params = tiny.params(config)
        with jax.log_compiles(), self.assertLogs("jax", "WARNING") as logs:
            for length in (1, 5, 11):
                for n, temperature in ((1, 0.0), (3, 0.5), (7, 1.0)):
                    engine.generate(
                        params,
                        config,
                        make_prompts(length),
                        max_new_tokens=n,
                        temperature=temperature,
                        top_p=0.9,
                    )
        compiled = COMPILES.findall("\n".join(logs.output))
        self.assertBetween(compiled.count("prefill"), 1, 2)  # 16 and 24 tokens
        self.assertBetween(compiled.count("decode"), 1, 2)

    def test_nothing_is_compiled_after_a_warm_up(self):
        config = dataclasses.replace(COUNTED, rope_theta=4e4)  # nobody else's programs
        params, seen = tiny.params(config), []
        machine = engine.Engine(params, config, num_slots=1, capacity=32, chunk=16)
        with jax.log_compiles(), self.assertLogs("jax", "WARNING") as logs:
            machine.warm_up(lambda *progress: seen.append(progress))
            self.assertEqual(seen, [(1, 3), (2, 3), (3, 3)])
            num_compiled = len(COMPILES.findall("\n".join(logs.output)))
            self.assertEqual(num_compiled, machine.max_programs)
            machine.clear_cache()
            machine.warm_up()  # as after a program that failed and lost the cache
            done = run_all(machine, make_requests(3, 17, 5)[:2])
        self.assertLen(COMPILES.findall("\n".join(logs.output)), num_compiled)
        self.assertLen(done[1].tokens, 12)

    @pytest.mark.slow  # 16 s
    def test_an_engine_never_exceeds_its_bound(self):
        config = dataclasses.replace(COUNTED, rope_theta=3e4)  # nobody else's programs
        params = tiny.params(config)
        machine = engine.Engine(params, config, num_slots=4, capacity=64, chunk=24)
        self.assertEqual(machine.max_programs, 2 * 2 * 2 + 1)  # 1, 4 rows; 16, 24
        rng = np.random.default_rng(0)
        with jax.log_compiles(), self.assertLogs("jax", "WARNING") as logs:
            for batch in range(6):
                lengths = rng.integers(1, 50, rng.integers(1, 9))
                requests = [
                    engine.Request(100 * batch + i, p, int(rng.integers(1, 12)))
                    for i, p in enumerate(make_prompts(*lengths))
                ]
                run_all(machine, requests)
        compiled = COMPILES.findall("\n".join(logs.output))
        self.assertBetween(len(compiled), 3, machine.max_programs)

    def test_sizes_waste_at_most_half(self):
        sizes = sorted({engine.bucket(n) for n in range(1, 1025)})
        self.assertEqual(
            sizes, [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
        )
        for n in range(1, 1025):
            self.assertGreaterEqual(engine.bucket(n), n)
            self.assertLess(engine.bucket(n), max(17, 1.5 * n + 1))


class InputTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("empty", [[3], []], {}, "Prompt 1 is empty"),
        ("id", [[3, 96]], {}, r"Prompt 0 has the id 96, but ids lie in 0\.\.95"),
        ("negative", [[-1]], {}, "Prompt 0 has the id -1"),
        ("long", [[3] * 120], {}, "max_position_embeddings=128"),
        ("none", [[3]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        (
            "cold",
            [[3]],
            {"temperature": -1.0},
            "temperature must be finite and not negative",
        ),
        ("top_p", [[3]], {"top_p": 0.0}, "top_p must lie in"),
        ("nan", [[3]], {"temperature": float("nan")}, "temperature must be finite"),
    )
    def test_refuses_wrong_requests_by_name(self, prompts, options, message):
        options = {"max_new_tokens": 9} | options
        with self.assertRaisesRegex(config_lib.InputError, message):
            engine.generate({}, TINY, prompts, **options)

    @parameterized.parameters(
        ({"top_k": -5}, "top_k must not be negative"),
        ({"min_p": 1.5}, r"min_p must lie in \[0, 1\]"),
        ({"id": 2**31}, "id must be an int in 0"),
    )
    def test_requests_are_checked(self, changes, message):
        request = engine.Request(
            **({"id": 0, "prompt": [3], "max_new_tokens": 9} | changes)
        )
        machine = engine.Engine(tiny.params(TINY), TINY, num_slots=1, capacity=16)
        with self.assertRaisesRegex(config_lib.InputError, message):
            machine.submit(request)

    def test_no_prompts_no_completions(self):
        self.assertEqual(engine.generate({}, TINY, [], max_new_tokens=9), [])


if __name__ == "__main__":
    environment.main()
