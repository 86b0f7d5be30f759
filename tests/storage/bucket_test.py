"""Folders in buckets, against emulators of S3 and Cloud Storage."""

import os
import pathlib
import shutil
import signal
import tempfile
import threading
import time
from unittest import mock

from absl.testing import absltest

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import host_copies
from glm5_jax.storage import bucket as bucket_lib
from glm5_jax.storage import copies, kept, sent
from tests import environment
from tests.storage import emulators


class AddressTest(absltest.TestCase):
    def test_addresses_are_of_two_stores(self):
        for path in ("gs://b/run", "s3://b", "gs:/b/run", pathlib.Path("s3://b/c")):
            self.assertTrue(bucket_lib.is_address(path), path)
        for path in ("", "runs/x", "/gs/x", "az://b/run", "gs", "gs://"):
            self.assertFalse(bucket_lib.is_address(path), path)

    def test_folders_that_stay_here_refuse_addresses(self):
        refused = self.assertRaisesRegex(config_lib.InputError, "no path of a file sys")
        with refused:
            config_lib.DataConfig(cache_dir="gs://bucket/cache")
        with refused:
            config_lib.RLConfig(servers="http://a", weights_store="s3://bucket/store")
        with refused:
            host_copies.HostCopies(pathlib.Path("run"), "gs://bucket/copies")

    def test_a_missing_library_is_named(self):
        with (
            mock.patch.dict("sys.modules", {"gcsfs": None, "fsspec": None}),
            self.assertRaisesRegex(config_lib.InputError, r"glm5_jax\[buckets\]"),
        ):
            bucket_lib.Bucket("gs://b/run")


