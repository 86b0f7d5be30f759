"""Starts real processes: the training command, or the functions of worker.py."""

import contextlib
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile

import jax

from tests import environment, forked

ROOT = pathlib.Path(__file__).parent.parent.parent
PORTS = range(10_000, 32_000)
_CHOICE = random.SystemRandom()  # processes of tests may have equal seeds
CONFIG = """
import dataclasses

from glm5_jax import command_line
from glm5_jax import config as config_lib
from tests import small_configs

def get_config():
    config = small_configs.text_run(
        {corpus!r},
        {cache!r},
        num_steps=5,
        eval_every=0,
        checkpoint_every=2,
        sample_tokens=0,
        loss=config_lib.LossConfig(indexer_weight=0.1),
        optim=config_lib.OptimConfig(
            learning_rate=1e-2, end_learning_rate=1e-3, ns_dtype="float32"
        ),
    )
    data = dataclasses.replace(config.data, batch_size=16)
    config = dataclasses.replace(config, data=data)
    return command_line.to_config_dict(config)
"""


def write_config(folder):
    """Writes a tiny run: experts, sparse attention, MTP, packing and Muon Split."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for i in range(40):
        text = "\n".join(f"def f{i}(x): return x + {j}" for j in range(i, i + 12))
        (corpus / f"{i}.txt").write_text(text)
    path = folder / "tiny.py"
    cache = str(folder / "cache")
    path.write_text(CONFIG.format(corpus=str(corpus), cache=cache))
    return path


def environ(num_devices=4):
    """Returns a child's environment: CPU devices, no restart for large pages."""
    return {
        **os.environ,
        **environment.VARIABLES,
        "PYTHONPATH": str(ROOT),
        "GLIBC_TUNABLES": "",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }


def train(config, workdir, *flags, wait=True):
    """Returns the training command with these flags."""
    command = [sys.executable, "-m", "glm5_jax.train", f"--config={config}"]
    child = start([*command, f"--workdir={workdir}", *flags])
    return finish(child) if wait else child


def start(command, **variables):
    """Starts a process in the root of the repository, with its output in one pipe."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ() | {name: str(value) for name, value in variables.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(child, timeout=600):
    """Returns the exit code and the output of a process."""
    try:
        output, _ = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        raise
    return child.returncode, output


def together(command, count=2, **variables):
    """Starts a command as `count` processes that find each other by the environment.

    Args:
      command: one for all, or a list of one each.
      count: of processes.
      **variables: of the environment.
    """
    commands = command if isinstance(command[0], list) else [command] * count
    children = [
        start(each, **variables, **one)
        for each, one in zip(commands, _members(count), strict=True)
    ]
    return [finish(child) for child in children]


def fork(function, *args, count=2, num_devices=4):
    """Calls a function in `count` processes that find each other by the environment.

    They are forked with their imports done, which take two seconds of each process.

    Args:
      function: its module is best one of those that `forked` preloads.
      *args: of the function.
      count: of processes.
      num_devices: of each process.

    Returns:
      The exit code and the output of each process.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for member in _members(count):
            log = pathlib.Path(folder) / str(len(children))
            child = forked.PROCESSES.Process(
                target=_call, args=(function, args, member, num_devices, log)
            )
            child.start()
            children.append((child, log))
        for child, _ in children:
            child.join(forked.SECONDS)
            child.kill()
            child.join()
        return [(child.exitcode, log.read_text()) for child, log in children]


def _call(function, args, member, num_devices, log):
    """Runs in a fork: jax has read the environment, but has no device yet."""
    for number in (1, 2):
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    os.environ |= environ(num_devices) | member
    environment.configure()
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    function(*args)


def _members(count):
    """Returns the variables of each of `count` processes that find each other."""
    address = f"127.0.0.1:{free_port()}"
    return [
        {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(number),
        }
        for number in range(count)
    ]


def free_port(count=1):
    """Returns a port that is free, as are those after it, `count` in all.

    It lies where Linux takes no ports of its own choice, also for clients: one of those
    could be another's before it is used.
    """
    for _ in range(100):
        first = _CHOICE.choice(PORTS)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise RuntimeError("no ports are free")
