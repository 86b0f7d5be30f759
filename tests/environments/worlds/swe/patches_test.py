"""Debian's patches as tasks, and what their headers tell of them."""

import asyncio
import collections
import io
import pathlib
import tarfile
import tempfile
import unittest
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from glm5_jax import config
from glm5_jax.environments import proofs
from glm5_jax.environments.worlds.swe import (
    command,
    dep3,
    diffs,
    mine,
    patches,
    records,
    sources,
    statements,
    world,
)
from tests import environment
from tests.environments.worlds.swe import packages

BROKEN = packages.SOURCE.replace("return high", "return low")
# The program's own release has two faults; a patch of Debian's mends each of them.
ORIGINAL = {
    "counts.py": BROKEN.replace("(a, b) for", "(b, a) for").encode(),
    "tests/test_counts.py": packages.TESTS.partition("    def test_pairs")[0].encode(),
    "README": b"Counts.\n",
    "debian/rules": b"of the program's own people\n",
}
HEADER = """Description: clamp gives the wrong bound
 A value above the upper bound is clamped to the lower one.
 Return high instead.
 .
 Seen in counts.py by many. The name high_bound is not taken.
Origin: upstream, https://example.org/counts/commit/0123456789abcdef
Bug: https://example.org/counts/issues/7
Bug-Debian: https://bugs.debian.org/1
Author: Somebody <somebody@example.org>
Last-Update: 2026-01-02
---
This patch header follows DEP-3.
"""
GIT = """From 0123456789abcdef0123456789abcdef01234567 Mon Sep 17 00:00:00 2001
From: Somebody <somebody@example.org>
Date: Fri, 5 Sep 2025 14:53:20 +0800
Subject: [PATCH 2/3] pairs come the wrong way
 round

The second item stands before the first.
* swap them

Signed-off-by: Somebody <somebody@example.org>
---
 counts.py | 2 +-
"""


def series():
    """Returns the patches by name, and the files that all of them make."""
    known, fault, right = (
        ORIGINAL["counts.py"],
        b"    return low\n    ret",
        b"return high",
    )
    mended = known.replace(fault, b"    return high\n    ret")
    both = {"counts.py": packages.SOURCE.encode()}
    both |= {"tests/test_counts.py": packages.TESTS.encode()}
    steps = {
        "readme": ("", {"README": b"Counts things.\n"}),
        "clamp.patch": (HEADER, {"counts.py": mended}),
        "other": ("", {"counts.py": right}),
        "upstream/CVE-2026-0001.patch": (GIT, both),
    }
    files, found = dict(ORIGINAL), {}
    for name, (head, changed) in steps.items():
        base = {"counts.py": b"none of it\n"} if name == "other" else files
        found[name] = head + diffs.make({k: base[k] for k in changed}, changed)
        files |= changed if name != "other" else {}
    return found, files


def write(folder):
    """Writes the two archives of a source package into a cache."""
    target = pathlib.Path(folder, "debian-patches", "counts")
    target.mkdir(parents=True)
    listed = "# in this order\n" + "".join(f"{name} -p1\n" for name in series()[0])
    additions = {"patches/series": listed, "changelog": "counts (1.0-2)\n"}
    additions |= {f"patches/{name}": text for name, text in series()[0].items()}
    for name, top, files in (
        ("counts_1.0.orig.tar.gz", "counts-1.0", ORIGINAL),
        ("counts_1.0-2.debian.tar.xz", "debian", additions),
    ):
        with tarfile.open(target / name, f"w:{name[-2:]}") as tar:
            for path, text in files.items():
                text = text.encode() if isinstance(text, str) else text
                info = tarfile.TarInfo(f"{top}/{path}")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))


class FetchTest(absltest.TestCase):
    def test_a_source_package_and_its_series(self):
        cache = pathlib.Path(self.create_tempdir().full_path)
        write(cache)
        package, found = sources.fetch_patched("counts", cache)
        self.assertEqual((package.name, package.version), ("counts", "1.0-2"))
        self.assertStartsWith(package.source, "debian:counts=1.0-2 sha256:")
        self.assertEqual(set(package.files), set(ORIGINAL) - {"debian/rules"})
        self.assertEqual(list(found), list(series()[0]))
        self.assertEqual(found, series()[0])

    def test_a_package_without_additions_is_refused(self):
        cache = pathlib.Path(self.create_tempdir().full_path)
        write(cache)
        (additions,) = cache.glob("debian-patches/counts/*.debian.*")
        additions.unlink()
        with self.assertRaisesRegex(config.InputError, "not of the format 3.0"):
            sources.fetch_patched("counts", cache)


