"""Boxes: what a shell keeps, how commands end, and attempts to get out of one."""

import asyncio
import hashlib
import os
import pathlib
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

import pytest
from absl.testing import absltest

from glm5_jax import config
from glm5_jax.environments import sandbox
from glm5_jax.environments.sandbox import box as box_lib
from glm5_jax.environments.sandbox import bubblewrap
from tests import environment

ROOT = pathlib.Path(__file__).resolve().parents[3]
MISSING = bubblewrap.missing()
SECONDS = 60.0  # for what must end by itself, on a machine under load
SMALL = sandbox.Limits(
    seconds=SECONDS, memory_bytes=2**30, num_processes=40, disk_bytes=2**22
)

# Says that the shell has ended, or that a command has; then answers what comes.
ANSWERS = """
in=10 out=11; [ -S /proc/$$/fd/10 ] && out=10 && printf 'ended\\n' >&10
[ $out = 11 ] && printf 'done 0\\n' >&11
while IFS= read -r line <&$in; do
  [ "$line" = start ] || { echo theirs; printf 'done 0\\n' >&$out; }
done
"""
# Has the first process of the box, which could be bubblewrap's own, forget to end with
# its parent, and tells the parent that all is over.
TRACE = b"""
import ctypes, os, time
libc = ctypes.CDLL(None)
call = lambda *words: libc.syscall(*map(ctypes.c_long, words))
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
names = "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip"
names += " cs eflags rsp ss fs_base gs_base ds es fs gs"
Registers = (ctypes.c_ulonglong * 27)
at = names.split().index
was, now = Registers(), Registers()
handle = call(434, 1, 0)  # pidfd_open, then pidfd_getfd
found = [call(438, handle, fd, 0) for fd in range(3, 60)]
named = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in found if fd >= 0}
events = [fd for fd, name in named.items() if "event" in name]
libc.ptrace(16, 1, None, None)  # attach
os.waitpid(1, 0x40000000)
libc.ptrace(12, 1, None, ctypes.byref(was))
now[:] = was[:]
now[at("rip")] -= 2
now[at("rax")], now[at("orig_rax")] = 157, 2**64 - 1  # prctl
now[at("rdi")], now[at("rsi")] = 1, 0  # of the death signal: none
libc.ptrace(13, 1, None, ctypes.byref(now))
libc.ptrace(9, 1, None, None)  # a step
os.waitpid(1, 0x40000000)
libc.ptrace(12, 1, None, ctypes.byref(now))
print("the death signal is", "off" if now[at("rax")] == 0 else "on", flush=True)
libc.ptrace(13, 1, None, ctypes.byref(was))
libc.ptrace(17, 1, None, None)
if os.fork() == 0:
    os.setsid()
    for fd in events:
        os.write(fd, (1).to_bytes(8, "little"))
    for number in range(50):
        open("/work/alive", "w").write(str(number))
        time.sleep(0.1)
"""


def with_box(use, image=None, limits=SMALL, kind=None):
    """Returns what a coroutine returns of a new box."""

    async def run():
        box = await sandbox.start(image, limits, kind)
        try:
            return await use(box)
        finally:
            await box.close()

    return asyncio.run(run())


def outputs(*commands, **settings):
    """Returns the results of commands in one box."""

    async def use(box):
        return [await box.run(command) for command in commands]

    return with_box(use, **settings)


async def run_until(box, command, said):
    """Returns the result of a command whose time is over once it has said something."""
    limits, timeout = [], asyncio.timeout

    def kept(seconds):
        limits.append(timeout(seconds))
        return limits[-1]

    with mock.patch.object(asyncio, "timeout", kept):
        running = asyncio.create_task(box.run(command, SECONDS))
        while not (limits and said.encode() in box._pipes.out._kept):
            assert not running.done(), running
            await asyncio.sleep(0.01)
    limit = limits[0]
    now = asyncio.get_running_loop().time()
    assert now < limit.when() <= now + SECONDS
    limit.reschedule(now)
    return await running


