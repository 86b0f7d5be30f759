"""Copies on hosts: whole or of no use, never of another branch of the run."""

import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import host_copies, replicas, rollback, shard_file
from tests import environment

METADATA = {"position": 7}


def state_of(step, mesh):
    """Returns a state with every kind of number, sharded, replicated and cut once."""
    rng = np.random.default_rng(step)
    w = rng.normal(size=(8, 6)).astype(np.float32)
    w[0, :2] = -0.0, 0.0
    values = {
        "params": {"w": w, "half": jnp.asarray(w, jnp.bfloat16), "one": np.float32(3)},
        "counts": (rng.integers(-9, 9, (4, 2), np.int32), w > 0),
    }
    places = {
        "params": {"w": P("fsdp"), "half": P(None, "tensor"), "one": P()},
        "counts": (P(("fsdp", "tensor")), P()),
    }
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), values, places
    )


def bits(state):
    return jax.tree.map(lambda x: np.asarray(x).tobytes(), state)


class HostCopiesTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.run_folder = pathlib.Path(self.create_tempdir("run").full_path)
        self.host = pathlib.Path(self.create_tempdir("host").full_path)
        self.mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))

    def open(self):
        copies = host_copies.HostCopies(self.run_folder, str(self.host))
        self.addCleanup(copies.close)
        return copies

    def saved(self, *steps):
        copies = self.open()
        for step in steps:
            copies.save(step, state_of(step, self.mesh), METADATA)
        copies.close()

    def restored(self, newer_than=0):
        """Returns the step, or None; the state must be that of the step."""
        abstract = state_of(0, self.mesh)
        found = self.open().restore(abstract, newer_than)
        if found is None:
            return None
        step, state, metadata = found
        self.assertEqual(metadata, METADATA)
        self.assertEqual(bits(state), bits(state_of(step, self.mesh)))
        places = [
            jax.tree.map(lambda x: x.sharding, each) for each in (state, abstract)
        ]
        self.assertEqual(*places)
        return step

    def files(self):
        return sorted(self.host.rglob("*.shards"))

    def steps(self):
        return [int(path.parent.name.partition("-")[0]) for path in self.files()]

    def test_the_newest_comes_back_bit_for_bit(self):
        self.saved(10, 20)
        self.assertEqual(self.restored(), 20)
        self.assertEqual(self.restored(newer_than=19), 20)
        self.assertIsNone(self.restored(newer_than=20))

    def test_it_is_copied_before_the_state_is_donated(self):
        copies, state = self.open(), state_of(5, self.mesh)
        copies.save(5, state, METADATA)
        jax.jit(lambda x: jax.tree.map(lambda y: y * 0, x), donate_argnums=0)(
            state["params"]
        )
        copies.close()
        self.assertEqual(self.restored(), 5)

    def test_older_ones_go_once_all_have_the_next(self):
        self.saved(10, 20, 30)
        self.assertEqual(self.steps(), [20, 30])
        self.assertEqual(self.restored(newer_than=10), 30)
        self.assertEqual(self.steps(), [30])

    def test_a_start_again_needs_no_more_room(self):
        """Nor does one whose process has another number leave anything behind."""
        self.saved(10, 20)
        for path in self.files():
            path.rename(path.with_name("7.shards"))
        copies = self.open()
        self.assertEqual(copies.restore(state_of(0, self.mesh), newer_than=0)[0], 20)
        copies.save(30, state_of(30, self.mesh), METADATA)
        copies.wait()
        self.assertEqual(self.steps(), [30])
        copies.drop()
        self.assertEmpty([*self.host.iterdir()])

    def test_two_starts_that_reach_a_step_are_not_mixed(self):
        """The first one's half of step 30 and the second one's are two copies."""
        whole = self.cut_files(30, self.mesh)
        self.open()  # another start, on which a process finished its half, too
        self.assertLen({path.parent for path in whole}, 1)
        other = whole[1].parent.with_name("30-5")
        other.mkdir()
        whole[1].rename(other / whole[1].name)
        self.assertIsNone(self.restored())

    def cut_files(self, step, mesh):
        """Saves a copy as two processes would, each with half of the leaves."""
        self.saved(step)
        (file,) = self.files()
        held = shard_file.ShardFile(file)
        parts = shard_file.own_parts(state_of(step, mesh))
        for number, names in enumerate(([*parts][:2], [*parts][2:])):
            half = {name: parts[name] for name in names}
            path = file.with_name(f"{number}.shards")
            shard_file.write(path, step, held.metadata, half)
        return self.files()

    def test_a_renamed_copy_is_not_read(self):
        self.saved(10)
        folder = self.files()[0].parent
        folder.rename(folder.with_name(folder.name.replace("10-", "20-")))
        with self.assertLogs(level="ERROR") as logs:
            self.assertIsNone(self.restored())
        self.assertIn("it holds step 10", "".join(logs.output))

    def test_files_of_several_processes_are_one_copy(self):
        self.cut_files(30, self.mesh)
        self.assertEqual(self.restored(), 30)

    def test_a_damaged_part_is_read_from_another_process_of_the_host(self):
        self.saved(10)
        content = bytearray(self.files()[0].read_bytes())
        self.files()[0].with_name("1.shards").write_bytes(content)
        content[-1] ^= 1
        self.files()[0].write_bytes(content)
        with self.assertLogs(level="ERROR"):
            self.assertEqual(self.restored(), 10)

    def test_another_cut_of_the_state_is_not_read(self):
        self.saved(10)
        self.mesh = jax.make_mesh((4, 1, 2), ("data", "fsdp", "tensor"))
        self.assertIsNone(self.restored())

    def test_fewer_replicas_read_the_same(self):
        self.saved(10)
        devices = self.mesh.devices[:1]
        self.mesh = Mesh(devices, ("data", "fsdp", "tensor"))
        self.assertEqual(self.restored(), 10)

    @parameterized.named_parameters(
        ("header", 60), ("length", 0), ("part", -1), ("cut", None)
    )
    def test_a_damaged_one_is_not_read(self, place):
        self.saved(10, 20)
        content = bytearray(self.files()[1].read_bytes())
        if place is None:
            del content[-4:]
        else:
            content[place] ^= 1
        self.files()[1].write_bytes(content)
        with self.assertLogs(level="ERROR") as logs:
            self.assertEqual(self.restored(), 10)
        self.assertIn("CANNOT BE READ", "".join(logs.output))

    def test_one_that_is_not_finite_is_not_taken(self):
        self.saved(10)
        copies, state = self.open(), state_of(20, self.mesh)
        state["params"]["one"] = state["params"]["one"] * np.nan
        copies.save(20, state, METADATA)
        copies.close()
        self.assertEqual(self.restored(), 10)

    def test_a_process_that_is_killed_leaves_no_copy(self):
        self.saved(10)
        whole = self.files()[0]
        unfinished = whole.parent.with_name("20-77") / ".0-abc.shards"
        unfinished.parent.mkdir()
        unfinished.write_bytes(whole.read_bytes()[:300])
        self.assertEqual(self.restored(), 10)
        self.assertFalse(unfinished.exists())

    def test_a_full_disk_costs_the_copy_and_not_the_run(self):
        copies = self.open()
        copies.save(10, state_of(10, self.mesh), METADATA)
        copies.wait()
        full = mock.patch.object(shard_file, "write", side_effect=OSError("full"))
        with full, self.assertLogs(level="ERROR") as logs:
            copies.save(20, state_of(20, self.mesh), METADATA)
            copies.save(30, state_of(30, self.mesh), METADATA)
            copies.wait()
        self.assertIn("STEP 20 HAS NO COPY ON THIS HOST: full", logs.output[0])
        self.assertEqual(self.restored(), 10)

    def test_a_rollback_makes_them_worthless(self):
        self.saved(10)
        rollback.write(self.run_folder, rollback.Rollback(4, 2, None))
        self.assertIsNone(self.restored())
        self.assertEmpty(self.files())

    def test_so_does_another_run_in_the_same_place(self):
        self.saved(10)
        (self.run_folder / "lineage").unlink()
        self.assertIsNone(self.restored())

    def test_other_runs_keep_theirs(self):
        self.saved(10)
        other = self.create_tempdir("other").full_path
        host_copies.HostCopies(pathlib.Path(other), str(self.host)).close()
        self.assertEqual(self.restored(), 10)

    def test_dropped_ones_are_gone(self):
        self.saved(10)
        copies = self.open()
        copies.drop()
        self.assertEmpty([*self.host.iterdir()])
        copies.save(12, state_of(12, self.mesh), METADATA)
        copies.close()
        self.assertEqual(self.restored(), 12)

    def test_another_model_has_none(self):
        self.saved(10)
        abstract = state_of(0, self.mesh)
        abstract["params"]["more"] = abstract["params"]["w"]
        self.assertIsNone(self.open().restore(abstract, newer_than=0))

    def test_a_folder_that_cannot_be_written_is_refused(self):
        with self.assertRaisesRegex(
            config_lib.InputError, "host_copy_folder='/proc/x'"
        ):
            host_copies.HostCopies(self.run_folder, "/proc/x")
        with self.assertRaisesRegex(config_lib.InputError, "that is not set"):
            host_copies.HostCopies(self.run_folder, "/tmp/$NO_SUCH_VARIABLE/x")


class ReplicasTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))

    def test_every_replica_gets_the_chosen_shards(self):
        """The others hold ones before; places along fsdp have sources of their own."""
        want = state_of(1, self.mesh)
        chosen = np.zeros((2, 2, 2), bool)
        chosen[0, 0], chosen[1, 1] = True, True
        right = {d.id for d in self.mesh.devices[chosen]}

        def broken(leaf):
            parts = [
                shard.data
                if shard.device.id in right
                else jax.device_put(np.ones_like(shard.data), shard.device)
                for shard in leaf.addressable_shards
            ]
            return jax.make_array_from_single_device_arrays(
                leaf.shape, leaf.sharding, parts
            )

        state = replicas.spread(jax.tree.map(broken, state_of(1, self.mesh)), chosen)
        for leaf, whole in zip(*map(jax.tree.leaves, (state, want)), strict=True):
            self.assertEqual(leaf.sharding, whole.sharding)
            for shard in leaf.addressable_shards:
                part = np.asarray(whole)[shard.index]
                self.assertEqual(np.asarray(shard.data).tobytes(), part.tobytes())

    def test_a_source_is_one_replica_of_each_place(self):
        devices = np.array(
            [[mock.Mock(process_index=2 * i + j) for j in range(2)] for i in range(3)]
        )
        mesh = mock.Mock(spec=Mesh, devices=devices, axis_names=("data", "fsdp"))
        for has, want in (
            ([True] * 6, [[1, 1], [0, 0], [0, 0]]),
            ([False, True, True, False, True, True], [[0, 1], [1, 0], [0, 0]]),
        ):
            np.testing.assert_array_equal(replicas.sources(mesh, has), want)
        lost = [True, False, True, False, True, False]
        self.assertIsNone(replicas.sources(mesh, lost))


if __name__ == "__main__":
    environment.main()
