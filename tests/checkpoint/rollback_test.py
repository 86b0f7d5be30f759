"""Rolls runs back by hand: steps set aside, rollback.json, refusals."""

import json
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import manifest, rollback, step_folder
from tests import environment
from tests.checkpoint import faults_test


class ByHandTest(faults_test.FaultsTestCase):
    def setUp(self):
        super().setUp()
        # Earlier rollbacks skipped five batches.
        for step in (3, 4):
            self.write_steps(step, keep=9, metadata={"position": step + 5})

    @parameterized.named_parameters(
        ("up_to_the_newest", 3, None, 6, [4]),
        ("none", 3, 0, 5, [4]),
        ("some", 3, 40, 45, [4]),
        ("of_an_earlier_version", 2, None, 7, [3, 4]),
        ("the_newest", 4, 1, 6, []),
    )
    def test_skips_batches(self, step, given, num_left_out, later):
        made, aside = rollback.by_hand(self.folder, step, given)
        self.assertEqual(aside, later)
        self.assertEqual(made, rollback.Rollback(step, num_left_out, None))
        self.assertEqual(made.position, step + num_left_out)
        self.assertEqual(rollback.read(self.folder), made)
        kept = [str(n) for n in range(1, step + 1)]
        self.assertEqual(
            self.names(), sorted([*kept, *map("{}.abandoned".format, later)])
        )

    @parameterized.named_parameters(
        ("of_the_run", 4, 40, 2, 42),
        ("of_a_step_that_is_gone", 7, 40, 2, 7),
        ("before_a_newer_step", 3, 5, 2, 7),
    )
    def test_batches_that_the_last_rollback_skipped_stay_skipped(
        self, step, left_out, back_to, num_left_out
    ):
        rollback.write(self.folder, rollback.Rollback(step, left_out, None))
        made, _ = rollback.by_hand(self.folder, back_to)
        self.assertEqual(made, rollback.Rollback(back_to, num_left_out, None))

    def test_rolls_back_by_hand_twice(self):
        first, _ = rollback.by_hand(self.folder, 3)
        second, _ = rollback.by_hand(self.folder, 2)
        self.assertEqual(second.position, first.position)

    def test_a_damaged_rollback_json_is_an_error(self):
        rollback.by_hand(self.folder, 3)
        path = self.folder / "rollback.json"
        whole = path.read_bytes()
        self.assertIn(b'"num_left_out": 6', whole)
        flipped = [bytearray(whole) for _ in whole]
        for i, content in enumerate(flipped):
            content[i] ^= 1
        for content in (b"", b"[]", b"\0" * 9, whole[:-9], *flipped):
            path.write_bytes(content)
            try:
                note = rollback.read(self.folder)
            except config_lib.DamagedError as error:
                self.assertIn("--roll_back=STEP", str(error))
            else:  # only whitespace changed
                self.assertEqual(note.num_left_out, 6)
                self.assertEqual(json.loads(content), json.loads(whole))
        # An editor may change the order of the keys.
        path.write_text(json.dumps(dict(reversed(json.loads(whole).items()))))
        self.assertEqual(rollback.read(self.folder).num_left_out, 6)
        path.write_text('{"step": 3, "num_left_out": 7, "health": null}')
        self.assertEqual(rollback.read(self.folder), rollback.Rollback(3, 7, None))

    def test_a_killed_rollback_can_be_repeated(self):
        with (
            mock.patch.object(step_folder, "set_aside", side_effect=KeyboardInterrupt),
            self.assertRaises(KeyboardInterrupt),
        ):
            rollback.by_hand(self.folder, 2)
        made, aside = rollback.by_hand(self.folder, 2)
        self.assertEqual((made.num_left_out, aside), (7, [3, 4]))

    @parameterized.named_parameters(
        ("no_step", 7, "no step 7 with a manifest .* one of \\[2, 3, 4\\]"),
        ("unproven", 1, "no step 1 with a manifest"),
        ("newest", 4, "step 4 is already the newest"),
    )
    def test_refusals(self, step, message):
        (self.step_folder(1) / manifest.NAME).unlink()
        with self.assertRaisesRegex(config_lib.InputError, message):
            rollback.by_hand(self.folder, step)
        self.assertEqual(self.names(), ["1", "2", "3", "4"])
        self.assertIsNone(rollback.read(self.folder))

    def test_refuses_a_damaged_step(self):
        faults_test.flip(faults_test.largest(self.step_folder(2)))
        with self.assertRaises(config_lib.DamagedError):
            rollback.by_hand(self.folder, 2)
        self.assertEqual(self.names(), ["1", "2", "3", "4"])

    def test_refuses_to_count_batches_by_a_step_of_another_number(self):
        metadata = self.step_folder(4) / "metadata" / "metadata"
        metadata.write_text('{"step": 3}')
        with self.assertRaisesRegex(config_lib.DamagedError, "4 holds step 3"):
            rollback.by_hand(self.folder, 2)
        metadata.unlink()
        with self.assertRaisesRegex(config_lib.DamagedError, "--leave_out=N .* step 2"):
            rollback.by_hand(self.folder, 2)
        self.assertEqual(self.names(), ["1", "2", "3", "4"])
        made, _ = rollback.by_hand(self.folder, 2, 3)
        self.assertEqual(made.position, 2 + 3)


if __name__ == "__main__":
    environment.main()
