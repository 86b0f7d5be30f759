"""The gateway: every sampled token is trained once, at its position."""

import dataclasses
import itertools
import random

import numpy as np
from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.inference import requests
from glm5_jax.rl import gateway
from tests import environment
from tests.data import templates_test

TOKENIZER = templates_test.TOKENIZER
SPECIAL = TOKENIZER.special_ids
HI = {"role": "user", "content": "Hi"}
TOOL = {"role": "tool", "content": "4"}
VERSIONS = ("glm5", "glm5.1", "glm5.2")
WORDS = ("so", " the", " añb", "\n\n", " 12", " 🙂", " <|user|>", "漢字", " x y")
ADD = templates_test.ADD


def completion(tokens, reason="stop", first=0):
    """Returns a completion whose tokens have different log-probs."""
    logprobs = [-float(i) for i in range(first, first + len(tokens))]
    return requests.Completion(list(tokens), logprobs, reason, [7] * len(tokens))


class Conversation:
    """A random conversation: an assistant thinks and calls; users and tools answer.

    If `is_canonical`, turns are tokenised as the template does; otherwise they are
    single bytes, which a tokenizer would merge.
    """

    def __init__(self, template, seed, is_canonical=True):
        self.template, self.is_canonical = template, is_canonical
        self.random = random.Random(seed)
        self.session = gateway.Session(template, [ADD])
        self.messages = [HI | {"content": self.words()}]
        self.prompts, self.sampled = [], []
        self.num_hidings = 0  # user messages after a shown thought
        self.has_thought = False

    def words(self, least=0):
        return "".join(self.random.choices(WORDS, k=self.random.randint(least, 4)))

    def turn(self, *, is_last=False):
        """Samples a turn; answers it unless it is the last."""
        prompt = self.session.prompt(self.messages)
        is_thinking = prompt[-1] == SPECIAL["<think>"]
        call = self.random.random() < 0.5 and not is_last
        # A requested thought is not empty, because glm5 shows no empty one.
        thought = f"t{self.words()}t" if is_thinking else ""
        tokens = self.ids(thought) + [SPECIAL["</think>"]] * is_thinking
        tokens += self.ids(f"c{self.words()}c" if self.random.random() < 0.9 else "")
        if call:
            tokens += templates_test.ids_of(
                "<tool_call>add<arg_key>x</arg_key><arg_value>"
            )
            tokens += self.ids(str(self.random.randint(0, 9999)))
            tokens += templates_test.ids_of("</arg_value></tool_call>")
        stop = "<|observation|>" if call else "<|user|>"
        tokens.append(SPECIAL["<|endoftext|>" if is_last else stop])
        first = sum(map(len, self.sampled))
        message = self.session.record(completion(tokens, first=first))
        self.prompts.append(prompt)
        self.sampled.append(tokens)
        self.messages.append(message)
        self.has_thought |= is_thinking
        if is_last:
            return
        if call:
            count = self.random.randint(1, 3)
            self.messages += [TOOL | {"content": self.words()} for _ in range(count)]
        else:
            self.messages.append(HI | {"content": self.words()})
            self.num_hidings += self.has_thought
            self.has_thought = False

    def ids(self, text):
        if self.is_canonical:
            return TOKENIZER.encode(text)
        return [TOKENIZER.pieces.index(bytes([byte])) for byte in text.encode()]

    def check_every_token_is_trained_once(self, test):
        samples = self.session.samples()
        trained = [
            (token, logprob, version)
            for sample in samples
            for token, is_trained, logprob, version in zip(
                sample.tokens,
                sample.mask,
                sample.logprobs,
                sample.versions,
                strict=True,
            )
            if is_trained
        ]
        tokens = list(itertools.chain(*self.sampled))
        test.assertEqual(trained, [(x, -float(i), 7) for i, x in enumerate(tokens)])
        for sample in samples:
            untrained = [
                (logprob, version)
                for is_trained, logprob, version in zip(
                    sample.mask, sample.logprobs, sample.versions, strict=True
                )
                if not is_trained
            ]
            test.assertEqual(set(untrained), {(0.0, gateway.NOT_SAMPLED)})
            test.assertTrue(sample.mask[-1])


