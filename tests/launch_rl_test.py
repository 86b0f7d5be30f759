"""Launch scripts of asynchronous RL: all of their processes, on one machine."""

import contextlib
import http.server
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from absl.testing import absltest, parameterized

from benchmarks import chaos
from glm5_jax import command_line
from glm5_jax.training.reporting import metrics
from tests import docs_blocks_test, environment, runs
from tests.processes import launch
from tests.training import async_processes_test

SECONDS = 300
NUM_STEPS = 40
SERVER = f"{sys.executable}\0-m\0glm5_jax.serve\0".encode()  # of its command line
# In place of srun: the tasks of a step on this machine, with Slurm's variables.
SRUN = """#!{python} -ES
import os, signal, subprocess, sys, time

words, options = sys.argv[1:], {{}}
while words[0].startswith("--"):
    name, _, options[name] = words.pop(0)[2:].partition("=")
count = int(options["ntasks"])
each = count // int(options["nodes"])
tasks, code, ends = [], 0, []
signal.signal(signal.SIGTERM, lambda *_: ends.append(True))
for number in range(count):
    log = open(options["output"].replace("%t", str(number)), "ab")
    variables = {{
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number % each),
        "SLURM_NTASKS": str(count),
        "SLURM_STEP_NODELIST": "127.0.0.1",
    }}
    environ = os.environ | variables
    tasks += [subprocess.Popen(words, env=environ, stdout=log, stderr=log)]
while None in [task.poll() for task in tasks]:
    bad = [task.returncode for task in tasks if task.returncode]
    if bad and not code and options["kill-on-bad-exit"] == "1":
        code = bad[0]
        ends.append(True)
    if ends:
        ends.clear()
        [task.terminate() for task in tasks]
    time.sleep(0.05)
codes = [task.returncode for task in tasks]
sys.exit(code or max(c if c >= 0 else 128 - c for c in codes))
"""
SCONTROL = """#!/usr/bin/env bash
[[ $1 == requeue ]] && echo "$2" >>"$REQUEUED" || printf '127.0.0.1\\n%.0s' {1..3}
"""
# In place of python: tells what it was called with, and ends when it is told to.
PYTHON = """#!/usr/bin/env bash
[[ $1 == -c ]] && exit # a server is in service
name=${2#glm5_jax.}
place=${name}_$SLURM_PROCID
[[ $name == train ]] && saved=143
trap 'echo TERM >>"$CALLS/$place"; exit ${saved:-0}' TERM
echo "$GLM5_JAX_API_KEY ${CUDA_VISIBLE_DEVICES:--} ${JAX_NUM_PROCESSES:--} ${@:3}" \\
  >>"$CALLS/$place"
until [[ -e $CALLS/end_$place ]]; do sleep 0.05; done
read -r code <"$CALLS/end_$place"
rm "$CALLS/end_$place"
exit "$code"
"""


class FolderTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.create_tempdir().full_path)

    def write(self, name, text):
        path = self.root / name
        path.write_text(text)
        path.chmod(0o755)
        return path


