"""The benchmark's command: what it prints and writes, and what it refuses."""

import contextlib
import dataclasses
import io
import json
import pathlib
from unittest import mock

import numpy as np
from absl.testing import parameterized

from pallas_kernels.bench import __main__ as bench
from pallas_kernels.bench import measure, operations, table
from tests import environment


def run(*argv):
    """Exit code and what was printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = bench.main(list(argv))
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


class BenchTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        seconds = measure.SAMPLE_SECONDS / 20  # no time is judged
        self.enter_context(mock.patch.object(measure, "SAMPLE_SECONDS", seconds))

    def test_times_and_errors_of_small_shapes(self):
        folder = pathlib.Path(self.create_tempdir().full_path)
        files = folder / "new" / "rows.json", folder / "times.png"
        code, out, err = run(
            "sparse_mla",
            "grouped_matmul",
            "--size=small",
            "--length=32",
            "--mode=fwd,bwd",
            f"--json={files[0]}",
            f"--plot={files[1]}",
        )
        self.assertEqual(code, 0, out + err)
        rows = json.loads(files[0].read_text())["rows"]
        ran = [(row["op"], row["mode"]) for row in rows]
        ops, modes = ("sparse_mla", "grouped_matmul"), ("fwd", "bwd")
        self.assertEqual(ran, [(op, mode) for op in ops for mode in modes])
        for row in rows:
            self.assertLessEqual(row["p10_ms"], row["median_ms"])
            self.assertGreater(row["p10_ms"], 0)
            self.assertLess(row["error"], 1e-2)
        self.assertEqual(out.count("\n"), 3 + len(rows))
        self.assertGreater(files[1].stat().st_size, 1000)

    def test_a_step_of_decoding_is_a_hundredth_of_a_program(self):
        """A step takes as long as its dispatch, so one program runs many."""
        programs = []

        def milliseconds(run, samples):
            programs.append(run.func.as_text())
            return {"median_ms": 50.0}

        self.enter_context(mock.patch.object(measure, "_milliseconds", milliseconds))
        for op, want in (("decode_sparse_mla", 0.5), ("indexer_topk", 50.0)):
            job = measure.Job(op, 32, "fwd", small=True)
            names = operations.OPERATIONS[op].inputs
            args = operations.make(job.case, names, job.pattern, job.lists)
            found = measure._timed(job, "reference", args, 1)
            self.assertEqual(found["median_ms"], want)
        trips = ['"known_trip_count":{"n":"100"}' in text for text in programs]
        self.assertEqual(trips, [True, False])

    def test_captured_lists_are_the_attended_keys(self):
        folder = pathlib.Path(self.create_tempdir().full_path)
        own = np.full((16, 64), -1, np.int32)
        own[:, 0] = np.arange(16)  # each query lists itself alone
        np.save(folder / "own.npy", own)
        argv = ("sparse_mla", "--size=small", "--length=16", "--index=captured")
        code, out, err = run(*argv, f"--lists={folder / 'own.npy'}")
        self.assertEqual(code, 0, out + err)
        args = operations.make(
            operations.at("sparse_mla", 16, small=True),
            ("indices",),
            "captured",
            own,
        )
        np.testing.assert_array_equal(args[0][0], own)
        np.save(folder / "short.npy", own[:9])
        code, _, err = run(*argv, f"--lists={folder / 'short.npy'}")
        self.assertEqual(code, 2)
        self.assertIn("--lists must be int32 [16, 64], got int32 (9, 64)", err)
        own[3, 1] = 3
        np.save(folder / "twice.npy", own)
        code, _, err = run(*argv, f"--lists={folder / 'twice.npy'}")
        self.assertEqual(code, 2)
        self.assertIn("the list of query (0, 3) names a key twice or falls", err)

    def test_an_op_that_fails_does_not_stop_the_others(self):
        code, out, _ = run(
            "sparse_mla",
            "dense_attention",
            "--size=small",
            "--length=16",
            "--implementation=gpu",
        )
        self.assertEqual(code, 1)
        self.assertEqual(out.count("NotImplementedError"), 2)

    @parameterized.parameters(
        (("sparse_ml",), "did you mean sparse_mla"),
        (("--length=12,x",), "--length must be positive integers"),
        (("--mode=forward",), "--mode must be of fwd,bwd,det"),
        (("--index=captured",), "needs --lists"),
        (("--index=all",), "--index must be random, local or captured"),
        (("--aot",), "--aot needs --chip"),
        (("--capability=9.0",), "only --aot takes it"),
        (("--aot", "--capability=9.0", "--chip=h200"), "--capability replaces --chip"),
        (("--aot", "--capability=7.5"), "'8.0', '8.6', '8.9', '9.0', '10.0', '12.0'"),
        (
            ("--aot", "--capability=8.6", "--blocks", "sparse_mla=32,8,2"),
            "sparse_mla takes 4 numbers, as in 32,32,8,2, got '32,8,2'",
        ),
        (("--chip=h200",), "the device is cpu; add --aot"),
        (("--blocks", "sparse_mla=32,8,2"), "--blocks needs a chip of v5e"),
        (
            ("--aot", "--chip=h200", "--blocks", "sparse=32,8,2"),
            "got 'sparse'; did you mean sparse_mla",
        ),
        (
            ("--aot", "--chip=h200", "--blocks", "sparse_mla=32,8,2"),
            "sparse_mla takes 4 numbers, as in 64,64,8,2, got '32,8,2'",
        ),
    )
    def test_wrong_input_exits_with_2(self, argv, message):
        code, _, err = run(*argv)
        self.assertEqual(code, 2)
        self.assertIn(message, err)

    def test_a_kernels_figures_are_printed(self):
        kernel = {
            "name": "_dq_kernel",
            "registers": 221,
            "spill_bytes": 0,
            "shared_bytes": 212 << 10,
            "resident": 1,
            "waves": 32768 / 132,
            "times": 1.25,
            "products": {"instructions": ("34 HGMMA 64x32x16", "8 HGMMA 64x64x16")},
            "is_serialized": False,
        }
        plain = kernel | {"name": "_select_kernel", "times": None}
        row = {"op": "sparse_mla", "length": 32768, "mode": "bwd", "issued": 1.5}
        line = table.line(row | {"gpu_kernels": [kernel, plain]}, table.COMPILED)
        self.assertIn("| 1.50 |", line)
        self.assertIn(
            "_dq_kernel 221 registers, 0 B spilled, 212 KiB shared, 1 at once, 248.24 "
            "waves, products 1.25 times (34 HGMMA 64x32x16 + 8 HGMMA 64x64x16); ",
            line,
        )
        self.assertIn("1 at once, 248.24 waves |", line)

    def test_floors_are_those_of_the_design(self):
        """Per query of GLM-5: 2.85e8 FLOP forward, 7.21e8 backward, 2.36 MB of rows."""
        case = operations.at("sparse_mla", 131072)
        entries = operations.listed(case)
        forward, _, backward, _ = operations.OPERATIONS["sparse_mla"].work(case)
        self.assertAlmostEqual(forward / entries * 2048, 2.85e8, delta=1e6)
        self.assertAlmostEqual(backward / entries * 2048, 7.21e8, delta=1e6)
        job = measure.Job("indexer_topk", 131072, "fwd")
        floor = measure.floor(job, bench.chips.CHIPS["h200"])
        self.assertAlmostEqual(floor["floor_ms"], 89, delta=1)
        self.assertEqual(floor["bound"], "matrix")
        job = dataclasses.replace(job, op="indexer_topk_fp8")
        for chip, times in (("h200", 2), ("l4", 2), ("a100", 1), ("v5p", 1)):
            chip = bench.chips.CHIPS[chip]
            plain = measure.floor(dataclasses.replace(job, op="indexer_topk"), chip)
            floor = measure.floor(job, chip)
            self.assertAlmostEqual(plain["floor_ms"] / floor["floor_ms"], times, 3)

    @parameterized.parameters(
        ("h200", 33792), ("v5p", 33792), ("v6e", 103424), ("tpu7x", 57344)
    )
    def test_sparse_begins_to_win_where_the_docs_say(self, chip, length):
        """By the floors of a whole layer, forward and backward: docs/kernels.md."""
        chip = bench.chips.CHIPS[chip]
        parts = ("indexer_topk", "fwd"), ("sparse_mla", "bwd")
        parts += (("sparse_indexer_kl_loss", "bwd"),)

        def is_less(length):
            floor = lambda op, mode: measure.floor(measure.Job(op, length, mode), chip)
            sparse = sum(floor(*part)["floor_ms"] for part in parts)
            return sparse < floor("dense_attention", "bwd")["floor_ms"]

        self.assertFalse(is_less(length - 1024))
        self.assertTrue(is_less(length))


if __name__ == "__main__":
    environment.main()
