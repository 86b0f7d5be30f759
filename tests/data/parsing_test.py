"""The parser of an assistant's turn, id by id."""

import itertools

import hypothesis
from absl.testing import parameterized
from hypothesis import strategies as st

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import parsing, templates, text_stream, tool_calls
from glm5_jax.data.chat.parsing import Call, Content, Reasoning
from tests import environment

TOKENIZER = tokenizer_lib.byte_tokenizer(tokenizer_lib.SPECIAL_TOKENS)
TEMPLATE = templates.Template(TOKENIZER)
SPECIAL = TOKENIZER.special_ids
QUICK = hypothesis.settings(
    max_examples=60, deadline=None, derandomize=True, database=None
)
WEATHER = {
    "function": {
        "name": "weather",
        "parameters": {"properties": {"city": {"type": "string"}}},
    }
}
USED = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|user|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_response>"),
)
IDS = st.lists(
    st.one_of(
        st.sampled_from([SPECIAL[name] for name in USED]),
        st.sampled_from(list("é🙂 \n{1a".encode())),
        st.integers(-2, TOKENIZER.vocab_size + 5),
    ),
    max_size=40,
)
TEXT = st.text(max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("aé🙂", min_size=1),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner),
    max_leaves=4,
)
NAMES = st.text("abc_-é", min_size=1, max_size=6)


def ids_of(text):
    return TOKENIZER.encode_spelt(text)


def events_of(pieces, *, is_thinking=True, tools=()):
    parser = parsing.Parser(
        TOKENIZER,
        is_thinking=is_thinking,
        tools=tools,
        stop_ids=TEMPLATE.stop_ids,
    )
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.close(), parser


def joined(events):
    """Returns the events with neighbouring texts of one kind as one."""
    found = []
    for event in events:
        if found and type(event) is type(found[-1]) and not isinstance(event, Call):
            event = type(event)(found.pop().text + event.text)
        found.append(event)
    return found


class CutTest(parameterized.TestCase):
    @QUICK
    @hypothesis.given(IDS, st.booleans(), st.lists(st.integers(0, 40)))
    def test_any_cut_gives_the_same_events(self, ids, is_thinking, cuts):
        whole, parser = events_of([ids], is_thinking=is_thinking)
        ends = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
        pieces = [ids[a:b] for a, b in itertools.pairwise(ends)]
        for cut in (pieces, [[id] for id in ids]):
            events, other = events_of(cut, is_thinking=is_thinking)
            self.assertEqual(events, whole)
            self.assertEqual(other.errors, parser.errors)
            self.assertEqual(other.is_stopped, parser.is_stopped)

    @QUICK
    @hypothesis.given(IDS)
    def test_texts_are_those_of_all_ids_together(self, ids):
        for options, whole in (
            ({"is_spelt": True}, TOKENIZER.spell),
            ({}, TOKENIZER.decode),
        ):
            stream = text_stream.TextStream(TOKENIZER, **options)
            text = "".join(map(stream.feed, ids)) + stream.close()
            self.assertEqual(text, whole(ids))

    def test_a_character_is_emitted_once_it_is_whole(self):
        events, _ = events_of([[b] for b in "é🙂".encode()], is_thinking=False)
        self.assertEqual(events, [Content("é"), Content("🙂")])


class RoundTripTest(parameterized.TestCase):
    @QUICK
    @hypothesis.given(
        TEXT,
        TEXT,
        st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES)), max_size=2),
    )
    def test_a_rendered_turn_is_parsed_back(self, thought, content, calls):
        """Also texts that spell special tokens, which stay texts."""
        turn = {
            "role": "assistant",
            "reasoning_content": f"<tool_call>{thought}",
            "content": f"</think>{content}",
            "tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in calls],
        }
        user = {"role": "user", "content": "Hi"}
        size = len(TEMPLATE.render([user], (), True).tokens)
        ids = TEMPLATE.render([user, turn], end=True).tokens[size:]
        message = TEMPLATE.parse(ids)
        self.assertEqual(message["reasoning_content"], f"<tool_call>{thought}".strip())
        self.assertEqual(message["content"], f"</think>{content}".strip())
        found = [call["function"] for call in message.get("tool_calls", [])]
        self.assertEqual(found, [{"name": n, "arguments": a} for n, a in calls])
        self.assertNotIn("errors", message)