class PropertyTest(parameterized.TestCase):
    @parameterized.product(
        version=VERSIONS, thinking=(True, False), canonical=(True, False)
    )
    def test_with_preserved_thoughts_ids_are_only_appended(
        self, version, thinking, canonical
    ):
        template = templates_test.template(version, thinking, clear=False)
        for seed in range(10):
            talk = Conversation(template, seed, canonical)
            for turn in range(6):
                talk.turn(is_last=turn == 5)
            pairs = zip(talk.prompts, talk.sampled, talk.prompts[1:], strict=False)
            for prompt, sampled, following in pairs:
                self.assertEqual(following[: len(prompt + sampled)], prompt + sampled)
            self.assertEqual(talk.session.num_forks, 0)
            self.assertLen(talk.session.samples(), 1)
            talk.check_every_token_is_trained_once(self)
            if canonical:
                self.assertEqual(talk.session.num_drift_tokens, 0)
                # All tokens and masks are the template's.
                whole = template.render(talk.messages, [ADD], end=True)
                (sample,) = talk.session.samples()
                self.assertEqual(sample.tokens, whole.tokens)
                self.assertEqual(sample.mask, whole.mask)
            else:
                self.assertGreater(talk.session.num_drift_tokens, 0)

    @parameterized.product(
        version=VERSIONS, thinking=(True, False), canonical=(True, False)
    )
    def test_hidden_thoughts_fork(self, version, thinking, canonical):
        template = templates_test.template(version, thinking, clear=True)
        for seed in range(10):
            talk = Conversation(template, seed, canonical)
            for turn in range(6):
                before = talk.session.num_forks
                shown = [*talk.messages]
                talk.turn(is_last=turn == 5)
                if talk.session.num_forks > before:
                    prompt = template.render(shown, [ADD], add_generation_prompt=True)
                    self.assertEqual(talk.prompts[-1], prompt.tokens)
            self.assertEqual(talk.session.num_forks, talk.num_hidings)
            self.assertLen(talk.session.samples(), 1 + talk.num_hidings)
            talk.check_every_token_is_trained_once(self)

    def test_any_ids_keep_their_places(self):
        # Even half characters and incomplete calls keep their ids.
        template = templates_test.template(clear=False)
        stops = sorted(template.stop_ids)
        others = sorted({*range(TOKENIZER.vocab_size)} - template.stop_ids)
        for seed in range(30):
            rng = random.Random(seed)
            session, messages, sampled = gateway.Session(template), [HI], []
            for _ in range(5):
                prompt = session.prompt(messages)
                tokens = rng.choices(others, k=rng.randint(0, 20))
                reason = rng.choice(("stop", "length")) if tokens else "stop"
                tokens += [rng.choice(stops)] if reason == "stop" else []
                messages.append(session.record(completion(tokens, reason)))
                messages.append(rng.choice((HI, TOOL)))
                sampled.append((prompt, tokens))
            (sample,) = session.samples()
            for prompt, tokens in sampled:
                end = len(prompt) + len(tokens)
                self.assertEqual(sample.tokens[:end], prompt + tokens)
                self.assertTrue(all(sample.mask[len(prompt) : end]))
            self.assertEqual(sum(sample.mask), sum(len(t) for _, t in sampled))


