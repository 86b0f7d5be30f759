"""Parts of tests of whole runs: a folder, a mesh of few devices, files of a run."""

import contextlib
import dataclasses
import math
import pathlib
import tempfile
import time
from unittest import mock

import jax
from absl.testing import parameterized

from glm5_jax import mesh as mesh_lib
from glm5_jax.checkpoint import manager
from glm5_jax.model import transformer
from glm5_jax.training import program as program_lib
from glm5_jax.training import step as step_lib
from glm5_jax.training.reporting import plot

DRAW = plot.plot_losses
# What the training step reads of a config, besides the shapes and sizes of batches.
READ_BY_STEP = ("stage", "num_steps", "model", "optim", "loss", "rl", "mesh")
COMPILED = {}  # steps on one device, by these
MADE = {}  # what makes initial values, and the evaluation step, by these


class FolderTest(parameterized.TestCase):
    """A class of tests with a folder, `root`, for all of them."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.root = pathlib.Path(folder.name)


class OneDeviceTest(FolderTest):
    """Runs on one device, which compiles faster; training/mesh_test.py has meshes.

    They do not draw loss.png, which takes longer than their steps: `DRAW` does.
    """

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.enterClassContext(use_devices())
        cls.enterClassContext(mock.patch.object(plot, "plot_losses"))


def use_devices(**sizes):
    """Patches the mesh that runs make: one device, or as many as the axes say."""
    return mock.patch.object(mesh_lib, "make_mesh", return_value=first_devices(**sizes))


@contextlib.contextmanager
def compile_once(config):
    """Patches what runs compile: all get the programs of `config`.

    Files whose configs differ in nothing that the step reads share them.
    """
    program = program_lib.make_program(config, first_devices())
    read = *(getattr(config, name) for name in READ_BY_STEP), *program.batch.items()
    read = *read, config.data.batches
    made = program, step_lib.make_eval_step(config)
    program, evaluate = MADE.setdefault(read, made)
    whole = program_lib.Program

    def lower(other, num_rows=None, lower_once=whole.lower):
        assert other.arguments == program.arguments
        key = *read, num_rows
        if key not in COMPILED:
            COMPILED[key] = lower_once(program, num_rows).compile()
        return mock.Mock(compile=mock.Mock(return_value=COMPILED[key]))

    def initial(other, seed, initial_once=whole.initial):
        assert other.arguments == program.arguments
        return initial_once(program, seed)

    with (
        mock.patch.multiple(whole, lower=lower, initial=initial),
        mock.patch.object(step_lib, "make_eval_step", return_value=evaluate),
    ):
        yield


@contextlib.contextmanager
def share_programs():
    """Lets runs with equal configs, but for where they start, share their programs."""
    programs, compiled, evaluations = {}, {}, {}
    make, evaluate = program_lib.make_program, step_lib.make_eval_step
    compile_step = program_lib.Program.compile

    def make_program(config, mesh):
        key = dataclasses.replace(config, init_from=None), mesh
        if key not in programs:
            programs[key] = make(config, mesh)
        return programs[key]

    def compile_once(program, num_rows, beside):
        key = id(program), num_rows
        beside()
        if key not in compiled:
            compiled[key] = compile_step(program, num_rows)
        return compiled[key]

    def make_eval_step(config):
        key = config.model, config.loss, config.quantization_aware
        return evaluations.setdefault(key, evaluate(config))  # jax.jit knows it again

    with (
        mock.patch.object(program_lib, "make_program", make_program),
        mock.patch.object(program_lib.Program, "compile", compile_once),
        mock.patch.object(step_lib, "make_eval_step", make_eval_step),
    ):
        yield


def first_devices(**sizes):
    """A mesh of as many as the axes say."""
    axes = mesh_lib.AXES
    shape = [sizes.get(axis, 1) for axis in axes]
    return jax.make_mesh(
        shape,
        axes,
        devices=jax.devices()[: math.prod(shape)],
        axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
    )


def params_of(workdir, model):
    """Parameters of a run's newest checkpoint."""
    abstract = transformer.abstract_params(model)
    return jax.device_get(manager.restore_params(workdir, abstract))


def wait_for_steps(workdir, child, num_steps=1):
    """Until a process has put down so many."""
    path = pathlib.Path(workdir) / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < num_steps:
        assert child.poll() is None, "the process has ended"
        time.sleep(0.05)