class CasesTest(parameterized.TestCase):
    """Complaints about other servers' parsers."""

    def test_a_call_within_the_thought_ends_it(self):
        ids = ids_of("I ask.<tool_call>weather</tool_call><|observation|>")
        events, parser = events_of([ids])
        self.assertEqual(joined(events), [Reasoning("I ask."), Call("weather", {})])
        self.assertEqual(parser.errors, ["the thought is not closed by </think>"])
        self.assertTrue(parser.is_stopped)

    def test_a_thought_may_mention_the_token_of_a_call(self):
        ids = ids_of("I write <tool_call> soon</think>Yes.")
        events, parser = events_of([ids])
        self.assertEqual(
            joined(events), [Reasoning("I write <tool_call> soon"), Content("Yes.")]
        )
        self.assertEqual(parser.errors, ["a tool call is not closed by </tool_call>"])

    def test_a_call_without_arguments(self):
        events, parser = events_of([ids_of("</think>Now:\n<tool_call>f</tool_call>")])
        self.assertEqual(joined(events), [Content("Now:"), Call("f", {})])
        self.assertEmpty(parser.errors)

    def test_a_name_comes_once_and_whole(self):
        text = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln"
        text += "</arg_value></tool_call><tool_call>get</tool_call>"
        events, _ = events_of([[id] for id in ids_of(text)], is_thinking=False)
        self.assertEqual(
            events, [Call("get_weather", {"city": "Köln"}), Call("get", {})]
        )

    @parameterized.parameters(
        "<tool_call>f", "<tool_call>f<arg_key>a</arg_key><arg_value>[1, 2"
    )
    def test_a_call_that_the_length_cuts_off_is_text(self, call):
        events, parser = events_of([ids_of("</think>So: " + call)])
        self.assertEqual(joined(events), [Content("So: " + call)])
        self.assertEqual(parser.errors, ["a tool call is not closed by </tool_call>"])
        self.assertFalse(parser.is_stopped)

    def test_text_that_looks_like_a_tag_is_text(self):
        ids = TOKENIZER.encode("</think><tool_call>f</tool_call><|user|>")
        events, parser = events_of([ids], is_thinking=False)
        self.assertEqual(joined(events), [Content(TOKENIZER.decode(ids))])
        self.assertEmpty(parser.errors)

    def test_types_of_arguments(self):
        value = "<arg_value>5</arg_value>"
        call = f"weather<arg_key>city</arg_key>{value}<arg_key>days</arg_key>{value}"
        ids = ids_of(f"</think><tool_call>{call}</tool_call>")
        events, _ = events_of([ids], tools=[WEATHER])
        self.assertEqual(events, [Call("weather", {"city": "5", "days": 5})])

    @parameterized.parameters(
        ("1.5", 1.5),
        ("null", None),
        ('{"a": [1, true]}', {"a": [1, True]}),
        ("Köln", "Köln"),
        ("1e999", "1e999"),
        ("[-1e999]", "[-1e999]"),
        ("NaN", "NaN"),
        ('"\\ud800"', '"\\ud800"'),
        ("[" * 65 + "]" * 65, "[" * 65 + "]" * 65),
        ('{"a":' * 65 + "1" + "}" * 65, '{"a":' * 65 + "1" + "}" * 65),
    )
    def test_a_value_is_text_if_it_could_not_be_written_again(self, text, want):
        self.assertEqual(tool_calls._value(text), want)

    def test_brackets_of_a_value_are_64_deep_at_most(self):
        for depth in (1, 63, 64):
            value = tool_calls._value("[" * depth + "]" * depth)
            for _ in range(depth - 1):
                (value,) = value
            self.assertEqual(value, [])

    @parameterized.parameters(
        # A thought begins at the first id or not at all.
        (False, "<think>a</think>b", [Reasoning("a"), Content("b")]),
        (True, "</think>a<think>b", [Content("a<think>b")]),
        # Half a character before a token, and at the end.
        (True, b"a\xc3</think>b\xc3", [Reasoning("a\ufffd"), Content("b\ufffd")]),
        (True, b"\0</think>\0", [Reasoning("\0"), Content("\0")]),
        (
            True,
            "a<tool_call>f</tool_call>b",
            [Reasoning("a"), Call("f", {}), Content("b")],
        ),
    )
    def test_borders_of_thought_and_content(self, is_thinking, text, want):
        if isinstance(text, bytes):
            first, second = text.split(b"</think>")
            ids = [*first, SPECIAL["</think>"], *second]
        else:
            ids = ids_of(text)
        events, _ = events_of([ids], is_thinking=is_thinking)
        self.assertEqual(joined(events), want)

    def test_the_open_thought_is_the_first_error(self):
        _, parser = events_of([ids_of("a<tool_call>f<tool_call>g")])
        unclosed = "a tool call is not closed by </tool_call>"
        thought = "the thought is not closed by </think>"
        self.assertEqual(parser.errors, [thought, unclosed, unclosed])

    def test_nothing_after_the_stop_is_read(self):
        events, _ = events_of([ids_of("</think>a<|user|>b"), ids_of("c")])
        self.assertEqual(events, [Content("a")])


if __name__ == "__main__":
    environment.main()
