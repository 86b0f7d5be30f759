"""A source that is fixed after its preparation began: finished parts are kept."""

import json
import os
import pathlib
import shutil
from unittest import mock

from glm5_jax import config
from glm5_jax.data.preparation import index as index_lib
from glm5_jax.data.preparation import part as part_lib
from glm5_jax.data.preparation import prepare
from tests import environment, runs
from tests.data import corpora

TRAIN = "train-*.array_record"


class MendedSourceTest(runs.FolderTest):
    """Checks that the bytes equal those of a fresh preparation of the fixed source."""

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)
        self.source = corpora.write_jsonl(self.folder / "corpus")
        self.target = self.folder / "target"

    def prepare(self, **changes):
        corpora.make_prepared(self.source, self.target, **changes)

    def assert_as_if_new(self, **changes):
        new = corpora.make_prepared(self.source, self.folder / "new", **changes)
        self.assertEqual(corpora.contents(self.target), corpora.contents(new))
        self.assertEmpty([p for p in self.target.rglob("*/") if not any(p.iterdir())])

    def replace_line(self, name, number, text):
        path = self.source / name
        lines = path.read_text(encoding="utf-8").splitlines()
        lines[number] = text
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def times(self):
        return {p.name: p.stat().st_mtime_ns for p in self.target.glob(TRAIN)}

    def made_since(self, times):
        now = self.times()
        return {name for name in now if times.get(name) != now[name]}

    def test_resumes_after_a_line_is_corrected(self):
        good = (self.source / "1.jsonl").read_text(encoding="utf-8").splitlines()[5]
        self.replace_line("1.jsonl", 5, good[:-3])
        with self.assertRaisesRegex(config.InputError, "1.jsonl:6 is not JSON"):
            self.prepare()
        times = self.times()
        self.assertNotEmpty(times)
        self.replace_line("1.jsonl", 5, good)
        self.prepare()
        self.assertNoCommonElements(self.made_since(times), times)
        self.assert_as_if_new()

    def test_a_changed_line_costs_its_part_even_if_finished(self):
        self.prepare()
        times = self.times()
        self.replace_line("1.jsonl", 5, json.dumps({"text": "something shorter"}))
        os.utime(self.source / "0.jsonl")  # a new time, the same content
        self.prepare()
        self.assertBetween(len(self.made_since(times)), 1, 2)
        self.assertLen(times, 6)
        self.assert_as_if_new()

    def test_a_part_under_way_is_not_taken_for_finished(self):
        self.prepare()
        self.replace_line("2.jsonl", 39, '{"text": 3}')
        with self.assertRaisesRegex(config.InputError, "2.jsonl:40 must have a string"):
            self.prepare()
        with self.assertRaisesRegex(config.InputError, "is not finished"):
            index_lib.read(self.target)

    def test_files_come_and_go(self):
        self.prepare(buckets=(80, 400))
        (self.source / "0.jsonl").unlink()
        (self.source / "1.jsonl").rename(self.source / "3.jsonl")
        (self.source / "4.txt").write_text("A text.")
        self.prepare(buckets=(80, 400))
        self.assert_as_if_new(buckets=(80, 400))
        shutil.rmtree(self.source)
        self.source.mkdir()
        (self.source / "4.txt").write_text("A text.")
        self.prepare(buckets=(80, 400))
        self.assert_as_if_new(buckets=(80, 400))

    def test_a_bpe_is_trained_on_the_source_as_it_is(self):
        settings = {"tokenizer": "bpe", "bpe_vocab_size": 320}
        self.prepare(**settings)
        before = (self.target / "tokenizer.json").read_bytes()
        self.replace_line("0.jsonl", 0, json.dumps({"text": "zyx " * 2000}))
        self.prepare(**settings)
        self.assertNotEqual((self.target / "tokenizer.json").read_bytes(), before)
        (self.target / "tokenizer.json").unlink()  # as if killed before it was made
        self.replace_line("0.jsonl", 0, json.dumps({"text": "xyz " * 2000}))
        self.prepare(**settings)
        self.assert_as_if_new(**settings)

    def test_files_that_are_not_read_are_named(self):
        (self.source / "more").mkdir()
        (self.source / "more" / "a.jsonl.xz").write_bytes(b"compressed")
        (self.source / ".hidden.csv").write_text("a,b")
        with self.assertLogs(level="WARNING") as logs:
            self.prepare()
        self.assertIn("1 files of the source are of other kinds", logs.output[0])
        self.assertIn("are not read: more/a.jsonl.xz.", logs.output[0])

    def test_damage_is_found_in_a_file_that_was_touched(self):
        self.prepare()
        path = self.target / "train-00000.array_record"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        os.utime(self.source / "0.jsonl")
        prepare.prepare(corpora.settings(self.source), self.target, check=True)
        self.assert_as_if_new()

    def test_a_source_that_has_moved_may_be_mended_there(self):
        self.prepare()
        shutil.move(self.source, self.folder / "moved")
        self.source = self.folder / "moved"
        self.prepare()
        self.replace_line("1.jsonl", 5, json.dumps({"text": "something shorter"}))
        self.source = self.source / ".." / "moved"  # the same, written otherwise
        self.prepare()
        self.assert_as_if_new()

    def test_a_source_that_changes_meanwhile_is_named_and_made_again(self):
        make = part_lib.make

        def change(*args, **kwargs):
            make(*args, **kwargs)
            with (self.source / "2.jsonl").open("a") as file:
                file.write('{"text": "more"}\n')

        refused = self.assertRaisesRegex(config.InputError, "again.*\n  2.jsonl")
        with mock.patch.object(part_lib, "make", change), refused:
            self.prepare()
        self.assertFalse((self.target / "index.json").exists())
        self.prepare()
        self.assert_as_if_new()


if __name__ == "__main__":
    environment.main()
