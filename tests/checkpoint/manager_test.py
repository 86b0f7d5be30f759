import gc
import pathlib
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import manager as manager_lib
from tests import environment

OPTIMIZER = optax.partition(
    {"adamw": optax.adamw(1e-3), "frozen": optax.set_to_zero()},
    {"w": "adamw", "frozen": {"b": "frozen"}},
)
METADATA = {"config": {"optim": {"learning_rate": 2e-4}}, "fingerprint": "abc"}


def make_state(step, width=32):
    w = jnp.arange(width * 64, dtype=jnp.float32).reshape(width, 64) + step
    params = {"w": w, "frozen": {"b": jnp.full([3], step, jnp.bfloat16)}}
    opt_state = OPTIMIZER.init(params)
    return {"params": params, "opt_state": opt_state, "step": jnp.int32(step)}


def abstract(tree):
    return jax.eval_shape(lambda: tree)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


class ManagerTestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir())

    def open(self, keep=3):
        manager = manager_lib.CheckpointManager(self.folder, keep)
        self.addCleanup(manager._orbax.close)
        return manager

    def with_steps(self, *steps):
        self.write_steps(*steps)
        return self.open()

    def write_steps(self, *steps):
        manager = self.open()
        for step in steps:
            manager.save(step, make_state(step), METADATA)
        manager.close()

    def step_folder(self, step):
        return self.folder / "checkpoints" / str(step)

    def data_file(self, step):
        files = (self.step_folder(step) / "state").rglob("d/*")
        return max(files, key=lambda path: path.stat().st_size)


class SaveRestoreTest(ManagerTestCase):
    def test_bit_exact(self):
        manager = self.with_steps(1, 2)
        step, state, metadata = manager.restore(abstract(make_state(0)))
        self.assertEqual((step, metadata), (2, METADATA))
        assert_same(state, make_state(2))
        self.assertEqual(state["params"]["frozen"]["b"].dtype, jnp.bfloat16)

    def test_a_named_step(self):
        manager = self.with_steps(1, 2)
        step, state, _ = manager.restore(abstract(make_state(0)), step=1)
        self.assertEqual(step, 1)
        assert_same(state, make_state(1))

    def test_donation_does_not_reach_a_save_under_way(self):
        manager = self.open()
        add = jax.jit(
            lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0
        )
        state = make_state(0, width=4096)
        want = jax.tree.map(np.array, state)
        manager.save(1, state, METADATA)
        for _ in range(3):
            state = add(state)
        _, got, _ = manager.restore(abstract(state))
        assert_same(got, want)

    def test_shardings_are_those_asked_for(self):
        self.write_steps(1)
        devices = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
        sharding = NamedSharding(devices, P("fsdp"))
        target = abstract(make_state(1)["params"])
        target["w"] = jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=sharding)
        params = manager_lib.restore_params(self.folder, target)
        self.assertEqual(params["w"].sharding, sharding)
        assert_same(params, make_state(1)["params"])

    def test_old_steps_go(self):
        manager = self.open(keep=2)
        for step in (1, 2, 3):
            manager.save(step, make_state(step), METADATA)
        manager.wait()
        self.assertEqual(manager.latest_step(), 3)
        self.assertFalse(self.step_folder(1).exists())
        self.assertTrue(self.step_folder(2).exists())

    def test_rolled_back_run_replaces_later_steps(self):
        manager = self.with_steps(1, 2, 3)
        manager.restore(abstract(make_state(0)), step=1)
        manager.save(2, make_state(20), METADATA)
        manager.save(3, make_state(30), METADATA)
        _, state, _ = manager.restore(abstract(make_state(0)))
        assert_same(state, make_state(30))
        _, state, _ = manager.restore(abstract(make_state(0)), step=2)
        assert_same(state, make_state(20))

    def test_the_same_step_twice_is_one_save(self):
        manager = self.open()
        manager.save(1, make_state(1), METADATA)
        manager.save(1, make_state(7), METADATA)
        _, state, _ = manager.restore(abstract(make_state(0)))
        assert_same(state, make_state(1))

    @parameterized.parameters(jnp.nan, jnp.inf)
    def test_a_state_that_is_not_finite_is_refused(self, bad):
        manager = self.with_steps(1)
        state = make_state(2)
        state["params"]["w"] = state["params"]["w"].at[3, 4].set(bad)
        with self.assertRaisesRegex(FloatingPointError, "newest checkpoint is step 1"):
            manager.save(2, state, METADATA)
        manager.wait()
        self.assertEqual(manager.latest_step(), 1)

    def test_a_full_disk_is_noticed_before(self):
        manager = self.open()
        usage = shutil.disk_usage(self.folder)._replace(free=1000)
        with (
            mock.patch.object(shutil, "disk_usage", return_value=usage),
            self.assertRaisesRegex(OSError, "1,000 are free"),
        ):
            manager.save(1, make_state(1), METADATA)


