"""Clients that send nonsense, arrive slowly, stop reading, leave, or are many."""

import asyncio
import contextlib
import copy
import json
import socket
import ssl

import aiohttp
import httpx
import hypothesis
from absl.testing import parameterized
from hypothesis import strategies as st

from tests import environment
from tests.serving import scripted

QUICK = hypothesis.settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
HI = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
FUNCTION = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"k": {"type": "integer"}}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAID = [
    {"role": "system", "content": "Be brief."},
    HI,
    {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "b",
        "tool_calls": [CALL],
    },
    {"role": "tool", "tool_call_id": "1", "content": "7"},
]
SETTINGS = {
    "model": scripted.NAME,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "n": 1,
    "seed": 3,
    "logit_bias": {"5": 1.5},
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "stop": ["x"],
    "stop_token_ids": [3],
    "ignore_eos": False,
    "max_tokens": 2,
}
TOOL = {"type": "function", "function": FUNCTION}
BLOCKS = [
    {"type": "thinking", "thinking": "b", "signature": ""},
    {"type": "text", "text": "a"},
    {"type": "tool_use", "id": "1", "name": "f", "input": {"k": 5}},
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "reasoning", "id": "r", "summary": [], "content": []},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "7"},
]
SHAPE = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 9},
        "b": {"type": "array", "items": {"$ref": "#/$defs/c"}, "maxItems": 2},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"c": {"enum": ["x", None]}},
}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SHAPE}}
# A body of every route in which every field that the route knows is right. What follows
# # is no part of the route.
BODIES = {
    "/v1/chat/completions": {
        **SETTINGS,
        "messages": SAID,
        "tools": [TOOL],
        "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": True, "clear_thinking": False},
        "thinking": {"type": "enabled"},
        "reasoning_effort": "high",
        "response_format": {"type": "text"},
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 1,
        "return_token_ids": True,
    },
    "/v1/chat/completions#form": {
        "messages": [HI],
        "tools": [TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "response_format": FORM,
        "max_tokens": 2,
    },
    "/v1/chat/completions#call": {
        "messages": [HI],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "max_tokens": 2,
    },
    "/v1/completions#regex": {
        "prompt": "a",
        "structured_outputs": {"regex": "(a|b)+[c-f]{2,3}"},
        "max_tokens": 2,
    },
    "/v1/completions#choice": {
        "prompt": "a",
        "guided_choice": ["ab", "c"],
        "max_tokens": 2,
    },
    "/v1/completions": {**SETTINGS, "prompt": ["a", "b"], "logprobs": 1},
    "/v1/responses": {
        "model": scripted.NAME,
        "input": ITEMS,
        "instructions": "Be brief.",
        "tools": [{"type": "function", **FUNCTION}],
        "max_output_tokens": 2,
        "temperature": 0.5,
        "reasoning": {"effort": "high"},
        "text": {"format": {"type": "text"}},
        "stream": True,
    },
    "/v1/messages": {
        "model": scripted.NAME,
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": BLOCKS},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "7"}
                ],
            },
        ],
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled"},
        "stop_sequences": ["x"],
        "max_tokens": 2,
        "stream": True,
    },
    "/inference/v1/generate": {
        "model": scripted.NAME,
        "token_ids": [97],
        "sampling_params": {**SETTINGS, "stop": None, "logprobs": 2},
    },
    "/tokenize": {"messages": SAID, "tools": [TOOL]},
    "/detokenize": {"tokens": [97, 3]},
}
NASTY = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 0.5, -0.5, 1e308),
    *(float("nan"), float("inf"), "", "a", "7", "\ud800", "\x00", "<think>", "é" * 999),
    *([], [None], [[]], [0], [-1], ["a"], [{}], {}, {"a": None}, {"": {}}, {"5": "a"}),
    *({"type": "text"}, {"type": []}, {"role": "user"}, [[0]], [2**70]),
    *({"$ref": "#"}, {"$ref": "http://a/b"}, {"enum": []}, {"type": "nothing"}),
    *({"pattern": "("}, {"anyOf": [{"$ref": "#"}]}, "(a{999}){999}", "(((", "[z-a]"),
    *({"type": "array", "minItems": 10**9}, {"minLength": 10**9, "type": "string"}),
)


def places(tree, before=()):
    """Returns the paths of all parts of a tree."""
    found = [before] if before else []
    if isinstance(tree, (dict, list)):
        keys = tree if isinstance(tree, dict) else range(len(tree))
        for key in keys:
            found += places(tree[key], (*before, key))
    return found


@st.composite
def bodies(draw):
    """Draws a route, and its body with a few parts replaced or left out."""
    path = draw(st.sampled_from([*BODIES]))
    body = copy.deepcopy(BODIES[path])
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from(places(body) or [()]))
        if not where:
            break
        parent = body
        for key in where[:-1]:
            parent = parent[key]
        if draw(st.booleans()) and draw(st.booleans()):
            del parent[where[-1]]
        else:
            parent[where[-1]] = copy.deepcopy(draw(st.sampled_from(NASTY)))
    return path, body


