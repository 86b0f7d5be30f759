"""The store of weights: readers get a version of the writer, whole, or nothing."""

import dataclasses
import os
import pathlib
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from concurrent import futures
from typing import Any
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import uvicorn
from absl.testing import absltest, parameterized
from hypothesis import strategies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm5_jax import config
from glm5_jax.rl.weight_store import files, manifest, reader, sources, writer

# Publishes versions until it is killed; every value of version n is n.
_ENDLESS = """
import sys, time
import numpy as np
from glm5_jax.rl.weight_store import writer
store = writer.Writer(sys.argv[1])
for version in range(1, 10**6):
    store.publish({"a": np.full((64, 1000), version, np.float32)}, version)
    print(version, flush=True)
    time.sleep(0.02)  # a slow reader of a chain is not overtaken
"""


def _params(seed: int, rate: float = 0.0) -> dict:
    """Returns weights of bfloat16 that `rate` moves by another seed's signs."""
    rng = np.random.default_rng(0)
    base = rng.normal(0, 0.02, (3, 40, 50)).astype(np.float32)
    signs = np.random.default_rng(seed).choice([-1, 1], base.shape)
    return {
        "layers": {"q": (base + rate * signs).astype(ml_dtypes.bfloat16)},
        "norm": np.arange(7, dtype=np.float32),
        "scale": np.array(seed, np.float32),
    }


def _values(snapshot: reader.Snapshot | None) -> dict[str, np.ndarray]:
    assert snapshot is not None
    return {
        name: reader._cut(held, (slice(None),) * len(held.shape))
        for name, held in snapshot.leaves.items()
    }


