"""Log-probs of prompts, by HTTP and below it."""

import asyncio
import contextlib
import dataclasses
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import openai
from absl.testing import absltest, parameterized

from glm5_jax.http_server import errors
from glm5_jax.inference import engine, prompt_scores, scoring, service
from glm5_jax.serving import logprobs, prompt_logprobs, served
from tests.inference import engine_test
from tests.serving import scripted, server_test
from tests.serving.scripted import TOKENIZER


class FormsTest(server_test.ClientTest):
    """What answers tell of their prompts."""

    def logprobs(self, text):
        """Returns the log-probs of all tokens after each token of a text."""
        row = jnp.asarray([TOKENIZER.encode(text)])
        logits = engine_test.full_logits(scripted.params(), scripted.MODEL, row)[0]
        return np.asarray(jax.nn.log_softmax(logits))

    def test_an_evaluation_harness_asks_for_the_log_probs_of_a_text(self):
        """As lm_eval's local-completions does, several texts at once."""
        texts = ["abxd", "ab"]
        rows = [TOKENIZER.encode(text) for text in texts]
        asked = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
        answer = self.complete(rows, **asked)
        (split,) = self.complete("é", **asked).choices
        self.assertEqual(split.logprobs.text_offset[:3], [0, 0, 1])
        drawn = ["<|endoftext|>", "c"]
        for text, end, choice in zip(texts, drawn, answer.choices, strict=True):
            self.assertStartsWith(choice.text, text)
            found, want = choice.logprobs, self.logprobs(text)
            self.assertEqual(found.tokens, [*text, end])
            self.assertEqual(found.text_offset, [*range(len(text) + 1)])
            self.assertIsNone(found.token_logprobs[0])
            self.assertIsNone(found.top_logprobs[0])
            for place, (before, after) in enumerate(itertools.pairwise(text), 1):
                own = found.token_logprobs[place]
                self.assertAlmostEqual(own, want[place - 1, ord(after)], 4)
                ((likeliest, value),) = found.top_logprobs[place].items()
                is_greedy = before + after in ("ab", "bc", "cd")
                self.assertEqual(likeliest == after, is_greedy)
                self.assertEqual(value == own, is_greedy)  # to the last bit
        self.assertEqual(answer.usage.prompt_tokens, 6)

    @parameterized.parameters(False, True)
    def test_a_prompt_alone(self, streams):
        fields = {"max_tokens": 0, "logprobs": 0, "echo": True, "n": 2}
        answer = self.complete(["abc", "x"], stream=streams, **fields)
        choices = [c.choices[0] for c in answer] if streams else answer.choices
        self.assertEqual([c.index for c in choices], [0, 1, 2, 3])
        self.assertEqual([c.text for c in choices], ["abc", "abc", "x", "x"])
        self.assertEqual({c.finish_reason for c in choices}, {"length"})
        self.assertLen(choices[0].logprobs.token_logprobs, 3)
        self.assertIsNone(choices[0].logprobs.top_logprobs)

    def test_a_stream_begins_with_the_prompt(self):
        fields = {"stream": True, "logprobs": 1, "echo": True, "max_tokens": 3}
        first, *others = [c.choices[0] for c in self.complete("ab", **fields)]
        self.assertEqual((first.text, first.finish_reason), ("ab", None))
        self.assertEqual(first.logprobs.tokens, ["a", "b"])
        self.assertEqual("".join(c.text for c in others), "cd")
        offsets = [x for c in others for x in c.logprobs.text_offset]
        self.assertEqual(offsets, [2, 3, 4])

    def test_likeliest_tokens_and_ranks_in_vllm_s_form(self):
        row, want = TOKENIZER.encode("abxd"), self.logprobs("abxd")
        body = {"token_ids": row, "sampling_params": {"prompt_logprobs": 2}}
        body["sampling_params"]["max_tokens"] = 1
        answer = self.http.post("/inference/v1/generate", json=body).json()
        first, *places = answer["prompt_logprobs"]
        self.assertIsNone(first)
        for id, place, values in zip(row[1:], places, want, strict=False):
            order = np.argsort(-values, kind="stable")
            ids = dict.fromkeys([id, *order[:2].tolist()])
            self.assertEqual(list(place), [str(i) for i in ids])
            for shown in ids:
                found = place[str(shown)]
                self.assertAlmostEqual(found["logprob"], values[shown], 4)
                self.assertEqual(found["rank"], order.tolist().index(shown) + 1)
                self.assertEqual(found["decoded_token"], TOKENIZER.spell([shown]))
        asked = {"max_tokens": 1, "extra_body": {"prompt_logprobs": 2}}
        (choice,) = self.complete("abxd", **asked).choices
        self.assertEqual(choice.model_dump()["prompt_logprobs"], [None, *places])

    def test_no_likeliest_tokens_leave_the_prompt_s_own(self):
        asked = {"max_tokens": 1, "extra_body": {"prompt_logprobs": 0}}
        (choice,) = self.complete("ab", **asked).choices
        first, place = choice.model_dump()["prompt_logprobs"]
        self.assertIsNone(first)
        self.assertEqual(list(place), [str(ord("b"))])
        self.assertEqual(place[str(ord("b"))]["rank"], 1)

    @parameterized.parameters(
        ({"max_tokens": 0}, "max_new_tokens"),
        ({"echo": True, "logprobs": 21}, "0..20"),
        ({"echo": True, "logprobs": -1}, "0..20"),
        ({"extra_body": {"prompt_logprobs": 21}}, "0..20"),
        ({"echo": True, "max_tokens": 0, "prompt": [2**70]}, "Ids must lie in"),
        ({"echo": True, "max_tokens": 0, "prompt": [-1]}, "Ids must lie in"),
        ({"echo": True, "max_tokens": 0, "prompt": "a" * 769}, "more than the 768"),
        ({"echo": True, "logprobs": 1, "prompt": "", "max_tokens": 0}, "at least one"),
        (
            {"echo": True, "logprobs": 1, "prompt": "a" * 769, "max_tokens": 0},
            "more than the 768",
        ),
    )
    def test_wrong_fields(self, fields, message):
        fields = {"prompt": "a", **fields}
        with self.assertRaisesRegex(openai.BadRequestError, message):
            self.complete(**fields)

    def test_names_of_tokens(self):
        info = self.http.get("/tokenizer_info").json()
        self.assertEqual(info["eos_token"], "<|endoftext|>")
        for text, ids in (
            (info["eos_token"], [TOKENIZER.eos_id]),
            ("a<|user|>", [*b"a<|user|>"]),
        ):
            answer = self.http.post("/tokenize", json={"prompt": text}).json()
            self.assertEqual(answer["tokens"], ids)


