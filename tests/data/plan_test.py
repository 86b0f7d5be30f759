"""Cutting a source into parts, sampling it, and the bars that a terminal shows."""

import contextlib
import io
import os
import pathlib
from unittest import mock

from absl.testing import parameterized

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.preparation import inputs, plan, prepare, workers
from glm5_jax.data.preparation import part as part_lib
from glm5_jax.data.sources import documents as documents_lib
from glm5_jax.data.sources import formats
from tests import environment
from tests.data import corpora

MIB = 2**20


class Terminal(io.StringIO):
    """Text that claims to be shown on a terminal."""

    def isatty(self):
        return True


class FolderTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.create_tempdir().full_path)
        self.source, self.target = self.root / "source", self.root / "target"
        for folder in (self.source, self.target):
            folder.mkdir()

    def settings(self, **changes):
        return corpora.settings(self.source, **changes)


class PlanTest(FolderTest):
    @parameterized.parameters(
        ([MIB // 2, MIB // 2, 1], [[0, 1], [2]]),
        ([MIB // 2, MIB // 2 + 1], [[0], [1]]),
        ([MIB + 1, 1, 1], [[0], [1, 2]]),
        ([1, MIB, 1], [[0], [1], [2]]),
    )
    def test_neighbours_are_joined_up_to_shard_mib(self, sizes, want):
        for i, size in enumerate(sizes):
            (self.source / f"{i}.txt").write_bytes(b"x" * size)
        settings = self.settings(shard_mib=1.0)
        made = plan.make(settings, self.target, inputs.files_of(settings), 1)
        found = [[int(s.path[0]) for s in part.spans] for part in made.parts]
        self.assertEqual(found, want)
        self.assertEqual([part.number for part in made.parts], [*range(len(want))])
        num_bytes = [sum(sizes[i] for i in part) for part in want]
        self.assertEqual([part.num_bytes for part in made.parts], num_bytes)
        files = [[file[:2] for file in part.files] for part in made.parts]
        self.assertEqual(files, [[(f"{i}.txt", sizes[i]) for i in p] for p in want])

    @parameterized.parameters(4, 5, 6, 7)
    def test_a_message_names_five_files_and_counts_the_others(self, count):
        (self.source / "a.txt").write_text("a")
        for i in range(count):
            (self.source / f"{i}.csv").write_text("a")
        settings = self.settings()
        with self.assertLogs(level="WARNING") as logs:
            plan.make(settings, self.target, inputs.files_of(settings), 1)
        names = [f"{i}.csv" for i in range(min(count, 5))]
        more = [f"and {count - 5} more"] if count > 5 else []
        self.assertEndsWith(logs.output[0], f": {', '.join(names + more)}.")

    @parameterized.parameters((15, 1), (16, 1), (17, 2), (32, 2), (33, 3))
    def test_a_bpe_trains_on_at_most_16_parts_spread_evenly(self, count, step):
        """Each part is a line of one file; a few names are held out."""
        path = self.source / "a.jsonl"
        path.write_text("".join(f'{{"text": "{i}"}}\n' for i in range(count)))
        spans = formats.cut(self.source, path, 1)
        parts = [part_lib.Part(i, (span,), ()) for i, span in enumerate(spans)]
        self.assertLen(parts, count)
        settings = self.settings(held_out_percent=1)
        is_used = lambda i: (
            not inputs.is_held_out(
                settings, documents_lib.Document(f"a.jsonl:{i + 1}", "")
            )
        )
        want = [str(i) for i in range(0, count, step) if is_used(i)]
        self.assertEqual(list(prepare._sample(settings, parts)), want)

    def test_each_part_gives_a_bpe_its_share_of_the_text(self):
        path = self.source / "a.jsonl"
        path.write_text('{"text": "' + "x" * 99 + '"}\n')
        (span,) = formats.cut(self.source, path, formats.WHOLE)
        line = span.stop
        path.write_text(path.read_text() * 10)
        parts = [
            part_lib.Part(i, (formats.Span("a.jsonl", 0, 10 * line, 1, 0),), ())
            for i in range(2)
        ]
        settings = self.settings(held_out_percent=1)
        for limit, want in ((2 * 99, 2), (2 * 100, 4), (4 * 99, 4), (4 * 99 + 2, 6)):
            with mock.patch.object(tokenizer_lib, "MAX_TRAINING_BYTES", limit):
                self.assertLen(list(prepare._sample(settings, parts)), want)

    def test_rows_of_texts_are_neither_cut_nor_thoughtful(self):
        (self.source / "a.jsonl").write_text('{"text": "abc"}\n' * 5)
        settings = self.settings(shard_mib=1.0)
        figures = prepare.prepare(settings, self.target)
        record = part_lib.read_record(self.target, 0)
        names = ("documents", "cut", "dropped", "thoughtful")
        self.assertEqual([record[name] for name in names], [5, 0, 0, 0])
        self.assertEqual(figures["documents"], 5)
        self.assertNotIn("cut", figures)
        held_out = figures.get("held_out", {"tokens": 0})["tokens"]
        self.assertEqual(figures["train"]["tokens"] + held_out, 5 * 3)
        rows, tokens = figures["train"]["rows"], figures["train"]["tokens"]
        self.assertEqual(figures["train"]["filled"], round(tokens / rows / 32, 4))


class BarTest(FolderTest):
    def test_bars_reach_their_end_on_a_terminal(self):
        corpora.write_jsonl(self.source)
        with contextlib.redirect_stderr(Terminal()) as shown:
            prepare.prepare(self.settings(), self.target, check=True)
            prepare.prepare(self.settings(), self.target, check=True)
        for label in ("scan", "prepare", "check"):
            self.assertIn(f"{label}: 100%", shown.getvalue())

    def test_no_bar_without_a_terminal(self):
        (self.source / "a.jsonl").write_text('{"text": "abc"}\n' * 5)
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            prepare.prepare(self.settings(), self.target, check=True)
        self.assertNotIn("%", shown.getvalue())


class WorkersTest(parameterized.TestCase):
    @parameterized.parameters(([], 4), ([3], 4), ([3, 4], 1), ([3, 4], 0))
    def test_one_worker_or_task_needs_no_other_process(self, tasks, num_workers):
        """Functions within a test cannot be sent to another process."""
        here = lambda task: (task, os.getpid())
        got = list(workers.results(here, tasks, num_workers))
        self.assertEqual(got, [(task, os.getpid()) for task in tasks])


if __name__ == "__main__":
    environment.main()