class BoundaryTest(parameterized.TestCase):
    def test_a_stop_that_is_the_next_role_is_not_repeated(self):
        session = gateway.Session(templates_test.template(clear=False))
        prompt = session.prompt([HI])
        tokens = templates_test.ids_of("a</think>b<|user|>")
        message = session.record(completion(tokens))
        following = session.prompt([HI, message, HI])
        self.assertEqual(
            following, prompt + tokens + templates_test.ids_of("Hi<|assistant|><think>")
        )

    @parameterized.named_parameters(
        ("in_the_thought", "a", "</think><|endoftext|>"),
        ("behind_the_thought", "a</think>b", "<|endoftext|>"),
    )
    def test_a_turn_that_was_cut_off_is_ended_untrained(self, text, end):
        session = gateway.Session(templates_test.template(clear=False))
        prompt, tokens = session.prompt([HI]), templates_test.ids_of(text)
        message = session.record(completion(tokens, "length"))
        following = session.prompt([HI, message, HI])
        bridge = templates_test.ids_of(f"{end}<|user|>Hi<|assistant|><think>")
        self.assertEqual(following, prompt + tokens + bridge)
        session.record(completion([SPECIAL["<|user|>"]]))
        (sample,) = session.samples()
        mask = [False] * len(prompt) + [True] * len(tokens) + [False] * len(bridge)
        self.assertEqual(sample.mask, [*mask, True])
        self.assertEqual(session.num_truncated, 1)

    def test_an_empty_response_is_a_turn(self):
        session = gateway.Session(templates_test.template(thinking=False))
        session.prompt([HI])
        message = session.record(completion([SPECIAL["<|user|>"]]))
        self.assertEqual(message["content"], "")
        (sample,) = session.samples()
        self.assertEqual(sum(sample.mask), 1)
        self.assertEqual(session.num_turns, 1)

    def test_tool_results_go_on_with_the_switch_of_their_user(self):
        template = templates_test.template(clear=False)
        session = gateway.Session(template)
        messages = [HI | {"enable_thinking": False}]
        session.prompt(messages)
        messages.append(session.record(completion([SPECIAL["<|observation|>"]])))
        messages.append(TOOL)
        ids = session.prompt(messages)
        self.assertEqual(ids[-1], SPECIAL["</think>"])
        self.assertEqual(ids, template.render(messages, (), True).tokens)
        messages[-1:] = [TOOL, HI]
        self.assertEqual(session.prompt(messages)[-1], SPECIAL["<think>"])

    @parameterized.named_parameters(
        ("edited", lambda m: [HI | {"content": "Ho"}, *m[1:], TOOL]),
        ("dropped", lambda m: [HI]),
        ("asked_again", lambda m: m),
        ("words_put_into_its_mouth", lambda m: [*m, {**m[1], "content": "c"}, TOOL]),
    )
    def test_another_history_forks(self, change):
        template = templates_test.template(clear=False)
        session = gateway.Session(template)
        session.prompt([HI])
        tokens = templates_test.ids_of("a</think>b<|observation|>")
        messages = change([HI, session.record(completion(tokens))])
        ids = session.prompt(messages)
        self.assertEqual(ids, template.render(messages, (), True).tokens)
        self.assertEqual(session.num_forks, 0)  # nothing was sampled there yet
        session.record(completion(tokens))
        self.assertEqual(session.num_forks, 1)
        first, second = session.samples()
        self.assertEqual(sum(first.mask), len(tokens))
        self.assertEqual(sum(second.mask), len(tokens))
        self.assertEqual(second.tokens, ids + tokens)

    def test_a_prompt_may_be_asked_for_again(self):
        session = gateway.Session(templates_test.template())
        self.assertEqual(session.prompt([HI]), session.prompt([HI]))
        ids = session.prompt([HI])
        ids.clear()  # the caller's own list
        session.record(completion([SPECIAL["<|user|>"]]))
        with self.assertRaisesRegex(AssertionError, "needs a prompt"):
            session.record(completion([SPECIAL["<|user|>"]]))

    def test_drift_is_counted_from_where_it_begins(self):
        session = gateway.Session(templates_test.template())
        session.prompt([HI])
        word = max(TOKENIZER.pieces, key=len)  # one token
        split = [TOKENIZER.pieces.index(bytes([byte])) for byte in word]
        head = templates_test.ids_of("a</think>")
        session.record(completion([*head, *split, SPECIAL["<|user|>"]]))
        self.assertEqual(session.num_drift_tokens, len(split))


class MisalignedTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("no_tokens", {"tokens": [], "logprobs": [], "versions": []}, "no tokens"),
        ("logprob_missing", {"logprobs": [-1.0]}, "1 log-probs"),
        ("version_missing", {"versions": [0]}, "1 versions"),
        ("nan", {"logprobs": [-1.0, float("nan")]}, "not finite"),
        ("above_0", {"logprobs": [-1.0, 0.001]}, "above 0"),
        ("unfinished", {"finish_reason": None}, "finish reason None"),
        ("stop_without_one", {"tokens": [65, 66]}, "0 stop tokens"),
        ("two_stops", {"tokens": [SPECIAL["<|user|>"]] * 2}, "2 stop tokens"),
        ("length_with_stop", {"finish_reason": "length"}, "1 stop tokens"),
        ("experts", {"experts": np.zeros((2, 1, 1), np.int32)}, "experts of 2 tokens"),
    )
    def test_raises(self, changes, message):
        session = gateway.Session(templates_test.template())
        session.prompt([HI])
        good = completion([65, SPECIAL["<|user|>"]])
        with self.assertRaisesRegex(gateway.MisalignedError, message):
            session.record(dataclasses.replace(good, **changes))
        self.assertEmpty(session.samples())

    def test_experts_are_the_last_turn_s(self):
        session = gateway.Session(templates_test.template())
        size = len(session.prompt([HI])) + 1
        experts = np.arange(size)[:, None, None]
        turn = completion([65, SPECIAL["<|user|>"]])
        session.record(dataclasses.replace(turn, experts=experts))
        (sample,) = session.samples()
        self.assertLen(sample.experts, len(sample.tokens) - 1)

    def test_a_sample_is_checked(self):
        with self.assertRaisesRegex(gateway.MisalignedError, "'logprobs': 0"):
            gateway.Sample([1], [True], [], [0]).check()


class BadInputTest(parameterized.TestCase):
    def test_messages_without_roles(self):
        session = gateway.Session(templates_test.template())
        with self.assertRaisesRegex(config.InputError, "role must be one of"):
            session.prompt([{"content": "Hi"}])

    def test_a_tokenizer_without_roles(self):
        with self.assertRaisesRegex(config.InputError, "special tokens"):
            templates.Template(tokenizer_lib.byte_tokenizer())


if __name__ == "__main__":
    environment.main()
