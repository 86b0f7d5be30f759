"""Kept proofs: which changes of a task make its old proof count no more."""

import dataclasses
import json
import pathlib
from unittest import mock

from absl.testing import parameterized

import glm5_jax
from glm5_jax import config, environments
from glm5_jax.environments import ledger, proofs, protocol
from glm5_jax.environments.harbor import world as harbor
from glm5_jax.environments.tasks import ladder
from glm5_jax.environments.worlds.swe import drivers, records
from glm5_jax.environments.worlds.swe import world as swe
from glm5_jax.environments.worlds.swe.chain import stored
from glm5_jax.environments.worlds.swe.chain import world as chain_world
from glm5_jax.environments.worlds.terminal import world as terminal
from tests import environment

PROOF = proofs.Proof("one", "", (), 12, 1.0)
PATCH = "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
RECORD = records.Record(
    **dict.fromkeys(("repo", "version", "kind", "source", "problem_statement"), "x"),
    **dict.fromkeys(("FAIL_TO_PASS", "PASS_TO_PASS"), ()),
    instance_id="one",
    tree="x",
    tests="x",
    hidden=("test_a.py",),
    patch=PATCH,
    changed={},
    recipe=records.Recipe(
        language="x", runner="perl", parser="x", files=("test_a.py",)
    ),
)
TREE = {"a.py": b"x = 1\n", "test_a.py": b"assert x\n"}
FOLDER = {
    "task.toml": "",
    "instruction.md": "Say yes.",
    "environment/Dockerfile": "FROM debian\nWORKDIR /app\nRUN echo 1 > a\n",
    "solution/solve.sh": "true",
    "tests/test.sh": "test -e a",
}


class Own:
    """A taskset whose attempts and scoring are what its class says."""

    name, told, wrong, scored = "own", "say yes", "no", "exactly"

    def task(self, split, seed, index):
        return protocol.Task("one", ({"role": "user", "content": self.told},))

    def environment(self):
        return ladder.SingleTurn(ladder.exact)

    def demonstration(self, task):
        return None

    def attempts(self, task):
        yes, no = ({"role": "assistant", "content": x} for x in ("yes", self.wrong))
        return proofs.Attempts((yes,), ((no,),))

    def scored_by(self, task):
        return self.scored


class LedgerTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)

    def is_known(self, made, **how):
        """Returns whether the proof of its first task is there; then keeps one."""
        given = {"num_repeats": 10, **how}
        kept = ledger.Ledger(self.folder / "proofs.jsonl", made, **given)
        task = made.task("train", 0, 0)
        found = kept.find(task)
        kept.add(task, PROOF)
        return found == PROOF

    @parameterized.parameters("told", "wrong", "scored")
    def test_a_changed_task_is_proven_anew(self, field):
        self.assertFalse(self.is_known(Own()))
        self.assertTrue(self.is_known(Own()))
        with mock.patch.object(Own, field, "other"):
            self.assertFalse(self.is_known(Own()))
            self.assertTrue(self.is_known(Own()))

    @parameterized.parameters("KeyError: {1}", "KeyError: {1", "\x85{1}", "ö{")
    def test_half_a_line_is_none(self, failure):
        """What was cut off may end as a whole line does."""
        made, path = Own(), self.folder / "proofs.jsonl"
        self.is_known(made)
        half = json.dumps({"task": "two", "failures": [failure]}, ensure_ascii=False)
        with path.open("ab") as file:
            file.write(half.encode().partition(b'"]')[0].removesuffix(b"\xb6{"))
        self.assertEqual(ledger.verdicts(path), {"one": True})
        self.assertTrue(self.is_known(made))
        self.assertEqual(ledger.verdicts(path), {"one": True})

    def test_the_folder_of_the_file_is_made(self):
        path = self.folder / "new" / "deep" / "proofs.jsonl"
        made = Own()
        kept = ledger.Ledger(path, made, 10)
        kept.add(made.task("train", 0, 0), PROOF)
        self.assertEqual(ledger.verdicts(path), {"one": True})

    def test_a_file_that_cannot_be_made_is_told_before_any_proof(self):
        path = self.folder / "file" / "proofs.jsonl"
        path.parent.write_text("")
        with self.assertRaisesRegex(config.InputError, "^--out=.*cannot be written"):
            ledger.Ledger(path, Own(), 10)

    def test_another_version_proves_anew(self):
        self.is_known(Own())
        with mock.patch.object(glm5_jax, "__version__", "9"):
            self.assertFalse(self.is_known(Own()))

    def test_other_repeats_and_services_prove_anew(self):
        self.is_known(Own())
        self.assertFalse(self.is_known(Own(), num_repeats=9))
        self.assertFalse(self.is_known(Own(), through="http://127.0.0.1:1"))

    @parameterized.parameters("test_a.py", "a.py", "runner", "record")
    def test_hidden_tests_and_runners_of_packages_count(self, changed):
        def made(record, tree):
            at = self.folder / changed / str(len(list(self.folder.glob("*/*"))))
            folder = records.Folder(at)
            folder.add_tree("x", tree)
            folder.add(record)
            stored.add(folder, stored.Chain(chain_id="x", repo="x", links=(record,)))
            return swe.Swe(f"swe:{at}"), chain_world.SweChain(f"swe_chain:{at}")

        def keys(worlds):
            return [one.scored_by(one.task_of(*one.by_id.values())) for one in worlds]

        tree, record = dict(TREE), RECORD
        before = keys(made(record, tree))
        self.assertEqual(keys(made(record, tree)), before)
        if changed in tree:
            tree[changed] += b"y = 1\n"
        elif changed == "record":
            record = dataclasses.replace(record, PASS_TO_PASS=("z",))
        else:
            self.enter_context(
                mock.patch.object(drivers, "edition", return_value="other")
            )
        for old, new in zip(before, keys(made(record, tree)), strict=True):
            self.assertNotEqual(old, new)

    @parameterized.parameters(
        ("tests/test.sh", "test -e b"),
        ("environment/Dockerfile", "FROM debian\nWORKDIR /app\nRUN echo 2 > a\n"),
        ("task.toml", "[agent]\ntimeout_sec = 9.0\n"),
    )
    def test_tests_and_builds_of_folders_count(self, path, text):
        def key(name, files):
            for at, content in files.items():
                file = self.folder / name / "one" / at
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content)
            one = harbor.Harbor(f"harbor:{self.folder / name}")
            return one.scored_by(one.task_of(one.by_id["one"]))

        before = key("old", FOLDER)
        self.assertEqual(key("again", FOLDER), before)
        self.assertNotEqual(key("new", {**FOLDER, path: text}), before)

    def test_checks_of_the_terminal_count(self):
        made = environments.make("terminal:checksum")
        task = made.task("train", 0, 0)
        told = made.scored_by(task)
        for expect in terminal.draft(*task.answer).expects:
            self.assertIn(repr(expect.stdout), told)
        self.assertNotIn(" at 0x", told)  # the same in another process


if __name__ == "__main__":
    environment.main()
