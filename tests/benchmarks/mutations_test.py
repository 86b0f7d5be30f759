"""The edits that are drawn from a file."""

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


def edits():
    tree = ast.parse(textwrap.dedent(SOURCE))
    found = mutations._edits(tree)
    return sorted((node.lineno, ast.unparse(node), new) for node, new in found)


class EditsTest(absltest.TestCase):
    def test_annotations_decorators_and_messages_stay(self):
        want = [
            (3, "2", "3"),
            (3, "25", "26"),
            (4, "1", "2"),
            (4, "4", "5"),
            (4, "os.cpu_count() or 1", "(os.cpu_count() and 1)"),
            (5, "1", "2"),
            (8, "2", "3"),
            (11, "2", "3"),
            (11, "self.cores / 2", "(self.cores * 2)"),
            (16, "5", "6"),
            (16, "x > 5", "(not (x > 5))"),
            (16, "x > 5", "(x >= 5)"),
            (18, "7", "8"),
            (18, "sizes.append(7)", "pass"),
            (19, "8", "9"),
            (19, "False", "True"),
            (19, "True", "False"),
        ]
        self.assertEqual(edits(), want)


if __name__ == "__main__":
    environment.main()