class HeaderTest(parameterized.TestCase):
    def test_fields_of_dep3(self):
        found = dep3.read(HEADER + series()[0]["readme"])
        self.assertEqual(found.paragraphs[0], ("clamp gives the wrong bound",))
        self.assertEqual(found.paragraphs[1][1], "Return high instead.")
        self.assertLen(found.paragraphs, 3)
        bugs = ("https://example.org/counts/issues/7", "https://bugs.debian.org/1")
        self.assertEqual(found.bugs, bugs)

    def test_a_patch_of_git(self):
        found = dep3.read(GIT, "upstream/CVE-2026-0001.patch")
        told = (
            ("pairs come the wrong way round",),
            ("The second item stands before the first.", "swap them"),
        )
        self.assertEqual(found, dep3.Header(told, ("CVE-2026-0001",)))

    @parameterized.parameters(
        ("", ()),
        ("## DP: it breaks\n", (("it breaks",),)),
        ("Description:\n it breaks\n", (("it breaks",),)),
        ("It breaks.\nFixes: nothing\n", (("It breaks.",), ("Fixes: nothing",))),
    )
    def test_other_headers(self, text, paragraphs):
        patch = text + "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
        self.assertEqual(dep3.read(patch).paragraphs, paragraphs)


@unittest.skipIf(packages.MISSING, packages.MISSING)
class MineTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        write(temporary.name)
        cls.folder = records.Folder(f"{temporary.name}/tasks")
        package, found = sources.fetch_patched("counts", pathlib.Path(temporary.name))
        for _ in range(2):  # the second one has nothing to do
            asyncio.run(patches.mine_patches(package, found, cls.folder, 9))
        cls.clamp, cls.pairs = cls.folder.records()

    def test_each_patch_that_a_test_notices_is_a_task(self):
        outcomes = mine.Log(self.folder).outcomes
        known = {patch: told for (_, patch), told in outcomes.items()}
        self.assertEqual(
            known,
            {
                "": "tests run (python)",
                "readme": "no source is changed",
                "clamp.patch": mine.MADE,
                "other": "does not fit",
                "upstream/CVE-2026-0001.patch": mine.MADE,
            },
        )
        self.assertEqual({r.kind for r in self.folder.records()}, {"patch"})

    def test_the_solution_is_the_patch(self):
        files = series()[1]
        for record, text in (
            (self.clamp, b"return low\n    r"),
            (self.pairs, b"(b, a) f"),
        ):
            given = self.folder.agent_tree(record)
            self.assertIn(text, given["counts.py"])
            self.assertEqual(given["README"], files["README"])
            self.assertNotIn("tests/test_counts.py", given)
            solved = self.folder.solved_tree(record)["counts.py"]
            self.assertEqual(solved, files["counts.py"])
            hidden = self.folder.hidden_tree(record)
            self.assertEqual(hidden, {"tests/test_counts.py": packages.TESTS.encode()})
        self.assertLen(self.clamp.FAIL_TO_PASS, 1)
        self.assertLen(self.clamp.PASS_TO_PASS, 3)

    def test_a_statement_tells_the_bug_and_not_the_change(self):
        told = self.clamp.problem_statement
        self.assertStartsWith(told, "# counts: clamp gives the wrong bound\n")
        self.assertIn("\nA value above the upper bound is clamped to the lower", told)
        self.assertIn("Reported as https://example.org/counts/issues/7, https", told)
        self.assertIn(">>> self.assertEqual(clamp(4, 1, 3), 3)", told)
        for text in ("Return", "counts.py", "commit", "DEP-3", "Somebody"):
            self.assertNotIn(text, told)
        told = self.pairs.problem_statement
        self.assertStartsWith(told, "# counts: pairs come the wrong way round\n")
        self.assertIn("Reported as CVE-2026-0001.", told)
        self.assertEmpty(statements.leaks(told, self.pairs))

    @pytest.mark.slow
    def test_they_are_proven(self):
        swe = world.Swe(f"swe:{self.folder.path}")
        for record in self.folder.records():
            proof = asyncio.run(proofs.prove(swe, swe.task_of(record), num_repeats=1))
            self.assertEmpty(proof.failures)

    def test_a_patch_that_another_one_needs(self):
        """The other one is then on neither side."""
        text = series()[1]["counts.py"]
        more = text.replace(b"return high", b"return min(x, high)")
        later = diffs.make({"counts.py": text}, {"counts.py": more})
        package = sources.Package("counts", "1.0-2", "test", ORIGINAL)
        found = patches._candidate(
            package, {**series()[0], "later": later}, "clamp.patch"
        )
        self.assertStartsWith(found.solved.version, "1.0-2-")
        self.assertEqual(found.solved.files, series()[1])
        self.assertEqual(list(found.changed), ["counts.py"])


class CommandTest(absltest.TestCase):
    def test_what_cannot_be_fetched_is_counted(self):
        out = self.create_tempdir().full_path
        failing = mock.Mock(side_effect=config.InputError("no such package"))
        with mock.patch.object(sources, "fetch_patched", failing):
            *_, last = command.run("patches:none", out, num_tasks=1, seed=0)
        counts = collections.Counter(mine.Log(records.Folder(out)).outcomes.values())
        self.assertEqual(counts, {"not to be fetched": 1})
        self.assertIn('"not to be fetched": 1', last)


if __name__ == "__main__":
    environment.main()
