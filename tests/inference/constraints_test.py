"""Checks that requests with grammars draw as the grammar and the model say.

The allowed tokens of the oracle come from a list of all texts of a grammar.
"""

import dataclasses
import functools
import json
import re
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.inference import (
    constraints,
    engine,
    events,
    grammars,
    placement,
    programs,
    requests,
    sampling,
    service,
)
from glm5_jax.inference.limits import Limits
from glm5_jax.inference.requests import Request
from tests import environment, small_configs
from tests.inference import engine_test, fewer_programs, mesh_test
from tests.model import tiny

TOKENIZER = tokenizer_lib.byte_tokenizer(tokenizer_lib.SPECIAL_TOKENS)
MODEL = dataclasses.replace(
    small_configs.DENSE_MODEL,
    vocab_size=TOKENIZER.vocab_size + 12,
    num_nextn_predict_layers=1,
)
THOUGHT_END = TOKENIZER.special_ids["</think>"]
END = TOKENIZER.eos_id
ENDS = frozenset([END, TOKENIZER.special_ids["<|user|>"]])
CHOICES = ["ab", "abc", "abd", "xyzxyzxyzxyz", "é"]
WORDS = [a + b + c for a in "ab" for b in "ab" for c in "abc"]
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["colour", "sizes"],
    "additionalProperties": False,
}
NO_BLANKS = dict.fromkeys(b" \t\r\n", -100.0)
SIZES = {"num_slots": 3, "capacity": 112, "chunk": 16}
LOGPROB_ATOL = 1e-5  # float32 sums in another order
SECONDS = 60.0


@functools.cache
def compiler():
    return grammars.Grammars(TOKENIZER, MODEL.vocab_size)


def of(kind, source):
    return compiler().compile([grammars.Source(kind, source)], ENDS)


def after_thought(inner):
    call = TOKENIZER.special_ids["<tool_call>"]
    return constraints.After(inner, THOUGHT_END, frozenset([call]))


@functools.cache
def params():
    return tiny.params(MODEL)


def make_engine(num_steps, **limits):
    limits = Limits(with_adjustments=True, page_size=8, **limits)
    options = SIZES | {"num_steps": num_steps}
    with fewer_programs.of_all_rows():
        return engine.Engine(params(), MODEL, **options, limits=limits)


@functools.cache
def with_slots():
    return make_engine(6)


def make_requests():
    """Makes requests with grammars, and with none; all but one are random."""
    prompts = np.random.default_rng(0).integers(1, 255, (7, 12)).tolist()
    thinks, lengths = {"logit_bias": {THOUGHT_END: 4.5}}, {1: 70, 4: 90, 6: 70}
    wishes = [
        {"constraint": of("choice", CHOICES)},
        {},
        {"constraint": of("regex", "[ab]{2}[abc]"), "temperature": 2.0},
        {"constraint": after_thought(of("choice", CHOICES)), **thinks},
        {"constraint": of("json_schema", SCHEMA), "logit_bias": NO_BLANKS},
        {"constraint": of("choice", CHOICES), "temperature": 0.0},
        {"frequency_penalty": 2.0},
    ]
    return [
        Request(i, prompt, lengths.get(i, 20), ENDS, seed=7 + i, **more)
        for i, (prompt, more) in enumerate(zip(prompts, wishes, strict=True))
    ]


@functools.cache
def wanted():
    return engine_test.run_all(with_slots(), make_requests())


def text_of(completion):
    return TOKENIZER.spell(completion.tokens[:-1])


def by_hand(texts, drawn):
    """Returns the ids that may follow, from the list of all texts."""
    before = bytes(drawn)
    found = {t[len(before)] for t in texts if t.startswith(before) and t != before}
    return sorted(found | (ENDS if before in texts else set()))