class WeightStoreTest(parameterized.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name, "weights")

    def _require(self, snapshot: reader.Snapshot | None, params: dict) -> None:
        found = _values(snapshot)
        np.testing.assert_array_equal(found["layers/q"], params["layers"]["q"])
        np.testing.assert_array_equal(found["norm"], params["norm"])
        np.testing.assert_array_equal(found["scale"], params["scale"])

    def test_a_reader_gets_what_was_written(self) -> None:
        store, eye = writer.Writer(self.root), reader.Reader(self.root)
        self.assertIsNone(eye.follow())
        store.publish(_params(0), 3)
        held = eye.follow()
        self._require(held, _params(0))
        self.assertEqual(held.version, 3)
        self.assertIsNone(eye.follow(held))

    def test_small_changes_take_few_bytes(self) -> None:
        store, eye = writer.Writer(self.root), reader.Reader(self.root)
        whole = store.publish(_params(0), 0)
        held = eye.follow()
        small = store.publish(_params(1, rate=1e-6), 1)
        self.assertEqual(small.base, whole.name)
        self.assertLess(small.num_bytes, 0.2 * whole.num_bytes)
        self._require(eye.follow(held), _params(1, rate=1e-6))
        self._require(reader.Reader(self.root).follow(), _params(1, rate=1e-6))

    def test_no_changes_take_no_bytes(self) -> None:
        store, eye = (
            writer.Writer(self.root / "below"),
            reader.Reader(self.root / "below"),
        )
        store.publish(_params(0), 0)
        held = eye.follow()
        self.assertEqual(store.publish(_params(0), 1).num_bytes, 0)
        held = eye.follow(held)
        self._require(held, _params(0))
        self.assertEqual(held.version, 1)

    def test_no_changes_are_whole_in_their_turn(self) -> None:
        store = writer.Writer(self.root, full_every=3)
        sizes = [store.publish(_params(0), n).num_bytes for n in range(7)]
        self.assertEqual([bool(n) for n in sizes], [True, False, False] * 2 + [True])

    def test_windows_have_32_mib_and_begin_at_64_bytes(self) -> None:
        blocks = [*writer._blocks(np.zeros(2**26 + 8, np.uint8))]
        starts = [(0,), (2**25,), (2**26,)]
        self.assertEqual([start for start, _ in blocks], starts)
        self.assertEqual([len(values) for _, values in blocks], [2**25, 2**25, 8])
        with mock.patch.object(writer, "_WINDOW_BYTES", 1000):
            leaves = writer.Writer(self.root).publish(_params(0), 0).leaves
        windows = [window for leaf in leaves.values() for window in leaf.windows]
        self.assertGreater(len(windows), 12)
        self.assertEqual({window.offset % 64 for window in windows}, {0})
        self.assertLess(max(window.offset for window in windows), 12_000 + 64 * 20)
        self._require(reader.Reader(self.root).follow(), _params(0))

    def test_versions_are_on_the_disk_before_they_have_their_name(self) -> None:
        synced, sync = [], os.fsync

        def noted(descriptor: int) -> None:
            found = os.fstat(descriptor)
            size = None if stat.S_ISDIR(found.st_mode) else found.st_size
            synced.append((found.st_ino, size, len(manifest.names(self.root))))
            sync(descriptor)

        def file(path: pathlib.Path) -> tuple[int, int]:
            return path.stat().st_ino, path.stat().st_size

        with mock.patch.object(os, "fsync", noted):
            name = writer.Writer(self.root).publish(_params(0), 3).name
        folder = self.root / name.folder
        wanted = [
            (*file(folder / "process_0.bin"), 0),
            (*file(folder / manifest.FILE), 0),
            (folder.stat().st_ino, None, 0),
            (self.root.stat().st_ino, None, 1),
        ]
        self.assertEqual(synced, wanted)

    def test_two_versions_stay_and_every_sixteenth_is_whole(self) -> None:
        store, bases = writer.Writer(self.root), []
        for version in range(18):
            params = {"a": np.full(1000, version, np.int32)}
            bases.append(store.publish(params, version).base)
        whole = [version for version, base in enumerate(bases) if base is None]
        self.assertEqual(whole, [0, 16])
        self.assertEqual(manifest.names(self.root), [(0, 16), (0, 17)])

    def test_large_changes_are_stored_whole_and_need_no_base(self) -> None:
        store = writer.Writer(self.root)
        store.publish(_noise(0), 0)
        self.assertIsNone(store.publish(_noise(1), 1).base)

    def test_late_readers_need_at_most_full_every_versions(self) -> None:
        store = writer.Writer(self.root, full_every=3, keep=1)
        seen, remove = [], shutil.rmtree

        def noted(folder: pathlib.Path, **how: Any) -> None:
            seen.append((folder / manifest.FILE).exists())
            remove(folder, **how)

        with mock.patch.object(shutil, "rmtree", noted):
            for version in range(8):
                store.publish(_params(version, rate=1e-6), version)
                self.assertLen(manifest.names(self.root), version % 3 + 1)
                self._require(
                    reader.Reader(self.root).follow(), _params(version, rate=1e-6)
                )
        self.assertEqual(seen, [False] * 6)  # readers must not see half a version

    def test_folders_that_stay_stop_nothing(self) -> None:
        """As those of a network's file system, whose files a reader has open."""
        store = writer.Writer(self.root, keep=1)
        (self.root / ".i0009-v000000003").mkdir()
        with mock.patch.object(os, "rmdir", side_effect=OSError("not empty")):
            store.publish(_noise(0), 0)
            store.publish(_noise(1), 1)
            store = writer.Writer(self.root, keep=1)
            with (
                mock.patch.object(os, "fsync", side_effect=OSError("no space left")),
                self.assertRaisesRegex(OSError, "no space"),
            ):
                store.publish(_noise(2), 2)
            found = reader.Reader(self.root).follow()
        np.testing.assert_array_equal(_values(found)["a"], _noise(1)["a"])

    @hypothesis.settings(max_examples=25, deadline=None)
    @hypothesis.given(
        steps=strategies.lists(
            strategies.tuples(
                strategies.sampled_from([0.0, 1e-6, 1e-2]), strategies.booleans()
            ),
            max_size=6,
        ),
    )
    def test_any_order_of_writing_and_reading(
        self, steps: list[tuple[float, bool]]
    ) -> None:
        with tempfile.TemporaryDirectory() as root:
            store, eye = writer.Writer(root, full_every=4), reader.Reader(root)
            held = None
            with self.assertNoLogs("absl", "WARNING"):  # no second attempts
                for version, (rate, reads) in enumerate(steps):
                    params = _params(version, rate)
                    store.publish(params, version)
                    if reads:
                        held = eye.follow(held)
                        self._require(held, params)

    @parameterized.parameters("flipped", "short", "missing", "manifest")
    def test_damage_is_never_served(self, damage: str) -> None:
        store, eye = writer.Writer(self.root), reader.Reader(self.root)
        store.publish(_params(0), 0)
        held = eye.follow()
        name = store.publish(_params(1, rate=1e-2), 1).name
        folder = self.root / name.folder
        data = folder / "process_0.bin"
        if damage == "flipped":
            values = bytearray(data.read_bytes())
            values[100] ^= 4
            data.write_bytes(values)
        elif damage == "short":
            data.write_bytes(data.read_bytes()[:-3])
        elif damage == "missing":
            data.unlink()
        else:
            text = (folder / manifest.FILE).read_text()
            (folder / manifest.FILE).write_text(text.replace('"norm"', '"Norm"'))
        with self.assertRaises(manifest.StoreError):
            eye.follow(held)
        self._require(held, _params(0))  # as good as before
        store.restart()
        store.publish(_params(2, rate=1e-2), 2)
        self._require(eye.follow(held), _params(2, rate=1e-2))

    def test_a_difference_that_does_not_fit_is_read_from_the_last_whole(self) -> None:
        store, eye = writer.Writer(self.root), reader.Reader(self.root)
        store.publish(_params(0), 0)
        held = eye.follow()
        store.publish(_params(1, rate=1e-6), 1)
        wrong = _params(5, rate=1e-3)["layers"]["q"].reshape(-1).reshape(3, 40, 50)
        held.leaves["layers/q"].windows[0, 0, 0] = wrong
        with self.assertLogs("absl", "WARNING"):
            self._require(eye.follow(held), _params(1, rate=1e-6))

    def test_a_failed_version_is_not_seen_and_the_next_one_is_whole(self) -> None:
        store, eye = writer.Writer(self.root), reader.Reader(self.root)
        store.publish(_params(0), 0)
        held = eye.follow()
        with (
            mock.patch.object(os, "fsync", side_effect=OSError("no space left")),
            self.assertRaisesRegex(OSError, "no space"),
        ):
            store.publish(_params(1, rate=1e-6), 1)
        self.assertIsNone(eye.follow(held))
        self.assertLen(list(self.root.iterdir()), 1)
        self.assertIsNone(store.publish(_params(1, rate=1e-6), 1).base)
        self._require(eye.follow(held), _params(1, rate=1e-6))

    def test_a_trainer_that_resumes_may_go_back(self) -> None:
        eye = reader.Reader(self.root)
        before = writer.Writer(self.root)
        for version in range(3):
            before.publish(_params(version, rate=1e-6), version)
        held = eye.follow()
        (self.root / ".i0000-v000000003").mkdir()  # was under way
        after = writer.Writer(self.root)
        self.assertNoHiddenFolders()
        after.publish(_params(9, rate=1e-6), 1)
        held = eye.follow(held)
        self.assertEqual(held.name, manifest.Name(1, 1))
        self._require(held, _params(9, rate=1e-6))
        with self.assertRaisesRegex(config.InputError, "version must increase"):
            after.publish(_params(9), 1)
        third = writer.Writer(self.root).publish(_params(9), 0).name
        self.assertEqual(third, manifest.Name(2, 0))
        with self.assertRaisesRegex(config.InputError, "version must increase"):
            writer.Writer(self.root).publish(_params(9), -1)

    def assertNoHiddenFolders(self) -> None:
        self.assertEmpty([p for p in self.root.iterdir() if p.name.startswith(".")])

    @parameterized.parameters(1, 2, 3)
    def test_a_version_that_vanishes_is_replaced_by_the_next(self, times: int) -> None:
        store, eye = writer.Writer(self.root, keep=1), reader.Reader(self.root)
        store.publish(_noise(0), 0)
        read, versions = eye.read, iter(range(1, times + 1))

        def late(name: manifest.Name, held: None) -> reader.Snapshot:
            version = next(versions, None)
            if version is not None:  # deleted between its listing and reading
                store.publish(_noise(version), version)
            return read(name, held)

        eye.read = late
        if times < 3:
            self.assertEqual(eye.follow().version, times)
            return
        with self.assertRaisesRegex(manifest.StoreError, "v000000002 lacks a file"):
            eye.follow()

    def test_what_was_read_outlives_its_files(self) -> None:
        store, eye = writer.Writer(self.root, keep=1), reader.Reader(self.root)
        store.publish(_noise(0), 0)
        held = eye.follow()
        store.publish(_noise(1), 1)
        np.testing.assert_array_equal(_values(held)["a"], _noise(0)["a"])

    def test_a_killed_writer_leaves_whole_versions(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", _ENDLESS, str(self.root)], stdout=subprocess.PIPE
        )
        self.addCleanup(process.kill)
        eye, held, num_seen = reader.Reader(self.root), None, 0
        process.stdout.readline()  # the first version is there
        while num_seen < 5:
            found = eye.follow(held)
            if found is not None:
                held, num_seen = found, num_seen + 1
                np.testing.assert_array_equal(_values(held)["a"], held.version)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        found = eye.follow(held) or held
        np.testing.assert_array_equal(_values(found)["a"], found.version)

    def test_processes_write_parts_of_one_version(self) -> None:
        texts: list[str] = []
        barrier = threading.Barrier(2)

        def gather(process: int, text: str) -> list[str]:
            texts.append(text)
            barrier.wait()
            return list(texts) if process == 0 else []

        halves = np.arange(24, dtype=np.float32).reshape(4, 6)
        stores = [
            writer.Writer(
                self.root,
                incarnation=0,
                process=i,
                gather=lambda text, i=i: gather(i, text),
            )
            for i in range(2)
        ]

        def shifted(process: int) -> list:
            return [((2 * process, 0), halves[2 * process : 2 * process + 2])]

        def publish(process: int) -> None:
            stores[process].publish({"a": _Sharded(halves, shifted(process))}, 0)

        with mock.patch.object(writer, "_blocks", lambda array: iter(array.blocks)):
            other = threading.Thread(target=publish, args=(1,))
            other.start()
            publish(0)
            other.join()
        found = _values(reader.Reader(self.root).follow())
        np.testing.assert_array_equal(found["a"], halves)


