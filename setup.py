"""Packaging. All metadata is here; pyproject.toml only configures tools."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$',
    (ROOT / "glm5_jax" / "__init__.py").read_text(encoding="utf-8"),
    re.MULTILINE,
).group(1)

# The lower bounds are the oldest releases that the tests ran with; there are no upper
# ones. requirements/ holds exact pins.
LIBTPU = "libtpu; sys_platform == 'linux' and platform_machine == 'x86_64'"
ARROW = ["pyarrow>=26"]  # Parquet files and Hugging Face datasets
TEST = [
    *ARROW,
    "beartype",
    "ipykernel",
    "jupytext",
    LIBTPU,  # compiles a few kernels for TPUs; no TPU is needed
    "nbclient",
    "pytest>=8",
    "pytest-xdist",
]
# 0.4.0 and 0.4.1 do not run under jax 0.12: their rule for dead code takes one argument
# too few.
# The kernels are fitted to the compiler of Triton 3.6: 3.9 spills up to 1.2 KB a thread
# where 3.6 spills nothing (docs/design/0004-one-seam-for-kernels.md).
TRITON = ["triton>=3.6,<3.7", "jax-triton>=0.3.1,!=0.4.0,!=0.4.1"]
DEV = [*TEST, "pre-commit", "pyrefly", "ruff"]

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
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=setuptools.find_packages(
        include=["glm5_jax", "glm5_jax.*", "pallas_kernels", "pallas_kernels.*"]
    ),
    # An explicit root makes an editable install put the whole checkout on the path, so
    # that `python tests/x_test.py` finds the package `tests` as well.
    package_dir={"": "."},
    python_requires=">=3.11",
    install_requires=[
        "absl-py>=2.1",
        "array-record>=0.8.6; sys_platform != 'win32'",
        "flax>=0.12",
        "grain>=0.2.18",
        "jax>=0.10",
        "jaxtyping>=0.3",
        "matplotlib>=3.8",
        "ml_collections>=1.1",
        "ml_dtypes>=0.5",
        "numpy>=2.0",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "safetensors>=0.5",
        "tensorstore>=0.1.71",
        "tokenizers>=0.21",
        "tqdm>=4.66",
    ],
    extras_require={
        "gpu": ["jax[cuda13]", *TRITON],
        "tpu": ["jax[tpu]"],
        # Compilers for chips that are not there: TPUs and an H200.
        "aot": ["jax[cuda13-local]", LIBTPU, *TRITON],
        "arrow": ARROW,
        # launch/ray_job.py, on a Ray cluster.
        "ray": ["ray>=2.60"],
        # Environments of a hundred procedural tasks.
        "reasoning_gym": ["reasoning-gym>=0.1.25"],
        "test": TEST,
        "dev": DEV,
    },
)