class NonsenseTest(scripted.ServerTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        key = {"Authorization": f"Bearer {scripted.KEY}"}
        made = httpx.Client(base_url=cls.url, headers=key, timeout=60)
        cls.http = cls.enterClassContext(made)

    def post(self, path, body):
        text, path = json.dumps(body), path.partition("#")[0]
        headers = {"Content-Type": "application/json"}
        return self.http.post(path, content=text, headers=headers)

    @parameterized.parameters(*((path,) for path in BODIES))
    def test_the_bodies_are_right(self, path):
        self.assertEqual(self.post(path, BODIES[path]).status_code, 200)

    @QUICK
    @hypothesis.given(bodies())
    def test_no_body_makes_the_server_fail(self, drawn):
        path, body = drawn
        answer = self.post(path, body)
        hypothesis.event(f"{path} {answer.status_code}")
        self.assertIn(answer.status_code, (200, 400, 404), answer.text)
        self.assertNotIn("The server failed", answer.text)
        self.assertNotIn("The engine failed", answer.text)
        if answer.status_code != 200:
            self.assertTrue(answer.json()["error"]["message"])


class SlowTest(scripted.ServerTest):
    limits = {  # noqa: RUF012
        "max_body_seconds": 0.2,
        "max_stall_seconds": 0.2,
        # Others than the slow clients send theirs in time.
        "sockets": {"max_head_seconds": 2.0, "send_buffer": 4096},
    }

    @contextlib.contextmanager
    def connection(self, **options):
        host, port = self.url.removeprefix("http://").split(":")
        with socket.socket() as made:
            for name, value in options.items():
                made.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
            made.settimeout(30)
            made.connect((host, int(port)))
            yield made

    def head(self, path="/v1/completions", size=1000):
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            f"x-api-key: {scripted.KEY}",
        ]
        lines += ["Content-Type: application/json", f"Content-Length: {size}", "", ""]
        return "\r\n".join(lines).encode()

    def tearDown(self):
        """The server answers others, and nothing is left of the slow client."""
        scripted.wait_until(lambda: not self.door.num_active)
        self.assertEqual(httpx.get(f"{self.url}/health").status_code, 200)
        super().tearDown()

    @property
    def door(self):
        return self.server.config.app

    @parameterized.parameters(b"", b"POST /v1/completions HTTP/1.1\r\nHost: loc")
    def test_a_head_that_does_not_arrive(self, part):
        with self.connection() as made:
            made.sendall(part)
            self.assertEqual(made.recv(100), b"")

    def test_a_second_head_that_does_not_arrive(self):
        with self.connection() as made:
            made.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            self.assertIn(b"200 OK", made.recv(1000))
            made.sendall(b"GET /hea")
            self.assertEqual(made.recv(100), b"")

    def test_a_body_that_does_not_arrive(self):
        with self.connection() as made:
            made.sendall(self.head() + b'{"prompt": ')
            answer = made.recv(10_000)
            self.assertStartsWith(answer, b"HTTP/1.1 408")

    def test_a_client_that_leaves_within_its_body(self):
        with self.connection() as made:
            made.sendall(self.head() + b'{"prompt": ')

    def test_a_client_that_does_not_read(self):
        asked = {"prompt": "x", "max_tokens": 700, "logprobs": 20}
        body = json.dumps({**asked, "stream": True}).encode()
        with self.connection(SO_RCVBUF=4096) as made:
            made.sendall(self.head(size=len(body)) + body)
            scripted.wait_until(lambda: self.service.stats().ended.get("length", 0))
            scripted.wait_until(lambda: not self.door.num_active)

    def test_other_protocols(self):
        with self.connection() as made, self.assertRaises(ssl.SSLError):
            context = ssl.create_default_context()
            context.wrap_socket(made, server_hostname="localhost")
        with self.connection() as made:
            made.sendall(b"\x00\xff" * 50_000)
            self.assertStartsWith(made.recv(1000), b"HTTP/1.1 400")


class ManyTest(scripted.ServerTest):
    """benchmarks/serving_cpu.py holds them for a minute, and looks at memory."""

    NUM, LEAVING = 200, 20

    async def stream(self, http):
        """Returns the text of an answer."""
        body = {"prompt": "a", "stream": True}
        async with http.post(f"{self.url}/v1/completions", json=body) as answer:
            lines = (await answer.text()).split("\n\n")
        self.assertEqual(lines[-2:], ["data: [DONE]", ""])
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        return "".join(event["choices"][0]["text"] for event in events)

    async def ask_all(self):
        """Returns the answers of those that stay; all are asked at the same time."""
        key = {"x-api-key": scripted.KEY}
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=key, connector=connector) as http:
            asked = [asyncio.create_task(self.stream(http)) for _ in range(self.NUM)]
            while self.service.stats().waiting < self.NUM:
                await asyncio.sleep(0.01)
            for leaving in asked[: self.LEAVING]:
                leaving.cancel()
            while self.service.stats().waiting > self.NUM - self.LEAVING:
                await asyncio.sleep(0.01)
            self.service.resume()
            return await asyncio.gather(*asked[self.LEAVING :])

    def test_no_stream_of_many_is_lost(self):
        self.service.pause().result()
        answers = asyncio.run(asyncio.wait_for(self.ask_all(), 120))
        self.assertEqual(answers, ["bcd"] * (self.NUM - self.LEAVING))
        scripted.wait_until(lambda: not self.server.config.app.num_active)
        self.assertEqual(self.service.stats().ended["abort"], self.LEAVING)


if __name__ == "__main__":
    environment.main()