@dataclasses.dataclass
class _Sharded:
    """An array of which a process holds some blocks."""

    whole: np.ndarray
    blocks: list

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape

    @property
    def dtype(self) -> np.dtype:
        return self.whole.dtype


class UrlTest(parameterized.TestCase):
    """The folder behind a socket."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.root = pathlib.Path(folder.name, "weights")
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(files.app(cls.root, key="k"), log_level="error")
        )
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        cls.addClassCleanup(thread.join)
        cls.addClassCleanup(setattr, server, "should_exit", True)
        cls.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def test_versions_come_over_a_socket(self) -> None:
        eye = reader.Reader(sources.Url(self.url, key="k"))
        store = writer.Writer(self.root)
        held = None
        for version in range(3):
            params = _params(version, rate=1e-6)
            store.publish(params, version)
            held = eye.follow(held)
            found = _values(held)
            np.testing.assert_array_equal(found["layers/q"], params["layers"]["q"])
        store.publish(_params(7, rate=1e-2), 7)
        data = self.root / manifest.names(self.root)[-1].folder / "process_0.bin"
        data.write_bytes(data.read_bytes()[:100])
        with self.assertRaisesRegex(manifest.StoreError, "ends before"):
            eye.follow()

    def test_wrong_keys_and_paths_are_refused(self) -> None:
        with self.assertRaisesRegex(manifest.StoreError, "401"):
            reader.Reader(sources.Url(self.url, key="wrong")).follow()
        (self.root.parent / "secret").write_text("x")
        source = sources.Url(self.url, key="k")
        for path in ("..%2Fsecret", "i0000-v000000000/..%2F..%2Fsecret", "a/b"):
            with self.assertRaises(FileNotFoundError):
                source.get(path)

    def test_an_end_that_refuses_is_an_error(self) -> None:
        with socket.socket() as silent:  # which holds the port and does not listen
            silent.bind(("127.0.0.1", 0))
            source = sources.Url(f"http://127.0.0.1:{silent.getsockname()[1]}")
            with self.assertRaisesRegex(manifest.StoreError, "refused"):
                reader.Reader(source).follow()

    @parameterized.parameters(b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[[0")
    def test_a_silent_end_is_an_error(self, begun: bytes) -> None:
        """It takes the connection, and hangs before or in the midst of its answer."""
        over = threading.Event()

        def answer(listener: socket.socket) -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(begun)
                over.wait(30)

        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            futures.ThreadPoolExecutor() as threads,
            mock.patch.object(sources, "_TIMEOUT", 0.2),
        ):
            threads.submit(answer, listener)
            source = sources.Url(f"http://127.0.0.1:{listener.getsockname()[1]}")
            try:
                with self.assertRaisesRegex(manifest.StoreError, "timed out"):
                    reader.Reader(source).follow()
            finally:
                over.set()


class PlaceTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.root = pathlib.Path(folder.name)
        cls.values = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)

    def _sharded(self, spec: PartitionSpec) -> NamedSharding:
        mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
        return NamedSharding(mesh, spec)

    @parameterized.product(
        written=(PartitionSpec("a", "b"), PartitionSpec("b"), PartitionSpec()),
        wanted=(PartitionSpec("b", "a"), PartitionSpec(None, ("a", "b")), None),
    )
    def test_engines_take_windows_of_their_own_sharding(
        self, written: PartitionSpec, wanted: PartitionSpec | None
    ) -> None:
        if len(jax.devices()) < 4:
            self.skipTest("needs four devices")
        params = {"x": jax.device_put(self.values, self._sharded(written))}
        store = writer.Writer(self.root)
        store.publish(params, 0)
        sharding = (
            jax.sharding.SingleDeviceSharding(jax.devices()[0])
            if wanted is None
            else self._sharded(wanted)
        )
        like = jax.ShapeDtypeStruct((8, 12), jnp.float32, sharding=sharding)
        placed = reader.place(reader.Reader(self.root).follow(), {"x": like})
        np.testing.assert_array_equal(placed["x"], self.values)
        self.assertEqual(placed["x"].sharding, sharding)

    def test_devices_need_all_their_windows(self) -> None:
        """A process that leaves out windows cannot place the arrays of others."""
        whole, half = self._sharded(PartitionSpec()), self._sharded(PartitionSpec("a"))
        halves = {"x": jax.device_put(self.values, half)}
        writer.Writer(self.root).publish(halves, 0)
        like = {"x": jax.ShapeDtypeStruct((8, 12), jnp.float32, sharding=whole)}
        for is_needed in (False, True):
            eye = reader.Reader(
                self.root, lambda leaf, w, first=is_needed: first and w.start == (0, 0)
            )
            held = eye.follow()
            self.assertLen(held.leaves["x"].windows, int(is_needed))
            with self.assertRaisesRegex(manifest.StoreError, "do not cover"):
                reader.place(held, like)

    @parameterized.parameters(
        ({"y": ((8, 12), np.float32)}, "the store lacks y|the model lacks x"),
        ({"x": ((8, 13), np.float32)}, "x has"),
        ({"x": ((8, 12), np.int32)}, "x has"),
    )
    def test_other_models_are_refused(self, wanted: dict, message: str) -> None:
        writer.Writer(self.root).publish({"x": self.values}, 0)
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            for name, (shape, dtype) in wanted.items()
        }
        with self.assertRaisesRegex(manifest.StoreError, message):
            reader.place(reader.Reader(self.root).follow(), like)


def _noise(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return {"a": rng.integers(0, 256, 5000, np.uint8)}


if __name__ == "__main__":
    absltest.main()
