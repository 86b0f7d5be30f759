"""Patches against GNU patch, which applies what we make and makes what we apply."""

import pathlib
import shutil
import subprocess
import tempfile
import unittest

from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.environments.worlds.swe import diffs
from tests import environment

LINES = [f"line {i}\n" for i in range(30)]
CASES = (
    ("a_line", LINES, [*LINES[:4], "x\n", *LINES[5:]]),
    ("two_hunks", LINES, ["x\n", *LINES[1:20], "y\n", "z\n", *LINES[24:]]),
    ("the_end_has_no_line_feed", LINES, [*LINES[:-1], "line 29"]),
    ("it_had_none", [*LINES[:-1], "line 29"], LINES),
    ("both_have_none", ["a\n", "b"], ["c\n", "b"]),
    ("all", LINES, ["x\n"]),
)


class PatchTest(parameterized.TestCase):
    @parameterized.named_parameters(*CASES)
    def test_apply_inverts_make(self, before, after):
        old, new = ({"a.txt": "".join(x).encode()} for x in (before, after))
        self.assertEqual(diffs.apply(diffs.make(old, new), old), new)

    @parameterized.named_parameters(*CASES)
    @unittest.skipIf(not shutil.which("patch"), "needs the package patch")
    def test_patch_applies_what_we_make(self, before, after):
        old, new = ({"a.txt": "".join(x).encode()} for x in (before, after))
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "a.txt")
            path.write_bytes(old["a.txt"])
            patch = diffs.make(old, new).encode()
            command = ["patch", "-p1", "-s", "-d", folder]
            subprocess.run(command, input=patch, check=True)
            self.assertEqual(path.read_bytes(), new["a.txt"])

    @parameterized.named_parameters(*CASES)
    @unittest.skipIf(not shutil.which("git"), "needs git")
    def test_apply_applies_what_git_makes(self, before, after):
        with tempfile.TemporaryDirectory() as folder:
            for side, lines in (("a", before), ("b", after)):
                pathlib.Path(folder, side).write_text("".join(lines))
            command = ["git", "diff", "--no-index", "--no-prefix", "a", "b"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        patch = done.stdout.replace("--- a\n+++ b", "--- x/f\n+++ x/f")
        old, new = ({"f": "".join(x).encode()} for x in (before, after))
        self.assertEqual(diffs.apply(patch, old), new)

    def test_new_and_deleted_files(self):
        old, new = {"a": b"1\n", "b": b"2\n"}, {"b": b"3\n", "d/c": b"4\n"}
        patch = diffs.make(old, new)
        self.assertEqual(diffs.apply(patch, old), new)
        self.assertEqual({k: v[0] for k, v in diffs.parse(patch).items()},
                         {"a": None, "b": "b", "d/c": "d/c"})  # fmt: skip

    def test_a_hunk_moves_with_the_lines_above_it(self):
        old = {"a": "".join(LINES).encode()}
        new = {"a": "".join([*LINES[:4], "x\n", *LINES[5:]]).encode()}
        moved = {"a": b"above\n" + old["a"]}
        patched = diffs.apply(diffs.make(old, new), moved)
        self.assertEqual(patched["a"], b"above\n" + new["a"])

    def test_what_does_not_fit_is_refused(self):
        patch = diffs.make({"a": b"1\n"}, {"a": b"2\n"})
        with self.assertRaisesRegex(config.InputError, "does not fit a at line 1"):
            diffs.apply(patch, {"a": b"3\n"})
        with self.assertRaisesRegex(config.InputError, "give the patch whole"):
            diffs.apply(patch.replace("+2\n", ""), {"a": b"1\n"})


if __name__ == "__main__":
    environment.main()
