"""What the tasks of several hops, counts, sources and conversations ask."""

import collections
import json
import math
import pathlib
import re
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from glm5_jax import config as config_lib
from glm5_jax.evals import answering, catalogue, haystack, likelihood, record, report
from glm5_jax.evals.suites import counting, mrcr, needle, sources, tracing
from tests import environment
from tests.evals import subjects

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[2] / "golden" / "ruler.json").read_text()
)
LENGTH, COUNT = 2200, 3
SUBJECT = record.Subject(
    config=config_lib.ModelConfig(), params={}, tokenizer=subjects.BYTES
)


def trace(text):
    """Follows the assignments of a prompt from the value that its question names."""
    value = re.findall(r"\d{4,}", text)[-1]
    found = re.findall(rf"(?:VAR (\w+) = {value}|value of (\w+) is {value})", text)
    names = [a or b for a, b in found]
    while True:
        hop = (
            rf"(?:VAR (\w+) = VAR {names[-1]}\b|value of (\w+) is that of {names[-1]})"
        )
        found = re.findall(hop, text)
        if not found:
            return names
        names += [a or b for a, b in found]


def count(text, number):
    """The most frequent words between a prompt's first line and its question."""
    listed = text.rpartition("\n")[0]
    listed = re.split(r"often\.\n|coded words\.|Words:", listed)[-1]
    words = re.findall(r"[a-z]+", listed)
    return [word for word, _ in collections.Counter(words).most_common(number)]


def find_module(text):
    name = re.search(r"class (\w+)\?", text)[1]
    parts = re.split(r"\n\nModule ", text)
    [part] = [p for p in parts if f"class {name}" in p.partition("\n\nQ")[0]]
    return [part.partition(":")[0]]


def find_function(text):
    description = re.search(r"description: (.*)\n", text)[1]
    [found] = [f for f in sources.functions() if f.description == description]
    return [re.search(rf"def ({found.name})\b", text)[1]]


def find_label(text):
    line = text.rpartition("\n")[2].removesuffix(" =>")
    [module] = [m for m, own in sources.lines().items() if line in own][:1]
    labels = collections.Counter(
        label
        for other, label in re.findall(r"\n(.*) => (\d\d)", text)
        if other in sources.lines()[module]
    )
    return [labels.most_common(1)[0][0]]


def repeat(text):
    code, nth, kind, topic = re.search(
        r"Say (\d+), then repeat the (\w+) (\w+) about (\w+)\.", text
    ).groups()
    said = re.findall(rf"Write a {kind} about {topic}\.\nAssistant: (.*)\n", text)
    return [f"{code} {said[mrcr._ORDINALS.index(nth)]}"]


ORACLES = {
    "variables": trace,
    "ruler_vt": trace,
    "common_words": lambda text: count(text, 3),
    "ruler_cwe": lambda text: count(text, 10),
    "frequent_words": lambda text: count(text, 3),
    "ruler_fwe": lambda text: count(text, 3),
    "documents_qa": find_module,
    "code_search": find_function,
    "many_shot": find_label,
    "mrcr_2": repeat,
    "mrcr_4": repeat,
}


def make(name, length=LENGTH, count=COUNT):
    setting = record.Setting(length=length, num_tasks=count, seed=5)
    return catalogue.SUITES[name].tasks(setting, SUBJECT)


class TasksTest(parameterized.TestCase):
    @parameterized.parameters(*ORACLES)
    def test_reading_the_prompt_gives_the_answers_and_silence_none(self, name):
        tasks, suite = make(name), catalogue.SUITES[name]
        texts = []
        for task in tasks:
            self.assertLen(task.prompt, LENGTH - task.max_new_tokens)
            text = subjects.BYTES.decode(task.prompt)
            found = ORACLES[name](text)
            self.assertEqual(sorted(found), sorted(task.answers))
            texts.append(", ".join(found))
            room = len(subjects.BYTES.encode(" " + texts[-1]))
            self.assertLessEqual(room, task.max_new_tokens)
        setting = record.Setting(length=LENGTH)
        for answers, wanted in ((texts, 1.0), ([""] * COUNT, 0.0)):
            with subjects.knowing(tasks, answers):
                done = [*suite.answer(SUBJECT, setting, [*enumerate(tasks)])]
            scores = [answer.figures["accuracy"][0] for _, answer in done]
            self.assertEqual(scores, [wanted] * COUNT)

    @parameterized.parameters(
        *(n for n in ORACLES if not n.startswith("ruler_")), "needle"
    )
    def test_short_words_fit_small_contexts(self, name):
        length = 480 if name in ("variables", "needle", "many_shot") else 768
        for task in make(name, length):
            self.assertLen(task.prompt, length - task.max_new_tokens)

    def test_a_repeated_text_without_its_code_is_worth_nothing(self):
        task = record.Task([1], ("1234 One two three.",), 20)
        self.assertEqual(mrcr.similarity(task, "One two three."), 0.0)
        self.assertEqual(mrcr.similarity(task, " 1234 One two three.\nUser"), 1.0)
        self.assertBetween(mrcr.similarity(task, "1234 One two"), 0.5, 0.99)

    def test_values_are_scored_in_part(self):
        task = record.Task([1], ("1234", "5678"), 20)
        self.assertEqual(answering.share_of_answers(task, " 5678, and 9"), 0.5)


