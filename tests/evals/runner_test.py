"""Suites run on a tiny model: stored answers, resuming, tables, and bad input."""

import dataclasses
import json
import math
import pathlib
from unittest import mock

import jax
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.evals import answering, catalogue, held_out, record, report, runner
from glm5_jax.training.reporting import suites
from tests import environment, runs
from tests.evals import subjects


class RunTest(runs.FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.subject = subjects.subject(num_hidden_layers=1, num_nextn_predict_layers=0)
        cls.out = cls.root / "evals"
        [cls.result] = cls.run_suite(num_tasks=3)
        cls.stored = (cls.out / "answers.jsonl").read_text()

    @classmethod
    def run_suite(cls, **changes):
        given = {"lengths": [96], "out": cls.out, **changes}
        return runner.run(cls.subject, ["needle"], **given)

    def setUp(self):
        super().setUp()
        (self.out / "answers.jsonl").write_text(self.stored)

    def test_a_line_and_a_table_hold_the_figures(self):
        accuracy = self.result.figures["accuracy"]
        self.assertEqual((accuracy.mean, accuracy.count), (0.0, 3))  # untrained
        self.assertGreater(accuracy.high, 0.5)  # of three tasks little is known
        line = json.loads((self.out / "results.jsonl").read_text())
        self.assertEqual(line["figures"]["accuracy"]["count"], 3)
        self.assertEqual((line["suite"], line["length"]), ("needle", 96))
        table = (self.out / "table.md").read_text()
        self.assertIn("| needle | 96 | accuracy | 0 | 0 to ", table)

    def test_a_table_keeps_the_suites_of_earlier_commands(self):
        folder = self.root / "tables"
        folder.mkdir()
        later = dataclasses.replace(self.result, suite="recall")
        for digest, result in (("a", self.result), ("b", self.result), ("a", later)):
            report.write(folder, digest, [result])
        rows = (folder / "table.md").read_text().splitlines()[2:]
        self.assertEqual(
            [row.split(" | ")[0] for row in rows], ["| needle", "| recall"]
        )

    def test_a_figure_that_is_not_finite_is_not_stored(self):
        def generated(subject, tasks, score):
            for number, _ in tasks:
                yield number, record.Answer({"accuracy": (math.nan, 1.0)})

        with (
            mock.patch.object(answering, "generated", generated),
            self.assertRaisesRegex(config_lib.InputError, "training has diverged"),
        ):
            self.run_suite(num_tasks=4, out=self.root / "diverged")

    def test_a_rerun_asks_only_what_is_missing(self):
        asked = []
        lines = self.stored.splitlines(keepends=True)
        last = json.loads(lines[2])

        def generated(subject, tasks, score):
            del subject, score
            asked.append([number for number, _ in tasks])
            figures = {"accuracy": tuple(last["figures"]["accuracy"])}
            yield from ((i, record.Answer(figures, last["text"])) for i, _ in tasks)

        with mock.patch.object(answering, "generated", generated):
            [again] = self.run_suite(num_tasks=3)
            # A killed run leaves half a line.
            text = "".join([*lines[:2], lines[2][:20]])
            (self.out / "answers.jsonl").write_text(text)
            [resumed] = self.run_suite(num_tasks=3)
        self.assertEqual(asked, [[], [2]])
        self.assertEqual([again, resumed], [self.result] * 2)
        added = (self.out / "answers.jsonl").read_text().splitlines()[-1]
        self.assertEqual(json.loads(added), last)

    @parameterized.parameters(
        {"seed": 1}, {"lengths": [112]}, {"names": "needle_text"}, {"model": "other"}
    )
    def test_stored_answers_are_those_of_one_setting(self, **changes):
        suite = catalogue.SUITES[changes.pop("names", "needle")]
        subject = self.subject
        if changes.pop("model", None):
            subject = dataclasses.replace(subject, identity="other")
        [length] = changes.pop("lengths", [96])
        setting = record.Setting(length=length, **changes)
        key = runner._key(suite, setting, subject.digest())
        self.assertEmpty([*runner._stored(self.out, key)])

    def test_answers_on_another_text_are_not_reused(self):
        path = self.root / "text.txt"
        setting = record.Setting(length=32, corpus=record.Corpus(source=str(path)))

        def key(text, name="bits_per_byte"):
            path.write_text(text)
            held_out._texts.cache_clear()
            held_out.digest.cache_clear()
            return runner._key(catalogue.SUITES[name], setting, "model")

        first = key("one line\n" * 40)
        self.assertNotEqual(key("another\n" * 40), first)
        self.assertEqual(key("one line\n" * 40), first)
        # Suites that read no held-out text do not read the source.
        self.assertEqual(key("", "needle"), key("any", "needle"))

    def test_a_short_group_of_rows_is_not_reused_as_a_whole_one(self):
        path = self.root / "rows.txt"
        path.write_text("a line\n" * 40)
        corpus = record.Corpus(source=str(path))

        def key(num_tasks, name):
            setting = record.Setting(length=32, num_tasks=num_tasks, corpus=corpus)
            return runner._key(catalogue.SUITES[name], setting, "model")

        router = [key(n, "router") for n in (3, 7, 8, 16)]
        self.assertLen({*router}, 3)
        self.assertEqual(router[2], router[3])
        self.assertEqual(key(1, "recall"), key(16, "recall"))

    def test_shares_have_wilsons_interval_and_parts_students(self):
        answers = [record.Answer({"accuracy": (x, 1.0)}) for x in (1.0, 0.0, 1.0)]
        setting, suite = record.Setting(length=8), catalogue.SUITES["needle"]
        share = report.summarize(suite, setting, answers).figures["accuracy"]
        self.assertLess(share.high, 1)
        part = dataclasses.replace(suite, is_share=False)
        mean = report.summarize(part, setting, answers).figures["accuracy"]
        self.assertGreater(mean.high, 1)
        self.assertEqual(mean.mean, share.mean)


class BadInputTest(parameterized.TestCase):
    """Each is found before anything is compiled, and says what to do."""

    @parameterized.named_parameters(
        ("unknown", "needel", [64], "no suite 'needel'. Did you mean needle"),
        ("too_long", "needle", [64, 512], r"2\.\.256.*RoPE.*512"),
        ("no_length", "needle", [], "suite_lengths"),
    )
    def test_it_is_refused(self, name, lengths, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            runner.run(subjects.subject(), [name], lengths=lengths)

    def test_a_run_is_refused_before_it_starts(self):
        model = subjects.subject().config
        config = config_lib.TrainConfig(model=model, eval_suites=("recal",))
        with self.assertRaisesRegex(config_lib.InputError, "Did you mean recall"):
            suites.require(config)
        known = dataclasses.replace(config, eval_suites=("recall",))
        longer = dataclasses.replace(known, eval_suite_lengths=(300,))
        with self.assertRaisesRegex(config_lib.InputError, r"2\.\.256.*300"):
            suites.require(longer)
        suites.require(known)
        with mock.patch.object(jax, "process_count", return_value=2):
            suites.require(dataclasses.replace(known, eval_suites=()))
            with self.assertRaisesRegex(config_lib.InputError, "eval_suites.*one proc"):
                suites.require(known)

    def test_a_model_without_tokenizer_is_refused(self):
        config = subjects.subject().config
        with self.assertRaisesRegex(config_lib.InputError, "needle needs a tokenizer"):
            runner.require(["needle"], config, False, [64])

    def test_a_folder_that_cannot_be_written_is_named(self):
        subject = dataclasses.replace(subjects.subject(), identity="x")
        with self.assertRaisesRegex(config_lib.InputError, "/dev/null/evals.*--out"):
            out = pathlib.Path("/dev/null/evals")
            runner.run(subject, ["needle"], lengths=[96], out=out)


if __name__ == "__main__":
    environment.main()
