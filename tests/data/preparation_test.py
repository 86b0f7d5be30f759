"""Preparing a corpus: the same bytes in every way, and their content."""

import fcntl
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.preparation import index as index_lib
from glm5_jax.data.preparation import inputs, plan, prepare, shards, workers
from glm5_jax.data.sources import documents as documents_lib
from tests import environment, runs
from tests.data import corpora

ROOT = pathlib.Path(__file__).parent.parent.parent
# Digest of the 40 documents; a change remakes every part.
SOURCE_SHA256 = "333e4f5f5aa6e2234e2d73c0584e29b26f3181b37bd26eb7f3bc6b53aa8c593f"


def rows_of(folder, side="train"):
    index = index_lib.read(folder)
    rows = shards.ShardRows(
        folder,
        getattr(index, side),
        eos_id=index.eos_id,
        sequence_length=index.settings["sequence_length"],
    )
    return [rows[i] for i in range(len(rows))]


def segments(rows):
    """Returns the ids of each piece of a document, with its last target."""
    for row in rows:
        for segment in range(1, row["segment_ids"].max() + 1):
            is_in = row["segment_ids"] == segment
            yield [*row["tokens"][is_in], row["targets"][is_in][-1]]


class PreparationTest(runs.FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.source = corpora.write_jsonl(cls.root / "corpus")
        cls.whole = corpora.make_prepared(cls.source, cls.root / "whole")

    def target(self):
        return pathlib.Path(self.create_tempdir().full_path) / "target"

    def documents(self):
        return documents_lib.read_documents(str(self.source))

    def test_files_of_a_prepared_folder(self):
        names = set(corpora.contents(self.whole))
        self.assertContainsSubset(
            {"index.json", "plan.json", "tokenizer.json", "train-00000.array_record"},
            names,
        )
        index = index_lib.read(self.whole)
        self.assertGreater(len(index.train), 3)
        self.assertEqual(sum(s.rows for s in index.train), len(rows_of(self.whole)))

    def test_every_document_is_there_once_on_its_side(self):
        tokenizer = tokenizer_lib.named("byte")
        for side in inputs.SIDES:
            ids = [i for s in segments(rows_of(self.whole, side)) for i in s[1:]]
            want = [
                i
                for d in self.documents()
                if documents_lib.is_held_out(d.name, 20) == (side == "held_out")
                for i in [*tokenizer.encode(d.text)[1:], tokenizer.eos_id]
            ]
            self.assertCountEqual(ids, want)

    def test_any_number_of_workers_writes_the_same_bytes(self):
        again = corpora.make_prepared(self.source, self.target(), num_workers=3)
        self.assertEqual(corpora.contents(again), corpora.contents(self.whole))

    def test_damaged_parts_are_made_again_and_no_others(self):
        folder = corpora.make_prepared(self.source, self.target())
        want = corpora.contents(folder)
        times = {p: p.stat().st_mtime_ns for p in folder.glob("train-*")}
        flipped = folder / "held_out-00004.array_record"
        content = bytearray(flipped.read_bytes())
        content[len(content) // 2] ^= 1
        flipped.write_bytes(content)
        corpora.make_prepared(self.source, folder)  # without check it trusts sizes
        self.assertEqual(flipped.read_bytes(), content)
        (folder / "train-00001.array_record").unlink()
        cut = folder / "train-00002.array_record"
        cut.write_bytes(cut.read_bytes()[:-9])
        (folder / "parts" / "00003.json").write_text('{"docu')
        (folder / ".train-00001-abc.array_record").write_text("half")
        prepare.prepare(corpora.settings(self.source), folder, check=True)
        self.assertEqual(corpora.contents(folder), want)
        kept = {p.name for p, t in times.items() if p.stat().st_mtime_ns == t}
        made = {f"train-{i:05d}.array_record" for i in (1, 2, 3, 4)}
        self.assertEqual({p.name for p in times} - kept, made)
        self.assertEmpty(list(folder.glob(".train-*")))

    def test_workers_start_without_jax(self):
        """Each would take two seconds and 200 MB for it."""
        code = "import glm5_jax.data.preparation.prepare, sys; print(*sys.modules)"
        command = [sys.executable, "-c", code]
        out = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        self.assertNoCommonElements(out.stdout.decode().split(), {"jax", "grain"})

    def test_a_killed_preparation_resumes(self):
        """Kills the parent with SIGKILL: workers end too, and the next run finishes."""
        folder = self.target()
        command = [sys.executable, "-m", "glm5_jax.prepare", "--workers=2"]
        changes = {"sequence_length": 32, "held_out_percent": 20, "tokenizer": "byte"}
        changes |= {"source": self.source, "target": folder}
        changes |= {"shard_mib": corpora.SHARD_MIB}
        command += [f"--{name}={value}" for name, value in changes.items()]
        child = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
        )
        while not list(folder.glob("parts/*.json")):
            self.assertIsNone(child.poll())
            time.sleep(0.002)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        self.wait_until_alone(child.pid)
        corpora.make_prepared(self.source, folder)
        self.assertEqual(corpora.contents(folder), corpora.contents(self.whole))

    def wait_until_alone(self, group):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return
            time.sleep(0.02)
        self.fail("workers live on without their parent")

    def test_memory_is_that_of_a_part(self):
        """Measures a child's peak resident size as it prepares a larger corpus."""
        source = pathlib.Path(self.create_tempdir().full_path)
        line = json.dumps({"text": "word " * 100}) + "\n"
        with (source / "a.jsonl").open("w") as file:
            file.writelines([line] * 8_000)  # 4 MB
        code = """
import pathlib, re, sys
from tests.data import corpora
status = pathlib.Path("/proc/self/status")
used = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1])
before = used()
source, folder = sys.argv[1:]
for mib in (0.5, 4):  # the peak does not fall
    settings = {"shard_mib": mib, "sequence_length": 4096}
    corpora.make_prepared(source, pathlib.Path(folder, str(mib)), **settings)
    print((used() - before) / 1024)
"""
        command = [sys.executable, "-c", code, str(source), self.target()]
        got = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        of_small, of_large = map(float, got.stdout.split())
        # Libraries take 20 MiB; a MiB of text takes 7, as each byte is an id.
        self.assertLess(of_small, 35)
        self.assertGreater(of_large, of_small + 20)

    def test_a_full_disk_ends_it_and_it_resumes(self):
        """Simulates it by a limit on file size, which only shards exceed."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        folder = self.target()
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
        with self.assertRaisesRegex(OSError, "train-00000.* cannot be written"):
            corpora.make_prepared(self.source, folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        self.assertEmpty(list(folder.rglob("*.array_record")))
        corpora.make_prepared(self.source, folder)
        self.assertEqual(corpora.contents(folder), corpora.contents(self.whole))

    def test_other_settings_and_sources_are_refused(self):
        with self.assertRaisesRegex(config.InputError, "seed: 0 there, 1 here"):
            corpora.make_prepared(self.source, self.whole, seed=1)
        before = corpora.contents(self.whole)
        other = corpora.write_jsonl(self.root / "other", seed=1)
        with self.assertRaisesRegex(config.InputError, "corpus there, .*other here"):
            corpora.make_prepared(other, self.whole)
        self.assertEqual(corpora.contents(self.whole), before)

    def test_one_preparation_at_a_time(self):
        refused = self.assertRaisesRegex(config.InputError, "another process is prep")
        with (self.whole / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with refused:
                corpora.make_prepared(self.source, self.whole)

    def test_a_folder_of_others_is_left_alone(self):
        folder = pathlib.Path(self.create_tempdir().full_path)
        (folder / "mine.txt").write_text("mine")
        with self.assertRaisesRegex(config.InputError, "not empty"):
            corpora.make_prepared(self.source, folder)

    def test_a_bad_line_is_named_and_the_rest_is_kept(self):
        source = corpora.write_jsonl(pathlib.Path(self.create_tempdir().full_path))
        lines = (source / "2.jsonl").read_text().splitlines()
        lines[30] = '{"body": 1}'
        (source / "2.jsonl").write_text("\n".join(lines))
        folder = self.target()
        with self.assertRaisesRegex(config.InputError, r"2.jsonl:31 must.*\['body'\]"):
            corpora.make_prepared(source, folder, num_workers=2)
        self.assertNotEmpty(list(folder.glob("parts/*.json")))
        with self.assertRaisesRegex(config.InputError, "is not finished"):
            index_lib.read(folder)

    def test_a_bpe_is_trained_on_training_documents_and_kept(self):
        folder = corpora.make_prepared(
            self.source, self.target(), tokenizer="bpe", bpe_vocab_size=320
        )
        tokenizer = tokenizer_lib.load(folder)
        self.assertEqual(index_lib.read(folder).tokenizer, tokenizer.digest[:16])
        again = corpora.make_prepared(
            self.source, self.target(), 2, tokenizer="bpe", bpe_vocab_size=320
        )
        self.assertEqual(corpora.contents(again), corpora.contents(folder))


class PackingTest(runs.FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.source = corpora.write_jsonl(cls.root / "corpus")
        cls.tokenizer = tokenizer_lib.named("byte_chat")
        cls.texts = {
            d.name: d.text for d in documents_lib.read_documents(str(cls.source))
        }

    def prepare(self, **changes):
        folder = pathlib.Path(self.create_tempdir().full_path) / "target"
        changes = {"tokenizer": "byte_chat", **changes}
        return corpora.make_prepared(self.source, folder, **changes)

    def ids(self, is_held_out=False):
        """Returns the ids of each document, with <|endoftext|>."""
        return [
            (*self.tokenizer.encode(text), self.tokenizer.eos_id)
            for name, text in self.texts.items()
            if documents_lib.is_held_out(name, 20) == is_held_out
        ]

    def test_best_fit_leaves_documents_whole_that_fit(self):
        folder = self.prepare(packing="best_fit", sequence_length=150)
        found = {tuple(s) for s in segments(rows_of(folder))}
        fitting = {ids for ids in self.ids() if len(ids) <= 151}
        self.assertGreater(len(fitting), 20)
        self.assertContainsSubset(fitting, found)
        longer = [ids for ids in self.ids() if len(ids) > 151]
        self.assertNotEmpty(longer)
        for ids in longer:
            self.assertIn(ids[:151], found)
        total = sum(len(ids) - 1 for ids in self.ids())
        self.assertEqual(sum(len(s) - 1 for s in found), total)

    def test_buckets_are_folders_by_length(self):
        folder = self.prepare(buckets=(100, 200), packing="best_fit")
        limits = {"up_to_100": (1, 100), "up_to_200": (101, 200), "longer": (201, 9999)}
        for name, (low, high) in limits.items():
            want = [
                i for ids in self.ids() if low < len(ids) <= high + 1 for i in ids[1:]
            ]
            found = [i for s in segments(rows_of(folder / name)) for i in s[1:]]
            self.assertCountEqual(found, want, name)
        with self.assertRaisesRegex(config.InputError, "longer, up_to_100, up_to_200"):
            index_lib.read(folder)

    def test_fill_in_the_middle_can_be_undone(self):
        folder = self.prepare(fim_rate=1.0, packing="best_fit", sequence_length=600)
        special = self.tokenizer.special_ids
        names = ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>")
        marks = {special[name]: name for name in names}
        undone, modes = [], set()
        for ids in segments(rows_of(folder)):
            self.assertEqual(ids.pop(), self.tokenizer.eos_id)
            places = [i for i, token in enumerate(ids) if token in marks]
            self.assertEqual(places[0], 0)
            modes.add(tuple(marks[ids[i]] for i in places))
            ends = [*places[1:], len(ids)]
            parts = {
                marks[ids[i]]: bytes(ids[i + 1 : j])
                for i, j in zip(places, ends, strict=True)
            }
            prefix, suffix, middle = (parts[name] for name in names)
            undone.append((prefix + middle + suffix).decode())
        train = [
            t for n, t in self.texts.items() if not documents_lib.is_held_out(n, 20)
        ]
        self.assertCountEqual(undone, train)
        self.assertEqual(modes, {names, (names[1], names[0], names[2])})
        for ids in segments(rows_of(folder, "held_out")):
            self.assertEmpty(set(ids) & set(marks))

    def test_fill_in_the_middle_needs_its_tokens(self):
        with self.assertRaisesRegex(config.InputError, "fim_rate needs special tokens"):
            self.prepare(fim_rate=0.5, tokenizer="byte")


class ErrorTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("rate", {"fim_rate": 1.5}, r"fim_rate must lie in 0\.\.1"),
        ("buckets", {"buckets": (9, 5)}, "buckets must be ascending"),
        ("shard", {"shard_mib": 0.0}, "shard_mib must be > 0"),
        ("source", {"source": ""}, "source is empty"),
        ("held_out", {"held_out_percent": 0}, r"held_out_percent must lie in 1\.\.50"),
    )
    def test_settings(self, changes, message):
        with self.assertRaisesRegex(config.InputError, message):
            corpora.settings(**{"source": "python", **changes})

    @parameterized.named_parameters(
        ("inside", {}, "documents/rows", "lies inside --source"),
        ("no_tokenizer", {"tokenizer": "bqe"}, "rows", "Give 'bpe', 'byte'"),
        ("fim", {"tokenizer": "byte", "fim_rate": 0.5}, "rows", "code_prefix"),
        ("fim_bpe", {"tokenizer": "bpe", "fim_rate": 0.5}, "a/b/rows", "code_prefix"),
        ("field", {"field": "body"}, "rows", r"h.jsonl:1 .*got \['text'\]"),
        ("column", {"field": "body", "tokenizer": "bpe"}, "rows", "h.jsonl:1"),
        (
            "all_held_out",
            {"buckets": (5,)},
            "rows",
            "has nothing to train on",
        ),
    )
    def test_an_impossible_preparation_leaves_nothing(self, changes, target, message):
        folder = pathlib.Path(self.create_tempdir().full_path)
        (folder / "documents").mkdir()
        # sha256(b"h.jsonl:1") % 100 is 7: it is held out.
        (folder / "documents" / "h.jsonl").write_text('{"text": "a text"}')
        settings = corpora.settings(folder / "documents", **changes)
        with self.assertRaisesRegex(config.InputError, message):
            prepare.prepare(settings, folder / target)
        self.assertEqual([path.name for path in folder.iterdir()], ["documents"])
        self.assertEqual(os.listdir(folder / "documents"), ["h.jsonl"])

    def test_a_folder_without_documents_is_refused(self):
        folder = pathlib.Path(self.create_tempdir().full_path)
        (folder / "corpus").mkdir()
        with self.assertRaisesRegex(config.InputError, "holds no documents"):
            prepare.prepare(corpora.settings(folder / "corpus"), folder / "rows")

    def test_a_link_to_nowhere_is_named(self):
        folder = pathlib.Path(self.create_tempdir().full_path)
        (folder / "corpus").mkdir()
        (folder / "corpus" / "a.jsonl").symlink_to(folder / "nowhere")
        with self.assertRaisesRegex(config.InputError, "a.jsonl cannot be read: No"):
            corpora.make_prepared(folder / "corpus", folder / "rows")
        self.assertFalse((folder / "rows").exists())

    def test_records_of_before_hold_for_the_same_documents(self):
        """Their digest depends on the number of documents read at once."""
        folder = pathlib.Path(self.create_tempdir().full_path)
        (folder / "corpus").mkdir()
        lines = "".join(f'{{"text": "{i}"}}\n' for i in range(40))
        (folder / "corpus" / "a.jsonl").write_text(lines)
        corpora.make_prepared(folder / "corpus", folder / "rows", shard_mib=1.0)
        record = json.loads((folder / "rows" / "parts" / "00000.json").read_text())
        self.assertEqual(record["documents"], 40)
        self.assertEqual(record["source_sha256"], SOURCE_SHA256)

    def test_the_corpus_of_python_is_one_part(self):
        folder = pathlib.Path(self.create_tempdir().full_path)
        files = [(inputs.PYTHON, 7, "0" * 64)]
        (part,) = plan.make(corpora.settings("python"), folder, files, 1).parts
        (span,) = part.spans
        self.assertEqual((span.path, span.start, span.stop), (inputs.PYTHON, 0, 7))
        self.assertEqual((part.number, span.first), (0, 0))
        self.assertEqual(part.files, tuple(files))

    def test_command(self):
        folder = self.create_tempdir().full_path
        for flags, message in (
            (["--source=nowhere"], "'nowhere' does not exist"),
            (["--source=python", "--packing=best"], "packing must be one of"),
            (["--source=python", "--sequence_length=x"], "must be an integer, got 'x'"),
            (["--source=python", "--config=a.py"], "--config has no effect here"),
        ):
            command = [sys.executable, "-m", "glm5_jax.prepare", *flags]
            command.append(f"--target={folder}/target")
            got = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            self.assertEqual(got.returncode, 2, got.stderr)
            self.assertIn(message, got.stderr)
            self.assertNotIn("Traceback", got.stderr)


class BarTest(parameterized.TestCase):
    @parameterized.product(is_shown=(True, False), is_terminal=(True, False))
    def test_only_a_terminal_shows_it(self, is_shown, is_terminal):
        with (
            mock.patch.object(sys.stderr, "isatty", return_value=is_terminal),
            mock.patch.object(sys.stderr, "write"),
            workers.bar("read", 9, is_shown=is_shown) as bar,
        ):
            self.assertEqual(bar.disable, not (is_shown and is_terminal))


if __name__ == "__main__":
    environment.main()
