"""A model behind an endpoint: what is sent, and what is made of the answer."""

import asyncio
import http.server
import json
import threading

from absl.testing import absltest

from glm5_jax import config
from glm5_jax.environments import endpoint, tool_calls
from glm5_jax.environments.worlds.frontend import judge

CALL = {"id": "1", "type": "function", "function": {"name": "open", "arguments": "{}"}}


class EndpointTest(absltest.TestCase):
    def test_a_completion_becomes_a_turn(self):
        got = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                size = int(self.headers["Content-Length"])
                got.append((self.path, json.loads(self.rfile.read(size))))
                message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
                body = json.dumps({"choices": [{"message": message}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words):
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        ask = endpoint.ask(f"http://127.0.0.1:{server.server_port}/v1", "m")
        history = [
            {"role": "user", "content": "a"},
            tool_calls.turn("click", selector="#a"),
        ]
        try:
            turn = asyncio.run(ask(history, judge.TOOLS))
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
        self.assertEqual(
            turn, {"role": "assistant", "content": "", "tool_calls": [CALL]}
        )
        ((path, body),) = got
        self.assertEqual((path, body["model"]), ("/v1/chat/completions", "m"))
        self.assertLen(body["tools"], len(judge.TOOLS))
        sent = body["messages"][1]["tool_calls"][0]["function"]
        self.assertEqual(json.loads(sent["arguments"]), {"selector": "#a"})

    def test_no_answer_is_the_users_to_mend(self):
        ask = endpoint.ask("http://127.0.0.1:1/v1", "m")
        with self.assertRaisesRegex(config.InputError, "does not answer.*--base_url"):
            asyncio.run(ask([], judge.TOOLS))


if __name__ == "__main__":
    absltest.main()
