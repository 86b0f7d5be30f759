"""Boxes of podman and Docker keep apart what those of bubblewrap do."""

import asyncio
import io
import json
import os
import pathlib
import re
import subprocess
import tarfile
import tempfile
from unittest import mock

import pytest
from absl.testing import absltest

from glm5_jax.environments import sandbox
from glm5_jax.environments.sandbox import container, container_files
from tests import environment
from tests.environments.sandbox import box_test

# An engine that has the image and, with --other, runs what it is given.
FAKE = """#!/bin/sh
case "$*" in
  *"image inspect"*) exit 0 ;;
  "--other run"*) exit 0 ;;
  *) echo "it bounds nothing."; exit 1 ;;
esac
"""


class EngineTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        (folder / "fake").write_text(FAKE)
        (folder / "fake").chmod(0o755)
        path = f"{folder}:{os.environ['PATH']}"
        self.enterContext(mock.patch.dict(os.environ, PATH=path))

    def test_what_an_engine_does_not_hold_is_told(self):
        told = container.Engine("fake", (("--more", "x"),)).missing()
        self.assertEqual(
            told, "fake: it bounds nothing.; fake --more x: it bounds nothing."
        )
        told = container.Engine("no_such_engine").missing()
        self.assertEqual(told, "there is no no_such_engine.")
        with mock.patch.object(os, "geteuid", return_value=1000):
            told = container.Engine("fake", is_mapped=True).missing()
        self.assertIn("for root alone", told)

    def test_its_command_has_the_words_that_it_needs(self):
        engine = container.Engine("fake", (("--other",),))
        self.assertEqual(engine.missing(), "")
        self.assertEqual(engine._found[0], ["fake", "--other"])

    def test_a_file_may_have_the_whole_bound(self):
        """The shell counts blocks as POSIX has them."""
        engine = container.Engine("fake", (("--other",),))
        top = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        limits = sandbox.Limits(disk_bytes=4096)
        words = engine.holder(top / "room", top, sandbox.Image(), ["true"], limits)
        (script,) = [word for word in words if "ulimit -f" in word]
        bound = re.search(r"ulimit -f \d+", script)[0]
        for size, kept in ((4096, 4096), (5000, 4096)):
            made = f"set -o posix; {bound}; head -c {size} /dev/zero > {top}/x"
            subprocess.run(["bash", "-c", made], check=False)
            self.assertEqual((top / "x").stat().st_size, kept)

    def test_a_container_that_does_not_start_is_tried_again(self):
        path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), "tried")
        for code, tries in ((126, 3), (125, 3), (1, 1), (0, 1)):
            path.write_text("")
            run = f"echo >> {path}; exit {code}"
            words = ["sh", "-c", container._TRIES, "sh", "sh", "-c", run]
            self.assertEqual(subprocess.run(words).returncode, code)
            self.assertEqual(path.read_text().count("\n"), tries)


class FilesTest(absltest.TestCase):
    def test_the_image_is_folders_and_links(self):
        with tarfile.open(fileobj=io.BytesIO(container_files.image())) as archive:
            found = {member.name: member for member in archive}
        self.assertFalse(any(member.isreg() for member in found.values()))
        self.assertEqual(found["lib64"].linkname, "usr/lib64")
        self.assertEqual(found["box"].mode, 0o700)
        self.assertRegex(container_files.image_name(), r"^glm5_jax_box:[0-9a-f]{12}$")

    def test_rules_forbid_namespaces_and_nothing_else(self):
        kept, gone = ["read", "ptrace"], ["unshare", "clone", "clone3", "mount"]
        rules = {
            "defaultAction": "SCMP_ACT_ERRNO",
            "syscalls": [
                {"names": [*kept, *gone], "action": "SCMP_ACT_ALLOW"},
                {"names": ["setns"], "action": "SCMP_ACT_ALLOW"},
            ],
        }
        found = json.loads(container_files.without_namespaces(json.dumps(rules)))
        first, clone = found["syscalls"]
        self.assertEqual(first["names"], kept)
        self.assertEqual(clone["names"], ["clone"])
        (flags,) = clone["args"]
        for name in ("NEWNS", "NEWCGROUP", "NEWUTS", "NEWIPC", "NEWUSER", "NEWPID"):
            self.assertTrue(flags["value"] & getattr(CLONE, name), name)
        self.assertFalse(flags["value"] & CLONE.THREAD)


class CLONE:
    """Flags of clone, of linux/sched.h."""

    NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
    NEWUSER, NEWPID, THREAD = 0x10000000, 0x20000000, 0x10000


@pytest.mark.slow
class PodmanShellTest(box_test.ShellTest):
    kind = "podman"


@pytest.mark.slow
class PodmanEscapeTest(box_test.EscapeTest):
    kind = "podman"
    more = frozenset({"box", "run", "sys", "work"})
    written = ("/work", "/tmp", "/dev/shm")
    least_files = 500
    can_trace = False

    def test_an_order_in_parts_is_taken(self):
        """As a busy machine has it: a start was lost, and its box never answered."""

        async def use(box):
            running = asyncio.create_task(box.run("sleep 100", box_test.SECONDS))
            await asyncio.sleep(0.2)
            for part in (b"ki", b"ll\n"):
                box._socket.send(part)
                await asyncio.sleep(1.3)  # the first process looks each second
            return await running

        done = self.with_box(use)
        self.assertEqual((done.exit_code, done.is_timeout), (None, False))


@pytest.mark.slow
class DockerShellTest(box_test.ShellTest):
    kind = "docker"


@pytest.mark.slow
class DockerEscapeTest(PodmanEscapeTest):
    kind = "docker"


if __name__ == "__main__":
    environment.main()
