"""The kernels' own distribution requires exactly the packages that they import."""

import ast
import importlib.metadata
import inspect
import pathlib
import re
import subprocess
import sys
import tomllib

from absl.testing import absltest

import glm5_jax
import pallas_kernels
from tests import environment

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLDER = ROOT / "pallas_kernels"
PYPROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Of files that run where an extra is installed, by the first word of their names.
EXTRA_OF = {"gpu": "gpu", "triton": "gpu", "aot": "gpu", "plot": "bench"}
TESTED_WITH = {"torch"}  # for Triton's interpreter; nobody else needs it
# Runs the README's example and the benchmark where the modules of the first argument
# cannot be found.
ALONE = """
import importlib.metadata, sys
hidden = set(sys.argv[1].split(","))
class Finder:
    finders = tuple(sys.meta_path)
    find_distributions = importlib.metadata.MetadataPathFinder().find_distributions
    def find_spec(self, name, *args):
        if name.partition(".")[0] not in hidden:
            found = (finder.find_spec(name, *args) for finder in self.finders)
            return next(filter(None, found), None)
sys.meta_path[:] = [Finder()]
exec(sys.argv[2])
assert loss.shape == () and bool(jnp.isfinite(loss))
from pallas_kernels.bench import __main__ as bench
sys.exit(bench.main(["sparse_mla", "--size=small", "--length=16", "--mode=bwd"]))
"""


def names(requirements):
    """Returns the import names of the distributions."""
    return {re.match(r"[\w-]+", r)[0].replace("-", "_") for r in requirements}


def imported(path):
    """Modules outside the standard library that a file imports."""
    heads = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            heads |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            heads.add(node.module.partition(".")[0])
    return heads - sys.stdlib_module_names - {"pallas_kernels"}


def others(requirements):
    """Installed modules that the requirements and theirs do not bring."""
    waiting, seen = list(names(requirements)), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        requires = importlib.metadata.requires(name) or []
        waiting += names(r for r in requires if "extra ==" not in r)
    owners = importlib.metadata.packages_distributions()
    return {m for m, owner in owners.items() if not seen & names(owner)}


class RequirementsTest(absltest.TestCase):
    def test_they_are_the_imported_ones(self):
        used = {}
        for path in FOLDER.rglob("*.py"):
            extra = EXTRA_OF.get(path.stem.split("_")[0])
            used[extra] = used.get(extra, set()) | imported(path)
        base = names(PROJECT["dependencies"])
        self.assertEqual(used.pop(None), base - {"ml_dtypes"})
        self.assertIn("ml_dtypes", used["gpu"])
        for extra, modules in used.items():
            self.assertEqual(modules - base - TESTED_WITH, names(EXTRAS[extra]) - base)

    def test_the_whole_asks_for_them_too(self):
        self.assertEqual(glm5_jax.__version__, PROJECT["version"])
        self.assertEqual(pallas_kernels.__version__, PROJECT["version"])
        self.assertTrue((FOLDER / "py.typed").exists())
        self.assertIn("py.typed", PYPROJECT["tool"]["hatch"]["build"]["include"])
        whole = (ROOT / "setup.py").read_text()
        for name in names(PROJECT["dependencies"]) | names(EXTRAS["gpu"]):
            self.assertNotRegex(whole, rf'"{name}\b.*[<>=]', "one bound, in one file")

    def test_the_reference_page_is_that_of_the_docstrings(self):
        page = (ROOT / "docs" / "kernels_reference.md").read_text()
        for name in pallas_kernels.__all__:
            if callable(function := getattr(pallas_kernels, name)):
                made_by = "run benchmarks/kernels_reference.py"
                self.assertIn(f"## `pallas_kernels.{name}`", page, made_by)
                self.assertIn(inspect.getdoc(function), page, made_by)

    def test_an_op_and_its_benchmark_run_with_nothing_else(self):
        hidden = others(PROJECT["dependencies"]) - {"pallas_kernels"}
        self.assertContainsSubset({"flax", "absl", "optax", "matplotlib"}, hidden)
        text = (FOLDER / "README.md").read_text()
        example = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
        ran = subprocess.run(
            [sys.executable, "-c", ALONE, ",".join(sorted(hidden)), example],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        self.assertEqual(ran.returncode, 0, ran.stderr + ran.stdout)
        self.assertEqual(ran.stdout.count("| sparse_mla | 16 | bwd |"), 1)


if __name__ == "__main__":
    environment.main()