class ShellTest(absltest.TestCase):
    """Subclasses are of other kinds."""

    kind = "bubblewrap"

    def setUp(self):
        super().setUp()
        if missing := sandbox.KINDS[self.kind].missing():
            self.skipTest(missing)
        folder = self.enterContext(tempfile.TemporaryDirectory())
        os.chmod(folder, 0o755)
        self.enterContext(mock.patch.object(tempfile, "tempdir", folder))

    def tearDown(self):
        self.assertEmpty(os.listdir(tempfile.gettempdir()))
        super().tearDown()

    def test_a_shell_remembers_and_outlives_what_ends_it(self):
        image = sandbox.Image(
            {"a/b.txt": b"1\n", "run": b'#!/bin/sh\nprintf "ran %s" "$1"\n'}
        )
        one, two, both, ended, again, bad, back = outputs(
            "cd a; x=$(cat b.txt)",
            "echo $x; echo wrong >&2; false",
            "echo 'done 0'; ../run \"a  'b\\n\"; printf '%s' '|é\\x'",
            "exit 3",
            "pwd; echo ${x-gone}; cat a/b.txt",
            "if",
            "sleep 100 & echo here",
            image=image,
            kind=self.kind,
        )
        self.assertEqual((one.exit_code, one.stdout, one.stderr), (0, "", ""))
        self.assertEqual((two.exit_code, two.stdout, two.stderr), (1, "1\n", "wrong\n"))
        self.assertEqual(both.stdout, "done 0\nran a  'b\\n|é\\x")
        self.assertIsNone(ended.exit_code)
        self.assertFalse(ended.is_timeout)
        folder, *rest = again.stdout.split()
        self.assertEndsWith(folder, "/work")
        self.assertEqual(rest, ["gone", "1"])
        self.assertNotEqual(bad.exit_code, 0)
        self.assertIn("syntax error", bad.stderr)
        self.assertEqual((back.exit_code, back.stdout), (0, "here\n"))

    def test_time_and_output_are_bounded(self):

        async def use(box):
            late = await run_until(box, "echo 1 > kept; echo begun; sleep 100", "begun")
            after = await box.run("cat kept")
            long = await box.run("head -c 300000 /dev/zero | tr '\\0' x; echo >&2")
            return late, after, long, await box.run("echo short")

        late, after, long, short = with_box(use, kind=self.kind)
        self.assertEqual((late.exit_code, late.stdout), (None, "begun\n"))
        self.assertTrue(late.is_timeout)
        self.assertLess(late.seconds, SECONDS)
        self.assertEqual((after.exit_code, after.stdout), (0, "1\n"))
        self.assertEqual(long.stdout, "x" * SMALL.output_bytes)
        self.assertTrue(long.is_cut)
        self.assertEqual((short.stdout, short.is_cut), ("short\n", False))

    def test_files_have_any_bytes_and_names(self):
        content = bytes(range(256)) * 3 + b"\x001\x007z"

        async def use(box):
            await box.write("x/it's \\ -n é", content)
            await box.write("-n", b"")
            with self.assertRaisesRegex(box_lib.BrokenError, "missing"):
                await box.read("missing")
            with self.assertRaisesRegex(box_lib.BrokenError, "could not be written"):
                await box.write("/proc/x", b"")
            return await box.read("x/it's \\ -n é"), await box.read("./-n")

        self.assertEqual(with_box(use, kind=self.kind), (content, b""))

    def test_large_files_are_written_at_once_and_a_failure_tells_why(self):
        """What does not fit into a pipe, in less than a line of its size took."""
        content = bytes(range(256)) * 2**15  # 8 MiB

        async def use(box):
            await box.write("x", content)
            for path in ("x/y", "/dev/full"):  # all that is sent is read, too
                with self.assertRaisesRegex(
                    sandbox.FileError, "n: .*(exists|direct|space)"
                ):
                    await box.write(path, b"touch bad\n" * 2**15)
            await box.write("empty", b"")
            listed = await box.run("sha256sum < x; wc -c < empty; ls")
            await box.run("mkfifo f")
            with (
                mock.patch.object(box, "_limits", sandbox.Limits(seconds=0.2)),
                self.assertRaisesRegex(sandbox.FileError, "f could.*more than 0 s"),
            ):
                await box.read("f")
            return listed.stdout.split()

        found = with_box(use, kind=self.kind, limits=sandbox.Limits(seconds=5.0))
        digest = hashlib.sha256(content).hexdigest()
        self.assertEqual(found, [digest, "-", "0", "empty", "x"])

    def test_a_shell_that_gets_no_pipes_closes_no_files_of_others(self):
        """The third one fails, and then all goes on."""
        real, told = os.mkfifo, []

        def full(path, mode):
            told.append(path)
            if len(told) == 3:
                raise OSError(24, "Too many open files")
            real(path, mode)

        async def use(box):
            await box.run("true")
            await box.restart()
            with (
                mock.patch.object(os, "mkfifo", full),
                self.assertRaisesRegex(sandbox.BrokenError, "no shell: .*Too many"),
            ):
                await box.run("true")
            opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
            said = await box.run("echo again")
            await box.restart()
            with (
                mock.patch.object(os, "mkfifo", side_effect=OSError),
                self.assertRaises(sandbox.BrokenError),
            ):
                await box.run("true")
            return said.stdout, opened

        said, opened = with_box(use, kind=self.kind)
        self.assertEqual(said, "again\n")
        for descriptor in opened:
            os.close(descriptor)  # none has been closed

    def test_a_narrow_umask_does_not_close_the_files_of_an_image(self):
        image = sandbox.Image({"a/b/c.txt": b"1\n", "a/d.txt": b"2\n"})
        self.addCleanup(os.umask, os.umask(0o077))
        (said,) = outputs("cat a/b/c.txt a/d.txt", kind=self.kind, image=image)
        self.assertEqual(said.stdout, "1\n2\n")

    def test_files_are_read_up_to_seven_tenths_of_the_output(self):
        most = SMALL.output_bytes * 7 // 10

        async def use(box):
            await box.write("most", bytes(most))
            await box.run("cat most most > more")  # where the shell begins
            with self.assertRaisesRegex(box_lib.BrokenError, "more .* it is too long"):
                await box.read("more")
            await box.run("base64() { echo wrong.; }")
            with self.assertRaisesRegex(box_lib.BrokenError, "could not be read"):
                await box.read("most")
            await box.restart()
            return await box.read("most")

        self.assertEqual(with_box(use, kind=self.kind), bytes(most))

    def test_a_start_or_command_that_is_cancelled_leaves_nothing(self):
        async def use(box):
            with self.assertRaises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await box.run("sleep 100")

        with_box(use, kind=self.kind)

        many = pathlib.Path(self.create_tempdir())
        for number in range(3000):  # to be copied
            (many / str(number)).touch()

        async def begin(image, seconds):
            starting = sandbox.start(image, limits=SMALL, kind=self.kind)
            task = asyncio.create_task(starting)
            await asyncio.sleep(0)
            time.sleep(seconds)  # the box's processes go on
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(begin(sandbox.Image(), 0.0))
        asyncio.run(begin(sandbox.Image(folder=many), 0.03))
        time.sleep(0.2)  # for what has been left to write

    def test_a_start_that_is_cancelled_at_its_end_leaves_nothing(self):
        async def begin():
            loop = asyncio.get_running_loop()
            task = loop.create_task(sandbox.start(limits=SMALL, kind=self.kind))
            remove = shutil.rmtree

            def cancel(path, **given):
                loop.call_soon_threadsafe(task.cancel)
                time.sleep(0.1)
                remove(path, **given)

            with mock.patch.object(shutil, "rmtree", cancel):
                await asyncio.wait({task})
            if not task.cancelled():
                await task.result().close()

        asyncio.run(begin())


