"""A process reads of a store what its devices hold, and what has changed since."""

import contextlib
import dataclasses
import pathlib
import runpy
import shutil
import sys
import tempfile
import types
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax import config
from glm5_jax import mesh as mesh_lib
from glm5_jax.inference import leader, placement
from glm5_jax.model import transformer
from glm5_jax.quantization import leaf as quantized
from glm5_jax.rl import publisher
from glm5_jax.rl.weight_store import manifest, reader, sources, writer
from glm5_jax.serving import new_weights
from tests import environment, forked, small_configs
from tests.model import tiny
from tests.processes import launch
from tests.serving import scripted

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

    def __init__(self, model=small_configs.DENSE_MODEL, params=(), mesh=None):
        self.config, self._placed = model, (dict(params), mesh)

    @property
    def placed_params(self):
        return self._placed


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


class QuantizedTest(parameterized.TestCase):
    """A quantized server takes the codes of a trainer that rounds to its scheme."""

    MODEL = small_configs.TEXT_MODEL

    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.create_tempdir().full_path)
        self.store = writer.Writer(self.root)

    def pushed(self, seed, weights, version):
        """Publishes parameters as a trainer does; returns them, and their folder."""
        params = tiny.params(self.MODEL, seed)
        pushed = publisher.rollout_params(params, self.MODEL, weights)
        found = self.store.publish(quantized.to_dicts(pushed), version)
        return pushed, self.root / found.name.folder, found

    def engine(self, weights, mesh=None):
        """An engine that began with other parameters of a scheme."""
        params = publisher.rollout_params(tiny.params(self.MODEL), self.MODEL, weights)
        if mesh is not None:
            places = placement.params(params, self.MODEL, mesh)
            params = jax.device_put(params, places)
        return Engine(self.MODEL, params, mesh)

    @parameterized.product(weights=("fp8", "w4a8"), has_mesh=(False, True))
    def test_it_holds_the_trainer_s_codes(self, weights, has_mesh):
        axes = config.MeshConfig(data=1, fsdp=2, expert=4)
        mesh = mesh_lib.make_mesh(axes) if has_mesh else None
        engine, last = self.engine(weights, mesh), new_weights.Last()
        for version, seed in enumerate((1, 2, 2)):
            wanted, path, record = self.pushed(seed, weights, version)
            found = new_weights.read(engine, path, last)
            jax.tree.map(np.testing.assert_array_equal, found, wanted)
        self.assertIsNotNone(record.base)  # nothing changed: a difference of few bytes
        whole = sum(x.nbytes for x in jax.tree.leaves(wanted))
        self.assertLess(record.num_bytes, 0.05 * whole)
        ours = jax.tree.map(lambda x: x.sharding, engine.placed_params[0])
        self.assertEqual(jax.tree.map(lambda x: x.sharding, found), ours)

    @parameterized.parameters(
        ("fp8", "same", "are quantized, unlike those of .* --quantize must be"),
        ("same", "fp8", "are not quantized, unlike those of .* --quantize must be"),
        ("fp8", "int8", "is of another model: .* --quantize must be"),
    )
    def test_weights_of_another_scheme_are_refused(self, ours, theirs, words):
        _, path, _ = self.pushed(1, theirs, 0)
        with self.assertRaisesRegex(config.InputError, words):
            new_weights.read(self.engine(ours), path, new_weights.Last())

    def test_a_folder_is_refused(self):
        with self.assertRaisesRegex(config.InputError, "new is no version of a weight"):
            new_weights.read(self.engine("fp8"), self.root / "new", new_weights.Last())


def send_weights(folder, port):
    """Runs the command serve_weights, in a child."""
    sys.argv = ["", f"--weights_store={folder}", f"--port={port}", "--api_key=k"]
    runpy.run_module("glm5_jax.serve_weights", run_name="__main__", alter_sys=True)


class FarTest(parameterized.TestCase):
    """A store in a folder that the server does not see, and behind a URL."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.root, cls.own = folder / "trainer", folder / "server"
        shapes = transformer.abstract_params(small_configs.DENSE_MODEL)
        params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
        cls.name = writer.Writer(cls.root).publish(params, 3).name.folder
        port = launch.free_port()
        child = forked.PROCESSES.Process(target=send_weights, args=(cls.root, port))
        child.start()
        cls.addClassCleanup(child.join)
        cls.addClassCleanup(child.terminate)
        cls.url = f"http://127.0.0.1:{port}"
        scripted.wait_until(cls.is_open)

    @classmethod
    def is_open(cls):
        with contextlib.suppress(manifest.StoreError):
            return bool(sources.Url(cls.url, "k").names())

    def setUp(self):
        super().setUp()
        self.own.mkdir()
        self.addCleanup(shutil.rmtree, self.own)

    def read(self, far):
        last = new_weights.Last()
        return new_weights.Own(Engine(), self.own / self.name, last, far)._params

    @parameterized.named_parameters(("missing", None), ("damaged", b"{"))
    def test_the_next_way_is_tried_where_the_folder_fails(self, manifest_text):
        if manifest_text is not None:
            (self.own / self.name).mkdir()
            (self.own / self.name / manifest.FILE).write_bytes(manifest_text)
        found = self.read(sources.Url(self.url, "k")).result()
        np.testing.assert_array_equal(found["norm"], 1)

    def test_both_ways_fail(self):
        with mock.patch.object(new_weights, "_VISIBLE_SECONDS", 0.0):
            reading = self.read(sources.Url(self.url, "wrong"))
            words = "not been in sight for 0 s.*manifest.*401.*serve_weights"
            with self.assertRaisesRegex(config.InputError, words):
                reading.result()


if __name__ == "__main__":
    environment.main()
