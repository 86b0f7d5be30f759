"""A tiny package with tests, and folders of tasks mined from it."""

import asyncio
import functools
import pathlib
import tempfile

from glm5_jax.environments.sandbox import bubblewrap
from glm5_jax.environments.worlds.swe import mine, records, sources

MISSING = bubblewrap.missing()
SOURCE = '''"""Counts things."""


def clamp(x, low, high):
    """Returns x, but not below low or above high."""
    if x < low:
        return low
    if x > high:
        return high
    return x


def pairs(items):
    return [(a, b) for a, b in zip(items, items[1:])]
'''
TESTS = """import unittest

from counts import clamp, pairs


class ClampTest(unittest.TestCase):
    def test_inside(self):
        self.assertEqual(clamp(2, 1, 3), 2)

    def test_below(self):
        self.assertEqual(clamp(0, 1, 3), 1)

    def test_above(self):
        self.assertEqual(clamp(4, 1, 3), 3)

    def test_pairs(self):
        self.assertEqual(pairs([1, 2, 3]), [(1, 2), (2, 3)])
"""
FILES = {"counts.py": SOURCE.encode(), "tests/test_counts.py": TESTS.encode()}


def package(name="counts", files=None):
    return sources.Package(name, "1.0", f"test:{name}", files or FILES)


@functools.cache
def folder():
    """Returns a folder with every task of the package."""
    made = records.Folder(pathlib.Path(tempfile.mkdtemp()) / "tasks")
    asyncio.run(mine.mine(package(), made, num_tasks=3, seed=0))
    return made
