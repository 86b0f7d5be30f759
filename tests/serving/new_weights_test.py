"""A process reads of a store what its devices hold, and what has changed since."""

import dataclasses
import pathlib
import tempfile
import types
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax.inference import leader
from glm5_jax.model import transformer
from glm5_jax.rl.weight_store import manifest, reader, sources, writer
from glm5_jax.serving import new_weights
from tests import environment, small_configs

SHAPE = (8, 6)


def leaf(*indices):
    """A leaf of which this process's devices hold these blocks."""
    held = dict(enumerate(indices))
    place = types.SimpleNamespace(addressable_devices_indices_map=lambda shape: held)
    return types.SimpleNamespace(shape=SHAPE, sharding=place)


def window(start, shape):
    return manifest.Window(start, shape, "f", 0, 1, "raw", "")


class NeedsTest(parameterized.TestCase):
    @parameterized.parameters(
        ((0, 0), (4, 6), False),
        ((0, 0), (5, 6), True),
        ((4, 0), (3, 2), False),
        ((4, 0), (3, 3), True),
        ((6, 2), (2, 4), False),
        ((5, 3), (1, 1), True),
        ((6, 3), (1, 1), False),
        ((7, 0), (1, 1), True),
        ((7, 1), (1, 5), False),
    )
    def test_a_window_that_overlaps_a_block(self, start, shape, wanted):
        blocks = (slice(4, 6), slice(2, None)), (slice(7, 8), slice(None, 1))
        needs = new_weights.Needs({"a": {"w": leaf(*blocks)}})
        self.assertEqual(needs("a/w", window(start, shape)), wanted)

    def test_a_leaf_that_the_model_lacks_is_left_to_who_compares_names(self):
        self.assertTrue(new_weights.Needs({})("b", window((0, 0), SHAPE)))

    def test_a_scalar(self):
        scalar = leaf(())
        scalar.shape = ()
        self.assertTrue(new_weights.Needs({"s": scalar})("s", window((), ())))


class Engine(leader.Member):
    """What reading weights asks of an engine."""

    def __init__(self):
        self.config = small_configs.DENSE_MODEL

    @property
    def placed_params(self):
        return {}, None


class DifferencesTest(parameterized.TestCase):
    """Of three versions each of the two last is a difference to the one before."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        store, cls.versions = writer.Writer(pathlib.Path(folder, "store")), []
        shapes = transformer.abstract_params(small_configs.DENSE_MODEL)
        for version in range(3):
            params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
            params["norm"] += version
            found = store.publish(params, version)
            cls.versions.append(pathlib.Path(folder, "store", found.name.folder))

    def setUp(self):
        super().setUp()
        self.opened, plain = [], sources.Folder.open

        def noted(folder, name, file):
            self.opened.append(name.version)
            return plain(folder, name, file)

        self.enterContext(mock.patch.object(sources.Folder, "open", noted))

    def require(self, read, version, opened):
        found = read(self.versions[version])
        np.testing.assert_array_equal(found["norm"], version + 1)
        np.testing.assert_array_equal(found["embed_tokens"], 1)
        self.assertEqual(self.opened, opened)
        self.opened.clear()

    @parameterized.parameters(False, True)
    def test_a_push_reads_what_changed_since_the_one_before(self, is_one_of_several):
        engine, last = Engine(), new_weights.Last()

        def read(path):
            if is_one_of_several:
                return new_weights.read_as_member(engine, path)
            return new_weights.read(engine, path, last)

        self.require(read, 0, [0])
        self.require(read, 1, [1])
        self.require(read, 2, [2])
        self.require(read, 1, [0, 1])  # of a trainer that went back

    def test_a_version_before_that_is_another_does_no_harm(self):
        """As where a store was made anew in the same folder."""
        engine, last = Engine(), new_weights.Last()
        new_weights.read(engine, self.versions[0], last)
        leaves = dict(last.snapshot.leaves)
        ((start, values),) = leaves["norm"].windows.items()
        windows = {start: values + 1}
        leaves["norm"] = dataclasses.replace(leaves["norm"], windows=windows)
        last.snapshot = reader.Snapshot(last.snapshot.name, leaves)
        self.opened.clear()
        self.require(lambda p: new_weights.read(engine, p, last), 1, [1, 0, 1])


if __name__ == "__main__":
    environment.main()