class OracleTest(parameterized.TestCase):
    @parameterized.parameters((0, CHOICES), (2, WORDS), (5, CHOICES))
    def test_each_token_is_drawn_from_what_is_allowed(self, index, texts):
        request, completion = make_requests()[index], wanted()[index]
        texts = [text.encode() for text in texts]
        prompts = [request.prompt]
        (logits,) = engine_test.next_logits(params(), MODEL, prompts, [completion])
        key = sampling.request_keys(0, np.array([request.seed]))[0]
        for place, id in enumerate(completion.tokens):
            allowed = by_hand(texts, completion.tokens[:place])
            self.assertIn(id, allowed)
            self.assertAlmostEqual(
                completion.raw_logprobs[place],
                float(jax.nn.log_softmax(logits[place])[id]),
                delta=LOGPROB_ATOL,
            )
            masked = np.full(MODEL.vocab_size, -np.inf, np.float32)
            masked[allowed] = np.asarray(logits[place])[allowed]
            scaled = jnp.asarray(masked / (request.temperature or 1.0))
            self.assertAlmostEqual(
                completion.logprobs[place],
                float(jax.nn.log_softmax(scaled)[id]),
                delta=LOGPROB_ATOL,
            )
            token_key = jax.random.fold_in(key, len(request.prompt) + place)
            drawn = jax.random.categorical(token_key, scaled)
            best = int(np.argmax(masked))
            self.assertEqual(id, int(drawn) if request.temperature else best)
        self.assertEqual(completion.finish_reason, "stop")

    def test_json_follows_its_schema(self):
        found = json.loads(text_of(wanted()[4]))
        jsonschema.validate(found, SCHEMA)

    def test_a_grammar_begins_after_the_thought(self):
        """Within the thought nothing ends the text, and tokens are free."""
        tokens = wanted()[3].tokens
        place = tokens.index(THOUGHT_END)
        self.assertBetween(place, 1, 17)
        self.assertEmpty(ENDS & {*tokens[:place]})
        answer = bytes(tokens[place + 1 : -1]).decode()
        self.assertIn(answer, CHOICES)


def check_all(test, found):
    """Checks that the requests drew what they draw on one device, undisturbed."""
    for id, completion in wanted().items():
        test.assertEqual(found[id].tokens, completion.tokens, id)
        test.assertEqual(found[id].finish_reason, completion.finish_reason)


class InvarianceTest(parameterized.TestCase):
    def test_alone(self):
        found = {}
        for request in make_requests():
            found |= engine_test.run_all(with_slots(), [request])
        check_all(self, found)

    def test_pages_preemption_and_other_dispatches(self):
        machine = make_engine(3, num_pages=14)
        check_all(self, engine_test.run_all(machine, make_requests()))
        self.assertGreater(machine.num_preempted, 0)

    def test_drafts(self):
        machine = make_engine(4, num_drafts=2, adapts_drafts=False)
        requests = make_requests()
        # Rounds that a grammar cuts off do not count; those of others do.
        for ids, is_counted in (([0, 2, 5], False), ([1], True)):
            engine_test.run_all(machine, [requests[i] for i in ids])
            self.assertEqual(machine.drafter.acceptance.rounds > 0, is_counted)
        check_all(self, engine_test.run_all(machine, make_requests()))

    def test_dispatches_that_fail(self):
        """The matchers follow what was committed, whatever was planned."""
        machine, decode, calls = with_slots(), programs.decode, []

        def failing(*args, **options):
            calls.append(None)
            result = decode(*args, **options)
            if len(calls) % 3 == 0:
                raise RuntimeError("lost, with the cache")
            return result

        for request in make_requests():
            machine.submit(request)
        done = {}
        with mock.patch.object(programs, "decode", failing):
            while machine.num_pending:
                try:
                    done |= machine.step()
                except RuntimeError:
                    continue
        check_all(self, done)


@pytest.mark.slow
class MeshTest(parameterized.TestCase):
    def test_each_device_has_the_guides_of_its_slots(self):
        mesh = mesh_test.make_mesh(fsdp=2, expert=2, tensor=2)
        placed = jax.device_put(params(), placement.params(params(), MODEL, mesh))
        with jax.set_mesh(mesh):
            machine = engine.Engine(
                placed,
                MODEL,
                **SIZES | {"num_slots": 8},
                num_steps=6,
                limits=Limits(with_adjustments=True),
            )
        check_all(self, engine_test.run_all(machine, make_requests()))


