"""Test runs in the sandbox: a fresh copy of a package, its tests, and their outcomes.

A run counts only if it is whole, as parsers.read_run has it. Lines of the runner's own
begin with a token that the package's code is not told.
"""

import dataclasses
import re
import secrets

from glm5_jax import config
from glm5_jax.environments import sandbox
from glm5_jax.environments.worlds.swe import drivers, parsers, records

MAX_SECONDS = 60.0  # of a run by the clock: a loaded machine is slow
CPU_SECONDS = 20  # of each process, such as one in an endless loop
OUTPUT_BYTES = 2**22  # of a log; also bounds what is read of an agent's file
_ADDRESSES = dict.fromkeys(
    ("javascript", "typescript"), 2**37
)  # V8 reserves far more than it uses


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run of a package's tests."""

    outcomes: parsers.Outcomes
    problem: str  # "" if the run is whole
    log: str
    seconds: float  # by the clock
    cpu_seconds: float = 0.0  # of all processes

    def passed(self) -> set[str]:
        """Returns the tests that passed, none if the run is not whole."""
        if self.problem:
            return set()
        return {k for k, v in self.outcomes.items() if v == parsers.PASSED}


async def run(
    files: records.Files, recipe: records.Recipe, seconds: float = MAX_SECONDS
) -> Trial:
    """Runs the tests of a package in a fresh sandbox.

    Args:
        files: the package with its tests.
        recipe: how they run.
        seconds: limit of time.

    Raises:
        config.InputError: the machine lacks a program that they need, or its sandbox
            has no folder /work.
    """
    sandbox.require_work()
    token = secrets.token_hex(16)
    if lacking := drivers.missing(recipe):
        raise config.InputError(f"tests in {recipe.language} cannot run: {lacking}.")
    image = sandbox.Image(
        files={
            **{f"{drivers.ROOT}/{path}": text for path, text in files.items()},
            **drivers.files(recipe, token),
        },
        binds=drivers.binds(recipe),
    )
    box = await sandbox.start(image, limits(recipe))
    try:
        # The shell says what its processes took, on the last line.
        command = f"ulimit -t {CPU_SECONDS}\n{drivers.command(recipe)}\ntimes"
        result = await box.run(command, seconds=seconds)
    finally:
        await box.close()
    stdout, _, taken = result.stdout.rstrip("\n").rpartition("\n")
    log = stdout.rpartition("\n")[0] + "\n" + result.stderr
    if result.is_timeout:
        return Trial({}, "out of time", log, result.seconds)
    if result.is_cut:
        return Trial({}, "the log is too long", log, result.seconds)
    is_guarded = recipe.runner in drivers.GUARDED
    read = parsers.read_run(log, token, recipe.parser, is_guarded=is_guarded)
    outcomes, problem = read
    log = log.replace(token, "TOKEN")
    return Trial(outcomes, problem, log, result.seconds, _cpu_seconds(taken))


def _cpu_seconds(taken: str) -> float:
    """Returns the sum of a line such as "0m1.250s 0m0.030s"; 0.0 if it has no time."""
    found = re.findall(r"(\d+)m([\d.]+)s", taken)
    return sum((60 * int(minutes) + float(seconds) for minutes, seconds in found), 0.0)


def limits(recipe: records.Recipe) -> sandbox.Limits:
    """Returns the limits of a box in which a package is tested."""
    memory = _ADDRESSES.get(recipe.language, sandbox.Limits.memory_bytes)
    return sandbox.Limits(output_bytes=OUTPUT_BYTES, memory_bytes=memory)
