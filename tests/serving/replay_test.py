"""Answers with thoughts and calls, in every form, however the engine cuts them.

The engine's place is taken by one that says a given text in given pieces, because no
small model says all of these.
"""

import json

import anthropic
import hypothesis
import openai
from absl.testing import parameterized
from hypothesis import strategies as st

from glm5_jax.data.chat import templates
from glm5_jax.http_server import guard
from glm5_jax.inference import events, requests, service
from glm5_jax.serving import served
from tests import environment
from tests.serving import scripted
from tests.serving.scripted import TOKENIZER

QUICK = hypothesis.settings(
    max_examples=40, deadline=None, derandomize=True, database=None
)
HI = {"role": "user", "content": "Hi"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
NAMES = ("get", "get_weather")
NOW = "<tool_call>get</tool_call>"
CITY = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>5</arg_value>"
DAYS = "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
WEATHER = ("get_weather", {"city": "5", "days": 3})
# Of each: what is said after <think>; thought, content, calls, and reason if not stop.
SAID = {
    "text": ("a</think>b<|user|>", "a", "b", [], "stop"),
    "call": (f"a</think>{CITY}{DAYS}<|observation|>", "a", "", [WEATHER]),
    "no_arguments": (f"a</think>{NOW}<|observation|>", *("a", "", [("get", {})])),
    "two": (
        *(f"a</think>b{NOW}{CITY}{DAYS}<|observation|>", "a", "b"),
        [("get", {}), WEATHER],
    ),
    "in_the_thought": (f"a{CITY}{DAYS}<|observation|>", "a", "", [WEATHER]),
    "text_between": (
        *(f"</think>é{NOW}漢{NOW}字<|user|>", "", "é漢字"),
        [("get", {}), ("get", {})],
    ),
    "cut_off": (f"a</think>b{CITY}", "a", f"b{CITY}", [], "length"),
    "cut_off_after_a_call": (f"a</think>{NOW}b", "a", "b", [("get", {})], "length"),
    "thought_alone": ("I think", "I think", "", [], "length"),
    "malformed": ("</think><tool_call></tool_call>c<|user|>", "", None, [], "stop"),
}


class Replay(service.Service):
    """Says the same ids to whoever asks."""

    capacity = scripted.CAPACITY

    def __init__(self):
        self.pieces = []  # of ids
        self._id = 0

    def new_id(self):
        self._id += 1
        return self._id

    def submit(self, request, on_event):
        ids = [id for piece in self.pieces for id in piece]
        for piece in self.pieces:
            numbers = (0.0,) * len(piece)
            some = ([],) * len(piece)
            on_event(
                events.Tokens(tuple(piece), numbers, (0,) * len(piece), numbers, some)
            )
        is_stop = bool(ids) and ids[-1] in request.stop_ids
        reason = "stop" if is_stop else "length"
        on_event(events.End(reason, requests.Completion(ids, [0.0] * len(ids), reason)))

    def abort(self, id):
        pass

    def close(self):
        pass


def cut(ids, places):
    """Cuts ids into pieces before the places."""
    ends = sorted({place % (len(ids) + 1) for place in places} | {len(ids)})
    return [ids[a:b] for a, b in zip([0, *ends], ends, strict=False) if b > a]


class ReplayTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.replay = Replay()
        model = served.Served(
            name=scripted.NAME,
            service=cls.replay,
            tokenizer=TOKENIZER,
            template=templates.Template(TOKENIZER),
            defaults={"temperature": 0.0},
        )
        url, _ = cls.enterClassContext(scripted.running(model, guard.Limits()))
        cls.openai = cls.enterClassContext(
            openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
        )
        cls.anthropic = cls.enterClassContext(
            anthropic.Anthropic(base_url=url, api_key="-", max_retries=0)
        )

    def say(self, name, places=()):
        """Prepares an answer; returns its parts and the engine's reason."""
        text, thought, content, calls, *reason = SAID[name]
        self.replay.pieces = cut(TOKENIZER.encode_spelt(text), places)
        if content is None:  # it stays text
            content = "<tool_call></tool_call>c"
        return thought, content, calls, reason[0] if reason else "stop"

    cases = st.tuples(st.sampled_from([*SAID]), st.lists(st.integers(0, 99)))

    @QUICK
    @hypothesis.given(cases)
    def test_chat_completions(self, case):
        thought, content, calls, reason = self.say(*case)
        fields = {"model": scripted.NAME, "messages": [HI], "tools": self.tools()}
        create = self.openai.chat.completions.create
        (choice,) = create(**fields).choices
        message = choice.message
        self.assertEqual(getattr(message, "reasoning_content", ""), thought)
        self.assertEqual(message.content or "", content)
        got = [c.function for c in message.tool_calls or ()]
        self.assertEqual([(f.name, json.loads(f.arguments)) for f in got], calls)
        chunks = [chunk.choices[0] for chunk in create(stream=True, **fields)]
        self.check_stream(chunks, message, calls)
        self.assertEqual(choice.finish_reason, self.reason_of(reason, calls))
        self.assertEqual(chunks[-1].finish_reason, choice.finish_reason)

    def reason_of(self, reason, calls):
        """Returns stop as tool_calls, if there are any."""
        return "tool_calls" if reason == "stop" and calls else reason

    def check_stream(self, chunks, message, calls):
        """Compares a stream with the whole answer."""
        *parts, last = chunks
        self.assertEqual({part.finish_reason for part in parts}, {None})
        self.assertEqual(last.delta.model_dump(exclude_none=True), {})
        deltas = [part.delta for part in parts]
        text = "".join(delta.content or "" for delta in deltas)
        self.assertEqual(text, message.content or "")
        thought = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
        self.assertEqual(thought, getattr(message, "reasoning_content", ""))
        got = [call for delta in deltas for call in delta.tool_calls or ()]
        # The name once and whole, with an id of its own; then the arguments.
        named = [call for call in got if call.function.name]
        self.assertEqual([call.function.name for call in named], [x for x, _ in calls])
        self.assertEqual([call.index for call in named], [*range(len(calls))])
        self.assertLen({call.id for call in named}, len(calls))
        for number, (_, arguments) in enumerate(calls):
            mine = [call for call in got if call.index == number]
            self.assertIs(mine[0], named[number])
            self.assertEqual([call.id for call in mine[1:]], [None] * len(mine[1:]))
            text = "".join(call.function.arguments or "" for call in mine)
            self.assertEqual(json.loads(text), arguments)

    @QUICK
    @hypothesis.given(cases)
    def test_responses(self, case):
        thought, content, calls, reason = self.say(*case)
        tools = [{"type": "function", "name": n, "parameters": SCHEMA} for n in NAMES]
        fields = {"model": scripted.NAME, "input": "Hi", "tools": tools}
        with self.openai.responses.stream(**fields) as stream:
            *_, last = stream
        streamed = last.response
        for answer in (self.openai.responses.create(**fields), streamed):
            items = {kind: [] for kind in ("reasoning", "message", "function_call")}
            for item in answer.output:
                items[item.type].append(item)
            texts = [item.content[0].text for item in items["reasoning"]]
            self.assertEqual("".join(texts), thought)
            self.assertEqual(answer.output_text, content)
            got = [(c.name, json.loads(c.arguments)) for c in items["function_call"]]
            self.assertEqual(got, calls)
            status = "incomplete" if reason == "length" else "completed"
            self.assertEqual(answer.status, status)

    @QUICK
    @hypothesis.given(cases)
    def test_messages(self, case):
        thought, content, calls, reason = self.say(*case)
        tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
        fields = {"model": scripted.NAME, "messages": [HI], "tools": tools}
        fields |= {"max_tokens": 64}
        with self.anthropic.messages.stream(**fields) as stream:
            streamed = stream.get_final_message()
        for answer in (self.anthropic.messages.create(**fields), streamed):
            blocks = {kind: [] for kind in ("thinking", "text", "tool_use")}
            for block in answer.content:
                blocks[block.type].append(block)
            self.assertEqual("".join(b.thinking for b in blocks["thinking"]), thought)
            self.assertEqual("".join(b.text for b in blocks["text"]), content)
            self.assertEqual([(b.name, b.input) for b in blocks["tool_use"]], calls)
            by_reason = {"stop": "end_turn", "length": "max_tokens"}
            wanted = by_reason.get(self.reason_of(reason, calls), "tool_use")
            self.assertEqual(answer.stop_reason, wanted)

    def tools(self):
        """Returns two functions, of which one's name begins with the other's."""
        return [
            {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
            for name in NAMES
        ]


if __name__ == "__main__":
    environment.main()
