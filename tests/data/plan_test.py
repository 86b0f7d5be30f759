"""Cutting a source into parts, sampling it, and the bars that a terminal shows."""

import contextlib
import io
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import threading
from concurrent import futures
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.preparation import index as index_lib
from glm5_jax.data.preparation import inputs, plan, prepare, workers
from glm5_jax.data.preparation import part as part_lib
from glm5_jax.data.sources import documents as documents_lib
from glm5_jax.data.sources import formats
from tests import environment
from tests.data import corpora

MIB = 2**20
FILE = ("parts", 0, "files", 0)
SPAN = ("parts", 0, "spans", 0)
VALUES = (  # of plan.json, as paths
    *((name,) for name in ("settings", "source", "files", "parts")),
    *(("parts", 0, name) for name in ("number", "spans", "files")),
    *(SPAN, *((*SPAN, name) for name in ("path", "start", "stop", "first"))),
    *(FILE, *((*FILE, i) for i in range(3)), ("files", 0), ("parts", 0)),
    *(("files", 0, 0), ("files", 0, 1), ("files", 0, 2), (*SPAN, "num_bytes")),
)


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
        ([MIB, MIB // 2, MIB // 2], [[0], [1, 2]]),
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

    def test_a_lone_file_and_conversations_have_no_unread_files(self):
        (self.source / "a.jsonl").write_text('{"messages": []}')
        (self.source / "b.csv").write_text("a")
        chats = self.settings(kind="conversations", packing="best_fit")
        file = corpora.settings(self.source / "a.jsonl")
        with self.assertNoLogs(level="WARNING"):
            for i, settings in enumerate((file, chats)):
                (self.target / f"{i}").mkdir()
                files = inputs.files_of(settings)
                plan.make(settings, self.target / f"{i}", files, 1)
                self.assertEqual([name for name, *_ in files], ["a.jsonl"])
        with self.assertRaisesRegex(config.InputError, "b.csv' is a file"):
            inputs.files_of(corpora.settings(self.source / "b.csv"))

    def test_a_preparation_of_before_resumes(self):
        """It has these settings; others, and a new version, would be refused."""
        settings = self.settings(packing="best_fit", buckets=(5,))
        (self.source / "a.txt").write_text("a")
        made = plan.make(settings, self.target, inputs.files_of(settings), 1)
        want = {
            "version": 1,
            "tokenizer": tokenizer_lib.named("byte").digest[:16],
            "field": "text",
            "sequence_length": 32,
            "packing": "best_fit",
            "buckets": [5],
            "held_out_percent": 20,
            "fim_rate": 0.0,
            "fim_spm_rate": 0.5,
            "seed": 0,
            "shard_mib": corpora.SHARD_MIB,
        }
        self.assertEqual(made.settings, want)

    def damaged(self, at, value, *, checksum):
        """Puts a value into plan.json; earlier versions wrote no checksum."""
        path = self.target / index_lib.PLAN
        tree = node = json.loads(path.read_text())
        for key in at[:-1]:
            node = node[key]
        self.assertNotEqual(node[at[-1]], value)
        node[at[-1]] = value
        if not checksum:
            del tree["checksum"]
        path.write_text(json.dumps(tree))

    @parameterized.parameters(*VALUES)
    def test_wrong_types_are_refused(self, *at):
        """In plans of earlier versions, too, which have no checksum."""
        (self.source / "a.txt").write_text("a" * 9)
        settings = self.settings()
        files = inputs.files_of(settings)
        for value in (None, 1.5, True, [[]], [1], {"a": 1}):
            if at == ("settings",) and isinstance(value, dict):
                continue  # of other settings than these
            for now in (files, []):  # unchanged, and changed
                plan.make(settings, self.target, files, 1)
                self.damaged(at, value, checksum=False)
                with self.assertRaisesRegex(config.InputError, "plan.json cannot be"):
                    plan.make(settings, self.target, now, 1)
                (self.target / index_lib.PLAN).unlink()

    def test_a_plan_that_is_no_object_is_refused(self):
        settings = self.settings()
        for text in (b"null", b"[]", b"1", b"{}", b"", b"\xff", b"[" * 100_000):
            (self.target / index_lib.PLAN).write_bytes(text)
            with self.assertRaisesRegex(config.InputError, "give another --target"):
                plan.make(settings, self.target, [], 1)

    @parameterized.parameters("start", "stop", "first")
    def test_other_numbers_would_prepare_other_rows(self, name):
        (self.source / "a.txt").write_text("a" * 99)
        settings = self.settings()
        files = inputs.files_of(settings)
        made = plan.make(settings, self.target, files, 1)
        self.assertEqual(plan.make(settings, self.target, files, 1), made)
        self.damaged(("parts", 0, "spans", 0, name), 7, checksum=True)
        with self.assertRaisesRegex(config.InputError, "does not match its checksum"):
            plan.make(settings, self.target, files, 1)

    def test_a_plan_of_an_earlier_version_gets_its_checksum(self):
        (self.source / "a.txt").write_text("a")
        settings = self.settings()
        files = inputs.files_of(settings)
        made = plan.make(settings, self.target, files, 1)
        path = self.target / index_lib.PLAN
        text = path.read_text()
        self.damaged(("source",), "moved", checksum=False)
        self.assertEqual(plan.make(settings, self.target, files, 1), made)
        self.assertEqual(path.read_text(), text)

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
        self.assertBetween(figures["seconds"], 0, 60)
        self.assertEqual(figures["seconds"], round(figures["seconds"], 2))

    def test_a_bucket_holds_documents_up_to_its_length(self):
        """A text of n bytes has n targets, the end of the document included."""
        texts = ["x" * n for n in (4, 5, 6, 7, 8, 9)] * 5
        lines = "".join(f'{{"text": "{text}"}}\n' for text in texts)
        (self.source / "a.jsonl").write_text(lines)
        figures = prepare.prepare(self.settings(buckets=(5, 8)), self.target)
        numbers = {"up_to_5": {4, 5}, "up_to_8": {6, 7, 8}, "longer": {9}}
        is_train = lambda i: (
            not inputs.is_held_out(
                self.settings(), documents_lib.Document(f"a.jsonl:{i + 1}", "")
            )
        )
        sizes = [len(text) for i, text in enumerate(texts) if is_train(i)]
        got = {name: figures[f"{name}/train"]["tokens"] for name in numbers}
        want = {name: sum(n for n in sizes if n in of) for name, of in numbers.items()}
        self.assertEqual(got, want)


class BarTest(FolderTest):
    def test_bars_reach_their_end_on_a_terminal(self):
        corpora.write_jsonl(self.source)
        # One process, unless more are asked for.
        alone = mock.patch.object(
            multiprocessing, "get_context", side_effect=AssertionError
        )
        with contextlib.redirect_stderr(Terminal()) as shown, alone:
            prepare.prepare(self.settings(), self.target, check=True)
            prepare.prepare(self.settings(), self.target, check=True)
        for label in ("scan", "prepare", "check"):
            size = r"\d+(\.\d+)?k"  # in units that a person reads
            done = rf"{label}: 100%[^\r]*\| {size}/{size} "
            self.assertRegex(shown.getvalue(), done)

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

    def test_two_workers_are_other_processes_and_an_error_ends_them(self):
        got = set(workers.results(os.readlink, ["/proc/self"] * 2, 2))
        self.assertNotIn(str(os.getpid()), got)
        folder = pathlib.Path(self.create_tempdir().full_path)
        go, end = folder / "go", futures.ProcessPoolExecutor.shutdown
        wait = f"until [ -e {go} ]; do sleep 0.02; done; touch"
        tasks = [["sh", "-c", f"{wait} {folder / str(i)}"] for i in range(40)]

        def ended(pool, *args, **kwargs):
            go.touch()
            end(pool, *args, **kwargs)

        with (
            mock.patch.object(futures.ProcessPoolExecutor, "shutdown", ended),
            self.assertRaises(subprocess.CalledProcessError),
        ):
            list(workers.results(subprocess.check_call, [["false"], *tasks], 2))
        self.assertLess(len(os.listdir(folder)), 10)  # those under way finish

    def test_a_worker_ends_when_its_parent_dies(self):
        """A pipe stands for the parent's life; its other end closes as that dies."""
        dead, alive = os.pipe()
        self.addCleanup(os.close, dead)
        parent, ended = mock.Mock(sentinel=dead), threading.Event()
        end = {"side_effect": lambda _: ended.set()}
        with (
            mock.patch.object(multiprocessing, "parent_process", return_value=parent),
            mock.patch.object(signal, "raise_signal", **end),
            mock.patch.dict(os.environ),
        ):
            before = set(threading.enumerate())
            workers._begin()
            (waiting,) = set(threading.enumerate()) - before
            self.assertTrue(waiting.daemon)  # it keeps no worker from ending
            self.assertFalse(ended.wait(0.05))
            os.close(alive)
            self.assertTrue(ended.wait(30))
            waiting.join()


if __name__ == "__main__":
    environment.main()