class StoreTest:
    """What holds of both stores."""

    scheme = ""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        root = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.root = root
        cls.enterClassContext(emulators.serving(cls.scheme, root / "home"))

    def setUp(self):
        super().setUp()
        copies._copied.cache_clear()
        self.name = self._testMethodName
        self.address = f"{self.scheme}://bucket/{self.name}"
        self.here = self.root / "work" / self.name
        self.here.mkdir(parents=True)

    def put(self, **contents):
        emulators.write(self.here, **contents)
        bucket = bucket_lib.Bucket(self.address)
        for name in contents:
            name = name.replace("__", "/")
            bucket.upload(self.here / name, name)
        return bucket

    def objects(self):
        return emulators.objects(self.scheme, self.name)

    def elsewhere(self):
        """Another machine: nothing is here."""
        folder = self.root / f"{self.name}_elsewhere_{time.monotonic_ns()}"
        return mock.patch.dict(os.environ, {copies.VARIABLE: str(folder)})

    def test_objects_have_sizes_versions_and_times(self):
        bucket = self.put(a="one", b__c="three")
        before = bucket.objects()
        self.assertEqual({n: s.size for n, s in before.items()}, {"a": 3, "b/c": 5})
        self.assertLess(abs(time.time() - before["a"].modified), 3600)
        self.put(a="two")
        after = bucket.objects()
        self.assertNotEqual(after["a"].version, before["a"].version)
        self.assertEqual(after["b/c"], before["b/c"])
        self.assertEqual(bucket.read_text("b/c"), "three")
        self.assertIsNone(bucket.read_text("none"))
        bucket.delete("a")
        bucket.delete("a")
        self.assertEqual(list(bucket.objects()), ["b/c"])

    def test_a_neighbour_with_the_same_beginning_is_another_folder(self):
        self.put(a="one")
        other = bucket_lib.Bucket(f"{self.scheme}://bucket/{self.name[:-1]}")
        self.assertEqual(other.objects(), {})

    def test_a_bucket_that_does_not_exist(self):
        bucket = bucket_lib.Bucket(f"{self.scheme}://no-such-bucket/run")
        self.assertEqual(bucket.objects(), {})
        with self.assertRaisesRegex(config_lib.InputError, "no-such-bucket/run"):
            copies.local(bucket.address)
        with self.assertRaises((config_lib.InputError, FileNotFoundError)):
            bucket.write_text("x", "y")

    def test_a_copy_is_fetched_once_and_follows_the_bucket(self):
        self.put(a="one", b__c="three", d="gone")
        place = copies.local(self.address)
        self.assertEqual((place / "a").read_text(), "one")
        self.assertEqual((place / "b" / "c").read_text(), "three")
        bucket = self.put(a="two")
        bucket.delete("d")
        copies._copied.cache_clear()
        with mock.patch.object(
            bucket_lib.Bucket, "download", autospec=True, side_effect=lambda *a: None
        ) as download:
            # The size of "two" is that of "one": the version tells.
            copies.local(self.address)
        self.assertEqual([call.args[1] for call in download.call_args_list], ["a"])

    def test_files_that_left_the_bucket_leave_the_copy(self):
        bucket = self.put(a="one", b__c="three")
        place = copies.local(self.address)
        bucket.delete("b/c")
        copies._copied.cache_clear()
        copies.local(self.address)
        self.assertFalse((place / "b").exists())
        self.assertTrue((place / "a").exists())

    def test_times_of_a_copy_are_those_of_the_bucket(self):
        self.put(a="one")
        times = []
        for _ in range(2):
            copies._copied.cache_clear()
            with self.elsewhere():
                times.append((copies.local(self.address) / "a").stat().st_mtime)
        self.assertEqual(*times)

    def test_a_single_object_is_a_file(self):
        self.put(a="one")
        path = copies.local(f"{self.address}/a")
        self.assertEqual(path.read_text(), "one")
        self.assertEqual(path.name, "a")

    def test_of_a_run_the_newest_sealed_step_is_copied(self):
        step = "checkpoints__{}__{}".format
        self.put(
            **{"config.json": "{}"},
            **{step(n, "params__x"): str(n) for n in (2, 4, 10)},
            **{step(n, "manifest.json"): "{}" for n in (2, 4)},
        )
        checkpoints = copies.local(self.address) / "checkpoints"
        self.assertEqual(os.listdir(checkpoints), ["4"])
        other = copies.local(f"{self.address}/checkpoints/2")
        self.assertEqual((other / "params" / "x").read_text(), "2")
        self.assertEqual((other.parents[1] / "config.json").read_text(), "{}")
        with self.assertRaisesRegex(config_lib.InputError, "nothing"):
            copies.local(f"{self.address}/checkpoints/3")

    def test_names_that_lead_out_of_the_folder_are_refused(self):
        bucket = self.put(a="one")
        bad = {"../b": bucket.objects()["a"]}
        with self.assertRaisesRegex(config_lib.InputError, "Rename the object"):
            copies.fetch(bucket, bad, self.here / "copy")
        self.assertFalse((self.here / "b").exists())

    def test_a_disk_that_is_too_small_is_told_beforehand(self):
        bucket = self.put(a="one")
        bad = {"a": bucket_lib.Stored(2**60, "", 0.0)}
        with self.assertRaisesRegex(config_lib.InputError, copies.VARIABLE):
            copies.fetch(bucket, bad, self.here / "copy")

    def test_a_new_folder_is_uploaded_and_its_files_here_are_deleted(self):
        with sent.new_folder(self.address) as place:
            emulators.write(place, **{"config.json": "{}", "a__b": "one"})
        self.assertEqual(self.objects(), ["a/b", "config.json"])
        self.assertFalse(place.exists())
        with (
            self.assertRaisesRegex(config_lib.InputError, "exists"),
            sent.new_folder(self.address),
        ):
            self.fail("the block ran")

    def test_of_a_new_folder_that_fails_nothing_stays(self):
        upload = bucket_lib.Bucket.upload

        def some(bucket, path, name):
            if name == "config.json":
                raise config_lib.InputError("no more")
            upload(bucket, path, name)

        with (
            mock.patch.object(bucket_lib.Bucket, "upload", some),
            self.assertRaisesRegex(config_lib.InputError, "no more"),
            sent.new_folder(self.address) as place,
        ):
            emulators.write(place, **{"config.json": "{}", "a__b": "one"})
        self.assertEqual(self.objects(), [])

    def step(self, place, number, content="", manifest="{}"):
        files = {"params__x": content or str(number), "manifest.json": manifest}
        for name, text in files.items():
            emulators.write(place, **{f"checkpoints__{number}__{name}": text})

    def test_a_folder_is_kept_in_step(self):
        self.enterContext(mock.patch.object(kept, "SECONDS", 0.1))
        with kept.in_step(self.address) as place:
            emulators.write(place, **{"config.json": "{}", "metrics.jsonl": "1\n"})
            self.step(place, 2)
            emulators.write(place, checkpoints__4__params__x="no manifest yet")
            emulators.write(place, **{".hidden": "x"})
            emulators.write(place, **{"checkpoints__2.damaged__params__x": "set aside"})
            self.wait_for("checkpoints/2/manifest.json")
            self.step(place, 4)
            (place / "checkpoints" / "2" / "params" / "x").unlink()
            (place / "checkpoints" / "2" / "manifest.json").unlink()
        expected = ["checkpoints/4/manifest.json", "checkpoints/4/params/x"]
        expected = [".owner", *expected, "config.json", "metrics.jsonl"]
        self.assertEqual(self.objects(), expected)

    def wait_for(self, name):
        deadline = time.monotonic() + emulators.SECONDS
        while name not in self.objects():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def test_the_manifest_goes_up_last_and_down_first(self):
        order = []
        for method in ("upload", "delete"):
            original = getattr(bucket_lib.Bucket, method)

            def noting(bucket, *args, original=original, method=method):
                order.append((method, args[-1]))
                original(bucket, *args)

            patch = mock.patch.object(bucket_lib.Bucket, method, noting)
            self.enterContext(patch)
        with kept.in_step(self.address) as place:
            self.step(place, 2)
        self.assertEqual(order[-1], ("upload", "checkpoints/2/manifest.json"))
        order.clear()
        with kept.in_step(self.address) as place:
            self.step(place, 2, "of another branch", '{"again": 1}')
        self.assertEqual(
            order,
            [
                ("delete", "checkpoints/2/manifest.json"),
                ("upload", "checkpoints/2/params/x"),
                ("upload", "checkpoints/2/manifest.json"),
            ],
        )
        with kept.in_step(self.address) as place:
            self.step(place, 4)
        order.clear()
        with kept.in_step(self.address) as place:
            emulators.write(place, **{"rollback.json": "{}"})
            (place / "checkpoints" / "4").rename(place / "checkpoints" / "4.abandoned")
            self.step(place, 3)
        self.assertEqual(order[0], ("upload", "rollback.json"))
        self.assertEqual(order[1], ("delete", "checkpoints/4/manifest.json"))
        self.assertEqual(order[-1], ("upload", "checkpoints/3/manifest.json"))

    def test_a_folder_that_was_deleted_here_deletes_nothing_there(self):
        with kept.in_step(self.address) as place:
            emulators.write(place, **{"config.json": "{}"})
            self.step(place, 2)
        before = self.objects()
        shutil.rmtree(place)
        with self.assertRaises(KeyError), kept.in_step(self.address) as place:
            self.assertEqual(os.listdir(place / "checkpoints"), ["2"])
            raise KeyError
        self.assertEqual(self.objects(), before)

    def test_objects_of_others_are_refused_and_stay(self):
        self.put(**{".gitattributes": "x", "model.bin": "y"})
        before = self.objects()
        with (
            self.assertRaisesRegex(config_lib.InputError, "not empty"),
            kept.in_step(self.address),
        ):
            self.fail("the block ran")
        self.assertEqual(self.objects(), before)
        self.put(**{"config.json": "{}", "checkpoints__1__old": "has no manifest"})
        with kept.in_step(self.address) as place:
            emulators.write(place, **{"config.json": "{}"})
        self.assertContainsSubset([*before, "checkpoints/1/old"], self.objects())

    def test_what_an_overtaken_start_seals_late_does_not_count(self):
        with kept.in_step(self.address) as place:
            emulators.write(place, **{"config.json": "{}"})
            self.step(place, 2)
        late = bucket_lib.Bucket(self.address)
        with self.elsewhere(), kept.in_step(self.address) as there:
            for name in ("params/x", "manifest.json"):
                source = place / "checkpoints" / "2" / name
                late.upload(source, f"checkpoints/9/{name}")
            self.step(there, 3)
        self.assertNotIn("checkpoints/9", " ".join(self.objects()))

    def test_an_object_that_was_lost_is_uploaded_again(self):
        with kept.in_step(self.address) as place:
            self.step(place, 2)
        before = self.objects()
        bucket_lib.Bucket(self.address).delete("checkpoints/2/params/x")
        with kept.in_step(self.address) as place:
            emulators.write(place, a="anything new")
        self.assertEqual(self.objects(), sorted([*before, "a"]))

    def test_a_copy_that_another_process_reads_is_not_changed(self):
        self.put(a="one")
        place = copies.local(self.address)
        held = dict(copies._READ)
        copies._READ.clear()  # as if another process had them
        self.put(a="two")
        copies._copied.cache_clear()
        with self.assertRaisesRegex(config_lib.InputError, "another process reads"):
            copies.local(self.address)
        self.assertEqual((place / "a").read_text(), "one")
        for descriptor in held.values():
            os.close(descriptor)
        copies._copied.cache_clear()
        self.assertEqual((copies.local(self.address) / "a").read_text(), "two")

    def test_a_corpus_may_have_any_names(self):
        self.put(checkpoints__1__a="one", checkpoints__2__a="two")
        place = copies.local(self.address)
        self.assertEqual(sorted(os.listdir(place / "checkpoints")), ["1", "2"])

    def test_what_was_uploaded_is_not_uploaded_again(self):
        with kept.in_step(self.address) as place:
            emulators.write(place, a="one", b="two")
        with (
            mock.patch.object(
                bucket_lib.Bucket, "upload", autospec=True, side_effect=None
            ) as upload,
            kept.in_step(self.address) as place,
        ):
            emulators.write(place, b="three")
        self.assertEqual([call.args[2] for call in upload.call_args_list], ["b"])

    def test_another_machine_goes_on(self):
        with kept.in_step(self.address) as place:
            emulators.write(place, **{"config.json": "{}"})
            self.step(place, 2)
        bucket_lib.Bucket(self.address).upload(
            place / "config.json",
            "checkpoints/4/half",  # of a machine that was killed
        )
        with self.elsewhere(), kept.in_step(self.address) as there:
            self.assertNotEqual(there, place)
            self.assertEqual(os.listdir(there / "checkpoints"), ["2"])
            self.step(there, 4)
        self.assertNotIn("checkpoints/4/half", self.objects())  # of the same number
        # The first machine's folder is of the past.
        with kept.in_step(self.address) as again:
            self.assertEqual(sorted(os.listdir(again / "checkpoints")), ["2", "4"])
        (left,) = place.with_name(f"{place.name}.bucket").glob("left_*")
        self.assertEqual(os.listdir(left / "checkpoints"), ["2"])

    def test_this_machine_keeps_what_it_could_not_upload(self):
        def refuse(bucket, path, name):
            raise config_lib.InputError("no network")

        with kept.in_step(self.address) as place:
            emulators.write(place, a="one")
        with (
            mock.patch.object(bucket_lib.Bucket, "upload", refuse),
            self.assertRaisesRegex(config_lib.InputError, "no network"),
            kept.in_step(self.address) as place,
        ):
            emulators.write(place, b="two")
        with kept.in_step(self.address) as place:
            self.assertEqual((place / "b").read_text(), "two")
        self.assertIn("b", self.objects())

    def test_a_start_elsewhere_ends_this_one(self):
        ended = []
        before = signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
        self.addCleanup(signal.signal, signal.SIGTERM, before)
        self.enterContext(mock.patch.object(kept, "SECONDS", 0.1))
        with (
            self.assertRaisesRegex(config_lib.InputError, "taken over by"),
            kept.in_step(self.address) as place,
        ):
            emulators.write(place, a="one")
            with self.elsewhere(), kept.in_step(self.address) as there:
                emulators.write(there, b="of the later start")
                deadline = time.monotonic() + emulators.SECONDS
                while not ended and time.monotonic() < deadline:
                    time.sleep(0.05)
            emulators.write(place, a="too late")
        self.assertEqual(ended, [1])
        self.assertIn("b", self.objects())
        self.assertNotEqual(bucket_lib.Bucket(self.address).read_text("a"), "too late")
        self.assertEqual((place / "a").read_text(), "too late")

    def test_a_start_that_is_overtaken_at_its_end_gets_no_signal(self):
        """Which would find no handler of the run, and a launcher start it again."""
        ended, begun, upload = [], threading.Event(), kept._Keeper.upload
        before = signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
        self.addCleanup(signal.signal, signal.SIGTERM, before)
        self.enterContext(mock.patch.object(kept, "SECONDS", 0.01))

        def late(keeper, **how):
            begun.set()
            keeper._ended.wait(emulators.SECONDS)
            upload(keeper, **how)

        with (
            mock.patch.object(kept._Keeper, "upload", late),
            self.assertRaisesRegex(config_lib.InputError, "taken over by"),
            kept.in_step(self.address) as place,
        ):
            emulators.write(place, a="one")
            bucket_lib.Bucket(self.address).write_text(".owner", "another")
            self.assertTrue(begun.wait(emulators.SECONDS))
        self.assertEqual(ended, [])

    def test_a_start_that_was_overtaken_does_not_end_as_a_preempted_one(self):
        with (
            self.assertRaisesRegex(config_lib.InputError, "taken over by"),
            kept.in_step(self.address) as place,
        ):
            emulators.write(place, a="one")
            bucket_lib.Bucket(self.address).write_text(".owner", "another")
            raise SystemExit(143)  # a launcher would start it again

    def test_two_starts_on_one_machine_are_refused(self):
        with (
            kept.in_step(self.address),
            self.assertRaisesRegex(config_lib.InputError, "writes into"),
            kept.in_step(self.address),
        ):
            self.fail("the block ran")

    def test_a_start_that_fails_leaves_nothing_in_the_bucket(self):
        with self.assertRaisesRegex(KeyError, "x"), kept.in_step(self.address):
            raise KeyError("x")
        self.assertEqual(self.objects(), [])

    def test_a_folder_is_itself(self):
        with kept.in_step("~/x") as place:
            self.assertEqual(place, pathlib.Path("~/x").expanduser())


class CloudStorageTest(StoreTest, absltest.TestCase):
    scheme = "gs"


class S3Test(StoreTest, absltest.TestCase):
    scheme = "s3"


if __name__ == "__main__":
    environment.main()
