"""Runs the notebooks at a tiny size, as Jupyter does: cell by cell, in a kernel."""

import os
import pathlib
import re
import tempfile
from unittest import mock

import jupytext
import nbclient
import nbformat
from absl.testing import absltest, parameterized

from tests import environment

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "colab").glob("*.py"))
# The names of another notebook; the collector's thresholds are those of conftest.py.
FORGET = "%reset -f\n__import__('gc').set_threshold(50_000, 20, 50)"
PARAMETERS = "parameters"  # tag of the cell that a test replaces
# As few and small programs as have every part that the notebook shows.
TINY = """
import dataclasses
MODEL = dataclasses.replace(
    presets.GLM5_1M,
    num_hidden_layers=2,
    n_shared_experts=0,
    num_nextn_predict_layers=0,
    vocab_size=512,
    index_topk=16,
    remat_policy="none",
)
DATA = config_lib.DataConfig(
    source={source!r},
    cache_dir={cache_dir!r},
    held_out_percent=30,
    bpe_vocab_size=512,
    sequence_length=64,
    batch_size=2,
)
STEPS = 2
"""
TINY_RL = """
import dataclasses
TASK = "reverse:3"
MODEL = dataclasses.replace(
    presets.small(hidden=48, layers=1, experts=2, vocab=320),
    first_k_dense_replace=0,
    n_shared_experts=0,
    num_nextn_predict_layers=0,
    index_topk=16,
    remat_policy="none",
)
SFT_STEPS, SFT_ROWS = 2, 4
RL_STEPS, PROMPTS, GROUP = 2, 2, 2
START = 0.0, 1.0
SHOWN = 2
"""
TIMEOUT = 300  # seconds of a cell; a hang must not hold the suite
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


class NotebookTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        """Starts one kernel: importing jax takes longer than most cells."""
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        variables = {
            "IPYTHONDIR": cls.folder,
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles a third faster
            "JAX_NUMPY_RANK_PROMOTION": "raise",
            "JUPYTER_RUNTIME_DIR": cls.folder,
            "PYTHONPATH": str(ROOT),  # so that nothing is installed
            "TMPDIR": cls.folder,
        }
        cls.enterClassContext(mock.patch.dict(os.environ, variables))
        empty = nbformat.v4.new_notebook()
        cls.client = nbclient.NotebookClient(empty, timeout=TIMEOUT)
        cls.enterClassContext(cls.client.setup_kernel(cwd=cls.folder))

    def run_tiny(self, name, parameters):
        """Returns a notebook's output with these parameters, and how many figures."""
        notebook = jupytext.read(ROOT / "colab" / name)
        (cell,) = (
            c for c in notebook.cells if PARAMETERS in c.metadata.get("tags", [])
        )
        source = str(ROOT / "glm5_jax")
        cell.source = parameters.format(source=source, cache_dir=self.folder)
        forget = nbformat.v4.new_code_cell(FORGET)
        notebook.cells.insert(0, forget)
        self.client.nb = notebook
        self.client.execute(cleanup_kc=False)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        outputs = [output for cell in code for output in cell.outputs]
        text = "".join(o.text for o in outputs if o.output_type == "stream")
        return text, sum("image/png" in o.get("data", {}) for o in outputs)

    def test_tour(self):
        text, num_figures = self.run_tiny("01_tour.py", TINY)
        self.assertEqual(num_figures, 5)
        self.assertRegex(text, r"eval/bits_per_byte +\d")

        with self.subTest("no selection holds more attention than the best one"):
            held = re.findall(r"on the selected keys: (\S+)", text)
            best = re.findall(r"the best ones: ([\d.]+)", text)
            self.assertLen(held, 2)
            for ours, limit in zip(held, best, strict=True):
                self.assertBetween(float(ours), 0, float(limit) + ROUNDED)
                self.assertLess(float(limit), 1)
        with self.subTest("Muon evens a head out, Muon Split more so"):
            spreads = []
            for name in ("gradient", "Muon, heads together", "Muon Split"):
                (line,) = re.findall(f"^{name} (.*)", text, re.MULTILINE)
                largest, *_, small, _ = (float(value) for value in line.split())
                spreads.append(largest / small)  # the least may be next to 0
            self.assertEqual(spreads, sorted(spreads, reverse=True))
            self.assertLess(spreads[-1], NEAR_ONE)

    def test_reinforcement_learning(self):
        text, num_figures = self.run_tiny("02_rl.py", TINY_RL)
        self.assertEqual(num_figures, 3)
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


if __name__ == "__main__":
    environment.main()