class Slurm:
    """launch/slurm_rl.sh on three nodes that are this one."""

    def __init__(self, root, *flags, **variables):
        for name, text in (
            ("srun", SRUN.format(python=sys.executable)),
            ("scontrol", SCONTROL),
        ):
            (root / name).write_text(text)
            (root / name).chmod(0o755)
        (root / "launch").exists() or (root / "launch").symlink_to(
            launch.ROOT / "launch"
        )
        environ = {**launch.environ(1), "PATH": f"{root}:{os.environ['PATH']}"}
        environ.pop("GLM5_JAX_API_KEY", None)
        environ |= {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NODELIST": "node[0-2]",
            "SLURM_NTASKS_PER_NODE": "2",
            "SERVER_NODES": "2",
            "REQUEUED": f"{root}/requeued",
            "CHIP": "none",
        }
        self.requeued, self.logs = root / "requeued", root / f"logs/{os.getpid()}"
        self.process = subprocess.Popen(
            ["bash", launch.ROOT / "launch" / "slurm_rl.sh", *flags],
            cwd=root,
            env=environ | {name: str(value) for name, value in variables.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def kill(self):
        """Ends all of it, also what outlives the script."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finish(self):
        """Returns the exit code and the output; nothing of it is left behind."""
        children = chaos.children_of(self.process.pid)
        code, output = launch.finish(self.process, SECONDS)
        left = chaos.wait_for_end(children)
        assert not left, f"{left} outlive the script: {output}"
        return code, output


class ScriptTest(FolderTest):
    """Its own logic, with a stand-in for python."""

    def setUp(self):
        super().setUp()
        self.calls = self.root / "calls"
        self.calls.mkdir()

    def started(self, **variables):
        port = launch.free_port()
        slurm = Slurm(
            self.root,
            "--config=configs/x.py",
            "--workdir=a b",
            PYTHON=self.write("python", PYTHON),
            CALLS=self.calls,
            CHECKPOINT="/shared/sft",
            STORE="/shared/weights",
            PORT=port,
            **variables,
        )
        self.addCleanup(slurm.kill)
        return slurm, port

    def wait_for(self, name, number=1):
        """Waits until a task has said so many lines; returns them."""
        path, deadline = self.calls / name, time.monotonic() + 60
        while True:
            lines = path.read_text().splitlines() if path.exists() else []
            if len(lines) >= number:
                return lines
            assert time.monotonic() < deadline, [*self.calls.iterdir()]
            time.sleep(0.05)

    def end(self, name, code):
        part = self.calls / "new"
        part.write_text(f"{code}\n")
        part.rename(self.calls / f"end_{name}")

    def test_everyone_gets_what_belongs_to_it(self):
        slurm, port = self.started(
            SERVERS_PER_NODE=2,
            CUDA_VISIBLE_DEVICES="0,1,2,3",
            SERVE="--num_slots=4 --capacity=64",
        )
        servers = [self.wait_for(f"serve_{number}")[0] for number in range(4)]
        key = servers[0].split()[0]
        self.assertRegex(key, "^[0-9a-f]{64}$")
        for number, said in enumerate(servers):
            share = "0,1" if number % 2 == 0 else "2,3"
            self.assertEqual(
                said,
                f"{key} {share} 1 --checkpoint=/shared/sft "
                f"--weights_root=/shared/weights --host=0.0.0.0 --num_slots=4 "
                f"--capacity=64 --port={port + 1 + number}",
            )
        urls = ",".join(f"http://127.0.0.1:{port + 1 + i}" for i in range(4))
        (router,) = self.wait_for("route_0")
        wanted = f"{key} 0,1,2,3 - --host=0.0.0.0 --port={port} --replicas={urls}"
        self.assertEqual(router, wanted)
        wanted = (
            f"{key} 0,1,2,3 - --config.init_from=/shared/sft "
            f"--config.rl.num_engines=0 --config.rl.servers=http://127.0.0.1:{port} "
            f"--config.rl.weights_store=/shared/weights --config=configs/x.py "
            f"--workdir=a b"
        )
        for number in range(2):
            self.assertEqual(self.wait_for(f"train_{number}"), [wanted])
            self.end(f"train_{number}", 0)
        code, output = slurm.finish()
        self.assertEqual(code, 0, output)
        self.assertFalse(slurm.requeued.exists())
        for number in range(4):  # they end with the trainer
            self.assertEqual(self.wait_for(f"serve_{number}", 2)[1], "TERM")
        names = {path.name for path in slurm.logs.iterdir()}
        wanted = {"router.log", "process_0.log", "process_1.log"}
        self.assertEqual(names, wanted | {f"server_{i}.log" for i in range(4)})

    def test_sigterm_is_for_the_trainer_and_queues_the_job_again(self):
        slurm, _ = self.started()
        for name in ("serve_0", "serve_1", "train_0", "train_1"):
            self.wait_for(name)
        self.end("serve_1", 1)  # a crash
        first, again = self.wait_for("serve_1", 2)
        self.assertEqual(first, again)
        slurm.process.terminate()
        code, output = slurm.finish()
        self.assertEqual(code, 143, output)
        self.assertEqual(slurm.requeued.read_text(), f"{os.getpid()}\n")
        self.assertEqual(self.wait_for("train_1", 2)[1:], ["TERM"])
        self.assertEqual(self.wait_for("serve_1", 3)[2:], ["TERM"])

    def test_sigterm_that_meets_the_script_at_its_start_is_for_the_trainer(self):
        sent = self.root / "sent"
        wait = f"until [[ -e {shlex.quote(str(sent))} ]]; do sleep 0.05; done"
        text = f"trap '[[ $BASH_COMMAND == trainer=* ]] && {wait}' DEBUG"
        slurm, _ = self.started(BASH_ENV=self.write("slow", text))
        for name in ("serve_0", "serve_1", "train_0", "train_1"):
            self.wait_for(name)
        slurm.process.terminate()
        sent.touch()
        code, output = slurm.finish()
        self.assertEqual(code, 143, output)
        self.assertEqual(slurm.requeued.read_text(), f"{os.getpid()}\n")
        self.assertEqual(self.wait_for("train_1", 2)[1:], ["TERM"])

    def test_a_failure_of_the_trainer_is_the_job_s(self):
        slurm, _ = self.started()
        self.wait_for("train_0")
        self.end("train_0", 7)
        self.assertEqual(slurm.finish()[0], 7)
        self.assertFalse(slurm.requeued.exists())

    def test_wrong_input_of_a_server_ends_the_job(self):
        slurm, _ = self.started()
        for name in ("train_0", "serve_0"):
            self.wait_for(name)
        self.end("serve_0", 2)
        code, output = slurm.finish()
        self.assertEqual(code, 2, output)
        self.assertIn("the router or the servers have ended", output)
        self.assertFalse(slurm.requeued.exists())

    def test_wrong_variables(self):
        for wrong, message in (
            ({"SERVER_NODES": 3}, "leave a node to the trainer, got 3 of 3 nodes"),
            ({"SERVER_NODES": 0}, "at least 1"),
            ({"STORE": ""}, "name a folder for the weights"),
            ({"CHECKPOINT": ""}, "name the model"),
        ):
            given = {"CHECKPOINT": "a", "STORE": "b"} | wrong
            code, output = Slurm(self.root, **given).finish()
            self.assertGreater(code, 0)
            self.assertIn(message, output)


class KeepTest(absltest.TestCase):
    def test_a_signal_that_meets_a_server_at_its_start_ends_it(self):
        text = (launch.ROOT / "launch" / "slurm_rl.sh").read_text()
        (keep,) = re.findall(r"^keep='\n(.*?)'$", text, re.MULTILINE | re.DOTALL)
        slow = self.create_tempfile(content="trap 'sleep 0.05' DEBUG").full_path
        program = (
            "trap 'echo drained; exit 0' TERM; "
            "kill -TERM $PPID; sleep 9 >&- 2>&- & wait"
        )
        done = subprocess.run(
            ["bash", "-c", keep, "serve", "sh", "-c", program],
            env={**os.environ, "BASH_ENV": slow, "FIRST_PORT": "1"},
            capture_output=True,
            text=True,
        )
        self.assertEqual((done.stdout, done.returncode), ("drained\n", 0), done.stderr)


class AwaitServersTest(absltest.TestCase):
    def test_it_asks_until_one_is_in_service(self):
        asked, answers = [], [503, 200]

        class Router(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(self.path)
                self.send_response(answers[len(asked) - 1])
                self.end_headers()

            def log_message(self, *_):
                pass

        with http.server.HTTPServer(("127.0.0.1", 0), Router) as router:
            thread = threading.Thread(target=router.serve_forever, args=(0.01,))
            thread.start()
            url = f"http://127.0.0.1:{router.server_port}/"
            command = ["bash", launch.ROOT / "launch" / "await_servers.sh", url]
            environ = os.environ | {"PYTHON": sys.executable}
            environ["BASH_FUNC_sleep%%"] = "() { command sleep 0.1; }"  # for 2
            subprocess.run(command, env=environ, check=True, timeout=60)
            router.shutdown()
            thread.join()
        self.assertEqual(asked, ["/health", "/health"])


def jobset():
    """The parts of launch/gke_rl_jobset.yaml: name, number, job and pod."""
    yaml = pytest.importorskip("yaml")
    path = launch.ROOT / "launch" / "gke_rl_jobset.yaml"
    whole = yaml.safe_load(path.read_text())
    parts = {}
    for part in whole["spec"]["replicatedJobs"]:
        job = part["template"]["spec"]
        parts[part["name"]] = part["replicas"], job, job["template"]["spec"]
    return whole, parts


class AgainTest(absltest.TestCase):
    def test_a_good_end_is_a_failure_for_a_job(self):
        for code, wanted in ((0, 1), (2, 2), (7, 7)):
            done = subprocess.run(
                ["launch/again.sh", "bash", "-c", f"exit {code}"], cwd=launch.ROOT
            )
            self.assertEqual(done.returncode, wanted)

    def test_a_signal_that_meets_the_script_at_its_start_goes_on(self):
        slow = self.create_tempfile(content="trap 'sleep 0.05' DEBUG").full_path
        program = (
            "trap 'sleep 0.2; echo drained; exit 0' TERM; "
            "kill -TERM $PPID; sleep 9 >&- 2>&- & wait"
        )
        done = subprocess.run(
            ["launch/again.sh", "sh", "-c", program],
            cwd=launch.ROOT,
            env={**os.environ, "BASH_ENV": slow},
            capture_output=True,
            text=True,
        )
        self.assertEqual((done.stdout, done.returncode), ("drained\n", 1), done.stderr)


def said(container):
    """The words that a container's shell calls python with."""
    (text,) = container["args"]
    program = (
        "exec() { [[ $1 == launch/* ]] && shift; shift; "
        'printf "%s\\n" "$@"; }; python() { printf "%s\\n" "$@"; };'
    )
    done = subprocess.run(
        ["bash", "-c", f"{program} {text}"],
        cwd=launch.ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def value(words, flag):
    (found,) = [w.partition("=")[2] for w in words if w.startswith(f"--{flag}=")]
    return found


class JobSetTest(absltest.TestCase):
    def test_every_command_parses_and_names_the_others(self):
        whole, parts = jobset()
        name = whole["metadata"]["name"]
        called = {}
        for part, (_, _, pod) in parts.items():
            (container,) = pod["containers"]
            module, *words = said(container)[1:]
            known = docs_blocks_test.flags_of(docs_blocks_test.module_file(module))
            for word in words:
                flag = re.match(r"--([\w.]+)=", word)[1]
                self.assertTrue(flag.startswith("config") or flag in known, word)
            called[part] = words
        route, serve, train = (called[p] for p in ("router", "server", "trainer"))
        number = parts["server"][0]
        port = value(serve, "port")
        urls = [f"http://{name}-server-{i}-0.{name}:{port}" for i in range(number)]
        self.assertEqual(value(route, "replicas").split(","), urls)
        router = f"http://{name}-router-0-0.{name}:{value(route, 'port')}"
        self.assertEqual(value(train, "config.rl.servers"), router)
        (wait,) = parts["trainer"][2]["initContainers"]
        self.assertEqual(wait["args"], [f"exec launch/await_servers.sh {router}"])
        for flag, same in (
            ("weights_root", "config.rl.weights_store"),
            ("checkpoint", "config.init_from"),
        ):
            self.assertEqual(value(serve, flag), value(train, same))
        train = [w.replace("NAME", "small_async_reverse") for w in train]
        arguments, _ = command_line.parse_command_line(["train", *train])
        self.assertEqual(arguments.train_config().rl.servers, router)
        overrides = command_line.parse_command_line(["serve", *serve])[0].overrides
        chips = parts["server"][2]["containers"][0]["resources"]["limits"]
        self.assertEqual(overrides, (("mesh.expert", str(chips["google.com/tpu"])),))

    def test_it_ends_with_the_trainer_which_alone_restarts_all(self):
        whole, parts = jobset()
        spec = whole["spec"]
        self.assertEqual(spec["successPolicy"]["targetReplicatedJobs"], ["trainer"])
        for part, (_, job, pod) in parts.items():
            self.assertEqual(job["backoffLimit"] == 0, part == "trainer")
            (rule,) = job["podFailurePolicy"]["rules"]
            self.assertEqual(rule["onExitCodes"]["values"], [2])
            self.assertEqual(pod["restartPolicy"], "Never")
            (container,) = pod["containers"]
            (key,) = [x for x in container["env"] if x["name"] == "GLM5_JAX_API_KEY"]
            self.assertEqual(
                key["valueFrom"], {"secretKeyRef": {"name": "glm5-key", "key": "key"}}
            )
            again = "" if part == "trainer" else "launch/again.sh "
            self.assertIn(f"exec {again}python -m glm5_jax.", container["args"][0])
            if "nodeSelector" in pod:
                chips = 1
                topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
                for side in topology.split("x"):
                    chips *= int(side)
                each = container["resources"]["limits"]["google.com/tpu"]
                self.assertEqual(job["completions"], chips // each)
            self.assertEqual(job["completions"], job["parallelism"])


@pytest.mark.slow
class RunTest(runs.FolderTest):
    """Real servers and trainers of a tiny model."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.start, cls.store = cls.root / "sft", cls.root / "weights"
        cls.store.mkdir()
        quick = {"rl.num_engines": 0, "num_steps": 1}
        command = async_processes_test.command(cls.start, **quick)
        code, output = launch.finish(launch.start(command))
        assert code == 0, output

    def flags(self, workdir, **changes):
        """Flags of a trainer of two devices, without the program and the servers."""
        command = async_processes_test.command(
            workdir,
            **{"mesh.data": 2, "sample_tokens": 0, "checkpoint_every": 10},
            **changes,
        )
        return [w for w in command[3:] if not w.startswith("--config.rl.num_engines")]

    def wait_for_record(self, workdir, process, is_there):
        path, deadline = workdir / "metrics.jsonl", time.monotonic() + SECONDS
        while True:
            records = metrics.read(path) if path.exists() else []
            if records and is_there(records[-1]):
                return
            self.assertIsNone(process.poll(), process.stdout.read)
            self.assertLess(time.monotonic(), deadline, records[-1:])
            time.sleep(0.2)

    def started(self, workdir):
        """Starts launch/slurm_rl.sh, or what Slurm would start of it again."""
        slurm = Slurm(
            self.root,
            *self.flags(workdir, num_steps=NUM_STEPS),
            PYTHON=sys.executable,
            CHECKPOINT=self.start,
            STORE=self.store,
            SERVE="--num_slots=8 --capacity=256",
            PORT=launch.free_port(3),  # with those of two servers
        )
        self.addCleanup(slurm.kill)
        return slurm

    def test_slurm(self):
        """A server is killed and comes back; SIGTERM, and the job queues again."""
        workdir = self.root / "slurm"
        slurm = self.started(workdir)
        self.wait_for_record(workdir, slurm.process, lambda last: last["step"] >= 2)
        children = chaos.children_of(slurm.process.pid)
        words = [pathlib.Path(f"/proc/{p}/cmdline").read_bytes() for p in children]
        variables = pathlib.Path(f"/proc/{children[-1]}/environ").read_text()
        key = re.search("GLM5_JAX_API_KEY=([0-9a-f]{64})\0", variables)[1]
        self.assertFalse(any(key.encode() in line for line in words))
        servers = [
            p
            for p, line in zip(children, words, strict=True)
            if line.startswith(SERVER)
        ]
        self.assertLen(servers, 2)
        os.kill(servers[0], signal.SIGKILL)
        repaired = "actors/servers_repaired"
        self.wait_for_record(workdir, slurm.process, lambda last: last[repaired])
        slurm.process.terminate()
        code, output = slurm.finish()
        self.assertEqual(code, 143, output)
        self.assertTrue(slurm.requeued.exists())
        before = metrics.read(workdir / "metrics.jsonl")[-1]["step"]
        self.assertLess(before, NUM_STEPS)

        code, output = self.started(workdir).finish()
        logs = "".join(p.read_text() for p in slurm.logs.glob("process_*"))
        self.assertEqual(code, 0, output + logs)
        records = metrics.read(workdir / "metrics.jsonl")
        self.assertEqual([r["step"] for r in records], [*range(1, NUM_STEPS + 1)])
        self.assertLessEqual(max(r["rollout/staleness_max"] for r in records), 2)
        self.assertLess(max(r["rl/logprob_gap"] for r in records), 1e-5)

    def test_commands_of_the_jobset(self):
        """Those of its pods, with the hosts, ports, folders and sizes of this test."""
        workdir = self.root / "gke"
        _, parts = jobset()
        with contextlib.ExitStack() as stack:
            first = launch.free_port(3)
            ports = [*range(first, first + 3)]
            changed = {
                "configs/NAME.py": "configs/small_rl_reverse.py",
                "/shared/run": f"{workdir}",
                "/shared": f"{self.root}",
                "glm5-rl-router-0-0.glm5-rl:8000": f"127.0.0.1:{ports[0]}",
                "--config.mesh.expert=4": "--config.mesh.expert=1",
                "--num_slots=64 --capacity=32768": "--num_slots=8 --capacity=256",
                "exec python": f"exec {sys.executable}",
                "again.sh python": f"again.sh {sys.executable}",
            }
            for i in range(4):  # the last two are names of the first ones
                host = f"127.0.0.1:{ports[1 + i % 2]}"
                changed[f"glm5-rl-server-{i}-0.glm5-rl:8000"] = host

            def begin(container, port=0, more=()):
                (text,) = container["args"]
                for old, new in changed.items():
                    text = text.replace(old, new)
                text = text.replace("--port=8000", f"--port={port}")
                text = " ".join([text, *map(shlex.quote, more)])
                log = stack.enter_context((self.root / f"{port}.log").open("wb"))
                own = {"GLM5_JAX_API_KEY": "secret", "PYTHON": sys.executable}
                process = subprocess.Popen(
                    [*container["command"], text],
                    cwd=launch.ROOT,
                    env=launch.environ(2 if more else 1) | own,
                    stdout=log,
                    stderr=log,
                )
                stack.callback(process.wait)
                stack.callback(process.terminate)
                return process

            def finish(process):
                code = process.wait(SECONDS)
                self.assertEqual(code, 0, (self.root / "0.log").read_text())

            (route,), (serve,) = (
                parts[n][2]["containers"] for n in ("router", "server")
            )
            begin(route, ports[0])
            servers = [begin(serve, port) for port in ports[1:]]
            trainer = parts["trainer"][2]
            finish(begin(trainer["initContainers"][0]))
            flags = [f for f in self.flags(workdir, num_steps=3) if "=" in f]
            flags = [f for f in flags if not re.match("--(config|workdir)=", f)]
            finish(begin(trainer["containers"][0], more=flags))
            request = urllib.request.Request(
                f"http://127.0.0.1:{ports[0]}/replicas",
                headers={"Authorization": "Bearer secret"},
            )
            with urllib.request.urlopen(request, timeout=30) as found:
                replicas = json.load(found)["replicas"]
            self.assertEqual({r["state"] for r in replicas}, {"ready"})
            self.assertEqual([s.poll() for s in servers], [None, None])
        records = metrics.read(workdir / "metrics.jsonl")
        self.assertEqual([r["step"] for r in records], [1, 2, 3])


if __name__ == "__main__":
    environment.main()
