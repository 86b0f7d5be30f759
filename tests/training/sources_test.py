"""Which sources a run says that it is of."""

import pathlib
import shutil
import subprocess
import unittest
from unittest import mock

from absl.testing import absltest

import glm5_jax
from glm5_jax.training.reporting import sources


class CommitTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.package = pathlib.Path(self.create_tempdir().full_path) / "glm5_jax"
        self.package.mkdir()
        self.file = self.package / "__init__.py"
        self.file.write_text("")
        self.enter_context(mock.patch.object(glm5_jax, "__file__", str(self.file)))

    def git(self, *arguments):
        command = ["git", "-C", str(self.package), "-c", "user.name=a"]
        command += ["-c", "user.email=a@b", "-c", "commit.gpgsign=false", *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    @unittest.skipUnless(shutil.which("git"), "needs git")
    def test_a_checkout_has_a_commit_and_says_whether_files_differ_from_it(self):
        self.git("init", "--quiet")
        self.git("add", ".")
        self.git("commit", "--quiet", "--message=first")
        (self.package / "notes.txt").write_text("git does not keep it")
        first = sources.commit.__wrapped__()
        self.assertRegex(first, "^[0-9a-f]{12}$")
        self.assertStartsWith(self.git("rev-parse", "HEAD"), first)
        self.file.write_text("changed = True\n")
        self.assertEqual(sources.commit.__wrapped__(), f"{first} with changes")

    def test_an_installed_package_has_a_version(self):
        self.assertEqual(
            sources.commit.__wrapped__(), f"version {glm5_jax.__version__}"
        )

    def test_nothing_fails_where_git_is_missing_or_stands_still(self):
        for error in (FileNotFoundError("git"), subprocess.TimeoutExpired("git", 10)):
            with mock.patch.object(subprocess, "run", side_effect=error):
                found = sources.commit.__wrapped__()
            self.assertStartsWith(found, "version ")


if __name__ == "__main__":
    absltest.main()
