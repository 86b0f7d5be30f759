"""Requests of one conversation have one key, and others have others."""

import json

from absl.testing import parameterized

from glm5_jax.serving.router import session
from tests import environment

SYSTEM = {"role": "system", "content": "Be brief."}
HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello"}
MORE = {"role": "user", "content": [{"type": "text", "text": "More"}]}


def key(headers=None, **fields):
    return session.key_of(headers or {}, json.dumps(fields).encode())


class SessionTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("chat", {"messages": [SYSTEM, HI]}, {"messages": [SYSTEM, HI, HELLO, MORE]}),
        (
            "anthropic",
            {"system": "S", "messages": [HI]},
            {"system": "S", "messages": [HI, HELLO, MORE]},
        ),
        (
            "responses",
            {"instructions": "S", "input": [HI]},
            {"instructions": "S", "input": [HI, HELLO, MORE]},
        ),
        ("ids", {"token_ids": [*range(64)]}, {"token_ids": [*range(99)]}),
        ("text", {"prompt": "a" * 256}, {"prompt": "a" * 300}),
        ("id_prompts", {"prompt": [*range(64)]}, {"prompt": [*range(65)]}),
    )
    def test_a_conversation_grows(self, first, later):
        self.assertEqual(key(**first, temperature=1), key(**later))

    @parameterized.named_parameters(
        ("system", {"messages": [HI]}, {"messages": [SYSTEM, HI]}),
        ("first", {"messages": [HI]}, {"messages": [MORE]}),
        ("anthropic", {"system": "S", "messages": [HI]}, {"messages": [HI]}),
        ("input", {"input": "a"}, {"input": "b"}),
        ("ids", {"token_ids": [1, 2]}, {"token_ids": [1, 3]}),
        ("users", {"user": "a"}, {"user": "b"}),
    )
    def test_others_differ(self, first, other):
        self.assertNotEqual(key(**first), key(**other))

    def test_what_the_client_names_goes_before_the_text(self):
        other = {"messages": [MORE]}
        for named in (
            {"user": "u"},
            {"prompt_cache_key": "u"},
            {"metadata": {"user_id": "u"}},
        ):
            self.assertEqual(key(**named, messages=[HI]), key(**named, **other))
        header = {"x-session-id": "1"}
        self.assertEqual(key(header, user="u"), key(header, **other))
        self.assertNotEqual(key(header), key({"x-session-id": "2"}))
        self.assertEqual(
            key(user="u", prompt_cache_key="c"), key(user="v", prompt_cache_key="c")
        )

    @parameterized.parameters(
        b"", b"{", b"[1]", b"null", b"\xff", b"[" * 10**5, b'{"messages": [1, {}]}',
        b'{"messages": {}, "user": 3, "metadata": "x"}', b'{"input": [3]}',
        b'{"messages": [{"role": {}}], "system": [{}]}', b'{"prompt": "\\ud800"}',
    )  # fmt: skip
    def test_any_body_has_a_key(self, body):
        found = session.key_of({}, body)
        self.assertEqual(found, session.key_of({}, body))


if __name__ == "__main__":
    environment.main()
