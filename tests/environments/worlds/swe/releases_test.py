"""Releases as tasks, and a task in SWE-bench's format and back."""

import asyncio
import json
import pathlib
import tempfile
import unittest

import pytest
from absl.testing import absltest

from glm5_jax import config
from glm5_jax.environments import proofs
from glm5_jax.environments.worlds.swe import (
    mine,
    records,
    releases,
    sources,
    swebench,
    world,
)
from tests import environment
from tests.environments.worlds.swe import packages

# Two places far apart, so that each is a hunk of its own.
GAP = "\n".join(f"# {i}" for i in range(12)).encode()
NEW = {
    **packages.FILES,
    "counts.py": packages.SOURCE.encode().replace(
        b"\n\ndef pairs", GAP + b"\n\ndef pairs"
    ),
    "CHANGES": b"1.0: clamp and pairs mended\n",
}
OLD = {
    **NEW,
    "counts.py": NEW["counts.py"]
    .replace(b"return high", b"return low")
    .replace(b"(a, b)", b"(b, a)", 1),
    "CHANGES": b"0.9\n",
    "tests/test_counts.py": b"",
}


def package(version, files):
    return sources.Package("counts", version, "test:counts", files)


@unittest.skipIf(packages.MISSING, packages.MISSING)
class ReleasesTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = records.Folder(self.create_tempdir().full_path)
        pair = package("0.9", OLD), package("1.0", NEW)
        asyncio.run(releases.mine_pair(*pair, self.folder, num_tasks=9))
        self.records = {record.kind: record for record in self.folder.records()}

    def test_a_release_and_each_of_its_places_are_tasks(self):
        kinds = [record.kind for record in self.folder.records()]
        self.assertEqual(kinds, ["release", "place", "place"])
        whole, *places = self.folder.records()
        self.assertEqual(self.folder.agent_tree(whole)["counts.py"], OLD["counts.py"])
        self.assertLen(whole.FAIL_TO_PASS, 2)
        self.assertEqual(
            {test for place in places for test in place.FAIL_TO_PASS},
            set(whole.FAIL_TO_PASS),
        )
        for record in self.folder.records():
            given = self.folder.agent_tree(record)
            self.assertEqual(given["CHANGES"], OLD["CHANGES"])
            self.assertNotIn("tests/test_counts.py", given)
            solved = self.folder.solved_tree(record)["counts.py"]
            self.assertEqual(solved, NEW["counts.py"])

    @pytest.mark.slow
    def test_they_are_proven(self):
        swe = world.Swe(f"swe:{self.folder.path}")
        task = swe.task_of(self.records["release"])
        proof = asyncio.run(proofs.prove(swe, task, num_repeats=2))
        self.assertEmpty(proof.failures)

    def test_swebench_and_back(self):
        """The task that is read is proven too."""
        line = swebench.write(self.folder, self.records["release"])
        with tempfile.TemporaryDirectory() as name:
            other = records.Folder(name)
            other.add(swebench.read(line, other))
            (read,) = other.records()
            written = self.records["release"]
            for key in ("instance_id", "FAIL_TO_PASS", "PASS_TO_PASS", "patch"):
                self.assertEqual(getattr(read, key), getattr(written, key))
            given = self.folder.agent_tree(written)
            self.assertEqual(other.agent_tree(read), given)
            swe = world.Swe(f"swe:{name}")
            task = swe.task_of(read)
            proof = asyncio.run(proofs.prove(swe, task, num_repeats=1))
            self.assertEmpty(proof.failures)

    def test_a_line_without_a_tree_needs_one(self):
        fields = json.loads(swebench.write(self.folder, self.records["release"]))
        tree = self.folder.agent_tree(self.records["release"])
        del fields["tree"], fields["recipe"]
        with self.assertRaisesRegex(config.InputError, "give the files of counts"):
            swebench.read(json.dumps(fields), self.folder)
        read = swebench.read(json.dumps(fields), self.folder, tree)
        self.assertEqual(read.recipe, self.records["release"].recipe)
        del fields["patch"]
        with self.assertRaisesRegex(config.InputError, "needs patch"):
            swebench.read(json.dumps(fields), self.folder, tree)

    def test_the_same_release_twice_gives_no_task(self):
        with tempfile.TemporaryDirectory() as name:
            folder = records.Folder(name)
            pair = package("1.0", NEW), package("1.1", NEW)
            asyncio.run(releases.mine_pair(*pair, folder, num_tasks=9))
            outcomes = mine.Log(folder).counts(of_packages=False)
            self.assertEqual(outcomes, {"no test fails": 1})
            self.assertFalse(pathlib.Path(name, records.TASKS).exists())


if __name__ == "__main__":
    environment.main()
