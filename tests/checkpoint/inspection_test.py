"""Runs the checkpoint command: its output, deletions and exit codes."""

import contextlib
import io
import json
import pathlib
import re
import shutil
import subprocess
import sys
import time
import unittest
from unittest import mock

from absl import flags
from absl import logging as absl_logging
from absl.testing import flagsaver, parameterized
from etils import epath

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.checkpoint import __main__ as command
from glm5_jax.checkpoint import inspection, manifest, retention, step_folder
from tests import environment
from tests.checkpoint import faults_test

READ_ONLY = ("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc")
READ_ONLY += ("--ro-bind-try", "/dev/shm", "/dev/shm", "--")  # where tests may write


class CommandTest(faults_test.FaultsTestCase):
    def run_command(self, config=None, overrides=(), **given):
        """Runs the command; returns its exit code and its output."""
        out = io.StringIO()
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        given = {"checkpoint": str(self.folder)} | given
        with (
            flagsaver.flagsaver(**given),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
        ):
            code = command.main(
                command_line.Arguments(config=config, overrides=overrides)
            )
        return code, out.getvalue()

    def rows(self, **given):
        """Returns the exit code and the line of each folder."""
        code, text = self.run_command(**given)
        lines = [line for line in text.splitlines()[1:] if "error" not in line]
        return code, {line.split()[0]: line for line in lines}

    def test_lists(self):
        self.write_steps(3, metadata={"metrics": {"eval/bits_per_byte": 2.5}})
        (self.step_folder(1) / manifest.NAME).unlink()
        shutil.copytree(self.step_folder(1), self.step_folder("0.damaged"))
        code, rows = self.rows()
        self.assertEqual(code, 0)
        self.assertEqual([*rows], ["1", "2", "3", "0.damaged"])
        self.assertRegex(rows["1"], r"1 +\d.* kB +\d+ s +no manifest")
        self.assertRegex(rows["2"], "sizes match")
        self.assertRegex(rows["3"], "bits_per_byte 2.5 +sizes match")
        self.assertRegex(rows["0.damaged"], "set aside")

    def test_only_verify_sees_a_flipped_bit(self):
        faults_test.flip(faults_test.largest(self.step_folder(2)))
        self.assertEqual(self.rows()[0], 0)
        code, rows = self.rows(verify=True)
        self.assertEqual(code, 1)
        self.assertRegex(rows["1"], r"verified, \d+\.\d\d GB/s")
        self.assertIn("DAMAGED", rows["2"])
        self.assertIn("other content", self.run_command(verify=True)[1])
        one = str(self.step_folder(1))
        self.assertEqual(self.rows(verify=True, checkpoint=one)[0], 0)
        self.assertEqual(self.names(), ["1", "2"])  # nothing was changed

    @parameterized.parameters("truncated", "manifest_without_files", "no_metadata")
    def test_the_list_sees_missing_files(self, name):
        faults_test.DAMAGE[name](self.step_folder(2))
        code, rows = self.rows()
        self.assertEqual(code, 1)
        self.assertIn("DAMAGED", rows["2"])

    def test_rolls_back(self):
        self.write_steps(3, 4, keep=9)
        code, text = self.run_command(roll_back=2)
        self.assertEqual(code, 0)
        self.assertIn("steps [3, 4]", text)
        self.assertIn("from step 2, with batch 4.", text)
        code, text = self.run_command(roll_back=2, leave_out=5)
        self.assertEqual(
            (code, text), (0, "The run resumes from step 2, with batch 7.\n")
        )

    def test_rolls_back_and_skips_no_batch(self):
        _, text = self.run_command(roll_back=1, leave_out=0)
        self.assertIn("from step 1, with batch 1.", text)

    def test_prune_deletes_when_told_to(self):
        self.write_steps(3, 4, keep=9)
        shutil.copytree(self.step_folder(1), self.step_folder("0.damaged"))
        before = self.names()
        code, text = self.run_command(prune=True, keep=2)
        self.assertEqual(code, 0)
        self.assertIn("3 folders can be deleted; --yes deletes them.", text)
        self.assertNotIn("DAMAGED", text)
        self.assertRegex(text, r"\n +2 .* sizes match\n0\.damaged .* set aside\n")
        self.assertEqual(self.names(), before)
        code, text = self.run_command(prune=True, keep=2, yes=True)
        self.assertEqual(code, 0)
        self.assertEndsWith(text, "\nDeleted 3 folders.\n")
        self.assertEqual(self.names(), ["3", "4"])
        self.assertEqual(self.restored(), 4)

    def test_prune_keeps_to_the_runs_rule(self):
        config = {"checkpoints_to_keep": 1, "checkpoints_keep_every": 2, "stage": "rl"}
        (self.folder / "config.json").write_text(json.dumps(config))
        rule = inspection.rule_of(inspection.checkpoints_of(self.folder))
        want = retention.Retention(
            newest=1, every=2, metric="eval/success", is_lower_better=False
        )
        self.assertEqual(rule, want)
        self.write_steps(3)
        self.run_command(prune=True, yes=True)
        self.assertEqual(self.names(), ["2", "3"])

    def test_nothing_is_pruned_if_the_step_to_keep_is_damaged(self):
        faults_test.flip(faults_test.largest(self.step_folder(2)))
        with self.assertRaisesRegex(config_lib.DamagedError, "Nothing was deleted"):
            self.run_command(prune=True, keep=1, yes=True)
        self.assertEqual(self.names(), ["1", "2"])

    def test_nothing_is_pruned_without_a_manifest(self):
        self.remove_manifests(1, 2)
        with self.assertRaisesRegex(config_lib.InputError, "no step .* manifest"):
            self.run_command(prune=True, keep=1, yes=True)
        self.assertEqual(self.names(), ["1", "2"])

    def test_prune_keeps_folders_that_are_not_steps(self):
        for name in ("0", "2020"):
            (self.checkpoints / name).mkdir()
            (self.checkpoints / name / "photo.jpg").write_text("precious")
        self.run_command(prune=True, keep=1, yes=True)
        self.assertEqual(self.names(), ["0", "2", "2020"])

    @parameterized.named_parameters(
        ("nowhere", {"checkpoint": "/nowhere"}, "no checkpoint in /nowhere"),
        ("object_store", {"checkpoint": "az://bucket/run"}, "no path of a file system"),
        (
            "prune_nowhere",
            {"checkpoint": "/nowhere", "prune": True},
            "not a run folder",
        ),
        (
            "prune_in_a_bucket",
            {"checkpoint": "gs://bucket/run", "prune": True, "keep": 1},
            "needs --yes",
        ),
        ("no_rule", {"prune": True}, "give --keep=N"),
        ("keep_none", {"prune": True, "keep": 0}, "--keep must be at least 1"),
        ("keep_alone", {"keep": 1}, "need --prune"),
        ("leave_out_alone", {"leave_out": 1}, "needs --roll_back"),
        ("config", {"config": "configs/x.py"}, "--config has no effect"),
        ("override", {"overrides": (("config.seed", "1"),)}, "--config has no effect"),
        ("yes_alone", {"yes": True}, "need --prune"),
        ("both", {"verify": True, "prune": True}, "only one of"),
    )
    def test_wrong_input(self, given, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            self.run_command(**given)
        self.assertEqual(self.names(), ["1", "2"])

    @unittest.skipIf(shutil.which("bwrap") is None, "needs bubblewrap")
    def test_a_read_only_disk_is_named_in_one_line(self):
        line = r"error: .*Read-only file system.*\n$"
        for words in (["--roll_back=1"], ["--prune", "--keep=1", "--yes"]):
            command = [sys.executable, "-m", "glm5_jax.checkpoint", *words]
            found = subprocess.run(
                [*READ_ONLY, *command, f"--checkpoint={self.folder}"],
                capture_output=True,
                text=True,
                check=False,
            )
            self.assertEqual(found.returncode, 2, found.stderr)
            self.assertRegex(found.stderr, line)
            self.assertNotIn("Traceback", found.stderr)
            self.assertEqual(self.names(), ["1", "2"])

    def test_a_checkpoint_must_be_named(self):
        with self.assertRaisesRegex(flags.IllegalFlagValueError, "--checkpoint"):
            self.run_command(checkpoint=None)

    def test_a_step_that_a_running_job_has_deleted_is_no_row(self):
        folders = [epath.Path(self.step_folder(n)) for n in (1, 7)]
        (row,) = inspection.describe(folders)
        self.assertEqual((row.folder, row.status), (folders[0], "sizes match"))

    @parameterized.parameters("missing", "require_number")
    def test_a_step_that_is_deleted_while_it_is_described_is_no_row(self, name):
        look = getattr(step_folder, name)

        def late(folder):
            if folder.name == "1" and folder.exists():
                step_folder.remove(folder)
            return look(folder)

        steps = [epath.Path(self.step_folder(step)) for step in (1, 2)]
        with mock.patch.object(step_folder, name, late):
            (row,) = inspection.describe(steps, is_verified=True)
        self.assertEqual((row.folder.name, row.problem), ("2", ""))

    def test_the_metadata_must_be_of_the_step(self):
        self.remove_manifests(2)
        (self.step_folder(2) / "metadata" / "metadata").write_text('{"step": 1}')
        code, text = self.run_command()
        self.assertEqual(code, 1)
        self.assertIn("2 holds step 1, not step 2", text)

    def test_one_step_cannot_be_pruned(self):
        one = str(self.step_folder(1))
        with self.assertRaisesRegex(config_lib.InputError, "not a run folder"):
            self.run_command(checkpoint=one, prune=True, keep=1)

    def test_sizes_in_words(self):
        sizes = [inspection.bytes_text(x) for x in (0, 999, 1000, 9330000, 89 * 10**11)]
        self.assertEqual(sizes, ["0 B", "999 B", "1 kB", "9.33 MB", "8.9 TB"])


class TableTest(parameterized.TestCase):
    def row(self, **changes):
        """Returns a row of step 7, 2 s old."""
        row = inspection.Row(epath.Path("/run/checkpoints/7"), 5, 2.0, {}, "fine")
        return row._replace(**changes)

    @parameterized.parameters(
        (-1.0, "0 s"),
        (0.0, "0 s"),
        (119.0, "119 s"),
        (120.0, "2 min"),
        (7199.0, "120 min"),
        (7200.0, "2 h"),
        (172_799.0, "48 h"),
        (172_800.0, "2 d"),
    )
    def test_an_age_is_told_in_a_larger_unit_from_two_of_them_on(self, age, want):
        line = inspection.table([self.row(age=age)]).splitlines()[1]
        self.assertRegex(line, f"  5 B +{want} +fine$")

    def test_columns(self):
        """Numbers are on the right, words on the left, with two metrics at most."""
        metrics = {"eval/loss": 2.34567, "accuracy": 0.5, "eval/other": 1}
        rows = [
            self.row(metrics=metrics, status="DAMAGED", problem="7 is bad."),
            self.row(folder=epath.Path("/run/checkpoints/1000"), size=12_345, age=9e4),
        ]
        self.assertEqual(
            inspection.table(rows),
            "step     size   age  evaluation                status\n"
            "   7      5 B   2 s  loss 2.346, accuracy 0.5  DAMAGED\n"
            "1000  12.3 kB  25 h                            fine\n"
            "error: 7 is bad.",
        )

    def test_the_rate_of_a_verification_is_that_of_its_bytes(self):
        folder = pathlib.Path(self.create_tempdir()) / "checkpoints" / "7"
        files = {
            "params/_METADATA": "",
            "metadata/metadata": '{"step": 7}',
            "_CHECKPOINT_METADATA": "",
        }
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        with (folder / "more").open("wb") as file:
            file.truncate(2**24)
        manifest.seal(epath.Path(folder))
        began = time.perf_counter()
        with self.assertLogs(absl_logging.get_absl_logger(), "INFO") as logs:
            (row,) = inspection.describe([epath.Path(folder)], is_verified=True)
        seconds = time.perf_counter() - began
        rate = float(row.status.removeprefix("verified, ").removesuffix(" GB/s"))
        self.assertGreater(rate, 2**24 / seconds / 1e9 - 0.01)
        self.assertLess(rate, 100)
        (line,) = [line for line in logs.output if "Hashed" in line]
        said = float(re.search(r"in ([0-9.]+) s, ", line)[1])
        self.assertLess(said, seconds + 0.001)


if __name__ == "__main__":
    environment.main()
