"""The folder of compiled programs, and how to keep none."""

import os
import pathlib
import resource
from unittest import mock

import jax
from absl import flags
from absl.testing import absltest, flagsaver

from glm5_jax import compile_cache
from tests import environment


class CompileCacheTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)
        self.enterContext(mock.patch.dict(os.environ))
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
        self.update = self.enterContext(mock.patch.object(jax.config, "update"))

    def enabled(self, value):
        """The settings that jax is given."""
        with flagsaver.flagsaver(compile_cache=value):
            compile_cache.enable()
        return dict(call.args for call in self.update.call_args_list)

    def test_programs_of_this_kind_of_cpu_have_a_folder(self):
        with self.assertLogs("absl", "INFO") as logs:
            told = self.enabled(str(self.folder / "new"))
        folder = pathlib.Path(told["jax_compilation_cache_dir"])
        self.assertTrue(folder.is_dir())
        self.assertEqual(folder.parent, self.folder / "new")
        self.assertIn("--compile_cache=none", logs.output[0])
        again = self.enabled(str(self.folder / "new"))
        self.assertEqual(again["jax_compilation_cache_dir"], str(folder))

    def test_on_by_default_and_switchable(self):
        self.assertIn("glm5_jax", flags.FLAGS["compile_cache"].default)
        self.assertEmpty(self.enabled("none"))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = "mine"
        self.assertEmpty(self.enabled(str(self.folder)))

    def test_a_limit_of_addresses_is_told_before_xla_aborts_over_it(self):
        for limit in (3 * 2**29, 2**40):
            bounds = mock.patch.object(
                resource, "getrlimit", side_effect={resource.RLIMIT_AS: (limit, -1)}.get
            )
            with bounds, self.assertLogs("absl", "WARNING") as logs:
                self.enabled("none")
            (line,) = logs.output
            self.assertIn(f"limited to {limit / 2**30:.1f} GiB (ulimit -v)", line)
            self.assertIn("ulimit -v unlimited", line)
        none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        unbounded = mock.patch.object(resource, "getrlimit", return_value=none)
        with unbounded, self.assertNoLogs("absl", "WARNING"):
            self.enabled("none")

    def test_a_program_without_flags_takes_the_default_folder(self):
        home = self.enterContext(mock.patch.dict(os.environ, HOME=str(self.folder)))
        flags.FLAGS.unparse_flags()
        self.addCleanup(flags.FLAGS.mark_as_parsed)
        compile_cache.enable()
        told = dict(call.args for call in self.update.call_args_list)
        folder = pathlib.Path(told["jax_compilation_cache_dir"])
        self.assertTrue(folder.is_relative_to(home["HOME"]))

    def test_a_folder_that_cannot_be_made_ends_nothing(self):
        (self.folder / "file").touch()
        with self.assertLogs("absl", "WARNING"):
            self.assertEmpty(self.enabled(str(self.folder / "file")))

    def test_the_oldest_go_where_there_are_too_many(self):
        for age in range(4):
            path = self.folder / f"program{age}"
            path.write_bytes(bytes(10))
            os.utime(path, (1e9 - age, 1e9 - age))
        compile_cache.prune(self.folder, max_bytes=25)
        left = sorted(path.name for path in self.folder.iterdir())
        self.assertEqual(left, ["program0", "program1"])

    def test_what_was_read_last_stays(self):
        for name, read, written in (
            ("old", 1e9, 1e9),
            ("read", 3e9, 0),
            ("new", 2e9, 2e9),
        ):
            path = self.folder / name
            path.write_bytes(bytes(10))
            os.utime(path, (read, written))
        compile_cache.prune(self.folder, max_bytes=25)
        left = sorted(path.name for path in self.folder.iterdir())
        self.assertEqual(left, ["new", "read"])


if __name__ == "__main__":
    environment.main()
