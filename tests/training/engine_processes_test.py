"""What a trainer asks its orchestrator ends, whatever the orchestrator does."""

import contextlib
import dataclasses
import http.server
import json
import pathlib
import socket
import threading
from unittest import mock

from glm5_jax.rl import trajectories
from glm5_jax.training.feeds import engine_processes
from glm5_jax.weights import huggingface_export, loading
from tests import environment, runs
from tests.model import tiny
from tests.training import rl_runs

CONFIG = rl_runs.make_async(1, {"num_engines": 1})
STEP = {
    "played": trajectories.pack([[], []]),
    "evaluated": [2, trajectories.all_to_json([])],
    "counts": {"groups": 2},
    "ledger": {},
    "memory": {"next": 8, "again": [6]},
    "figures": {},
    "lag": 0.25,
    "repaired": 0,
}


@contextlib.contextmanager
def answering(*answers):
    """Yields the port of an orchestrator that answers so, and what it was asked."""
    asked, left = [], list(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            size = int(self.headers["Content-Length"])
            asked.append((self.path, json.loads(self.rfile.read(size))))
            data = json.dumps(left.pop(0)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            thread.join()


class EngineProcessesTest(runs.FolderTest):
    def asking(self, port):
        made = engine_processes.EngineProcesses(CONFIG)
        made._port, made._folder = port, pathlib.Path(self.root)
        return made

    def test_servers_do_not_begin_with_the_codes_of_a_release(self):
        """They could take neither whole weights nor codes of another rounding."""
        release, params = self.root / "release", tiny.params(CONFIG.model)
        huggingface_export.save_params(params, CONFIG.model, release)
        rl = dataclasses.replace(CONFIG.rl, rollout_weights="fp8")
        config = dataclasses.replace(CONFIG, init_from=str(release), rl=rl)
        made = engine_processes.EngineProcesses(config)
        made._folder = pathlib.Path(self.create_tempdir().full_path)
        command = made._serve(params, 1)
        self.assertContainsSubset(
            [f"--checkpoint={release}", "--quantize=fp8"], command
        )
        settings = json.loads((release / "config.json").read_text())
        settings["quantization_config"] = {"quant_method": "fp8"}
        (release / "config.json").write_text(json.dumps(settings))
        command = made._serve(params, 1)
        self.assertIn(f"--checkpoint={made._folder / 'start'}", command)
        self.assertFalse(loading.find(made._folder / "start").is_quantized)

    def test_a_step_that_is_not_ready_is_asked_for_again(self):
        waits = {"is_ready": False}
        held_out = {"episodes": trajectories.all_to_json([])}
        with answering(waits, waits, STEP, waits, held_out) as (port, asked):
            taken = self.asking(port).take(3)
            self.assertEqual(self.asking(port).evaluate(), [])
        self.assertEqual(taken.metrics["rollout/groups"], 2)
        self.assertEqual(taken.evaluated, (2, []))
        self.assertEqual(taken.memory, {"next": 8, "again": [6]})
        self.assertEqual(taken.metrics["actors/loop_lag_seconds"], 0.25)
        body = {"version": 3, "seconds": engine_processes._TURN_SECONDS}
        self.assertEqual(asked[:3], [("/take", body)] * 3)
        self.assertEqual([path for path, _ in asked[3:]], ["/evaluate"] * 2)

    def test_an_orchestrator_that_is_blocked_is_not_waited_for(self):
        (self.root / "orchestrator.log").write_text("It is in\n  step, calculator.py\n")
        words = "has not answered for 0.2 s, .*event loop is blocked.*calculator.py"
        with (
            socket.create_server(("127.0.0.1", 0)) as silent,
            mock.patch.object(engine_processes, "_TURN_SECONDS", 0.1),
            mock.patch.object(engine_processes, "_LATE_SECONDS", 0.1),
        ):
            made = self.asking(silent.getsockname()[1])
            for ask in (lambda: made.take(0), made.evaluate):
                with self.assertRaisesRegex(
                    engine_processes.ActorError, f"(?s){words}"
                ):
                    ask()


if __name__ == "__main__":
    environment.main()