class RlimitsTest(ShellTest):
    kind = "rlimits"


class ChoiceTest(absltest.TestCase):
    def only(self, *kinds):
        """Has no other kinds work, in this test."""

        def missing(kind):
            return "" if kind in kinds else f"no {kind}."

        self.enterContext(mock.patch.object(sandbox, "_missing", missing))
        for cached in (sandbox._first, sandbox._log):
            cached.cache_clear()
            self.addCleanup(cached.cache_clear)

    def test_a_missing_sandbox_is_told_and_no_demanded_one_is_replaced(self):
        self.only("rlimits")
        told = "bubblewrap: no bubblewrap.; podman: no podman.; docker: no docker."
        self.assertEqual(sandbox.describe(), f"rlimits; {told}")
        for kind in (None, "rlimits"):
            sandbox._log.cache_clear()
            with self.assertLogs("absl", "WARNING") as logged:
                (said,) = outputs("echo here", kind=kind)
            self.assertEqual(said.stdout, "here\n")
            self.assertIn("WITHOUT a sandbox", logged.output[0])
            self.assertIn("no bubblewrap.", logged.output[0])
        for kind in ("bubblewrap", "podman", "docker"):
            with self.assertRaisesRegex(config.InputError, f"'{kind}' does not work"):
                outputs("echo here", kind=kind)

    def test_without_bubblewrap_an_engine_is_taken_for_boxes_alone(self):
        self.only("docker", "rlimits")
        told = "docker; bubblewrap: no bubblewrap.; podman: no podman."
        self.assertEqual(sandbox.describe(), told)
        with self.assertLogs("absl", "WARNING") as logged:
            self.assertEqual(sandbox.confine(["true"]), ["true"])
        self.assertIn("WITHOUT a sandbox", logged.output[0])

    def test_a_variable_demands_a_kind(self):
        with mock.patch.dict(os.environ, GLM5_JAX_SANDBOX="rlimits"):
            self.assertEqual(sandbox.describe(), "rlimits; by $GLM5_JAX_SANDBOX")
            self.assertNotEqual(outputs("echo $HOME")[0].stdout, "/work\n")
        self.only("bubblewrap", "rlimits")
        for name in ("podman", "jail"):
            with mock.patch.dict(os.environ, GLM5_JAX_SANDBOX=name):
                for call in (sandbox.describe, lambda: outputs("true")):
                    with self.assertRaisesRegex(config.InputError, "does not work"):
                        call()

    def test_a_demanded_sandbox_is_told_too(self):
        if MISSING:
            self.skipTest(MISSING)
        sandbox._log.cache_clear()
        self.addCleanup(sandbox._log.cache_clear)
        with self.assertLogs("absl", "INFO") as logged:
            outputs("true", "true", kind="bubblewrap")
        self.assertEqual(
            [line for line in logged.output if "Commands" in line],
            ["INFO:absl:Commands run in bubblewrap."],
        )

    def test_wrong_settings_are_refused(self):
        with self.assertRaisesRegex(config.InputError, "'jail'.*none of bubblewrap"):
            asyncio.run(sandbox.start(kind="jail"))
        with self.assertRaisesRegex(config.InputError, "Limits.seconds must be posit"):
            sandbox.Limits(seconds=0.0)
        with self.assertRaisesRegex(ValueError, "leads out of the box"):
            asyncio.run(sandbox.start(sandbox.Image({"../x": b""})))


