"""Every format, read whole and in spans; compressed files; refused files."""

import gzip
import importlib
import json
import pathlib
import sys
import unittest
from importlib import util

import pyarrow
import pyarrow.parquet
from absl.testing import absltest, parameterized
from array_record.python import array_record_module

from glm5_jax import config
from glm5_jax.data.sources import compression, formats
from glm5_jax.data.sources import documents as documents_lib
from tests import environment

WHOLE = 2**62
TEXTS = [f"text {i} naïve 漢字 " + "x" * (i * 7 % 50) for i in range(60)]


def write_jsonl(path):
    lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(TEXTS)]
    path.write_text("\ufeff" + "\n".join(lines))  # the last line has no end


def write_parquet(path):
    table = pyarrow.table({"id": range(60), "text": TEXTS})
    pyarrow.parquet.write_table(table, path, row_group_size=7)


def write_arrow_stream(path):
    """Writes a file like Hugging Face datasets."""
    table = pyarrow.table({"id": range(60), "text": TEXTS})
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_arrow_file(path):
    table = pyarrow.table({"text": TEXTS})
    with pyarrow.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_array_record(path, records=None):
    records = records or [json.dumps({"text": text}).encode() for text in TEXTS]
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def write_gzip(path, data):
    path.write_bytes(gzip.compress(data))


def write_zstandard(path, data):
    """Writes two frames like parallel compressors, the first without its size."""
    zstandard = importlib.import_module("zstandard")
    half = len(data) // 2
    options = ({"write_content_size": False}, {"write_checksum": True})
    frames = zip((data[:half], data[half:]), options, strict=True)
    path.write_bytes(
        b"".join(zstandard.ZstdCompressor(**o).compress(part) for part, o in frames)
    )


class FormatsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.create_tempdir().full_path)

    def read(self, path, num_bytes=WHOLE, field="text"):
        return [
            pair
            for span in formats.cut(self.root, path, num_bytes)
            for pair in formats.read(self.root, span, field)
        ]

    @parameterized.named_parameters(
        ("jsonl", "a.jsonl", write_jsonl),
        ("parquet", "a.parquet", write_parquet),
        ("arrow_stream", "a.arrow", write_arrow_stream),
        ("arrow_file", "a.arrow", write_arrow_file),
        ("array_record", "a.array_record", write_array_record),
    )
    def test_spans_together_are_the_whole(self, name, write):
        path = self.root / "below" / name
        path.parent.mkdir()
        write(path)
        whole = self.read(path)
        self.assertEqual([text for _, text in whole], TEXTS)
        names = [f"below/{name}:{i}" for i in range(1, 61)]
        self.assertEqual([name for name, _ in whole], names)
        for num_bytes in (1, 500, 1000):
            spans = formats.cut(self.root, path, num_bytes)
            self.assertGreater(len(spans), 2)
            self.assertEqual(self.read(path, num_bytes), whole)
            if path.suffix != ".array_record":  # pads files to 64 KiB
                sizes = [span.num_bytes for span in spans]
                self.assertLess(max(sizes), 1200 + num_bytes)
        self.assertEqual(self.read(path, 500), whole)
        found = documents_lib.read_documents(str(self.root))
        self.assertCountEqual([(d.name, d.text) for d in found], whole)

    @parameterized.parameters(
        (9, [(0, 10, 1), (10, 20, 2), (20, 30, 3), (30, 34, 4)]),
        (10, [(0, 20, 1), (20, 34, 3)]),  # a cut is in the line after so many bytes
        (19, [(0, 20, 1), (20, 34, 3)]),
        (20, [(0, 30, 1), (30, 34, 4)]),
        (34, [(0, 34, 1)]),
    )
    def test_spans_of_lines(self, num_bytes, want):
        """Three lines of ten bytes, and one of four without an end."""
        path = self.root / "a.jsonl"
        path.write_bytes(b"012345678\n" * 3 + b"0123")
        spans = formats.cut(self.root, path, num_bytes)
        self.assertEqual([(s.start, s.stop, s.first) for s in spans], want)
        sizes = [s.num_bytes for s in spans]
        self.assertEqual(sizes, [stop - start for start, stop, _ in want])

    @parameterized.parameters(
        (1, [(0, 1, 1), (1, 2, 4), (2, 3, 6)]),
        (100, [(0, 1, 1), (1, 3, 4)]),
        (80, [(0, 1, 1), (1, 2, 4), (2, 3, 6)]),
        (101, [(0, 2, 1), (2, 3, 6)]),
        (180, [(0, 2, 1), (2, 3, 6)]),
        (181, [(0, 3, 1)]),
    )
    def test_neighbours_are_joined_until_they_have_the_bytes(self, num_bytes, want):
        sizes = [(3, 100), (2, 80), (4, 120)]
        spans = list(formats._joined(sizes, num_bytes))
        self.assertEqual(
            [(start, stop, first) for start, stop, first, _ in spans], want
        )
        got = [size for *_, size in spans]
        self.assertEqual(got, [sum(b for _, b in sizes[i:j]) for i, j, _ in want])

    def test_spans_of_records(self):
        """Twenty records; the file's bytes are divided evenly."""
        path = self.root / "a.array_record"
        write_array_record(path, [b"x" * 50] * 20)
        size = path.stat().st_size
        for num_bytes, step in ((1, 1), (size // 4, 5), (size - 1, 19), (size, 20)):
            spans = formats.cut(self.root, path, num_bytes)
            want = [
                (i, stop := min(i + step, 20), i + 1, (stop - i) * size // 20)
                for i in range(0, 20, step)
            ]
            got = [(s.start, s.stop, s.first, s.num_bytes) for s in spans]
            self.assertEqual(got, want)

    def test_empty_lines_count_and_are_no_documents(self):
        path = self.root / "a.jsonl"
        path.write_text('\n{"text": "a"}\r\n \n\n{"text": "b"}\n\n')
        for num_bytes in (1, 3, WHOLE):
            got = self.read(path, num_bytes)
            self.assertEqual(got, [("a.jsonl:2", "a"), ("a.jsonl:5", "b")])

    def test_a_text_is_one_span(self):
        path = self.root / "a.txt"
        path.write_text("abc\n" * 9)
        self.assertEqual(
            formats.cut(self.root, path, 5), [formats.Span("a.txt", 0, 36, 0, 36)]
        )

    def test_other_fields(self):
        for name, write in (("a.jsonl", write_jsonl), ("a.parquet", write_parquet)):
            write(self.root / name)
            got = [value for _, value in self.read(self.root / name, field="id")]
            self.assertEqual(got, [*range(60)])

    def test_records_that_are_texts(self):
        path = self.root / "a.array_record"
        write_array_record(path, [b"{no json", "é".encode()])
        got = self.read(path, field="")
        self.assertEqual([text for _, text in got], ["{no json", "é"])

    def test_a_hugging_face_folder_knows_its_files(self):
        """Reads a folder of Dataset.save_to_disk with an unrelated file."""
        write_arrow_stream(self.root / "data-00000-of-00001.arrow")
        write_arrow_stream(self.root / "cache-1234.arrow")
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        (self.root / "state.json").write_text(json.dumps(state))
        (self.root / "dataset_info.json").write_text("{}")
        names = [path.name for path in formats.document_files(self.root)]
        self.assertEqual(names, ["data-00000-of-00001.arrow"])

    def test_a_split_must_be_chosen(self):
        for split in ("train", "test"):
            (self.root / split).mkdir()
        (self.root / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
        with self.assertRaisesRegex(config.InputError, "splits test, train.*/test"):
            formats.document_files(self.root)

    @parameterized.named_parameters(
        ("parquet", "a.parquet", "a.parquet cannot be read"),
        ("arrow", "a.arrow", "a.arrow cannot be read"),
        ("array_record", "a.array_record", "a.array_record cannot be read"),
    )
    def test_not_such_a_file(self, name, message):
        (self.root / name).write_bytes(b"something else" * 9)
        with self.assertRaisesRegex(config.InputError, message):
            self.read(self.root / name)

    @parameterized.named_parameters(
        ("parquet", "a.parquet", write_parquet),
        ("arrow", "a.arrow", write_arrow_stream),
    )
    def test_no_such_column(self, name, write):
        write(self.root / name)
        with self.assertRaisesRegex(config.InputError, "no column 'body' but id, text"):
            self.read(self.root / name, field="body")

    def test_null(self):
        path = self.root / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
        with self.assertRaisesRegex(config.InputError, "a.parquet has null"):
            self.read(path)


class CompressedTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.create_tempdir().full_path)

    def write(self, suffix, write):
        if suffix == ".zst" and util.find_spec("zstandard") is None:
            raise unittest.SkipTest("the extra zstd is not installed")
        plain = self.root / "plain.jsonl"
        write_jsonl(plain)
        write(self.root / f"a.jsonl{suffix}", plain.read_bytes())
        write(self.root / f"b.txt{suffix}", "naïve\n".encode() * 70_000)
        plain.unlink()

    @parameterized.parameters((".gz", write_gzip), (".zst", write_zstandard))
    def test_a_compressed_file_is_its_content(self, suffix, write):
        self.write(suffix, write)
        path = self.root / f"a.jsonl{suffix}"
        for num_bytes in (500, WHOLE):
            spans = formats.cut(self.root, path, num_bytes)
            got = [p for span in spans for p in formats.read(self.root, span, "text")]
            names = [f"a.jsonl{suffix}:{i}" for i in range(1, 61)]
            self.assertEqual(got, list(zip(names, TEXTS, strict=True)))
        self.assertEqual(len(spans), 1)
        found = {d.name: d.text for d in documents_lib.read_documents(str(self.root))}
        self.assertLen(found, 61)
        self.assertEqual(found[f"b.txt{suffix}"], "naïve\n" * 70_000)

    @parameterized.parameters((".gz", write_gzip), (".zst", write_zstandard))
    def test_half_a_file_is_refused(self, suffix, write):
        self.write(suffix, write)
        for name in (f"a.jsonl{suffix}", f"b.txt{suffix}"):
            path = self.root / name
            path.write_bytes(path.read_bytes()[:-20])
            with self.assertRaisesRegex(config.InputError, f"{name} cannot be read"):
                documents_lib.read_documents(str(path))

    def test_no_such_file(self):
        """Refuses a file whose content has another format than its name."""
        self.write(".zst", write_gzip)
        with self.assertRaisesRegex(config.InputError, r"zst cannot be read"):
            documents_lib.read_documents(str(self.root))

    @parameterized.parameters((".gz", write_gzip), (".zst", write_zstandard))
    def test_bytes_are_skipped_and_a_file_is_closed(self, suffix, write):
        self.write(suffix, write)
        path = self.root / f"b.txt{suffix}"
        for skipped in (0, 1, 6, 300_000):
            with compression.open_file(path) as file:
                compression.skip(file, skipped)
                want = ("naïve\n".encode() * 70_000)[skipped:][:9]
                self.assertEqual(file.read(9), want)
            self.assertTrue(file.closed)
            still_open = [
                fd.resolve() for fd in pathlib.Path("/proc/self/fd").iterdir()
            ]
            self.assertNotIn(path.resolve(), still_open)

    def test_the_message_without_zstandard_names_the_extra(self):
        (self.root / "a.jsonl.zst").write_bytes(b"")
        hidden = absltest.mock.patch.dict(sys.modules, {"zstandard": None})
        with hidden, self.assertRaisesRegex(config.InputError, r"\[zstd\]"):
            documents_lib.read_documents(str(self.root))


if __name__ == "__main__":
    environment.main()
