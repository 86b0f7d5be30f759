"""Documents of a folder and of Python, their split, and refused sources."""

import gzip
import hashlib
import os
import pathlib

from absl.testing import absltest, parameterized

from glm5_jax import config
from glm5_jax.data.sources import documents as documents_lib
from tests import environment


class FolderTest(parameterized.TestCase):
    def make_folder(self, files):
        folder = pathlib.Path(self.create_tempdir().full_path)
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(folder)

    def test_a_file_and_packed_files(self):
        lines = "".join(f"line {i}\n" for i in range(99))
        rows = '{"text": "x"}\n{"text": "y"}\n'
        folder = self.make_folder(
            {
                "a.txt": lines,
                "b.txt.gz": gzip.compress(lines.encode()),
                "c.jsonl.gz": gzip.compress(rows.encode()),
                "d.gz": gzip.compress(b"what?"),
            }
        )
        (document,) = documents_lib.read_documents(f"{folder}/a.txt")
        self.assertEqual(document, documents_lib.Document("a.txt", lines))
        found = {d.name: d.text for d in documents_lib.read_documents(folder)}
        want = {"a.txt": lines, "b.txt.gz": lines}
        self.assertEqual(found, want | {"c.jsonl.gz:1": "x", "c.jsonl.gz:2": "y"})
        path = pathlib.Path(folder, "b.txt.gz")
        path.write_bytes(path.read_bytes()[:-12])
        with self.assertRaisesRegex(config.InputError, "b.txt.gz cannot be read"):
            documents_lib.read_documents(folder)

    def test_linked_folders_are_read_and_loops_end(self):
        elsewhere = pathlib.Path(self.make_folder({"b.txt": "b"}))
        folder = pathlib.Path(self.make_folder({"a.txt": "a"}))
        (folder / "part").symlink_to(elsewhere)
        (elsewhere / "back").symlink_to(folder)
        (folder / "self").symlink_to(folder)
        found = [d.name for d in documents_lib.read_documents(str(folder))]
        self.assertEqual(sorted(found), ["a.txt", "part/b.txt"])

    @parameterized.parameters(1, 10, 50)
    def test_of_a_lone_document_the_end_is_held_out(self, percent):
        text = "".join(f"line {i}\n" for i in range(1000))
        document = documents_lib.Document("input.txt", text)
        train, held_out = documents_lib.parted(document, percent)
        self.assertEqual(train.text + held_out.text, text)
        self.assertEndsWith(train.text, "\n")
        share = 100 * len(held_out.text) / len(text)
        self.assertAlmostEqual(share, percent, delta=0.2)
        self.assertFalse(documents_lib.is_held_out(train.name, percent))
        self.assertTrue(documents_lib.is_held_out(held_out.name, percent))
        self.assertLen(
            documents_lib.parted(documents_lib.Document("a", "x"), percent), 1
        )

    @parameterized.parameters(
        ("0\n2\n4\n6\n8\n", 50, "0\n2\n", "4\n6\n8\n"),
        ("0\n2\n4\n6\n8\n", 40, "0\n2\n4\n", "6\n8\n"),
        ("\n123456789", 50, "\n", "123456789"),
        ("0123456789", 30, "0123456", "789"),  # no line to cut at
        ("01234567890\n", 99, None, None),  # nothing to train on
    )
    def test_a_lone_document_is_cut_after_a_line(self, text, percent, train, held_out):
        parts = documents_lib.parted(documents_lib.Document("a", text), percent)
        want = [text] if train is None else [train, held_out]
        self.assertEqual([part.text for part in parts], want)

    def test_endless_or_nameless_sources_are_refused(self):
        folder = self.make_folder({"a.txt": "a"})
        os.mkfifo(f"{folder}/b.txt")
        with self.assertRaisesRegex(config.InputError, "b.txt is not a regular file"):
            documents_lib.read_documents(folder)
        os.remove(f"{folder}/b.txt")
        pathlib.Path(os.fsdecode(os.fsencode(folder) + b"/\xff.txt")).write_text("x")
        with self.assertRaisesRegex(config.InputError, "is not UTF-8"):
            documents_lib.read_documents(folder)

    def test_every_kind_of_file(self):
        folder = self.make_folder(
            {
                "b.txt": "two\r\nlines",
                "a/c.md": "# é",
                "d.py": "pass",
                "e.jsonl": '{"text": "x\\u2028y", "id": 1}\n\n{"text": "z"}\r\n',
                "bom.txt": b"\xef\xbb\xbfbom",
                "empty.txt": "",
                "f.bin": b"\xff",
                ".git/g.txt": "hidden",
                ".h.txt": "hidden",
            }
        )
        found = {d.name: d.text for d in documents_lib.read_documents(folder)}
        self.assertEqual(
            found,
            {
                "a/c.md": "# é",
                "b.txt": "two\r\nlines",
                "bom.txt": "bom",
                "d.py": "pass",
                "e.jsonl:1": "x\u2028y",
                "e.jsonl:3": "z",
            },
        )
        self.assertEqual(list(found), sorted(found))

    @parameterized.named_parameters(
        ("not_json", '{"text": "a"}\n{"text": ', r"e\.jsonl:2 is not JSON"),
        ("no_text", '\n{"body": "a"}', r'e\.jsonl:2 must .* "text", got \[.body'),
        ("no_object", "[1]", r"e\.jsonl:1 must be an object .* got list"),
        ("no_string", '{"text": 3}', r'e\.jsonl:1 must .* string in the field "text"'),
        ("surrogate", '{"text": "\\ud800"}', r"e\.jsonl:1 is not valid Unicode"),
        ("not_utf8", b"\xff\xfe", r"e\.jsonl:1 cannot be read as UTF-8"),
    )
    def test_bad_line(self, content, message):
        folder = self.make_folder({"e.jsonl": content})
        with self.assertRaisesRegex(config.InputError, message):
            documents_lib.read_documents(folder)

    @parameterized.named_parameters(
        ("empty", {}), ("other_kinds", {"a.csv": "1,2"}), ("no_text", {"a.txt": ""})
    )
    def test_nothing_to_read(self, files):
        with self.assertRaisesRegex(config.InputError, r"holds no text.*\.jsonl"):
            documents_lib.read_documents(self.make_folder(files))

    def test_no_folder(self):
        with self.assertRaisesRegex(config.InputError, "'pyhton' does not exist"):
            documents_lib.read_documents("pyhton")
        file = self.create_tempfile().full_path
        with self.assertRaisesRegex(config.InputError, "is a file"):
            documents_lib.read_documents(file)


