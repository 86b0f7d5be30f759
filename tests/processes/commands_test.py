"""generate and evaluate in two real processes equal those in one."""

import pathlib
import signal
import sys
import time

import httpx
import jax
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax.processes import interrupts
from glm5_jax.rl.weight_store import writer
from glm5_jax.weights import quantized_loading
from tests import environment, forked
from tests.processes import launch, worker

GOLDEN = str(pathlib.Path(__file__).parent.parent / "golden" / "glm5")
FLAGS = [f"--config.{name}={value}" for name, value in worker.FLOATS]
FLAGS += [f"--checkpoint={GOLDEN}", "--config.mesh.fsdp=2"]
CHAT_MODEL = str(pathlib.Path(__file__).parent.parent / "golden" / "chat_model")
NEW, DAMAGED = "i0000-v000000001", "i0000-v000000002"
HEARTBEAT = 10
SECONDS_TO_LEAVE = 60  # of which HEARTBEAT in silence, on a machine under load


class CommandsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)
        # As many and as long as a program of scores takes: all scores have one program.
        rows = np.random.default_rng(0).integers(3, 80, (4, worker.PROMPT_TOKENS))
        np.save(self.folder / "ids.npy", rows)
        np.save(self.folder / "two_ids.npy", rows[:2])
        (self.folder / "release").symlink_to(GOLDEN)
        (self.folder / "chat_model").symlink_to(CHAT_MODEL)

    def run_as(self, scenario, count, num_devices=2):
        sizes = {"count": count, "num_devices": num_devices // count}
        return launch.fork(worker.run, scenario, self.folder, **sizes)

    def test_two_processes_equal_one_on_the_same_mesh(self):
        for count in (1, 2):
            for code, output in self.run_as("continue_and_score", count):
                self.assertEqual(code, 0, output)
        for name in ("{}.json", "{}_ids", "{}_logits", "{}_led.json"):
            one, two = (self.folder / name.format(count) for count in (1, 2))
            self.assertEqual(one.read_bytes(), two.read_bytes(), name)
        logits = np.load(self.folder / "2_logits")
        self.assertTrue(np.isfinite(logits).all() and np.ptp(logits) > 0)

    @pytest.mark.slow
    def test_a_call_that_fails_in_one_ends_both(self):
        for code, output in self.run_as("lead_and_fail", 2):
            self.assertEqual(code, 1, output)
            self.assertIn("RuntimeError: a bug in process 0", output)

    @pytest.mark.slow
    def test_other_inputs_are_refused_by_both(self):
        ids = np.load(self.folder / "ids.npy")
        for number in range(2):
            np.save(self.folder / f"ids{number}.npy", ids + number)
        for code, output in self.run_as("score_other_rows", 2):
            self.assertEqual(code, 2, output)
            self.assertIn("process 1 has other settings or inputs than", output)

    @pytest.mark.slow
    def test_each_process_rounds_only_its_parts(self):
        done = self.run_as("round_shards", 2, num_devices=8)
        for (code, output), experts in zip(
            done, ("0, 1, 2, 3", "4, 5, 6, 7"), strict=True
        ):
            self.assertEqual(code, 0, output)
            self.assertIn(f"experts [{experts}]", output)


class CommandLineTest(parameterized.TestCase):
    """The commands themselves, as a shell starts them."""

    def command(self, name, *flags):
        return [sys.executable, "-m", f"glm5_jax.{name}", *FLAGS, *flags]

    def long(self):
        """Returns two processes that sample, after the first tokens."""
        folder = pathlib.Path(self.create_tempdir().full_path)
        np.save(folder / "ids.npy", np.full((1, 8), 5))
        command = self.command(
            "generate",
            f"--tokens={folder / 'ids.npy'}",
            "--max_new_tokens=100000",
            "--config.model.max_position_embeddings=200000",
            "--ignore_eos",
            f"--heartbeat_seconds={HEARTBEAT}",
        )
        address = f"127.0.0.1:{launch.free_port()}"
        children = [
            launch.start(
                command,
                JAX_COORDINATOR_ADDRESS=address,
                JAX_NUM_PROCESSES=2,
                JAX_PROCESS_ID=number,
                JAX_NUM_CPU_DEVICES=1,
            )
            for number in range(2)
        ]
        for child in children:
            self.addCleanup(child.stdout.close)
            self.addCleanup(child.wait)
            self.addCleanup(child.kill)  # the last clean-up runs first
            while "Compiling and sampling" not in child.stdout.readline():
                self.assertIsNone(child.poll())
        time.sleep(2.0)
        return children

    @parameterized.parameters(0, 1)
    @pytest.mark.slow
    def test_if_one_is_killed_the_other_ends(self, victim):
        children = self.long()
        began = time.monotonic()
        children[victim].send_signal(signal.SIGKILL)
        code, output = launch.finish(children[1 - victim], timeout=120)
        self.assertNotIn(code, (0, interrupts.EXIT_TERMINATED), output)
        self.assertLess(time.monotonic() - began, SECONDS_TO_LEAVE)
        # jax's own words; ours could not be said by a process that jax aborts.
        self.assertRegex(output, "another task died|have crashed")

    @parameterized.parameters(0, 1)
    @pytest.mark.slow
    def test_sigterm_to_one_ends_both(self, victim):
        children = self.long()
        children[victim].send_signal(signal.SIGTERM)
        for child in children:
            code, output = launch.finish(child, timeout=60)
            self.assertEqual(code, interrupts.EXIT_TERMINATED, output)
            self.assertIn("interrupted", output)

    @pytest.mark.slow
    def test_a_simulation_prints_what_one_process_prints(self):
        command = self.command("evaluate", f"--tokens={self.tokens()}")
        outputs = []
        for count in (1, 2):
            flag = f"--simulate_processes={count}"
            code, output = launch.finish(launch.start([*command, flag]))
            self.assertEqual(code, 0, output)
            outputs.append([x for x in output.splitlines() if x.startswith("{")])
        self.assertEqual(*outputs)

    @pytest.mark.slow
    def test_a_server_of_two_processes_answers_as_one_of_one_process(self):
        """Tokens, scores and refusals are the same; clients may leave; SIGTERM ends."""
        store = self.store()
        found = [self.answers(count, store) for count in (1, 2)]
        self.assertEqual(*found)
        *answered, refused, again, broken, after, new = found[0]
        self.assertEqual([code for code, _ in answered], [200] * 3)
        self.assertEqual([refused[0], broken], [400, 400])
        self.assertEqual([again, after], [answered[1]] * 2)
        self.assertEqual(new[0], 200)
        self.assertNotEqual(new[1]["choices"], after[1]["choices"])

    def store(self):
        """Returns a store with a version of other weights, and a damaged one."""
        store = pathlib.Path(self.create_tempdir().full_path) / "store"
        _, params, _ = quantized_loading.load_model(CHAT_MODEL, worker.FLOATS)
        params, making = jax.device_get(params), writer.Writer(store)
        for version in (1, 2):
            params = jax.tree.map(lambda x: 1.5 * x, params)
            making.publish(params, version)
        path = store / DAMAGED / "process_0.bin"
        path.write_bytes(path.read_bytes()[:-100])
        return store

    def answers(self, count, store):
        """Returns what a server of so many processes says."""
        port = launch.free_port()
        flags = f"--port={port}", "--capacity=64", f"--simulate_processes={count}"
        flags += (f"--weights_root={store}",)
        flags += f"--checkpoint={CHAT_MODEL}", "--model_name=tiny"
        child = launch.start(self.command("serve", *flags))
        for end in (child.stdout.close, child.wait, child.kill):  # the last one first
            self.addCleanup(end)
        log = []
        while not any("Serving tiny" in line for line in log):
            log.append(child.stdout.readline())
            self.assertIsNone(child.poll(), log)
        body = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 8, "seed": 3}
        body |= {"return_token_ids": True, "logprobs": 2}
        url = f"http://127.0.0.1:{port}"
        retry = httpx.HTTPTransport(retries=10)  # the port opens after the message
        with httpx.Client(base_url=url, timeout=120, transport=retry) as client:

            def ask(path, **fields):
                answer = client.post(path, json=fields)
                return answer.status_code, self.without_names(answer.json())

            stream = body | {"max_tokens": 50, "stream": True, "ignore_eos": True}
            with client.stream("POST", "/v1/completions", json=stream) as answer:
                next(answer.iter_lines())  # then the client leaves
            form = {"response_format": {"type": "json_object"}}
            found = [
                ask("/v1/completions", **body, temperature=0.0),
                ask("/v1/completions", **body),
                ask("/score", token_ids=[[5, 6, 7, 8, 9]]),
                ask("/v1/completions", **body | {"prompt": [10**6]}),
                ask("/v1/completions", **body),
            ]
            ask("/start_weight_update")
            code, said = ask("/update_weights", update_info={"path": DAMAGED})
            self.assertIn("cannot be used", str(said))
            found += [code, ask("/v1/completions", **body)]
            ask("/update_weights", update_info={"path": NEW})
            said = ask("/finish_weight_update", weight_version=7)
            self.assertEqual(said, (200, {"status": "finished", "weight_version": 7}))
            found.append(ask("/v1/completions", **body))
            if count > 1:
                code, said = ask("/v1/completions", **body, **form)
                self.assertEqual(code, 400, said)
                self.assertIn("a server of one process", str(said))
        child.send_signal(signal.SIGTERM)
        code, output = launch.finish(child, timeout=60)
        self.assertEqual(code, 0, output)
        return found

    def without_names(self, answer):
        for name in ("id", "created"):
            answer.pop(name, None)
        return answer

    def tokens(self):
        path = pathlib.Path(self.create_tempdir().full_path) / "ids.npy"
        np.save(path, np.random.default_rng(0).integers(3, 80, (2, 12)))
        return path

    @parameterized.parameters(
        ("generate", "--chat=glm5"),
        ("evaluate", "--suite=needle"),
        ("serve", "--num_replicas=2"),
    )
    def test_what_runs_in_one_process_is_refused(self, name, flag):
        got = forked.run(name, *FLAGS, flag, "--simulate_processes=2")
        self.assertEqual(got.returncode, 2, got.stderr)
        self.assertIn("run as several", got.stderr)

    def test_host_pages_need_one_process(self):
        flags = *FLAGS, "--host_pages=8", "--simulate_processes=2"
        got = forked.run("serve", *flags)
        self.assertEqual(got.returncode, 2, got.stderr)
        self.assertIn("--host_pages cannot be given to a server of", got.stderr)

    def test_a_mesh_is_needed(self):
        flags = f"--checkpoint={GOLDEN}", "--tokens=ids.npy", "--simulate_processes=2"
        got = forked.run("evaluate", *flags)
        self.assertEqual(got.returncode, 2, got.stderr)
        self.assertIn("several processes need a mesh", got.stderr)


if __name__ == "__main__":
    environment.main()