class RulerTest(parameterized.TestCase):
    @parameterized.parameters(940, 980, 1024)
    def test_common_words_that_do_not_fit_are_refused(self, length):
        with self.assertRaisesRegex(config_lib.InputError, "more than"):
            make("ruler_cwe", length, count=1)

    """RULER's own texts of one seed, as lm-eval 0.4.13 generates them (Apache-2.0).

    tests/golden/ruler.json has the output of generate_input_output of its prepare_niah,
    vt_utils, cwe_utils and fwe_utils after random.seed(42), with few words.
    """

    def middle(self, name, before, question):
        """The text between ours."""
        text = GOLDEN[name]["text"]
        self.assertStartsWith(text, before)
        self.assertEndsWith(text, question)
        return text[len(before) : -len(question)]

    @parameterized.parameters(
        ("niah_single_1", "number"),
        ("niah_multikey_3", "uuid"),
        ("niah_many", "number"),
    )
    def test_needles(self, name, kind):
        wording = needle.RULER
        before, question = wording.many if name == "niah_many" else wording.one
        keys = re.search(
            r"The special magic \w+ for (.*) mentioned", GOLDEN[name]["text"]
        )
        keys = keys[1].rpartition(" for ")[2]
        question = question.format(kind=kind, keys=keys)
        rest = self.middle(name, before.format(kind=kind), question)
        values = []
        for line in rest.removeprefix("\n").split("\n"):
            if line != "".join(haystack.NOISE).strip():
                key, value = re.fullmatch(r".* for (\S+) is: (\S+)\.", line).groups()
                made = wording.needle.format(kind=kind, key=key, value=value)
                self.assertEqual(line, made)
                values += [value] if key in keys else []
        self.assertSameElements(values, GOLDEN[name]["answers"])

    def test_variables(self):
        names = GOLDEN["vt"]["answers"]
        value = re.search(r"= (\d+)", GOLDEN["vt"]["text"])[1]
        rest = self.middle("vt", *tracing.ruler_texts(value, len(names)))
        for part in (*tracing.ruler_chain(names, value), "".join(haystack.NOISE)):
            self.assertIn(part.strip(), rest)
            rest = rest.replace(part.strip(), "")
        self.assertEqual(rest.strip(), "")
        self.assertEqual(trace(GOLDEN["vt"]["text"]), names)

    @parameterized.parameters(("cwe", 10), ("fwe", 3))
    def test_words(self, name, number):
        wording = {"cwe": counting.COMMON_RULER, "fwe": counting.FREQUENT_RULER}[name]
        self.middle(name, wording.before, wording.question)
        found = count(GOLDEN[name]["text"], number)
        self.assertSameElements(found, GOLDEN[name]["answers"])


class MultipleChoiceTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.path = pathlib.Path(self.create_tempdir().full_path) / "q.jsonl"
        self.suite = catalogue.SUITES["multiple_choice"]

    def write(self, *lines):
        text = "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines)
        self.path.write_text(text)
        return record.Setting(length=8, questions=str(self.path))

    def test_the_likeliest_text_is_chosen_in_all_and_by_its_bytes(self):
        subject = subjects.subject(
            num_hidden_layers=1, first_k_dense_replace=1, num_nextn_predict_layers=0
        )
        # A head of zeros makes every token alike, so the shortest text is likeliest
        # and all are alike by their bytes: the first is chosen.
        params = {**subject.params, "lm_head": subject.params["lm_head"] * 0}
        subject = record.Subject(
            config=subject.config, params=params, tokenizer=subjects.BYTES
        )
        choices = [" three", " six", " fourteen"]
        setting = self.write(
            {"question": "1 + 2 =", "choices": choices, "answer": 0},
            {"question": "1 + 2 + 3 =", "choices": choices, "answer": 1},
        )
        tasks = self.suite.tasks(setting, subject)
        answers = dict(self.suite.answer(subject, setting, [*enumerate(tasks)]))
        found = [answers[i].figures["accuracy"][0] for i in range(2)]
        self.assertEqual(found, [0.0, 1.0])
        np.testing.assert_array_equal(tasks[0].sizes, [6, 4, 9])

    def test_a_model_without_finite_logits_has_no_accuracy(self):
        setting = self.write({"question": "a", "choices": ["b", "c"], "answer": 0})
        tasks = self.suite.tasks(setting, SUBJECT)
        found = iter([likelihood.Likelihood(math.nan, None)] * 2)
        with mock.patch.object(likelihood, "of_pairs", return_value=found):
            answers = dict(self.suite.answer(SUBJECT, setting, [*enumerate(tasks)]))
        result = report.summarize(self.suite, setting, [answers[0]])
        for name in ("accuracy", "accuracy_per_byte"):
            self.assertTrue(math.isnan(result.figures[name].mean), name)

    def test_a_line_ends_at_a_line_feed_alone(self):
        choices = ["b\u2028c", "d\x85e"]
        line = {"question": "a\u2029", "choices": choices, "answer": 1}
        setting = self.write(json.dumps(line, ensure_ascii=False), line, "")
        tasks = self.suite.tasks(setting, SUBJECT)
        self.assertLen(tasks, 2)
        self.assertEqual(SUBJECT.words.decode(tasks[0].choices[0]), choices[0])

    def test_bad_lines_are_named(self):
        good = {"question": "a", "choices": ["b", "c"], "answer": 1}
        for bad in ("{", {**good, "answer": 2}, {**good, "choices": "bc"}, [1]):
            setting = self.write(good, bad)
            with self.assertRaisesRegex(config_lib.InputError, "q.jsonl:2 is no quest"):
                self.suite.tasks(setting, SUBJECT)


if __name__ == "__main__":
    environment.main()