class EscapeTest(absltest.TestCase):
    """Every attempt aims at this machine's loopback, at a folder of the test and at
    the box itself. Subclasses are of other kinds."""

    kind = "bubblewrap"
    more = frozenset({"work"})  # folders of the root besides a machine's own
    written = ("/work", "/", "/tmp", "/etc", "/dev/shm")
    least_files = 1000  # that a folder can have
    can_trace = True  # the first process

    def setUp(self):
        super().setUp()
        if missing := sandbox.KINDS[self.kind].missing():
            self.skipTest(missing)

    def outputs(self, *commands, **settings):
        """Returns the results of commands in one box."""
        return outputs(*commands, kind=self.kind, **settings)

    def with_box(self, use, **settings):
        """Returns what a coroutine returns of a new box."""
        return with_box(use, kind=self.kind, **settings)

    def test_hidden_folders_and_files_are_empty_and_stay_so(self):
        hidden = (pathlib.Path("/usr/share"), pathlib.Path("/usr/bin/env"))
        found, kept = self.outputs(
            "ls -A /usr/share | wc -l; wc -c < /usr/bin/env; touch /usr/share/a",
            "ls /usr/share /usr/bin/wc",
            image=sandbox.Image(hidden=hidden),
        )
        self.assertEqual(found.stdout.split(), ["0", "0"])
        self.assertIn("Read-only file system", found.stderr)
        self.assertEqual(kept.stdout.split(), ["/usr/bin/wc", "/usr/share:"])

    def test_files_of_the_machine_are_not_there(self):
        folder = self.create_tempdir()
        secret = folder.create_file("secret", "hidden").full_path
        link, listed, etc, usr, dev, node = self.outputs(
            f"ln -s {secret} link; cat link {secret}",
            "ls /; ls /proc/1/root/",
            "ls /tmp; cat /etc/passwd /etc/shadow /root/* /home/*",
            "touch /usr/x; echo x >> /usr/bin/env",
            "ls /dev; cat /dev/mem /dev/kmsg",
            "mknod x b 8 0; mount -t tmpfs x /tmp; chroot / true",
        )
        for result in (link, etc, usr, dev, node):
            self.assertNotIn("hidden", result.stdout)
            self.assertNotEqual(result.exit_code, 0, result)
        top = {"bin", "dev", "etc", "lib", "lib64", "proc", "sbin", "tmp", "usr"}
        self.assertEqual({*listed.stdout.split()}, top | self.more)
        self.assertEqual(etc.stdout, "")
        self.assertNoCommonElements(dev.stdout.split(), {"sda", "vda", "mem", "kvm"})
        self.assertEqual(node.stdout, "")

    def test_a_folder_of_an_image_is_not_written(self):
        folder = pathlib.Path(self.create_tempdir().full_path)
        (folder / "a.txt").write_text("1\n")
        for path in (folder, *folder.parents):
            if path.stat().st_uid == os.geteuid() and path != path.parent:
                path.chmod(path.stat().st_mode | 0o055)
        (result,) = self.outputs(
            "echo 2 >> a.txt; touch b; cat a.txt", image=sandbox.Image(folder=folder)
        )
        self.assertEqual((result.exit_code, result.stdout), (0, "1\n2\n"))
        self.assertEqual([path.name for path in folder.iterdir()], ["a.txt"])
        self.assertEqual((folder / "a.txt").read_text(), "1\n")

    def test_there_is_no_network(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            tcp, links = self.outputs(
                f"echo x > /dev/tcp/127.0.0.1/{port}", "cat /proc/net/dev | wc -l"
            )
            server.settimeout(0.1)
            with self.assertRaises(TimeoutError):
                server.accept()
        self.assertIn("refused", tcp.stderr)
        self.assertEqual(links.stdout.strip(), "3")  # two lines of titles, loopback

    def test_other_processes_are_neither_seen_nor_reached(self):
        with subprocess.Popen(["sleep", "100"]) as canary:
            try:
                seen, killed, _, after = self.outputs(
                    f"cat /proc/{canary.pid}/cmdline; ps -e | wc -l",
                    f"kill -9 {canary.pid}",
                    "kill -9 -1",
                    "echo alive",
                )
                self.assertIsNone(canary.poll())
            finally:
                canary.kill()
        self.assertNotIn("sleep", seen.stdout)
        self.assertLess(int(seen.stdout.split()[-1]), 10)
        self.assertNotEqual(killed.exit_code, 0)
        self.assertEqual(after.stdout, "alive\n")

    def test_there_are_no_privileges_to_gain(self):
        status, nested, setuid = self.outputs(
            "grep -E '^(CapEff|CapPrm|NoNewPrivs)' /proc/self/status",
            "unshare --user true; unshare --mount true",
            "cp /usr/bin/id .; chmod u+s id; ./id -u",
        )
        self.assertRegex(status.stdout, r"CapPrm:\t0+\nCapEff:\t0+\nNoNewPrivs:\t1")
        self.assertNotEqual(nested.exit_code, 0)
        self.assertEqual(setuid.stdout, "1000\n")

    def test_memory_disk_and_processes_are_bounded(self):
        code = "x = bytearray(2 * 10**9)"
        memory, disk, files, bomb, after = self.outputs(
            f"/usr/bin/python3 -c '{code}'",
            "head -c 9000000 /dev/zero > big; wc -c < big; rm big",
            "for i in $(seq 9); do head -c 1000000 /dev/zero > f$i || break; done",
            # Built-ins alone: where there is no process left, bash waits 15 s for one.
            "rm f*; :(){ :|:& }; : ; for i in {1..20000}; do true; done;"
            " set -- /proc/[0-9]*; echo $#",
            "echo alive",
        )
        self.assertNotEqual(memory.exit_code, 0)
        self.assertLess(int(disk.stdout), SMALL.disk_bytes + 1)
        self.assertIn("No space left", files.stderr)
        numbers = [int(word) for word in bomb.stdout.split() if word.isdigit()]
        self.assertLessEqual(max(numbers, default=0), SMALL.num_processes + 2)
        self.assertIn("alive", after.stdout)

    def test_all_that_a_box_can_write_has_one_bound(self):
        folders = " ".join({*self.written, "/", "/etc", "/dev"})
        big = "for at in $folders; do head -c 3000000 /dev/zero > $at/big; done"
        sizes = "for at in $folders; do stat -c %s $at/big; done"
        many = "rm -f /*/big /big; cd /tmp; echo {1..9000} | xargs touch; ls | wc -l"
        whole, numbers, _, left = self.outputs(
            f"folders='{folders}'; {big}; {sizes}",
            f"{many} 2> /dev/null",
            "exit",
            "ls / /tmp /dev/shm /work",
        )
        taken = [int(size) for size in whole.stdout.split()]
        self.assertLen(taken, len(self.written))  # /dev is not written
        self.assertLess(sum(taken), SMALL.disk_bytes + 1)
        self.assertBetween(int(numbers.stdout), self.least_files, 4096)
        self.assertNotIn("big", left.stdout)
        self.assertNotIn("9", left.stdout)

    def test_a_full_box_gives_no_more_shells_but_breaks_nothing(self):
        fill = (
            "rm -f /bin /lib /sbin /lib64; cd /work; i=0;"
            " while : > $((i += 1)); do :; done"
        )
        filled, after = self.outputs(fill, "echo alive", "exit", "echo alive")[::3]
        self.assertEqual(filled.exit_code, 0)
        self.assertIn(after.exit_code, (0, None))

    def test_processes_that_take_too_much_memory_together_end(self):
        """None of them alone does."""
        limits = sandbox.Limits(resident_bytes=2.5e8)
        one = "/usr/bin/python3 -c 'x = b\"x\" * 10**8; import time; time.sleep(20)'"

        async def play():
            box = await sandbox.start(limits=limits, kind=self.kind)
            try:
                commands = f"{one} & {one} & {one} & wait", "echo alive"
                return [await box.run(command) for command in commands]
            finally:
                await box.close()

        many, after = asyncio.run(play())
        self.assertEqual((many.exit_code, many.is_timeout), (None, False))
        self.assertLess(many.seconds, 15)
        self.assertIn("alive", after.stdout)

    def test_memory_is_bounded_in_total_also_in_the_background_and_below_threads(self):
        self.assertLess(sandbox.Limits().resident_bytes, 2**33)
        code = """
import os, threading, time
def start():
    if os.fork() == 0:
        taken = b"x" * 10**8
        time.sleep(20)
    time.sleep(20)
for _ in range(4):
    threading.Thread(target=start).start()
"""

        async def use(box):
            await box.write("many.py", code.encode())
            await box.run("/usr/bin/python3 many.py & sleep 0.5; kept=1")
            async with asyncio.timeout(SECONDS):
                while box._is_alive:
                    await asyncio.sleep(0.1)
            return await box.run("echo ${kept-gone}")

        limits = sandbox.Limits(resident_bytes=2.5e8)
        self.assertEqual(self.with_box(use, limits=limits).stdout, "gone\n")

    def test_a_restart_ends_a_command_that_answers_in_the_place_of_its_shell(self):
        async def use(box):
            await box.run(ANSWERS, 2.0)
            await box.restart()
            return await box.run("echo mine; ps -e | wc -l")

        done = self.with_box(use)
        self.assertEqual(done.stdout.split()[:1], ["mine"])
        self.assertLess(int(done.stdout.split()[1]), 7)

    def test_what_a_shell_says_besides_a_code_ends_it(self):
        for said in ("ended\\n", "done x\\n", "%099999d"):
            talk = f"for fd in {{3..60}}; do printf '{said}' >&$fd; done"
            first, second = self.outputs(f"{talk}; sleep 100", "echo alive")
            self.assertEqual((first.exit_code, first.is_timeout), (None, False))
            self.assertEqual((second.exit_code, second.stdout), (0, "alive\n"))

    def test_what_is_said_between_commands_ends_the_shell_and_takes_no_memory(self):
        talk = "for fd in {3..60}; do head -c 9999999 /dev/zero >&$fd; done 2>/dev/null"

        async def use(box):
            await box.run(f"( sleep 0.2; {talk} ) &")
            async with asyncio.timeout(SECONDS):
                while box._is_alive and len(box._answer) < 2**16:
                    await asyncio.sleep(0.01)
            return len(box._answer), await box.run("echo alive")

        size, done = self.with_box(use)
        self.assertLessEqual(size, 2**13)
        self.assertEqual(done.stdout, "alive\n")

    def test_no_program_has_the_pipes_of_the_shell(self):
        (found,) = self.outputs(
            "/usr/bin/python3 -c 'import os; print(*os.listdir(\"/proc/self/fd\"))'"
        )
        self.assertEqual(found.stdout.split(), ["0", "1", "2", "3"])  # 3: the listing

    def test_nothing_that_a_shell_did_to_its_output_remains(self):
        flags = "import fcntl; fcntl.fcntl(1, 4, 2048); fcntl.fcntl(1, 1031, 4096)"
        long = "head -c 60000 /dev/zero | tr '\\0' x"

        async def use(box):
            await box.run(f"/usr/bin/python3 -c '{flags}'")
            await box.restart()
            return await box.run(f"set -o pipefail; {long}")

        done = self.with_box(use)
        self.assertEqual((done.exit_code, len(done.stdout)), (0, 60_000))

    @unittest.skipIf(platform.machine() != "x86_64", "the registers of x86-64")
    def test_what_traces_the_first_process_does_not_outlive_a_restart(self):
        async def use(box):
            await box.write("trace.py", TRACE)
            traced = await box.run("/usr/bin/python3 trace.py; sleep 1")
            await box.restart()
            before = await box.run("cat alive; sleep 0.4")
            return traced, before, await box.run("cat alive")

        traced, before, after = self.with_box(use)
        self.assertEqual("the death signal is off" in traced.stdout, self.can_trace)
        self.assertEqual(before.stdout, after.stdout)

    @pytest.mark.slow
    def test_a_killed_owner_leaves_no_process(self):
        code = (
            "import asyncio\n"
            "from glm5_jax.environments import sandbox\n"
            "async def main():\n"
            f"    box = await sandbox.start(kind={self.kind!r})\n"
            "    task = asyncio.create_task(box.run('sleep 98.7654'))\n"
            "    await asyncio.sleep(0.5)\n"
            "    print('here', flush=True)\n"
            "    await task\n"
            "asyncio.run(main())\n"
        )
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        environ = {**os.environ, "TMPDIR": str(folder)}
        with subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=environ, stdout=subprocess.PIPE
        ) as child:
            self.assertEqual(child.stdout.readline(), b"here\n")
            child.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + SECONDS
        command = ["pgrep", "-f", "sleep 98.7654"]
        while subprocess.run(command, capture_output=True).stdout:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        (left,) = folder.iterdir()
        self.assertEmpty([*(left / "room").iterdir()])  # its files were in memory


@unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
class BubblewrapTest(absltest.TestCase):
    def test_a_folder_of_an_image_is_a_layer_for_ordinary_users(self):
        """The holder's script, played as one; plain files stand for the pipes."""
        base = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        folder, stage, room = (base / name for name in ("it's", "stage", "room"))
        for path in (folder, stage, room):
            path.mkdir()
        (folder / "a").write_text("1\n")
        (folder / "gone").touch()
        (stage / "b").write_text("2\n")
        (base / "told").touch()
        for path in (base, room):
            path.chmod(0o777)
        words = "stat -f -c %T .; cat a b; echo 3 >> a; rm gone; ls; exit 1"
        shell = ["bash", "-c", words]
        user = bubblewrap._as_user()
        if user:  # who runs the tests is root
            for path in (folder, *folder.iterdir()):
                os.chown(path, bubblewrap.owner(), bubblewrap.owner())
        with mock.patch.object(os, "geteuid", return_value=1000):
            image = sandbox.Image(folder=folder)
            command = bubblewrap.holder(room, stage, image, shell, SMALL)
        done = subprocess.run(
            [*user, *command], input="start\nstart\n", capture_output=True, text=True
        )
        self.assertEqual(done.stdout, "ready\nended\nended\n", done.stderr)
        self.assertEqual((base / "err").read_text().count("gone"), 1)  # once more
        said = (base / "out").read_text().split()
        self.assertEqual(said, ["overlayfs", "1", "3", "2", "a", "b"])
        self.assertEqual((folder / "a").read_text(), "1\n")
        self.assertTrue((folder / "gone").exists())

    def test_what_a_program_alone_can_write_is_bounded(self):
        show = (
            "df -B1 --output=size,target /tmp /dev/shm; : > /x; : > /dev/x; : > /usr/x"
        )
        done = subprocess.run(
            sandbox.confine(["bash", "-c", show]), capture_output=True, text=True
        )
        sizes = [int(line.split()[0]) for line in done.stdout.splitlines()[1:]]
        self.assertEqual(sizes, [2**29, 2**29])
        self.assertLen(done.stderr.splitlines(), 3)
        self.assertEqual(done.stderr.count("Read-only file system"), 3)


if __name__ == "__main__":
    environment.main()
