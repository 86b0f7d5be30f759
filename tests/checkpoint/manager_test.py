"""The manager of checkpoints: what it saves, restores and deletes."""

import contextlib
import shutil
import threading
from concurrent import futures
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from absl.testing import parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import (
    arrays,
    manifest,
    retention,
    same_shapes,
    step_folder,
    stored,
)
from glm5_jax.checkpoint import manager as manager_lib
from tests import environment
from tests.checkpoint import steps


class SaveRestoreTest(steps.StepsTestCase):
    def test_bit_exact(self):
        manager = self.with_steps(1, 2)
        step, state, metadata = manager.restore(steps.abstract(steps.make_state(0)))
        self.assertEqual((step, metadata), (2, steps.METADATA))
        steps.assert_same(state, steps.make_state(2))
        self.assertEqual(state["params"]["frozen"]["b"].dtype, jnp.bfloat16)
        # Without a sharding they come onto the first device.
        params = manager_lib.restore_params(
            self.folder, steps.abstract(steps.make_state(0)["params"])
        )
        for leaf in jax.tree.leaves((state, params)):
            self.assertEqual(leaf.devices(), {jax.devices()[0]})

    def test_a_named_step(self):
        manager = self.with_steps(1, 2)
        step, state, _ = manager.restore(steps.abstract(steps.make_state(0)), step=1)
        self.assertEqual(step, 1)
        steps.assert_same(state, steps.make_state(1))

    def test_an_older_step(self):
        manager, like = self.with_steps(1, 2, 3), steps.abstract(steps.make_state(0))
        self.assertEqual(manager.restore(like, before=3)[0], 2)
        with self.assertRaisesRegex(config_lib.InputError, r"no step 2 .*steps \[1\]"):
            manager.restore(like, step=2, before=2)

    def test_parts_of_a_state(self):
        self.write_steps(1)
        state = steps.make_state(1)
        some = {name: state[name] for name in ("params", "step")}
        got = manager_lib.read_state(self.step_folder(1), steps.abstract(some))
        steps.assert_same(got, some)

    def test_a_step_whose_folder_went_is_saved_again(self):
        """Somebody deleted it, and the run has gone back to the one before."""
        manager = self.with_steps(1, 2)
        shutil.rmtree(self.step_folder(2))
        manager.restore(steps.abstract(steps.make_state(0)), step=1)
        manager.save(2, steps.make_state(5), steps.METADATA)
        manager.wait()
        _, state, _ = manager.restore(steps.abstract(steps.make_state(0)))
        steps.assert_same(state, steps.make_state(5))

    def test_a_save_does_not_wait_for_its_writer(self):
        manager, go_on = self.open(), threading.Event()
        self.addCleanup(go_on.set)  # otherwise the thread outlives a failure
        to_save, written = stored.to_save, []

        def held(*args):
            go_on.wait(timeout=60)
            written.append(args)
            return to_save(*args)

        with mock.patch.object(stored, "to_save", held):
            manager.save(1, steps.make_state(1), steps.METADATA)
            self.assertEmpty(written)
            go_on.set()
            manager.close()
        self.assertEqual(self.names(), ["1"])

    def test_a_folder_is_made_with_its_parents(self):
        folder = self.folder / "some" / "run"
        manager = manager_lib.CheckpointManager(folder, 3)
        self.addCleanup(manager._orbax.close)
        self.assertEqual([*(folder / "checkpoints").iterdir()], [])

    def test_donation_does_not_reach_a_save_under_way(self):
        manager = self.open()
        add = jax.jit(
            lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0
        )
        state = steps.make_state(0, width=4096)
        want = jax.tree.map(np.array, state)
        manager.save(1, state, steps.METADATA)
        for _ in range(3):
            state = add(state)
        _, got, _ = manager.restore(steps.abstract(state))
        steps.assert_same(got, want)

    @parameterized.parameters("device", "pinned_host")
    def test_a_copy_to_save_shares_no_memory(self, kind):
        """Parts of a state may be offloaded, and so be where the copy goes."""
        place = jax.devices()[0]
        x = jax.device_put(
            jnp.ones((64, 64)),
            jax.sharding.SingleDeviceSharding(place, memory_kind=kind),
        )
        copy = arrays.copied({"x": x})["x"]
        self.assertEqual(copy.sharding.memory_kind, "pinned_host")
        self.assertNotEqual(copy.unsafe_buffer_pointer(), x.unsafe_buffer_pointer())

    def test_shardings_are_those_asked_for(self):
        self.write_steps(1)
        devices = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
        sharding = NamedSharding(devices, P("fsdp"))
        target = steps.abstract(steps.make_state(1)["params"])
        target["w"] = jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=sharding)
        params = manager_lib.restore_params(self.folder, target)
        self.assertEqual(params["w"].sharding, sharding)
        steps.assert_same(params, steps.make_state(1)["params"])

    def test_old_steps_are_deleted(self):
        manager = self.open(keep=2)
        for step in (1, 2, 3):
            manager.save(step, steps.make_state(step), steps.METADATA)
        manager.wait()
        self.assertEqual(manager.latest_step(), 3)
        self.assertFalse(self.step_folder(1).exists())
        self.assertTrue(self.step_folder(2).exists())

    def test_rolled_back_run_replaces_later_steps(self):
        manager = self.with_steps(1, 2, 3)
        manager.restore(steps.abstract(steps.make_state(0)), step=1)
        with self.assertLogs(level="WARNING") as logs:
            manager.save(2, steps.make_state(20), steps.METADATA)
        self.assertRegex(logs.output[0], r"Steps \[2, 3\] .* an abandoned branch")
        manager.wait()
        self.assertEqual(self.names(), ["1", "2"])  # 3 was of another branch
        manager.save(3, steps.make_state(30), steps.METADATA)
        _, state, _ = manager.restore(steps.abstract(steps.make_state(0)))
        steps.assert_same(state, steps.make_state(30))
        _, state, _ = manager.restore(steps.abstract(steps.make_state(0)), step=2)
        steps.assert_same(state, steps.make_state(20))

    def test_a_run_rolls_back_its_own_steps_and_may_skip_some(self):
        manager = self.with_steps(1)
        for step in (2, 3, 4):
            manager.save(step, steps.make_state(step), steps.METADATA)
        manager.restore(steps.abstract(steps.make_state(0)), step=2)
        manager.save(5, steps.make_state(50), steps.METADATA)
        manager.close()
        self.assertEqual(self.names(), ["2", "5"])
        for path in self.checkpoints.iterdir():
            self.assertGreater(manifest.verify(step_folder.find(path)), 0)
        _, state, _ = self.open().restore(steps.abstract(steps.make_state(0)))
        steps.assert_same(state, steps.make_state(50))

    def test_older_steps_with_a_manifest(self):
        manager = self.with_steps(2, 3)
        has = [step for step in range(5) if manager.has_before(step)]
        self.assertEqual(has, [3, 4])
        (self.step_folder(2) / manifest.NAME).unlink()
        has = [step for step in range(5) if manager.has_before(step)]
        self.assertEqual(has, [4])

    def test_errors_in_the_background_are_raised_once(self):
        manager = self.open()
        manager.check_for_errors()
        with mock.patch.object(manifest, "seal", side_effect=OSError("it is full")):
            manager.save(1, steps.make_state(1), steps.METADATA)
            futures.wait([manager._pending])
        with self.assertRaisesRegex(OSError, "step 1 cannot be written.* it is full"):
            manager.check_for_errors()
        manager.check_for_errors()

    def test_the_next_save_raises_the_error_of_the_one_before(self):
        manager = self.open()
        with mock.patch.object(manifest, "seal", side_effect=KeyError("a mistake")):
            manager.save(1, steps.make_state(1), steps.METADATA)
            futures.wait([manager._pending])
        with self.assertRaisesRegex(KeyError, "a mistake"):
            manager.save(2, steps.make_state(2), steps.METADATA)
        manager.save(1, steps.make_state(1), steps.METADATA)  # it is not saved yet
        manager.close()
        self.assertEqual(self.names(), ["1"])
        self.assertTrue((self.step_folder(1) / manifest.NAME).exists())

    def test_closing_ends_the_threads(self):
        tqdm.tqdm(disable=True)  # has a thread of its own, which stays
        before = {*threading.enumerate()}
        manager = self.with_steps(1)
        manager.save(2, steps.make_state(2), steps.METADATA)
        manager.close()
        left = {thread.name for thread in {*threading.enumerate()} - before}
        self.assertEqual(left, set())

    def test_a_save_under_way_is_not_waited_for(self):
        manager = self.open()
        go_on, seal = threading.Event(), manifest.seal
        self.addCleanup(go_on.set)  # otherwise the thread outlives a failure
        held = lambda *args: (go_on.wait(), seal(*args))
        with mock.patch.object(manifest, "seal", held):
            manager.save(1, steps.make_state(1), steps.METADATA)
            manager.check_for_errors()
            self.assertFalse((self.step_folder(1) / manifest.NAME).exists())
            go_on.set()
            manager.close()
        self.assertTrue((self.step_folder(1) / manifest.NAME).exists())

    def test_a_step_that_was_deleted_can_be_saved_again(self):
        manager = self.open(retention.Retention(newest=1, every=2))
        for step in (2, 3, 4):
            manager.save(step, steps.make_state(step), steps.METADATA)
        manager.wait()
        self.assertEqual(self.names(), ["2", "4"])
        manager.restore(steps.abstract(steps.make_state(0)), step=2)
        manager.save(3, steps.make_state(30), steps.METADATA)
        manager.close()
        self.assertEqual(self.names(), ["2", "3"])
        _, state, _ = self.open().restore(steps.abstract(steps.make_state(0)))
        steps.assert_same(state, steps.make_state(30))

    def test_from_8_devices_to_4_to_1(self):
        state = steps.make_state(0)
        for step, count in ((1, 8), (2, 4), (3, 1)):
            devices = jax.devices()[:count]
            mesh = jax.make_mesh(
                (count,), ("fsdp",), devices=devices, axis_types=(AxisType.Auto,)
            )
            places = jax.tree.map(
                lambda x, mesh=mesh: NamedSharding(
                    mesh, P("fsdp") if x.ndim == 2 else P()
                ),
                state,
            )
            manager = self.open()
            if step > 1:
                like = jax.tree.map(
                    lambda x, place: jax.ShapeDtypeStruct(
                        x.shape, x.dtype, sharding=place
                    ),
                    state,
                    places,
                )
                _, got, _ = manager.restore(like)
                steps.assert_same(got, steps.make_state(step - 1))
                self.assertEqual(got["params"]["w"].sharding, places["params"]["w"])
            manager.save(
                step, jax.device_put(steps.make_state(step), places), steps.METADATA
            )
            manager.close()
        _, got, _ = self.open().restore(steps.abstract(state))
        steps.assert_same(got, steps.make_state(3))

    def test_the_same_step_twice_is_one_save(self):
        manager = self.open()
        manager.save(1, steps.make_state(1), steps.METADATA)
        manager.save(1, steps.make_state(7), steps.METADATA)
        _, state, _ = manager.restore(steps.abstract(steps.make_state(0)))
        steps.assert_same(state, steps.make_state(1))

    def test_an_older_step_may_be_saved_later(self):
        self.write_steps(2, 1)
        self.assertEqual(self.names(), ["1", "2"])

    def test_the_step_that_was_restored_is_not_saved_again(self):
        """Otherwise a finished run that is started again rewrites its last step."""
        manager = self.with_steps(1, 2)
        manager.restore(steps.abstract(steps.make_state(0)))
        manager.save(2, steps.make_state(7), {})
        _, state, metadata = manager.restore(steps.abstract(steps.make_state(0)))
        steps.assert_same(state, steps.make_state(2))
        self.assertEqual(metadata, steps.METADATA)

    @parameterized.parameters(jnp.nan, jnp.inf)
    def test_a_state_that_is_not_finite_is_refused(self, bad):
        manager = self.with_steps(1)
        state = steps.make_state(2)
        state["params"]["w"] = state["params"]["w"].at[3, 4].set(bad)
        with self.assertRaisesRegex(FloatingPointError, "newest checkpoint is step 1"):
            manager.save(2, state, steps.METADATA)
        manager.wait()
        self.assertEqual(manager.latest_step(), 1)

    def test_a_full_disk_is_noticed_before_the_write(self):
        manager = self.open()
        usage = shutil.disk_usage(self.folder)._replace(free=1000)
        with (
            mock.patch.object(shutil, "disk_usage", return_value=usage),
            self.assertRaisesRegex(OSError, "1,000 are free"),
        ):
            manager.save(1, steps.make_state(1), steps.METADATA)

    @parameterized.parameters((0, True), (-1, False))
    def test_the_state_may_fill_the_disk(self, spare, has_room):
        manager, state = self.open(), steps.make_state(1)
        size = sum(x.nbytes for x in jax.tree.leaves(state))
        full = contextlib.nullcontext() if has_room else self.assertRaises(OSError)
        free = mock.patch.object(step_folder, "free_bytes", return_value=size + spare)
        with free, full:
            manager._require_space(state)


