"""Test runs in the sandbox: a fresh copy of a package, its tests, and their outcomes.

A run counts only if it is whole: the runner reached its end, and the canary, a test
that must fail, failed. Lines of the runner's own begin with a token that the package's
code is not told.
"""

import dataclasses
import functools
import pathlib
import re
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping

from glm5_jax import config
from glm5_jax.environments import sandbox
from glm5_jax.environments.worlds.swe import guarded_run, parsers, records, runners

ROOT = "repo"  # folder of the package below /work
MAX_SECONDS = 20.0  # of a run
_RUNNER = "runner"
_CANARY = "canary_of_the_runner"
_OUTPUT_BYTES = 2**22  # of a log; also bounds what is read of an agent's file
_ADDRESSES = {"javascript": 2**37}  # V8 reserves far more than it uses

# One test file; $file is its path, and the shell is in the package's folder.
_STEPS = {
    "perl": "perl $roots $file",
    "node": "node $file",
    "tape": "NODE_PATH=$tools/node_modules node $file",
    "node-test": "node --test --test-reporter=tap $file",
    "php": "php $file",
    "c": "cc -w -g -O0 $roots $file $link -lm -o /tmp/t && /tmp/t",
    "c++": "c++ -w -g -O0 $roots $file $link -lm -o /tmp/t && /tmp/t",
}
_COMPILE = """mkdir -p /tmp/objects; n=0
for s in $sources; do n=$((n+1)); $compiler -w -g -O0 $roots -c $s \
-o /tmp/objects/$n.o || exit 1; done; ar rcs /tmp/objects/all.a /tmp/objects/*.o"""
_ENDINGS = {
    "perl": ".t",
    "node": ".js",
    "tape": ".js",
    "node-test": ".js",
    "c": ".c",
    "c++": ".cpp",
}
RUNNERS = ("pytest", "unittest", *_STEPS)
# Everything is read before anything runs, so that no test can change the rest.
_DRIVER = """main() {
token=$(cat $token_file); rm -f $token_file
$prepare
for file in "$@"; do
printf '%s FILE %s\\n' "$token" "$file"
( $step ) 2>&1 </dev/null
printf '\\n%s EXIT %s\\n' "$token" "$?"
done
printf '%s DONE\\n' "$token"
}; main "$@"; exit
"""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run of a package's tests."""

    outcomes: parsers.Outcomes
    problem: str  # "" if the run is whole
    log: str
    seconds: float

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
    """
    token = secrets.token_hex(16)
    runner = {"token": token.encode(), **_runner_files(recipe)}
    image = sandbox.Image(
        files={f"{ROOT}/{k}": v for k, v in files.items()}
        | {f"{_RUNNER}/{k}": v for k, v in runner.items()},
        binds=binds(recipe),
    )
    box = await sandbox.start(image, limits(recipe))
    try:
        result = await box.run(command(recipe), seconds=seconds)
    finally:
        await box.close()
    log = result.stdout + result.stderr
    if result.is_timeout:
        return Trial({}, "out of time", log, result.seconds)
    if result.is_cut:
        return Trial({}, "the log is too long", log, result.seconds)
    outcomes, problem = _read(log, token, recipe)
    return Trial(outcomes, problem, log.replace(token, "TOKEN"), result.seconds)


def command(recipe: records.Recipe) -> str:
    """Returns the shell command that runs the tests and the canary."""
    files = " ".join(map(shlex.quote, recipe.files))
    token = f"/work/{_RUNNER}/token"
    if recipe.runner in ("pytest", "unittest"):
        tools = runners.folder("pytest") if recipe.runner == "pytest" else "-"
        return (
            f"cd /work/{ROOT} && {python()} -I /work/{_RUNNER}/guarded_run.py "
            f"{recipe.runner} {token} {tools} {':'.join(recipe.roots)} {files} 2>&1"
        )
    canary = f"/work/{_RUNNER}/{_CANARY}{_ENDINGS[recipe.runner]}"
    return f"cd /work/{ROOT} && bash /work/{_RUNNER}/driver.sh {files} {canary} 2>&1"


def _runner_files(recipe: records.Recipe) -> Mapping[str, bytes]:
    if recipe.runner in ("pytest", "unittest"):
        return {"guarded_run.py": pathlib.Path(guarded_run.__file__).read_bytes()}
    roots = " ".join(f"-I{root}" for root in recipe.roots)
    words = {
        "token_file": f"/work/{_RUNNER}/token",
        "step": _STEPS[recipe.runner],
        "prepare": _COMPILE if recipe.sources else ":",
        "sources": " ".join(map(shlex.quote, recipe.sources)),
        "compiler": "cc" if recipe.runner == "c" else "c++",
        "roots": roots,
        "tools": str(*binds(recipe)),
        # A test may include a source file: its own definitions come first.
        "link": "-Wl,-z,muldefs /tmp/objects/all.a" if recipe.sources else "",
    }
    driver = _DRIVER
    for _ in range(2):  # steps have words too
        driver = re.sub(r"\$(\w+)", lambda match: words.get(match[1], match[0]), driver)
    name = f"{_CANARY}{_ENDINGS[recipe.runner]}"
    return {"driver.sh": driver.encode(), name: recipe.canary.encode()}


def _read(log: str, token: str, recipe: records.Recipe) -> tuple[dict[str, str], str]:
    """Returns the outcomes of a log, and what is wrong with the run."""
    read = parsers.PARSERS[recipe.parser]
    if recipe.runner in ("pytest", "unittest"):
        lines = re.findall(rf"{token} (.*)", log)
        outcomes = dict(read("\n".join(lines)))
        if tampered := [line for line in lines if line.startswith("TAMPERED")]:
            return outcomes, f"the test runner was changed: {tampered[0].split()[1]}"
        is_done = lines[-1:] == ["DONE"]
    else:
        outcomes = dict(_read_sections(log, token, read))
        is_done = f"{token} DONE" in log
    canaries = [name for name in outcomes if _CANARY in name]
    if not is_done or not canaries:
        return outcomes, "the run ended early"
    is_caught = any(outcomes[name] == parsers.FAILED for name in canaries)
    for name in canaries:
        del outcomes[name]
    return outcomes, "" if is_caught else "a test that must fail did not"


def _read_sections(
    log: str, token: str, read: Callable[[str], parsers.Outcomes]
) -> Iterator[tuple[str, str]]:
    for section in log.split(f"{token} FILE ")[1:]:
        file, _, rest = section.partition("\n")
        text, _, code = rest.rpartition(f"{token} EXIT ")
        is_zero = code.split()[:1] == ["0"]
        yield file, parsers.PASSED if is_zero else parsers.FAILED
        for name, outcome in read(text).items():
            yield f"{file}::{name}", outcome


def limits(recipe: records.Recipe) -> sandbox.Limits:
    """Returns the limits of a box in which a package is tested."""
    memory = _ADDRESSES.get(recipe.language, sandbox.Limits.memory_bytes)
    return sandbox.Limits(output_bytes=_OUTPUT_BYTES, memory_bytes=memory)


def binds(recipe: records.Recipe) -> tuple[pathlib.Path, ...]:
    """Returns the host's folders that a box reads besides /usr."""
    return (runners.folder(recipe.runner),) if recipe.runner in runners.PATHS else ()


@functools.cache
def python() -> str:
    """Returns the Python that runs in the sandbox.

    Raises:
        config.InputError: there is none in /usr, which is all that a box sees.
    """
    if found := shutil.which("python3", path="/usr/bin:/usr/local/bin"):
        return found
    raise config.InputError("there is no python3 in /usr/bin; install python3.")