class DispatchTest(parameterized.TestCase):
    def count(self, **wishes):
        """Returns the tokens of a request, and the dispatches that drew them."""
        machine, number = with_slots(), 0
        request = Request(0, [5] * 12, 24, ENDS, seed=3, **wishes)
        completion = machine.submit(request)
        while machine.num_pending:
            machine.step()
            number += machine.dispatch.kind == "decode"
        return completion, number

    def test_forced_tokens_share_a_dispatch(self):
        completion, number = self.count(constraint=of("choice", ["hello, world"]))
        self.assertEqual(text_of(completion), "hello, world")
        np.testing.assert_allclose(completion.logprobs[:12], 0, atol=1e-6)
        self.assertLess(max(completion.raw_logprobs[:12]), -1e-3)
        self.assertEqual(number, 2)  # of 6 tokens each, after the prompt's

    def test_a_thought_is_not_cut(self):
        constraint = after_thought(of("choice", ["yes"]))
        bias = {THOUGHT_END: -100.0}
        _, number = self.count(constraint=constraint, logit_bias=bias)
        self.assertEqual(number, 4)  # 24 tokens, of which the prompt draws one


class Failing:
    """A constraint whose matcher fails after two tokens."""

    vocab_size, ends, pause = MODEL.vocab_size, ENDS, None

    def start(self):
        self.left = 3
        return self

    def allowed(self):
        self.left -= 1
        if not self.left:
            raise constraints.ConstraintError("too complex")
        return constraints.mask_of(frozenset([65, 66]), MODEL.vocab_size)

    def consume(self, ids):
        pass

    def rollback(self, number):
        pass


