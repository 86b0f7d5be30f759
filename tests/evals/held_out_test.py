"""Rows of held-out text by domain, and their bits per byte."""

import math

import numpy as np
from absl.testing import absltest

from glm5_jax import config as config_lib
from glm5_jax.data.sources import documents
from glm5_jax.evals import catalogue, held_out, record, report
from tests import environment, runs
from tests.evals import subjects


class HeldOutTest(runs.FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        for folder, letter in (("web", "w"), ("code", "c")):
            (cls.root / folder).mkdir()
            for i in range(120):
                text = f"{letter}{i} " * (i % 7 + 3)
                (cls.root / folder / f"{i}.txt").write_text(text)
        cls.corpus = record.Corpus(source=str(cls.root), percent=15)
        cls.setting = record.Setting(length=32, num_tasks=9, corpus=cls.corpus)
        cls.subject = subjects.subject(
            num_hidden_layers=1, first_k_dense_replace=1, num_nextn_predict_layers=0
        )

    def test_rows_hold_held_out_documents_of_one_domain_each(self):
        rows = held_out.rows(self.setting, self.subject)
        self.assertLen(rows, 9)
        self.assertEqual({row.domain for row in rows}, {"web", "code"})
        held = {
            d.text: d.name
            for d in documents.read_documents(str(self.root))
            if documents.is_held_out(d.name, 15)
        }
        for row in rows:
            ids = row.arrays["tokens"][row.arrays["segment_ids"] == 2]
            text = subjects.BYTES.decode(ids)
            names = [name for known, name in held.items() if known.startswith(text)]
            self.assertNotEmpty(names)
            if text:
                self.assertStartsWith(text, row.domain[0])

    def test_bits_are_over_the_bytes_of_the_targets(self):
        rows = held_out.rows(self.setting, self.subject)
        suite = catalogue.SUITES["bits_per_byte"]
        answers = dict(suite.answer(self.subject, self.setting, [*enumerate(rows)]))
        result = report.summarize(
            suite, self.setting, [answers[i] for i in range(len(rows))]
        )
        self.assertEqual({*result.figures}, {"all", "web", "code"})
        # A model whose head is 0 gives every token the same probability.
        flat = {**self.subject.params, "lm_head": self.subject.params["lm_head"] * 0}
        blank = record.Subject(
            config=self.subject.config, params=flat, tokenizer=subjects.BYTES
        )
        answers = dict(suite.answer(blank, self.setting, [*enumerate(rows)]))
        for row, answer in zip(rows, answers.values(), strict=True):
            count = row.arrays["loss_mask"].sum()
            num_bytes = np.sum(
                [
                    len(subjects.BYTES.pieces[target]) * mask
                    for target, mask in zip(
                        row.arrays["targets"], row.arrays["loss_mask"], strict=True
                    )
                ]
            )
            bits = count * math.log2(self.subject.config.vocab_size)
            np.testing.assert_allclose(answer.figures["all"], (bits, num_bytes), 1e-5)
            self.assertEqual(answer.figures[row.domain], answer.figures["all"])

    def test_more_rows_begin_with_the_same_ones(self):
        fewer = record.Setting(length=32, num_tasks=4, corpus=self.corpus)
        few = held_out.rows(fewer, self.subject)
        for row, other in zip(
            few, held_out.rows(self.setting, self.subject), strict=False
        ):
            np.testing.assert_array_equal(row.arrays["tokens"], other.arrays["tokens"])

    def test_a_source_without_held_out_documents_is_refused(self):
        names = (f"{i}.txt" for i in range(1000))
        kept = [n for n in names if not documents.is_held_out(n, 10)][:2]
        folder = self.root.parent / f"{self.root.name}_kept"
        folder.mkdir()
        self.addCleanup(
            lambda: [p.unlink() for p in folder.iterdir()] and folder.rmdir()
        )
        for name in kept:
            (folder / name).write_text("text")
        setting = record.Setting(length=8, corpus=record.Corpus(source=str(folder)))
        with self.assertRaisesRegex(config_lib.InputError, "is held out.*--source"):
            held_out.rows(setting, self.subject)


class DomainTest(absltest.TestCase):
    def test_it_is_the_top_folder_or_the_kind(self):
        names = ("topics/if", "json/decoder.py", "ast.py", "book.txt#1", "LICENSE")
        found = [held_out.domain(name) for name in names]
        self.assertEqual(found, ["topics", "json", "py", "txt", "text"])

    def test_all_records_of_a_file_are_of_its_kind(self):
        names = ("a.jsonl:12", "a.jsonl.gz:3", "a.txt.zst", "part.parquet:7", "web/x:3")
        found = [held_out.domain(name) for name in names]
        self.assertEqual(found, ["jsonl", "jsonl", "txt", "parquet", "web"])


if __name__ == "__main__":
    environment.main()
