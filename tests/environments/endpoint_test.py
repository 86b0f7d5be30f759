"""A model behind an endpoint: what is sent, and what is made of the answer."""

import asyncio
import json

from absl.testing import absltest

from glm5_jax import config
from glm5_jax.environments import endpoint, tool_calls
from glm5_jax.environments.worlds.frontend import judge
from tests.environments import chat_server

CALL = {"id": "1", "type": "function", "function": {"name": "open", "arguments": "{}"}}


class EndpointTest(absltest.TestCase):
    def test_a_completion_becomes_a_turn(self):
        said = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        history = [
            {"role": "user", "content": "a"},
            tool_calls.turn("click", selector="#a"),
        ]
        with chat_server.Server(lambda messages, number: said) as server:
            turn = asyncio.run(endpoint.ask(server.url, "m")(history, judge.TOOLS))
        self.assertEqual(
            turn, {"role": "assistant", "content": "", "tool_calls": [CALL]}
        )
        ((path, body, _),) = server.asked
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
