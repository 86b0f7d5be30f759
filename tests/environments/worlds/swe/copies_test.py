"""What a box must not show: other copies of a task's package below /usr."""

import dataclasses
import pathlib
import tempfile
import unittest
import zipfile
from unittest import mock

from absl.testing import absltest

from glm5_jax.environments.worlds.swe import copies, diffs
from tests.environments.worlds.swe import packages

FILES = {"pack/deep/codec.py": b"new", "pack/single.py": b"one", "setup.py": b"set up"}


class OnHostTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        core = (f"{self.root}/lib/core",)
        self.enter_context(mock.patch.object(copies, "_CORES", core))

    def put(self, path, content):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(content)

    def hidden(self):
        return [
            str(p.relative_to(self.root)) for p in copies.on_host(FILES, (self.root,))
        ]

    def test_a_package_of_the_same_names_is_hidden_whatever_it_holds(self):
        self.put("lib/other/vendor/pack/deep/codec.py", b"an older release")
        self.put("lib/other/vendor/pack/more.py", b"")
        self.put("lib/other/deep/codec.py", b"a part of it")
        self.assertEqual(self.hidden(), ["lib/other/deep", "lib/other/vendor/pack"])

    def test_folders_of_common_names_tell_no_package(self):
        files = {"src/a.c": b"one", "tests/b.py": b"two"}
        for name, content in (("x/src/a.c", b"other"), ("y/tests/b.py", b"two")):
            self.put(name, content)
        found = copies.on_host(files, (self.root,))
        self.assertEqual(found, (self.root / "y/tests/b.py",))

    def test_a_file_alone_is_hidden_for_its_content(self):
        self.put("share/a/setup.py", b"set up")
        self.put("share/b/setup.py", b"of another package")
        self.put("share/c/single.py", b"one")
        self.assertEqual(self.hidden(), ["share/a/setup.py", "share/c/single.py"])

    def test_languages_own_libraries_stay_but_for_what_was_installed_there(self):
        self.put("lib/core/pack/single.py", b"one")
        self.put("lib/core/site-packages/pack/single.py", b"two")
        self.assertEqual(self.hidden(), ["lib/core/site-packages/pack"])

    def test_compiled_java_is_hidden(self):
        (self.root / "java").mkdir()
        for name, inside in (("own", "org/own/Sums"), ("other", "org/other/Sums")):
            with zipfile.ZipFile(self.root / "java" / f"{name}.jar", "w") as jar:
                jar.writestr(f"{inside}.class", b"compiled")
        (self.root / "java" / "link.jar").symlink_to("own.jar")
        (self.root / "java" / "broken.jar").write_bytes(b"no archive")
        files = {"src/main/java/org/own/Sums.java": b"new"}
        found = copies.on_host(files, (self.root,))
        self.assertEqual(found, (self.root / "java/own.jar",))

    def test_what_cannot_be_read_is_no_copy(self):
        (self.root / "setup.py").symlink_to("nowhere")
        self.assertEqual(self.hidden(), [])


@unittest.skipIf(packages.MISSING, packages.MISSING)
class SecretsTest(absltest.TestCase):
    def test_what_the_agent_has_is_no_secret(self):
        folder = packages.folder()
        record = folder.records()[0]
        given, tests = folder.agent_tree(record), folder.hidden_tree(record)
        (changed,) = diffs.parse(record.patch)
        found = copies.secrets(folder, record)
        self.assertEqual(set(found), {changed, *tests})
        self.assertNotEqual(found[changed], given[changed])
        same = dataclasses.replace(record, patch="")
        self.assertEqual(set(copies.secrets(folder, same)), set(tests))


if __name__ == "__main__":
    absltest.main()
