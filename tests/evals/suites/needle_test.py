"""Retrieval tasks: their length, what they hide, what they ask, and who solves them."""

import re

import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.evals import catalogue, record
from glm5_jax.evals.suites import needle, retrieval
from tests import environment
from tests.evals import subjects

SHORT = re.compile(r"The number of ([\w-]+) is ([\w-]+)\.")
RULER = re.compile(r"One of the special magic \w+ for ([\w-]+) is: ([\w-]+)\.")
ASKED = re.compile(r"\n(?:The numbers? of|What .* for) (.+?) (?:is|are|mentioned)")
NAMES = [suite.name for suite in retrieval.SUITES]


def make(name, length=1500, count=4, tokenizer=subjects.BYTES):
    setting = record.Setting(length=length, num_tasks=count, seed=3)
    subject = record.Subject(
        config=config_lib.ModelConfig(), params={}, tokenizer=tokenizer
    )
    return catalogue.SUITES[name].tasks(setting, subject)


def look_up(prompt):
    """Answers a prompt by the sentences in it, as its question asks."""
    haystack, _, question = prompt.rpartition("\n")
    asked = ASKED.match("\n" + question)[1].replace(", and ", ", ").split(", ")
    pairs = [*SHORT.findall(haystack), *RULER.findall(haystack)]
    return " ".join(value for name in asked for key, value in pairs if key == name)


class TasksTest(parameterized.TestCase):
    @parameterized.parameters(*NAMES)
    def test_a_task_has_its_length_and_its_answers_once(self, name):
        for task in make(name):
            self.assertLen(task.prompt, 1500 - task.max_new_tokens)
            text = subjects.BYTES.decode(task.prompt)
            for answer in task.answers:
                self.assertEqual(text.count(answer), 1)
                room = len(subjects.BYTES.encode(f" {answer}"))
                self.assertLessEqual(room, task.max_new_tokens)

    @parameterized.parameters(*NAMES)
    def test_looking_up_scores_one_and_silence_zero(self, name):
        suite, tasks = catalogue.SUITES[name], make(name)
        subject = record.Subject(
            config=config_lib.ModelConfig(), params={}, tokenizer=subjects.BYTES
        )
        texts = [look_up(subjects.BYTES.decode(task.prompt)) for task in tasks]
        for answers, wanted in ((texts, 1.0), ([""] * len(tasks), 0.0)):
            with subjects.knowing(tasks, answers):
                done = suite.answer(
                    subject, record.Setting(length=1500), [*enumerate(tasks)]
                )
                scores = [answer.figures["accuracy"] for _, answer in done]
            self.assertEqual(scores, [(wanted, 1.0)] * len(tasks))

    @parameterized.parameters(
        ("needle_multikey", 4, 1),
        ("needle_multivalue", 4, 4),
        ("needle_multiquery", 4, 4),
        ("ruler_niah_single_3", 1, 1),
        ("ruler_niah_multiquery", 4, 4),
    )
    def test_as_many_needles_and_answers_as_said(self, name, needles, answers):
        for task in make(name, 3000):
            text = subjects.BYTES.decode(task.prompt)
            self.assertLen([*SHORT.findall(text), *RULER.findall(text)], needles)
            self.assertLen(set(task.answers), answers)

    def test_a_crowd_is_needles_only_and_their_keys_differ(self):
        [task, *_] = make("needle_crowd", 4000)
        pairs = SHORT.findall(subjects.BYTES.decode(task.prompt))
        self.assertGreater(len(pairs), 100)
        self.assertLen({key for key, _ in pairs}, len(pairs))

    def test_places_are_spread_over_the_haystack(self):
        places = []
        for task in make("needle", 1000, 60):
            text = subjects.BYTES.decode(task.prompt)
            places.append(SHORT.search(text).start() / len(text))
        counts, _ = np.histogram(places, bins=4, range=(0, 1))
        self.assertGreater(min(counts), 5)  # 15 each on average

    def test_a_tokenizer_with_merges_gets_the_exact_length_too(self):
        text = " The number of bado is 1234. The grass is green. Here we go."
        bpe = tokenizer_lib.train_bpe([text] * 3, 300)
        for task in make("needle_text", 200, tokenizer=bpe):
            self.assertLen(task.prompt, 200 - task.max_new_tokens)

    def test_more_tasks_begin_with_the_same_ones(self):
        self.assertEqual(make("needle", 300, 5)[:2], make("needle", 300, 2))

    def test_a_length_without_room_is_refused(self):
        with self.assertRaisesRegex(
            config_lib.InputError, "tokens more.*suite_lengths"
        ):
            make("needle_multikey", 60)


class DocumentsTest(parameterized.TestCase):
    def test_a_document_asks_and_answers_what_no_evaluation_does(self):
        lengths = [200, 300, 300]
        texts = needle.documents(needle.Retrieval(), subjects.BYTES, lengths, seed=3)
        asked = {subjects.BYTES.decode(t.prompt) for t in make("needle", 300)}
        for text, length in zip(texts, lengths, strict=True):
            question, _, value = text.rpartition(" ")
            self.assertEqual(look_up(question), value.rstrip("."))
            self.assertBetween(len(text), length - 4, length)
            self.assertNotIn(question, asked)
        self.assertLen({*texts}, 3)


if __name__ == "__main__":
    environment.main()
