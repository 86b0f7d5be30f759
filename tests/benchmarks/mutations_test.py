"""The edits that are drawn from a file: what a test should notice, and nothing else."""

import ast
import pathlib
import sys
import textwrap

from absl.testing import absltest

from tests import environment

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import mutations  # noqa: E402

SOURCE = """
    import functools
    _CHUNK_BYTES = 2**25
    _THREADS = min(4, os.cpu_count() or 1)
    _TABLE = {"n_group": 1}

    class Chip:
        cores: int = 2

        def half(self):
            return self.cores / 2

    @functools.lru_cache(maxsize=4)
    def f(x: int | None):
        logging.info("%d", 3)
        if x > 5:
            raise ValueError(f"{x - 1} is too large")
        sizes.append(7)
        return call(x, compiler_params=g(True), scratch_shapes=[8], is_new=False)
"""


def edits(is_table):
    tree = ast.parse(textwrap.dedent(SOURCE))
    found = mutations._edits(tree, is_table)
    return sorted((node.lineno, ast.unparse(node), new) for node, new in found)


class EditsTest(absltest.TestCase):
    def test_settings_hints_and_messages_stay(self):
        in_functions = [
            (11, "2", "3"),
            (11, "self.cores / 2", "(self.cores * 2)"),
            (16, "5", "6"),
            (16, "x > 5", "(not (x > 5))"),
            (16, "x > 5", "(x >= 5)"),
            (18, "7", "8"),
            (18, "sizes.append(7)", "pass"),
            (19, "False", "True"),
        ]
        named = [(4, "os.cpu_count() or 1", "(os.cpu_count() and 1)")]
        numbers = [(5, "1", "2"), (8, "2", "3")]
        self.assertEqual(edits(is_table=True), named + in_functions)
        self.assertEqual(edits(is_table=False), named + numbers + in_functions)


if __name__ == "__main__":
    environment.main()
