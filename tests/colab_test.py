"""Runs the notebooks at a tiny size, cell by cell, in this process."""

import contextlib
import io
import os
import pathlib
import re
import tempfile
import warnings
from unittest import mock

import jupytext
import matplotlib
import nbclient
import nbformat
import numpy as np
import pytest
from absl import logging
from absl.testing import parameterized

from glm5_jax import config as config_lib
from tests import environment, runs, small_configs
from tests.model import tiny

matplotlib.use("agg")
import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "colab").glob("*.py"))
TIMEOUT = 900  # seconds of a cell at full size
PARAMETERS = "parameters"  # tag of the cell whose values a test replaces
ROUNDED = 1e-3  # a printed share has three digits
FLOAT32 = 1e-5  # float32 exp and products against float64's, of values near 10
PARITY = 1e-5  # the limit on log-probs in float32
NEAR_ONE = 3  # five Newton-Schulz steps lift a 200th of the largest so far


def _cells(notebook: nbformat.NotebookNode) -> list[tuple]:
    return [(c.cell_type, c.source, c.metadata) for c in notebook.cells]


class ScriptsTest(parameterized.TestCase):
    @parameterized.named_parameters((path.stem, path) for path in SCRIPTS)
    def test_notebook_holds_the_cells_of_the_script_and_no_output(self, path):
        notebook = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
        self.assertEqual(
            _cells(notebook),
            _cells(jupytext.read(path)),
            f"jupytext --to ipynb --update {path.relative_to(ROOT)}",
        )
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        self.assertEmpty([cell for cell in code if cell.outputs])
        self.assertEqual({cell.execution_count for cell in code}, {None})

    def test_all_notebooks_install_by_the_same_cells_and_are_listed(self):
        first = [_cells(jupytext.read(path))[1:3] for path in SCRIPTS]
        self.assertIn("pip", first[0][1][1])
        for cells in first:
            self.assertEqual(cells, first[0])
        for page in ("README.md", "docs/index.md"):
            for path in SCRIPTS:
                self.assertIn(
                    path.with_suffix(".ipynb").name, (ROOT / page).read_text()
                )