class InputTest(steps.StepsTestCase):
    def test_no_checkpoint(self):
        manager = self.open()
        self.assertIsNone(manager.latest_step())
        with self.assertRaisesRegex(config_lib.InputError, "no checkpoint"):
            manager.restore(steps.abstract(steps.make_state(0)))
        for folder in (self.folder, self.folder / "nowhere"):
            with self.assertRaisesRegex(config_lib.InputError, "no checkpoint in"):
                manager_lib.restore_params(
                    folder, steps.abstract(steps.make_state(0)["params"])
                )

    def test_no_such_step(self):
        with self.assertRaisesRegex(config_lib.InputError, r"step 5 .*steps \[1, 2\]"):
            self.with_steps(1, 2).restore(steps.abstract(steps.make_state(0)), step=5)

    def test_another_model(self):
        manager = self.with_steps(1)
        other = steps.make_state(0, width=16)
        message = (
            r"params\.w: \(32, 64\) there, \(16, 64\) here\n"
            r"(.*\n)*Use the config of the run that wrote it"
        )
        with self.assertRaisesRegex(config_lib.InputError, message):
            manager.restore(steps.abstract(other))
        with self.assertRaisesRegex(config_lib.InputError, message):
            manager_lib.restore_params(self.folder, steps.abstract(other["params"]))
        self.assertEqual(manager.latest_step(), 1)

    def test_missing_and_surplus_leaves(self):
        self.write_steps(1)
        params = steps.abstract(steps.make_state(0)["params"])
        params["new"] = params.pop("w")
        message = r"params\.new: absent there, \(32, 64\) here\n  params\.w: \(32, 64\)"
        with self.assertRaisesRegex(config_lib.InputError, message):
            manager_lib.restore_params(self.folder, params)

    def test_another_optimizer(self):
        manager = self.with_steps(1)
        state = steps.make_state(0)
        state["opt_state"] = optax.trace(0.9).init(state["params"])
        with self.assertRaisesRegex(config_lib.InputError, r"opt_state.*absent"):
            manager.restore(steps.abstract(state))

    def test_no_folder_can_be_made(self):
        (self.folder / "checkpoints").write_text("a file")
        with self.assertRaisesRegex(config_lib.InputError, "cannot write checkpoints"):
            manager_lib.CheckpointManager(self.folder, 3)


class RestoreParamsTest(steps.StepsTestCase):
    def test_from_run_checkpoints_and_step_folder(self):
        self.write_steps(1, 2)
        target = steps.abstract(steps.make_state(0)["params"])
        for folder, step in (
            (self.folder, 2),
            (self.folder / "checkpoints", 2),
            (self.step_folder(1), 1),
        ):
            params = manager_lib.restore_params(folder, target)
            steps.assert_same(params, steps.make_state(step)["params"])
            self.assertEqual(manager_lib.read_metadata(folder), steps.METADATA)

    def test_reads_only_the_parameters(self):
        self.write_steps(1)
        with mock.patch.object(same_shapes, "require") as check:
            manager_lib.restore_params(
                self.folder, steps.abstract(steps.make_state(0)["params"])
            )
        names = [*check.call_args.args[0], *check.call_args.args[1]]
        self.assertEqual({name.split(".")[0] for name in names}, {"params"})


if __name__ == "__main__":
    environment.main()
