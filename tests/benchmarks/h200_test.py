"""The run of all kernels on a card: what crashes, hangs or fails costs its own row."""

import fcntl
import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

import pytest
from absl.testing import absltest

from tests import environment

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import h200  # noqa: E402
import h200_rows  # noqa: E402

from pallas_kernels.bench import measure  # noqa: E402

# A child that measures nothing, and does what FAULTS says of a row.
CHILD = """
import json, os, pathlib, sys, time
out, *names = [a for a in sys.argv[1:] if a != "--small"]
faults = json.loads(os.environ["FAULTS"])
for name in names:
    path, fault = pathlib.Path(out, "rows", name + ".json"), faults.get(name)
    path.write_text(json.dumps({"median_ms": 1.0}))
    if fault == "crash":
        os.abort()
    if fault == "hang":
        pathlib.Path(os.environ["PALLAS_BENCH_CARD"]).write_text(str(os.getpid()))
        time.sleep(100)
    if fault == "slow":  # and waits for another one that is
        pathlib.Path(out, f"slow_{os.getpid()}").touch()
        while len([*pathlib.Path(out).glob("slow_*")]) < 2:
            time.sleep(0.01)
        time.sleep(3.3)
    found = {"median_ms": 1.0, "is_done": True}
    found |= {"failure": "RuntimeError: an illegal address"} if fault == "raise" else {}
    path.write_text(json.dumps(found))
    print(name, *["again"] * (fault == "raise"), sep="\\n", flush=True)
    if fault == "raise":
        sys.exit(1)
"""
# Imports a script and a module of a site folder; prints where it looks first.
LOAD = """
import runpy, sys
runpy.run_path(sys.argv[1], run_name="loaded")
import only_there
print(sys.path[0])
"""
TIMES = (
    "time+sparse_mla+64+fwd+",
    "time+sparse_mla+64+bwd+",
    "time+sparse_mla+64+det+",
)
NEXT = "time+dense_attention+64+fwd+"


class PlanTest(absltest.TestCase):
    def test_values_go_before_times_and_ours_before_others(self):
        rows = h200_rows.plan(is_small=False)
        self.assertLen(set(rows), len(rows))
        phases = [h200_rows.PHASES.index(row.phase) for row in rows]
        self.assertEqual(phases, sorted(phases))
        for row in rows:
            self.assertEqual(h200_rows.Row.named(row.name), row)


class FaultsTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.out = pathlib.Path(self.create_tempdir().full_path)

    def run_with(self, faults, *argv):
        """Exit code and rows of a run whose children do as `faults` say."""
        argv = [f"--out={self.out}", "--small", *argv]
        child = (sys.executable, "-c", CHILD)
        with mock.patch.dict(os.environ, FAULTS=json.dumps(faults)):
            code = h200.main(argv, child)
        files = (self.out / "rows").glob("*.json")
        return code, {path.stem: json.loads(path.read_text()) for path in files}

    def test_a_fault_costs_one_row(self):
        faults = dict(zip(TIMES, ("crash", "hang", "raise"), strict=True))
        only = "--only=time,sparse_mla,dense_attention"
        code, rows = self.run_with(faults, only, "--row_seconds=1")
        self.assertEqual(code, 1)
        for name, words in zip(TIMES, ("SIGABRT", "no answer", "illegal"), strict=True):
            self.assertIn(words, rows[name]["failure"])
            self.assertEqual(rows[name]["median_ms"], 1)  # was measured before
        self.assertNotIn("failure", rows[NEXT])
        # Another call runs nothing again, or with --retry what failed alone.
        code, same = self.run_with(dict.fromkeys(rows, "raise"), only)
        self.assertEqual((code, same), (1, rows))
        code, mended = self.run_with({NEXT: "raise"}, only, "--retry")
        self.assertEqual(code, 0)
        self.assertTrue(all("failure" not in row for row in mended.values()))

    def test_processes_run_side_by_side_and_use_the_card_in_turn(self):
        """Of two groups, each has a process that waits for the other's."""
        only = "--only=time,sparse_mla,dense_attention"
        faults = {TIMES[0]: "slow", NEXT: "slow"}
        code, rows = self.run_with(faults, only, "--row_seconds=3", "--jobs=2")
        self.assertEqual(code, 0)  # nobody had the card for too long
        self.assertTrue(all("failure" not in row for row in rows.values()))
        card = self.out / h200.CARD
        lock = fcntl.LOCK_EX | fcntl.LOCK_NB
        named = mock.patch.dict(os.environ, {measure.CARD: str(card)})
        with card.open("rb") as other:
            with named, measure.alone(), self.assertRaises(BlockingIOError):
                fcntl.flock(other, lock)
            fcntl.flock(other, lock)

    def test_rows_that_time_cut_off_are_run_by_the_next_call(self):
        only, card = "--only=time,dense_attention", self.out / h200.CARD

        def now():
            """The time is over once the row has the card."""
            return 2.0 if card.exists() and card.read_text() else 0.0

        with mock.patch.object(h200, "time", mock.Mock(monotonic=now)):
            code, rows = self.run_with({NEXT: "hang"}, only, "--seconds=1")
        self.assertEqual(code, 3)
        self.assertNotIn("failure", rows[NEXT])
        code, rows = self.run_with({}, only)
        self.assertEqual(code, 0)
        self.assertTrue(all(row["is_done"] for row in rows.values()))

    def test_a_site_folder_alone_is_named(self):
        """PYTHONPATH=. before a site folder would hide its packages."""
        site = pathlib.Path(self.create_tempdir().full_path)
        (site / "only_there.py").touch()
        for script in ("h200.py", "h200_child.py"):
            command = [sys.executable, "-c", LOAD, str(ROOT / "benchmarks" / script)]
            environ = os.environ | {"PYTHONPATH": str(site)}
            first = subprocess.check_output(command, cwd="/", env=environ, text=True)
            self.assertEqual(first.strip(), str(ROOT.resolve()))

    def test_unknown_rows_are_named(self):
        with self.assertRaises(SystemExit) as stop:
            h200.main(["--out=nowhere", "--only=sparse"])
        self.assertEqual(stop.exception.code, 2)

    @pytest.mark.slow  # processes that compile every op
    def test_the_real_rows_rehearsed(self):
        out = pathlib.Path(self.create_tempdir().full_path)
        crash, hang, wrong = TIMES[0], NEXT, "values+decode_sparse_mla+0+fwd+"
        faults = {crash: "crash", hang: "hang", wrong: "wrong"}
        argv = [f"--out={out}", "--small", "--seconds=1500", "--row_seconds=60"]
        with mock.patch.dict(os.environ, H200_FAULTS=json.dumps(faults)):
            self.assertEqual(h200.main(argv), 1)
        rows = {p.stem: json.loads(p.read_text()) for p in (out / "rows").iterdir()}
        self.assertLen(rows, len(h200_rows.plan(is_small=True)))
        failed = {name for name, row in rows.items() if "failure" in row}
        self.assertEqual(failed, {crash, hang})
        self.assertGreater(rows[crash]["median_ms"], 0)
        wrongs = {name for name, row in rows.items() if row.get("is_wrong")}
        self.assertEqual(wrongs, {wrong})
        self.assertIn("decode_sparse_mla fwd: WRONG", (out / "table.md").read_text())


if __name__ == "__main__":
    environment.main()