# Orbax drops the other reads of a failed restore; Python reports them when it collects.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class FaultTest(ManagerTestCase):
    def tearDown(self):
        super().tearDown()
        gc.collect()

    @parameterized.parameters("truncated", "deleted", "zeroed", "emptied", "metadata")
    def test_an_unreadable_step_gives_way_to_the_one_before(self, fault):
        self.write_steps(1, 2)
        file = self.data_file(2)
        size = file.stat().st_size
        match fault:
            case "truncated":
                file.write_bytes(file.read_bytes()[: size // 2])
            case "deleted":
                file.unlink()
            case "zeroed":
                file.write_bytes(bytes(size))
            case "emptied":
                shutil.rmtree(self.step_folder(2))
                self.step_folder(2).mkdir()
            case "metadata":
                (self.step_folder(2) / "metadata" / "metadata").write_text("{")
        manager = self.open()
        step, state, _ = manager.restore(abstract(make_state(0)))
        self.assertEqual(step, 1)
        assert_same(state, make_state(1))
        manager.save(2, make_state(22), METADATA)
        manager.close()
        _, state, _ = self.open().restore(abstract(make_state(0)))
        assert_same(state, make_state(22))
        if fault != "emptied":
            self.assertTrue(self.step_folder("2.unreadable").exists())

    def test_a_named_step_does_not_fall_back(self):
        self.write_steps(1, 2)
        self.data_file(2).unlink()
        with self.assertRaisesRegex(Exception, "reading array"):
            self.open().restore(abstract(make_state(0)), step=2)

    def test_nothing_readable_left(self):
        self.write_steps(1)
        self.data_file(1).unlink()
        with self.assertRaisesRegex(RuntimeError, "none of the steps"):
            self.open().restore(abstract(make_state(0)))

    def test_unfinished_saves_are_removed(self):
        self.write_steps(1)
        unfinished = self.folder / "checkpoints" / "2.orbax-checkpoint-tmp"
        shutil.copytree(self.step_folder(1), unfinished)
        manager = self.open()
        self.assertEqual(manager.latest_step(), 1)
        manager.save(3, make_state(3), METADATA)  # waits for the removal
        self.assertFalse(unfinished.exists())


class InputTest(ManagerTestCase):
    def test_no_checkpoint(self):
        manager = self.open()
        self.assertIsNone(manager.latest_step())
        with self.assertRaisesRegex(config_lib.InputError, "no complete checkpoint"):
            manager.restore(abstract(make_state(0)))
        for folder in (self.folder, self.folder / "nowhere"):
            with self.assertRaisesRegex(config_lib.InputError, "no checkpoint in"):
                manager_lib.restore_params(folder, abstract(make_state(0)["params"]))

    def test_no_such_step(self):
        with self.assertRaisesRegex(config_lib.InputError, r"step 5 .*steps \[1, 2\]"):
            self.with_steps(1, 2).restore(abstract(make_state(0)), step=5)

    def test_another_model(self):
        manager = self.with_steps(1)
        other = make_state(0, width=16)
        message = (
            r"params\.w: \(32, 64\) there, \(16, 64\) here\n"
            r"(.*\n)*Use the config of the run that wrote it"
        )
        with self.assertRaisesRegex(config_lib.InputError, message):
            manager.restore(abstract(other))
        with self.assertRaisesRegex(config_lib.InputError, message):
            manager_lib.restore_params(self.folder, abstract(other["params"]))
        self.assertEqual(manager.latest_step(), 1)

    def test_missing_and_surplus_leaves(self):
        self.write_steps(1)
        params = abstract(make_state(0)["params"])
        params["new"] = params.pop("w")
        message = r"params\.new: absent there, \(32, 64\) here\n  params\.w: \(32, 64\)"
        with self.assertRaisesRegex(config_lib.InputError, message):
            manager_lib.restore_params(self.folder, params)

    def test_another_optimizer(self):
        manager = self.with_steps(1)
        state = make_state(0)
        state["opt_state"] = optax.trace(0.9).init(state["params"])
        with self.assertRaisesRegex(config_lib.InputError, r"opt_state.*absent"):
            manager.restore(abstract(state))

    def test_no_folder_can_be_made(self):
        (self.folder / "checkpoints").write_text("a file")
        with self.assertRaisesRegex(config_lib.InputError, "cannot write checkpoints"):
            manager_lib.CheckpointManager(self.folder, 3)


class RestoreParamsTest(ManagerTestCase):
    def test_from_run_checkpoints_and_step_folder(self):
        self.write_steps(1, 2)
        target = abstract(make_state(0)["params"])
        for folder, step in (
            (self.folder, 2),
            (self.folder / "checkpoints", 2),
            (self.step_folder(1), 1),
        ):
            params = manager_lib.restore_params(folder, target)
            assert_same(params, make_state(step)["params"])
            self.assertEqual(manager_lib.read_metadata(folder), METADATA)

    def test_reads_only_the_parameters(self):
        self.write_steps(1)
        with mock.patch.object(manager_lib, "_require_same_shapes") as check:
            manager_lib.restore_params(self.folder, abstract(make_state(0)["params"]))
        self.assertEqual(list(check.call_args.args[1]), ["params"])


if __name__ == "__main__":
    environment.main()
