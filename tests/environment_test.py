"""Named test files exist, and those that need it compile as for users."""

import functools
import importlib
import inspect
import os
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from tests import conftest, environment


def code_size():
    """Returns the bytes of a small program, compiled under the present settings."""
    program = jax.jit(lambda x: jnp.tanh(jnp.sin(x) * 2 + 1).sum())
    compiled = program.lower(jnp.ones((8, 8))).compile()
    return len(compiled.runtime_executable().serialize())


@functools.cache
def unoptimized_size():
    """Returns the bytes of that program in the other files."""
    with conftest.circumstances("losses_test.py"):
        return code_size()


class EnvironmentTest(parameterized.TestCase):
    def test_named_files_exist(self):
        names = *conftest.LONGEST, *conftest.OPTIMIZED, *conftest.SYNCED
        names += *conftest.TOGETHER, *conftest.TOGETHER.values()
        for name in names:
            self.assertTrue((conftest.HERE / name).is_file(), name)

    @parameterized.parameters("bfloat16", "float16", "float8_e4m3fn", "int32", "bool")
    def test_arrays_that_numpy_makes_are_those_of_a_program(self, dtype):
        x = np.float32([[1 / 3, -2.5, 0.0], [448.0, 1e-3, 7.5]])
        made = jnp.asarray(x), jnp.asarray(x, dtype), jnp.zeros((2, 3), dtype)
        wanted = jax.jit(lambda x: (x, x.astype(dtype), jnp.zeros((2, 3), dtype)))(x)
        x[:] = 5  # the arrays do not share its memory
        for got, want in zip(made, wanted, strict=True):
            self.assertEqual((got.dtype, got.weak_type), (want.dtype, want.weak_type))
            self.assertEqual(got.sharding, want.sharding)
            np.testing.assert_array_equal(got, want)

    def test_remembered_shuffles_are_grains(self):
        module = importlib.import_module(environment.SHUFFLES)
        environment.remember_shuffles()
        places = range(10)
        options = {"max_index": 9, "seed": 3, "rounds": 4}
        for _ in range(2):
            found = [module.index_shuffle(i, **options) for i in places]
            self.assertSameElements(found, places)
        plain = module.index_shuffle.__wrapped__
        self.assertEqual(found, [plain(i, **options) for i in places])
        self.assertGreaterEqual(module.index_shuffle.cache_info().hits, len(places))

    @parameterized.parameters(*[(name,) for name in conftest.OPTIMIZED])
    def test_these_files_compile_as_for_users(self, name):
        """LLVM unrolls the loops, so the machine code is longer."""
        if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "1":
            self.skipTest("the user asked for optimizations in every file")
        shorter = unoptimized_size()
        with conftest.circumstances(name):
            self.assertGreater(code_size(), 1.2 * shorter)

    @parameterized.parameters(*[(name,) for name in conftest.SYNCED])
    def test_these_files_wait_for_the_disk(self, name):
        with conftest.circumstances(name):
            self.assertTrue(inspect.isbuiltin(os.fsync))
            if conftest.DISK.is_dir():
                folder = pathlib.Path(self.create_tempdir())
                self.assertTrue(folder.is_relative_to(conftest.DISK))

    @parameterized.parameters("FULL_SHARE", "FULL_SHARE_OF_MAPPINGS")
    def test_programs_go_where_one_share_is_used_up(self, name):
        if not pathlib.Path("/proc/self").exists():
            self.skipTest("memory is counted on Linux")
        everything = {"FULL_SHARE": 1, "FULL_SHARE_OF_MAPPINGS": 1}
        with mock.patch.multiple(conftest, **everything):
            self.assertFalse(conftest.is_full())
        with mock.patch.multiple(conftest, **everything | {name: 0}):
            self.assertTrue(conftest.is_full())


if __name__ == "__main__":
    environment.main()
