"""Scores an agent's package in a container of Harbor's, from a folder of tests.

It stands alone beside kinds.py and parsers.py, as exported.py writes them: task.json
has the task, and hidden/ its tests. As in world.py, the agent's files are put over a
fresh copy, and the tests and what steers them are put back. A test runner lies in an
archive that the image has; one that was changed scores nothing.
"""

import contextlib
import hashlib
import io
import json
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from typing import Any

from glm5_jax.environments.worlds.swe import kinds, parsers

TASK, HIDDEN = "task.json", "hidden"
_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/work",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def main(tests: str, reward: str) -> None:
    """Writes the reward, 1 or 0.

    Args:
        tests: folder of the tests.
        reward: file to write.
    """
    folder = pathlib.Path(tests)
    task = json.loads((folder / TASK).read_text(encoding="utf-8"))
    _renew(pathlib.Path(task["repo"]), folder, task)
    token = secrets.token_hex(16)
    problem = _prepare(task, token)
    log, problem = ("", problem) if problem else _run(task)
    outcomes: Mapping[str, str] = {}
    if not problem:
        how = {"parser": task["parser"], "is_guarded": task["is_guarded"]}
        outcomes, problem = parsers.read_run(log, token, **how)
    wanted = [*task["FAIL_TO_PASS"], *task["PASS_TO_PASS"]]
    passed = sum(outcomes.get(test) == parsers.PASSED for test in wanted)
    is_solved = not problem and passed == len(wanted)
    sys.stdout.write(f"{passed} of {len(wanted)} tests pass. {problem}\n")
    path = pathlib.Path(reward)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # perhaps a link of the package's
    path.write_text(f"{int(is_solved)}\n", encoding="utf-8")


def _renew(repo: pathlib.Path, folder: pathlib.Path, task: Mapping[str, Any]) -> None:
    """Leaves in the package's folder the files that count."""
    files = {}
    for path in sorted(repo.rglob("*")):
        name = path.relative_to(repo).as_posix()
        if path.is_symlink() or not path.is_file() or "\n" in name:
            continue
        if not kinds.is_taken(name, task["guards"], task["given"]):
            continue
        if path.stat().st_size <= task["max_file_bytes"]:
            files[name] = path.read_bytes()
    kept = {name: text.encode("latin-1") for name, text in task["kept"].items()}
    hidden = folder / HIDDEN
    for path in sorted(hidden.rglob("*")):
        if path.is_file():
            kept[path.relative_to(hidden).as_posix()] = path.read_bytes()
    for path in repo.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    _write(repo, kinds.merged(files, kept))


def _prepare(task: Mapping[str, Any], token: str) -> str:
    """Writes the files of the test runner, and returns what is wrong with it."""
    work = pathlib.Path(task["repo"]).parent
    runner = work / pathlib.PurePosixPath(task["token"]).parent
    shutil.rmtree(runner, ignore_errors=True)
    texts = {path: text.encode("latin-1") for path, text in task["runner"]}
    _write(work, {**texts, task["token"]: token.encode()})
    if not task["tools"]:
        return ""
    archive = pathlib.Path(task["tools"]).read_bytes()
    if hashlib.sha256(archive).hexdigest() != task["tools_sha256"]:
        return "the test runner was changed"
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        files = {name: opened.read(name) for name in opened.namelist()}
    _write(runner / "tools", files)
    return ""


def _write(folder: pathlib.Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if content.startswith((b"#!", b"\x7fELF")) else 0o644)


def _run(task: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the log of the tests, and why there is no whole one."""
    with tempfile.TemporaryFile() as log:  # a pipe waits for all that have it
        process = subprocess.Popen(
            ["bash", "-c", f"ulimit -t {task['cpu_seconds']}\n{task['command']}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=pathlib.Path(task["repo"]).parent,
            env=_ENV,
            start_new_session=True,
        )
        try:
            process.wait(task["seconds"])
        except subprocess.TimeoutExpired:
            return "", "out of time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        output = log.read(task["output_bytes"] + 1)
    if len(output) > task["output_bytes"]:
        return "", "the log is too long"
    return output.decode(errors="replace"), ""