class NotebookTest(runs.OneDeviceTest):
    """One notebook a test; a cell runs as it stands, in the names of the others."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.enterClassContext(mock.patch.object(tempfile, "tempdir", str(cls.root)))
        cls.enterClassContext(runs.share_programs())
        cls.corpus = cls.root / "corpus"
        small_configs.write_corpus(cls.corpus)

    def setUp(self):
        super().setUp()
        self.addCleanup(plt.close, "all")
        logger = logging.get_absl_logger()
        # The level may be unset, which no verbosity is: the cleanup that runs last.
        self.addCleanup(logger.setLevel, logger.level)
        self.addCleanup(logging.set_verbosity, logging.get_verbosity())
        self.addCleanup(setattr, logger, "filters", [*logger.filters])

    def data(self, length, **changes):
        """Rows of bytes, for which no tokenizer is trained."""
        sizes = {"source": str(self.corpus), "tokenizer": "byte", "batch_size": 2}
        sizes |= {"held_out_percent": 30, "cache_dir": str(self.root)} | changes
        return config_lib.DataConfig(sequence_length=length, **sizes)

    def run_tiny(self, name, **parameters):
        """Returns the names, the text and the axes that a notebook leaves."""
        names, text = {"__name__": "__main__"}, io.StringIO()
        with contextlib.redirect_stdout(text), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")
            for cell in jupytext.read(ROOT / "colab" / name).cells:
                if cell.cell_type == "code":
                    code = compile(cell.source, f"{name}: {cell.source[:40]}", "exec")
                    exec(code, names)
                if PARAMETERS in cell.metadata.get("tags", []):
                    self.assertContainsSubset(parameters, names)
                    names |= parameters
        axes = [axis for i in plt.get_fignums() for axis in plt.figure(i).axes]
        for axis in axes:
            if axis.get_label() != "<colorbar>":
                self.assertNotEmpty(axis.get_xlabel())
        return names, text.getvalue(), axes

    def test_tour(self):
        model = tiny.model(
            num_hidden_layers=1,
            first_k_dense_replace=0,
            n_shared_experts=0,
            num_nextn_predict_layers=0,
            vocab_size=260,
        )
        data = self.data(length=32)
        _, text, _ = self.run_tiny("01_tour.py", MODEL=model, DATA=data, STEPS=2)
        self.assertLen(plt.get_fignums(), 5)
        self.assertRegex(text, r"eval/bits_per_byte +\d")

        with self.subTest("no selection holds more attention than the best one"):
            held = re.findall(r"on the selected keys: (\S+)", text)
            best = re.findall(r"the best ones: ([\d.]+)", text)
            self.assertLen(held, 2)
            for ours, limit in zip(held, best, strict=True):
                self.assertBetween(float(ours), 0, float(limit) + ROUNDED)
                self.assertLess(float(limit), 1)

    def test_reinforcement_learning(self):
        model = tiny.model(
            num_hidden_layers=1,
            first_k_dense_replace=1,
            num_nextn_predict_layers=0,
            attention="dense",
            vocab_size=320,
        )
        _, text, _ = self.run_tiny(
            "02_rl.py",
            TASK="reverse:3",
            MODEL=model,
            SFT_STEPS=2,
            SFT_ROWS=4,
            RL_STEPS=2,
            PROMPTS=2,
            GROUP=2,
            START=(0.0, 1.0),
            SHOWN=2,
        )
        self.assertLen(plt.get_fignums(), 3)
        self.assertRegex(text, r"eval/success +\d")
        self.assertIn("\x1b[32m", text)  # trained tokens are green
        with self.subTest("the ten lines are the objective"):
            (largest,) = re.findall(r"of 1000 losses: (\S+)", text)
            self.assertLess(float(largest), FLOAT32)
        with self.subTest("trainer and engine agree; rounded weights do not"):
            (gap,) = re.findall(r"tokens, largest gap (\S+)", text)
            self.assertLess(float(gap), PARITY)
            coarse = re.findall(r"(?:int8|4 bits) +mean gap (\S+),", text)
            self.assertLen(coarse, 2)
            self.assertLess(float(gap), float(coarse[0]))
            self.assertLess(float(coarse[0]), float(coarse[1]))

    def test_sparse_attention(self):
        model = tiny.model(
            num_hidden_layers=1,
            first_k_dense_replace=1,
            num_nextn_predict_layers=0,
            vocab_size=260,
        )
        names, text, _ = self.run_tiny(
            "03_sparse_attention.py",
            LENGTH=24,
            TOPK=model.index_topk,
            MODEL=model,
            DATA=self.data(length=24),
            DENSE_STEPS=2,
            WARMUP_STEPS=2,
            ADAPT_STEPS=2,
            # As in the notebook's further training, whose programs are then the same.
            OPTIM=config_lib.OptimConfig(
                name="adamw",
                learning_rate=2.5e-4,
                end_learning_rate=2.5e-4,
                schedule="constant",
                warmup_steps=0,
            ),
            NUM_ROWS=2,  # as many as a batch, for one set of programs
            TIMED=model,
            TIMED_LENGTHS=(16,),
        )
        self.assertLen(plt.get_fignums(), 5)
        with self.subTest("no selection holds more attention than the best one"):
            recalls, best = names["recalls"], names["best"]
            self.assertLen(recalls, 3)
            for values in recalls.values():
                self.assertTrue(np.all((values > 0) & (values < 1)))
            held = [
                np.sum(np.where(view.selected, view.mass, 0), axis=-1)
                for view in names["views_before"]
            ]
            for own, limit, view in zip(held, best, names["views_before"], strict=True):
                has_choice = np.asarray(view.visible).sum(-1) > model.index_topk
                self.assertLess(own[has_choice].mean(), limit)
        with self.subTest("each arm is scored"):
            scores = re.findall(r"([\d.]+) bits per byte \(", text)
            self.assertLen(scores, 4)
            self.assertLen({*scores}, 4)

    def test_muon_split(self):
        names, text, _ = self.run_tiny("04_muon_split.py", **self.muon())
        self.assertLen(plt.get_fignums(), 4)

        with self.subTest("heads that count little learn only if they are split"):
            lines = re.findall(r"last errors: +(.*)", text)
            together, split = (np.array(line.split(), float) for line in lines)
            self.assertGreater(together[-1], 100 * split.max())
        with self.subTest("each optimizer makes a run of its own"):
            self.assertEqual([r.arm.name for r in names["found"]], ["Muon", "AdamW"])
            first, second = (r.records[0][-1] for r in names["found"])
            self.assertNotEqual(first["train/lm_loss"], second["train/lm_loss"])
            self.assertNotEqual(first[names["LOGIT"]], second[names["LOGIT"]])
        with self.subTest("Muon evens a head out, Muon Split more so"):
            values = []
            for matrix in names["matrices"].values():
                heads = np.asarray(matrix).swapaxes(0, 1)
                values.append(np.linalg.svd(heads, compute_uv=False))
            gradient, together, split = (v[:, 0] / v[:, 4] for v in values)
            np.testing.assert_array_less(split, NEAR_ONE)
            self.assertGreater(together.max(), split.max())
            self.assertGreater(gradient.max(), together.max())

    def muon(self):
        """A study of two runs of two steps; Muon Split changes nothing in the base."""
        base = config_lib.TrainConfig(
            num_steps=2,
            eval_every=2,
            eval_batches=1,
            sample_tokens=0,
            eval_suites=("attention_logits",),
            eval_suite_tasks=2,
            model=small_configs.DENSE_MODEL,
            data=self.data(length=24),
            optim=config_lib.OptimConfig(ns_dtype="float32"),
        )
        rates = {"Muon": 1e-2, "AdamW": 3e-3}
        return {"STEPS": 2, "SEEDS": 1, "BASE": base, "RATES": rates}


@pytest.mark.slow
class JupyterTest(parameterized.TestCase):
    @parameterized.named_parameters((path.stem, path) for path in SCRIPTS)
    def test_notebook_runs_in_a_kernel_as_it_stands(self, path):
        folder = self.create_tempdir().full_path
        variables = {
            "IPYTHONDIR": folder,
            "JUPYTER_RUNTIME_DIR": folder,
            "PYTHONPATH": str(ROOT),  # so that nothing is installed
            "TMPDIR": folder,
        }
        notebook = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
        client = nbclient.NotebookClient(notebook, timeout=TIMEOUT)
        with mock.patch.dict(os.environ, variables), client.setup_kernel(cwd=folder):
            client.execute(cleanup_kc=False)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        shown = [o.get("data", {}) for cell in code for o in cell.outputs]
        self.assertNotEmpty([data for data in shown if "image/png" in data])


if __name__ == "__main__":
    environment.main()
