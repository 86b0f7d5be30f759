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

    def test_archives_with_another_release_or_the_same_text_are_hidden(self):
        for path, inside, text in (
            ("lib/core/bundled/pip.whl", "pip/_vendor/pack/deep/codec.py", b"an older"),
            ("share/pack.egg", "pack/single.py", b"another"),
            ("share/same.zip", "elsewhere/setup.py", b"set up"),
            ("share/other.whl", "other/setup.py", b"of another package"),
            ("share/part.zip", "codec.py", b"a part of it"),
        ):
            file = self.root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr(inside, text)
        whole = (self.root / "share/same.zip").read_bytes()
        self.put("share/broken.whl", b"PK\5\6" + bytes(16) + b"\xff\xff")
        self.put("share/damaged.zip", whole.replace(b"set up", b"sat up"))
        (self.root / "share/link.whl").symlink_to("pack.egg")
        archives = ["lib/core/bundled/pip.whl", "share/pack.egg", "share/same.zip"]
        self.assertEqual(self.hidden(), archives)

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
