"""Manifests of folders made by hand: shares, messages, names of steps."""

import errno
import hashlib
import json
import os
import pathlib
from unittest import mock

from absl.testing import parameterized
from etils import epath

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import manager, manifest, step_folder
from tests import environment

OTHERS = "params/ocdbt.process_1/d"  # of process 1
SHA_123 = hashlib.sha256(b"123").hexdigest()


class ManifestTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        run = epath.Path(self.create_tempdir().full_path)
        self.checkpoints = run / "checkpoints"
        self.run = run

    def write(self, name="7", sizes=(), metadata=None, is_sealed=True):
        """Writes a complete step folder with files of some sizes in state/."""
        folder = self.checkpoints / name
        for part in ("params", "metadata", "state"):
            (folder / part).mkdir(parents=True)
        (folder / "params" / "_METADATA").write_text("")
        (folder / "_CHECKPOINT_METADATA").write_text("")
        text = json.dumps(metadata or {"step": int(name)})
        (folder / "metadata" / "metadata").write_text(text)
        for i, size in enumerate(sizes):
            (folder / "state" / str(i)).write_bytes(bytes(size))
        if is_sealed:
            manifest.seal(folder)
        return folder

    @parameterized.parameters((0, 1), (1, 1), (5, 5), (6, 6), (8, 8))
    def test_a_message_names_five_files(self, count, size):
        folder = self.write(sizes=[size] * 9)
        for i in range(count):
            (folder / "state" / str(i)).unlink()
        if not count:
            self.assertGreater(manifest.verify(folder), 9)
            return
        named = [f"state/{i}: missing" for i in range(min(count, 5))]
        with self.assertRaises(config_lib.DamagedError) as caught:
            manifest.verify(folder)
        want = f"differs from its manifest in {count} of 12 files: {'; '.join(named)}"
        self.assertEndsWith(str(caught.exception), want + "; ..." * (count > 5) + ".")

    def test_files_are_shared_by_their_bytes_the_largest_first(self):
        folder = self.write(sizes=[500, 400, 300, 300, 100])
        rest = sum(path.stat().length for path in (folder / "metadata").iterdir())
        shares = [manifest.verify(folder, (), i, 2) for i in range(2)]
        self.assertEqual(shares, [800 + rest, 800])
        self.assertEqual(manifest.verify(folder), 1600 + rest)
        self.assertEqual(manifest.verify(folder, ["state"]), rest)
        self.assertEqual(manifest.verify(folder, ["state", "metadata"]), 0)

    def seal_with_two_writers(self, parts=()):
        """Seals a step with a file of process 1; returns it and the lists of hashes."""
        folder, given = self.write(sizes=[5], is_sealed=False), []
        (folder / "params" / "ocdbt.process_1").mkdir()
        (folder / OTHERS).write_text("123")
        manifest.seal(folder, gather=lambda text: given.append(text) or [text, *parts])
        return folder, [*map(json.loads, given)]

    @parameterized.parameters(
        ([], SHA_123),  # its writer did not see it
        ([{OTHERS: [2, "early"]}], SHA_123),  # it grew after its writer saw it
        ([{OTHERS: [3, "ours"]}], "ours"),  # in its writer's memory
    )
    def test_a_file_is_hashed_by_its_writer_if_that_saw_it_whole(self, parts, want):
        folder, (ours,) = self.seal_with_two_writers(map(json.dumps, parts))
        self.assertEqual(
            {*ours},
            {"params/_METADATA", "_CHECKPOINT_METADATA", "metadata/metadata"}
            | {"state/0"},
        )
        entries = manifest.read(folder)
        self.assertEqual({*entries}, {*ours, OTHERS})
        self.assertEqual(entries[OTHERS], (3, want))

    def test_process_0_syncs_what_the_others_did_not_see(self):
        synced = []
        note = lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        with mock.patch.object(os, "fsync", note):
            folder, _ = self.seal_with_two_writers()
        self.assertContainsSubset(
            [str(folder / OTHERS), str((folder / OTHERS).parent)], synced
        )

    def test_only_process_0_writes_the_manifest(self):
        folder, given = self.write(sizes=[5], is_sealed=False), []
        manifest.seal(folder, 1, lambda text: given.append(text) or [])
        self.assertEqual(given, ["{}"])
        self.assertFalse(manifest.is_sealed(folder))

    def test_verifying_writes_nothing_to_the_disk(self):
        folder = self.write(sizes=[5])
        with mock.patch.object(os, "fsync", side_effect=AssertionError):
            self.assertGreater(manifest.verify(folder), 5)

    @parameterized.parameters(
        {"version": 2, "hash": "sha256", "step": 7}, {"version": 1, "hash": "sha256"}
    )
    def test_manifests_of_both_formats_are_read(self, **head):
        folder = self.write(sizes=[3], is_sealed=False)
        entries = {"state/0": [3, hashlib.sha256(bytes(3)).hexdigest()]}
        content = {**head, "files": entries}
        own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        text = json.dumps(content | {"checksum": own}, indent=1) + "\n"
        (folder / manifest.NAME).write_text(text)
        self.assertEqual(manifest.verify(folder), 3)

    def test_each_process_finds_the_damage_of_its_share(self):
        folder = self.write(sizes=[500, 400])
        (folder / "state" / "1").write_bytes(b"x" * 400)
        self.assertEqual(manifest.verify(folder, (), 0, 2), 500)
        for arguments in ((folder,), (folder, (), 1, 2)):
            with self.assertRaisesRegex(config_lib.DamagedError, "1: other content"):
                manifest.verify(*arguments)

    @parameterized.parameters(
        ("0", 0),
        ("7", 7),
        ("10", 10),
        ("9" * 18, 10**18 - 1),
        ("1" + "0" * 18, None),
        ("07", None),
        ("00", None),
        ("-1", None),
        ("7.damaged", None),
        ("", None),
    )
    def test_names_of_steps(self, name, want):
        self.assertEqual(manifest.number_of(name), want)

    def test_whole_steps_are_those_that_prove_themselves(self):
        self.write("7", [3])
        self.write("8", [3], is_sealed=False)
        (self.write("9", [3]) / "state" / "0").write_bytes(b"abc")
        self.write("10", metadata={"step": 7})
        self.write("11", metadata={"step": 11, "position": 10})
        (self.write("12") / "_CHECKPOINT_METADATA").unlink()
        found = [n for n in range(6, 14) if step_folder.is_whole(self.run, n)]
        self.assertEqual(found, [7])

    def test_folders_are_set_aside_under_new_names(self):
        names = []
        for _ in range(3):
            folder = self.write("7")
            names.append(step_folder.set_aside(folder, step_folder.DAMAGED).name)
        self.assertEqual(names, ["7.damaged", "7.damaged.2", "7.damaged.3"])
        aside = step_folder.all_set_aside(self.checkpoints, step_folder.DAMAGED)
        self.assertEqual([path.name for path in aside], names)
        self.assertEqual(step_folder.all_set_aside(self.checkpoints, "deleting"), [])
        step_folder.remove(aside[1])
        left = sorted(path.name for path in self.checkpoints.iterdir())
        self.assertEqual(left, ["7.damaged", "7.damaged.3"])

    def test_a_link_is_removed_and_its_target_stays(self):
        folder = self.write("7", [3])
        for name in ("8", "8.damaged"):
            link = pathlib.Path(self.checkpoints / name)
            link.symlink_to(folder)
            step_folder.remove(epath.Path(link))
        self.assertEqual([path.name for path in self.checkpoints.iterdir()], ["7"])
        self.assertTrue(step_folder.is_whole(self.run, 7))

    def test_a_bucket_may_drop_a_folder_with_its_last_file(self):
        folder, rmdir = self.write("7", [3, 4]), os.rmdir

        def dropped(path, **where):
            rmdir(path, **where)
            raise FileNotFoundError(errno.ENOENT, "dropped", path)

        with mock.patch.object(os, "rmdir", dropped):
            step_folder.remove(folder)
        self.assertEqual([*self.checkpoints.iterdir()], [])

    def test_a_folder_that_cannot_be_deleted_is_told(self):
        folder = self.write("7", [3])
        error = PermissionError(errno.EPERM, "not yours")
        with (
            mock.patch.object(os, "unlink", side_effect=error),
            self.assertRaisesRegex(PermissionError, "not yours"),
        ):
            step_folder.remove(folder)
        names = [path.name for path in self.checkpoints.iterdir()]
        self.assertEqual(names, ["7.deleting"])

    @parameterized.parameters((400, 400), (401, 405), (9000, 405))
    def test_long_errors_keep_their_beginning_and_their_end(self, size, want):
        text = "".join(chr(0x4E00 + i) for i in range(size))
        got = manager._short(ValueError(text))
        self.assertLen(got, want)
        self.assertEqual((got[:150], got[-250:]), (text[:150], text[-250:]))


if __name__ == "__main__":
    environment.main()
