"""Runs commands of the package as processes that are forked with their imports done.

A process of its own spends two seconds on importing jax; a fork has it at once. The
server that forks has no device and no threads of jax, so the child starts as a user's
does: with its own flags, streams and exit code.
"""

import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
SECONDS = 300  # for a command, on a machine under load
PROCESSES = multiprocessing.get_context("forkserver")
# Libraries, and no command of the package: each defines its flags as it starts.
PROCESSES.set_forkserver_preload(
    [
        "glm5_jax.inference.commands",
        "glm5_jax.scale.compiled.report",
        "glm5_jax.scale.plan.planner",
        "glm5_jax.training.loop",
        "glm5_jax.weights.conversion",
        "s3fs",
        "tests.processes.worker",
        "tests.fork_server",  # the last one
    ]
)


def run(name, *flags, environ=()):
    """Returns what `python -m glm5_jax.NAME FLAGS` in the project's folder gave.

    `environ` is set besides what this process's first fork had.
    """
    return _run(_module, name, *flags, environ=environ)


def run_script(path, *flags):
    """Returns what `python PATH FLAGS` in the project's folder gave."""
    return _run(_script, path, *flags)


def _run(execute, name, *flags, environ=()):
    with tempfile.TemporaryDirectory() as folder:
        streams = [pathlib.Path(folder) / stream for stream in ("stdout", "stderr")]
        given = execute, name, flags, streams, dict(environ)
        child = PROCESSES.Process(target=_execute, args=given)
        child.start()
        child.join(SECONDS)
        if child.is_alive():
            child.kill()
            raise subprocess.TimeoutExpired([name, *flags], SECONDS)
        stdout, stderr = (stream.read_text() for stream in streams)
    return subprocess.CompletedProcess([name, *flags], child.exitcode, stdout, stderr)


def _execute(execute, name, flags, streams, environ):
    os.environ.update(environ)
    for stream, number in zip(streams, (1, 2), strict=True):
        os.dup2(os.open(stream, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    sys.argv = [name, *flags]
    execute(name)


def _module(name):
    runpy.run_module(f"glm5_jax.{name}", run_name="__main__", alter_sys=True)


def _script(path):
    runpy.run_path(path, run_name="__main__")