class PythonTest(absltest.TestCase):
    def test_the_corpus_that_every_python_carries(self):
        documents = documents_lib.read_documents("python")
        names = [d.name for d in documents]
        self.assertLen(set(names), len(names))
        for name in ("topics/lambda", "ast.py", "json/decoder.py"):
            self.assertIn(name, names)
        for name in names:
            self.assertNotRegex(name, r"(^|/)(tests?|site-packages|encodings)/")
        num_bytes = sum(len(d.text.encode()) for d in documents)
        self.assertBetween(num_bytes, 5e6, 20e6)
        held_out = [d for d in documents if documents_lib.is_held_out(d.name, 10)]
        self.assertBetween(len(held_out) / len(documents), 0.05, 0.15)
        # Modules in site-packages change; the corpus must not.
        self.assertNotIn("pip/__init__.py", names)


class SplitTest(absltest.TestCase):
    def test_held_out_by_the_hash_of_the_name(self):
        for name in ("a", "ast.py", "漢"):
            bucket = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100
            self.assertFalse(documents_lib.is_held_out(name, bucket))
            self.assertTrue(documents_lib.is_held_out(name, bucket + 1))

    def test_shuffle_depends_on_names_and_seed_alone(self):
        documents = [documents_lib.Document(str(i), "text") for i in range(50)]
        first = documents_lib.shuffled(documents, 0)
        self.assertEqual(documents_lib.shuffled(documents[::-1], 0), first)
        self.assertCountEqual(first, documents)
        self.assertNotEqual(first, documents)
        self.assertNotEqual(documents_lib.shuffled(documents, 1), first)

    def test_digest_sees_every_change(self):
        def digest(*pairs):
            return documents_lib.corpus_digest(
                documents_lib.Document(*pair) for pair in pairs
            )

        corpora = (
            [("a", "b")],
            [("ab", "")],
            [("a", "c")],
            [("a", "b"), ("c", "d")],
            [("a", "bcd")],
        )
        self.assertLen({digest(*corpus) for corpus in corpora}, len(corpora))
        self.assertEqual(digest(("a", "b")), digest(("a", "b")))


if __name__ == "__main__":
    environment.main()