class BatchesTest(parameterized.TestCase):
    def test_rows_of_about_the_same_length_share_a_pass(self):
        lengths = [3, 700, 4, 1, 690, 2, 3]
        rows = [[0] * length for length in lengths]
        found = [*prompt_scores.batches(rows, scripted.MODEL)]
        self.assertCountEqual(itertools.chain(*found), range(len(rows)))
        self.assertIn([1, 4], found)
        for batch in found:
            padded = {engine.bucket(lengths[i]) for i in batch if lengths[i] > 1}
            self.assertLessEqual(len(padded), 1)

    def test_a_pass_has_a_bounded_number_of_tokens(self):
        length = 512
        most = scoring.BATCH_TOKENS // length
        found = [*prompt_scores.batches([[0] * length] * (most + 1), scripted.MODEL)]
        self.assertEqual(found, [[*range(most)], [most]])

    def test_numbers_of_rows_are_few(self):
        """Each is a program for every length."""
        made = engine.Engine(
            scripted.params(), scripted.MODEL, num_slots=1, capacity=64
        )
        row, other = [*b"abxd"], [*b"cd"]
        alone, _ = prompt_scores.of(made, [row], 2)
        with mock.patch.object(scoring, "score", wraps=scoring.score) as score:
            for number in (2, 3, 4, 5):
                found, _ = prompt_scores.of(made, [row, *[other] * (number - 1)], 2)
                self.assertLen(found, number)
                np.testing.assert_allclose(
                    found[0].logprobs, alone[0].logprobs, atol=server_test.LOGPROB_ATOL
                )
                self.assertEqual(found[0].ranks, alone[0].ranks)
                self.assertLen(found[-1].logprobs, 1)
        sizes = [len(call.args[2]["tokens"]) for call in score.call_args_list]
        self.assertEqual(sizes, [4, 4, 4, 16])


class Replacing(service.Service):
    """Takes new weights after the first pass."""

    def call(self, function):
        found = super().call(function)
        if self.stats().version == 0:
            found.result()
            self.publish(self.others, 1).result()
        return found


class VersionTest(absltest.TestCase):
    def test_all_rows_are_scored_by_the_same_weights(self):
        made = engine.Engine(
            scripted.params(), scripted.MODEL, num_slots=1, capacity=64
        )
        with contextlib.closing(Replacing(made)) as driver:
            driver.others = jax.tree.map(np.zeros_like, scripted.params())
            model = served.Served(name="m", service=driver, tokenizer=TOKENIZER)
            rows = [[*b"ab"], [*b"abcdabcd"], [5]]
            asked = prompt_logprobs.scored(model, rows)
            found, version = asyncio.run(asked)
            self.assertEqual(version, driver.stats().version)
        self.assertGreater(version, 0)
        for row, scores in zip(rows, found, strict=True):
            even = [-np.log(scripted.MODEL.vocab_size)] * (len(row) - 1)
            np.testing.assert_allclose(scores.logprobs, even, rtol=1e-6)

    def test_the_time_is_limited(self):
        made = engine.Engine(
            scripted.params(), scripted.MODEL, num_slots=1, capacity=64
        )
        with contextlib.closing(service.Service(made)) as driver:
            model = served.Served(name="m", service=driver, max_seconds=0.0)
            with self.assertRaisesRegex(errors.ApiError, "time limit"):
                asyncio.run(prompt_logprobs.scored(model, [[*b"ab"]]))
        model = dataclasses.replace(model, max_seconds=9.0)
        with self.assertRaisesRegex(errors.ApiError, "shutting down"):
            asyncio.run(prompt_logprobs.scored(model, [[*b"ab"]]))


class OffsetsTest(absltest.TestCase):
    def test_tokens_of_one_character_have_its_place(self):
        ids = TOKENIZER.encode("aé🙂!b")
        for size in range(len(ids) + 1):
            made = logprobs.Offsets(TOKENIZER, 5)
            found = made.feed(ids[:size]) + made.feed(ids[size:])
            self.assertEqual(found, [5, 6, 6, 7, 7, 7, 7, 8, 9])

    def test_special_tokens_count_where_the_text_has_them(self):
        ids = TOKENIZER.encode_spelt("a<|user|>b")
        for is_spelt, last in ((False, 1), (True, len("a<|user|>"))):
            found = logprobs.Offsets(TOKENIZER, is_spelt=is_spelt).feed(ids)
            self.assertEqual(found, [0, 1, last])