class TrackerTest(parameterized.TestCase):
    MOST = 4

    def guide(self, tracker, text):
        """Returns the forced tokens after a text, and those allowed after them."""
        guide = tracker.guide([*text.encode()], self.MOST)
        words = guide.allowed
        allowed = [
            id
            for id in range(len(words) * constraints.WORD)
            if words[id // constraints.WORD] >> (id % constraints.WORD) & 1
        ]
        self.assertEqual(guide.num_tokens, len(guide.forced) + 1)
        return bytes(guide.forced).decode(), allowed

    def test_a_guide_is_a_function_of_the_text(self):
        """Also if a request has fewer tokens than before."""
        constraint = of("choice", ["ab", "abc@?", "z _`x"])
        wanted = {
            "": ("", [*b"az"]),
            "a": ("b", [*b"c", *ENDS]),
            "ab": ("", [*b"c", *ENDS]),
            "abc": ("@?", [*ENDS]),
            "abc@": ("?", [*ENDS]),
            # No more than a dispatch draws.
            "z": (" _`", [*b"x"]),
            "z ": ("_`x", [*ENDS]),
        }
        orders = [*wanted][:5], ["abc@", "ab", "ab", "abc", "a", ""], ["z ", "z", "z "]
        for texts in orders:
            tracker = constraints.Tracker(constraint)
            for text in texts:
                forced, allowed = wanted[text]
                found = self.guide(tracker, text)
                self.assertEqual(found, (forced, sorted(allowed)), text)

    def test_a_text_that_the_grammar_does_not_allow_ends(self):
        tracker = constraints.Tracker(of("choice", ["ab"]))
        for text in ("b", "bb"):
            self.assertEqual(self.guide(tracker, text), ("", sorted(ENDS)))
            self.assertIn('token "b" doesn\'t satisfy', tracker.error)

    def test_a_matcher_that_failed_stays_so(self):
        matcher = of("choice", ["ab"]).start()
        with self.assertRaisesRegex(constraints.ConstraintError, "cannot be followed"):
            matcher.rollback(1)
        with self.assertRaisesRegex(constraints.ConstraintError, "cannot be followed"):
            matcher.allowed()

    def test_a_token_that_is_not_allowed_is_refused(self):
        matcher = of("choice", ["ab"]).start()
        matcher.consume([*b"a"])
        with self.assertRaisesRegex(constraints.ConstraintError, "cannot be followed"):
            matcher.consume([*b"c"])

    @parameterized.parameters({}, {"may_end": True})
    def test_until_a_grammar_begins_one_mask_holds(self, **ending):
        inner, forbidden = of("choice", ["ab"]), frozenset([65])
        after = constraints.After(inner, THOUGHT_END, forbidden, **ending)
        tracker = constraints.Tracker(after)
        for text in ([], [66, 97], [66, 97, 98]):
            guide = tracker.guide(text, self.MOST)
            self.assertEqual((guide.forced, guide.pause), ((), THOUGHT_END))
            self.assertIsNone(guide.num_tokens)
            banned = forbidden if ending else forbidden | ENDS
            wanted = ~constraints.mask_of(banned, MODEL.vocab_size)
            np.testing.assert_array_equal(guide.allowed, wanted)
        ends = constraints.mask_of(ENDS, MODEL.vocab_size)
        for text, forced in (
            ([66, 97, 98, THOUGHT_END], (97, 98)),
            ([66, 97, 98, THOUGHT_END, 97], (98,)),
            ([THOUGHT_END, 97, 98], ()),
        ):
            for one in (tracker, constraints.Tracker(after)):
                guide = one.guide(text, self.MOST)
                self.assertEqual((guide.forced, guide.pause), (forced, None))
                np.testing.assert_array_equal(guide.allowed, ends)


class KeptTest(parameterized.TestCase):
    def test_the_latest_grammars_are_kept(self):
        own = grammars.Grammars(TOKENIZER, MODEL.vocab_size)

        def compiled(i):
            return own.compile([grammars.Source("choice", [str(i)])], ENDS)

        made = [compiled(i) for i in range(65)]
        for i in (1, 64):
            self.assertEqual(compiled(i), made[i])
        self.assertNotEqual(compiled(0), made[0])


class ErrorTest(parameterized.TestCase):
    def test_a_matcher_that_fails_ends_its_request_alone(self):
        heard, done = {}, threading.Semaphore(0)

        def hear(event, id):
            if isinstance(event, events.End):
                heard[id] = event
                done.release()

        driver = service.Service(make_engine(6))
        prompt = [1, 2, 3]
        asked = [
            Request(0, prompt, 20, ENDS, constraint=Failing()),
            Request(1, prompt, 8, ENDS, constraint=of("choice", ["yes"])),
        ]
        try:
            for request in asked:
                driver.submit(request, functools.partial(hear, id=request.id))
            for _ in asked:
                self.assertTrue(done.acquire(timeout=SECONDS))
        finally:
            driver.close()
        self.assertEqual(heard[0].reason, "error")
        self.assertEqual(heard[0].message, "too complex")
        self.assertEqual(heard[1].reason, "stop")
        self.assertEqual(text_of(heard[1].completion), "yes")

    @parameterized.parameters(
        ("json_schema", {"type": "objct"}, "Invalid type: objct"),
        ("json_schema", {"dependentSchemas": {}}, "dependentSchemas"),
        ("json_schema", [], "must be an object, got []"),
        ("regex", "(((", "unclosed group"),
        ("regex", 5, "must be a text, got 5"),
        ("choice", [], "at least one text"),
        ("choice", ["a", ""], "none of them empty"),
        ("choice", "ab", "at least one text"),
        ("choice", ["a", 5], "at least one text"),
        ("choice", ["\ud800"], ""),
        ("regex", "\ud800", "surrogates"),
        ("regex", [8] * 100, f"got {[8] * 100}"),  # 300 characters
        ("regex", 10**300, f"got 1{'0' * 296}..."),
        ("lark", "start: missing", "missing"),
        ("grammar", "nonsense", "GBNF"),
    )
    def test_wrong_grammars(self, kind, source, message):
        with self.assertRaisesRegex(grammars.GrammarError, re.escape(message)):
            of(kind, source)

    def test_wrong_requests(self):
        constraint = of("choice", ["a"])
        lacking = Request(0, [1], 1, frozenset([END]), constraint=constraint)
        (found,) = requests.errors(lacking, MODEL, 100)
        self.assertIn("among stop_ids", found)
        larger = dataclasses.replace(MODEL, vocab_size=400)
        whole = dataclasses.replace(lacking, stop_ids=ENDS)
        (found,) = requests.errors(whole, larger, 100)
        self.assertIn("400 ids", found)
        plain = engine.Engine(params(), MODEL, num_slots=1, capacity=16)
        with self.assertRaisesRegex(config_lib.InputError, "with_adjustments=True"):
            plain.check(whole)


if __name__ == "__main__":
    environment.main()
