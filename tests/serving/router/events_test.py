"""Streams are cut between events, and held back until a token comes."""

import itertools
import json

import hypothesis
from absl.testing import parameterized
from hypothesis import strategies

from glm5_jax.serving.router import events
from tests import environment

STREAM = (
    'data: {"a": "é"}\n\nevent: x\r\ndata: 1\r\n\r\n: note\n\ndata: [DONE]\n\n'.encode()
)
CHUNK = {"object": "chat.completion.chunk"}


def data(**fields):
    return f"data: {json.dumps(fields)}\n\n".encode()


def chunk(delta, **more):
    return data(**CHUNK, choices=[{"delta": delta, "finish_reason": None, **more}])


class EventsTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=60, deadline=None)
    @hypothesis.given(strategies.lists(strategies.integers(0, len(STREAM))))
    def test_any_cut_of_the_stream_gives_whole_events(self, cuts):
        bounds = [0, *sorted(cuts), len(STREAM)]
        whole, out = events.Events(), b""
        for start, end in itertools.pairwise(bounds):
            part = whole.feed(STREAM[start:end])
            self.assertTrue(not part or part.endswith((b"\n\n", b"\r\n\r\n")))
            out += part
        self.assertEqual(out, STREAM)
        self.assertEmpty(whole.close())

    def test_half_an_event_is_kept_until_the_end(self):
        whole = events.Events()
        self.assertEqual(whole.feed(b"data: 1\n\ndata: {"), b"data: 1\n\n")
        self.assertEqual(whole.close(), b"data: {")
        self.assertEqual(whole.close(), b"")

    @parameterized.named_parameters(
        ("nothing", b""),
        ("role", chunk({"role": "assistant", "content": ""})),
        ("two_roles", chunk({"role": "assistant"}) * 2),
        ("prompt_ids", data(**CHUNK, choices=[], prompt_token_ids=[1])),
        ("anthropic", b"event: message_start\n" + data(type="message_start")),
        (
            "responses",
            data(type="response.created") + data(type="response.in_progress"),
        ),
    )
    def test_openings(self, text):
        self.assertTrue(events.is_opening(text))

    @parameterized.named_parameters(
        ("content", chunk({"content": "a"})),
        ("thought", chunk({"role": "assistant", "reasoning_content": "a"})),
        ("call", chunk({"tool_calls": [{}]})),
        ("ids", chunk({}, token_ids=[1])),
        ("end", chunk({}, finish_reason="stop")),
        ("after_a_role", chunk({"role": "assistant"}) + chunk({"content": "a"})),
        ("completion", data(object="text_completion", choices=[{"text": ""}])),
        ("usage", data(**CHUNK, choices=[], usage={})),
        ("error", data(error={"message": "m"})),
        ("anthropic", data(type="content_block_start")),
        ("done", b"data: [DONE]\n\n"),
        ("list", b"data: [1]\n\n"),
    )
    def test_what_must_not_wait(self, text):
        self.assertFalse(events.is_opening(text))


if __name__ == "__main__":
    environment.main()
