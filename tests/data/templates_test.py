"""The chat template against independent renderings, and the parsing of ids."""

import dataclasses
import json
import pathlib

from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from tests import environment

FOLDER = pathlib.Path(__file__).parent.parent / "golden"
GOLDEN = json.loads((FOLDER / "chat.json").read_text(encoding="utf-8"))
TOKENIZER = tokenizer_lib.load(FOLDER / "chat_tokenizer.json")
SWITCHES = [(t, c) for t in (True, False) for c in (True, False)]
HI = {"role": "user", "content": "Hi"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "properties": {"x": {"type": "integer"}, "s": {"type": "string"}},
        },
    },
}


def template(version="glm5", thinking=True, clear=True):
    return templates.Template(TOKENIZER, version, thinking, clear)


def ids_of(text):
    """Returns the ids of a text whose special tokens are spelt out."""
    ids = []
    while text:
        found = [(text.index(n), n) for n in tokenizer_lib.SPECIAL_TOKENS if n in text]
        at, name = min(found, default=(len(text), None))
        ids += TOKENIZER.encode(text[:at])
        if name is not None:
            ids.append(TOKENIZER.special_ids[name])
        text = text[at + len(name or "") :]
    return ids


class OracleTest(parameterized.TestCase):
    @parameterized.product(version=("glm5", "glm5.1", "glm5.2"), switches=SWITCHES)
    def test_tokens_and_masks_are_the_oracle_s(self, version, switches):
        thinking, clear = switches
        ours = template(version, thinking, clear)
        cases = [
            case
            for case in GOLDEN["cases"]
            if (case["version"], case["enable_thinking"], case["clear_thinking"])
            == (version, thinking, clear)
        ]
        self.assertGreaterEqual(len(cases), 8)
        for case in cases:
            with self.subTest(case["name"]):
                conversation = GOLDEN["conversations"][case["name"]]
                messages, tools = conversation["messages"], conversation["tools"]
                rendered = ours.render(messages, tools, end=True)
                self.assertEqual(
                    TOKENIZER.spell(rendered.tokens), TOKENIZER.spell(case["tokens"])
                )
                self.assertEqual(rendered.tokens, case["tokens"])
                mask = "".join("01"[m] for m in rendered.mask)
                self.assertEqual(mask, case["mask"])
                prompt = ours.render(messages, tools, True)
                self.assertLen(prompt.tokens, case["prompt_size"])
                self.assertEqual(prompt.tokens[-3:], case["prompt_end"])
                plain = ours.render(messages, tools).tokens
                self.assertEqual(prompt.tokens[: len(plain)], plain)

    @parameterized.parameters(*GOLDEN["parsed"])
    def test_ids_spell_the_text_that_the_oracle_reads(self, name):
        case = GOLDEN["parsed"][name]
        tools = GOLDEN["conversations"]["consecutive_results"]["tools"]
        message = template().parse(case["ids"], tools)
        self.assertEqual(message["content"], case["content"].strip())
        self.assertEqual(message["reasoning_content"], case["reasoning_content"])
        calls = [call["function"] for call in message.get("tool_calls", [])]
        self.assertEqual(calls, case["calls"])
        self.assertEqual("errors" not in message, case["is_complete"])

    @parameterized.parameters(*GOLDEN["bridged"])
    def test_bridges_are_the_oracle_s(self, name):
        case = GOLDEN["bridged"][name]
        ids = template().bridge(
            case["messages"], case["last"], is_thinking=not case["is_complete"]
        )
        self.assertEqual(ids, case["ids"])


class TemplateTest(parameterized.TestCase):
    @parameterized.parameters(
        ("glm5", True, "[gMASK]<sop><|user|>Hi<|assistant|><think>"),
        ("glm5", False, "[gMASK]<sop><|user|>Hi<|assistant|></think>"),
        ("glm5.1", False, "[gMASK]<sop><|user|>Hi<|assistant|></think>"),
        ("glm5.2", False, "[gMASK]<sop><|user|>Hi<|assistant|><think></think>"),
        (
            "glm5.2",
            True,
            "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Hi<|assistant|><think>",
        ),
    )
    def test_generation_prompts(self, version, thinking, text):
        prompt = template(version, thinking).render([HI], add_generation_prompt=True)
        self.assertEqual(prompt.tokens, ids_of(text))
        self.assertFalse(any(prompt.mask))

    @parameterized.parameters(
        ("[gMASK]<sop>{{ tool | tojson }}", "glm5"),
        ("[gMASK]<sop>{% if not tool.defer_loading %}", "glm5.1"),
        ("[gMASK]<sop>Reasoning Effort: {% if not tool.defer_loading %}", "glm5.2"),
        ("[gMASK]<sop>Reasoning Effort: {% if c.type == 'tool_reference' %}", None),
        ("<|im_start|>", None),
        ("[MASK]<sop>{{ tool | tojson }}", None),
    )
    def test_the_version_of_a_released_template(self, text, version):
        self.assertEqual(templates.released_version(text), version)

    def test_defaults_are_those_of_a_run(self):
        of_a_run = templates.make_template(config.DataConfig(), TOKENIZER)
        self.assertEqual(templates.Template(TOKENIZER), of_a_run)

    @parameterized.parameters(
        (
            "glm5",
            '{"function": {"name": "f", "strict": true}}',
            '{"name": "g"}',
            '{"name": "h", "defer_loading": true}',
        ),
        ("glm5.1", '{"name": "f"}', '{"name": "g"}', '{"name": "h"}'),
        ("glm5.2", '{"name": "f"}', '{"name": "g"}'),
    )
    def test_what_a_version_shows_of_a_tool(self, version, *want):
        """All of it, its function, or its function unless it is to be loaded later."""
        deferred = {"name": "h", "defer_loading": True}
        tools = [{"function": {"name": "f", "strict": True}}, {"name": "g"}, deferred]
        text = TOKENIZER.spell(template(version).render([HI], tools).tokens)
        lines = text.partition("<tools>\n")[2].partition("</tools>")[0].splitlines()
        self.assertEqual(lines, [*want])

    def test_reasoning_effort(self):
        ours = dataclasses.replace(template("glm5.2"), reasoning_effort="high")
        self.assertIn(
            "Reasoning Effort: High<", TOKENIZER.spell(ours.render([HI]).tokens)
        )

    def test_thinking_is_switched_from_turn_to_turn(self):
        quiet = HI | {"enable_thinking": False}
        messages = [quiet, {"role": "assistant", "content": "a"}, HI]
        prompt = template("glm5.2").render(messages, add_generation_prompt=True)
        text = TOKENIZER.spell(prompt.tokens)
        self.assertTrue(text.endswith("<think></think>a<|user|>Hi<|assistant|><think>"))
        # The prompt's tokens are not trained, the model's are.
        end = len(ids_of("a<|user|>Hi<|assistant|><think>"))
        self.assertFalse(prompt.mask[-end - 1])
        self.assertTrue(prompt.mask[-end])
        for now, end in ((HI, "<think>"), (quiet, "</think>")):
            prompt = template("glm5").render([HI, now], add_generation_prompt=True)
            self.assertEqual(prompt.tokens[-1:], ids_of(end))
            bridge = template().bridge([now], None)
            self.assertEqual(bridge[-1:], ids_of(end))

    def test_a_sampled_turn_is_the_rendered_one(self):
        # prompt + sampled + bridge is the prompt of the longer conversation.
        call = {"function": {"name": "add", "arguments": {"x": 1, "s": "2"}}}
        turn = {
            "role": "assistant",
            "reasoning_content": "so",
            "content": "b",
            "tool_calls": [call],
        }
        results = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}]
        for version in ("glm5", "glm5.1", "glm5.2"):
            ours = template(version)
            prompt = ours.render([HI], [ADD], True).tokens
            sampled = ids_of(
                "so</think>b<tool_call>add<arg_key>x</arg_key><arg_value>1</arg_value>"
                "<arg_key>s</arg_key><arg_value>2</arg_value></tool_call>"
                "<|observation|>"
            )
            bridge = ours.bridge(results, sampled[-1])
            whole = ours.render([HI, turn, *results], [ADD], True)
            self.assertEqual(whole.tokens, prompt + sampled + bridge)
            self.assertEqual(
                whole.mask,
                [False] * len(prompt) + [True] * len(sampled) + [False] * len(bridge),
            )
            parsed = ours.parse(sampled, [ADD])
            again = ours.render([HI, parsed, *results], [ADD], True)
            self.assertEqual(again, whole)

    @parameterized.product(
        version=("glm5", "glm5.1", "glm5.2"), name=("tools", "consecutive_results")
    )
    def test_turn_after_turn_the_ids_only_grow(self, version, name):
        # Thoughts are kept, so every turn renders as it was sampled.
        conversation = GOLDEN["conversations"][name]
        tools = conversation["tools"]
        messages = [
            m | {"reasoning_content": "so"} if m["role"] == "assistant" else m
            for m in conversation["messages"]
        ]
        ours = template(version, clear=False)
        whole = ours.render(messages, tools, end=True)
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        ids = ours.render(messages[: turns[0]], tools, True).tokens
        for turn, after in zip(turns, [*turns[1:], None], strict=True):
            size = len(ids)
            while len(ids) < len(whole.tokens) and whole.mask[len(ids)]:
                ids.append(whole.tokens[len(ids)])
            parsed = ours.parse(ids[size:], tools)
            for key in ("content", "reasoning_content"):
                self.assertEqual(parsed[key], messages[turn].get(key, "").strip())
            if after is not None:
                ids += ours.bridge(messages[turn + 1 : after], ids[-1])
            self.assertEqual(ids, whole.tokens[: len(ids)])
        self.assertEqual(ids, whole.tokens)

    def test_bridge_ends_a_turn_that_was_cut_off(self):
        ours, letter = template(), TOKENIZER.encode("a")[0]
        tail = ids_of("<|user|>Hi<|assistant|><think>")
        end = TOKENIZER.eos_id
        self.assertEqual(ours.bridge([HI], letter), [end, *tail])
        self.assertEqual(ours.bridge([HI], None), [end, *tail])
        self.assertEqual(ours.bridge([HI], end), tail)
        self.assertEqual(ours.bridge([HI], tail[0]), tail[1:])
        self.assertEqual(ours.bridge([HI], ids_of("<|observation|>")[0]), tail)

    def test_without_a_user_every_turn_is_current(self):
        turn = {"role": "assistant", "reasoning_content": "é", "content": "a"}
        call = {"function": {"name": "f", "arguments": {"k": ["é"]}}}
        messages = [turn, turn | {"tool_calls": [call]}]
        text = TOKENIZER.spell(template().render(messages).tokens)
        self.assertEqual(
            text,
            "[gMASK]<sop><|assistant|><think>é</think>a<|assistant|><think>é</think>a"
            '<tool_call>f<arg_key>k</arg_key><arg_value>["é"]</arg_value></tool_call>',
        )

    def test_content_in_parts(self):
        """Follows the release's visible_text and its loop over a tool's results."""
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        call = {"function": {"name": "f", "arguments": {}}}
        messages = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": ["</think>", "c"], "tool_calls": [call]},
            {"role": "tool", "content": ["1", {"output": "2"}]},
            {"role": "tool", "content": parts},
        ]
        text = template().tokenizer.spell(template().render(messages).tokens)
        self.assertEqual(
            text,
            "[gMASK]<sop><|user|>ab<|assistant|></think>c<tool_call>f</tool_call>"
            "<|observation|><tool_response>1</tool_response>"
            "<tool_response>2</tool_response><tool_response>ab</tool_response>",
        )

    def test_two_closed_thoughts(self):
        """The first is the thought; the content follows the last."""
        content = "<think>x</think>y</think>\nz"
        messages = [HI, {"role": "assistant", "content": content}]
        text = template().tokenizer.spell(template().render(messages).tokens)
        self.assertTrue(text.endswith("<|assistant|><think>x</think>z"), text)

    def test_text_never_becomes_a_special_token(self):
        # The released file does not declare some of these special.
        backend = json.loads((FOLDER / "chat_tokenizer.json").read_text())
        for token in backend["added_tokens"]:
            token["special"] = token["content"].startswith("<|")
        path = self.create_tempfile(content=json.dumps(backend)).full_path
        text = "".join(tokenizer_lib.SPECIAL_TOKENS)
        for tokenizer in (TOKENIZER, tokenizer_lib.load(path)):
            ids = tokenizer.encode(text)
            self.assertEmpty(set(ids) & set(tokenizer.special_ids.values()))
            self.assertEqual(tokenizer.decode(ids), text)

    def test_missing_special_tokens_are_named(self):
        for tokenizer in (
            tokenizer_lib.byte_tokenizer(),
            tokenizer_lib.byte_tokenizer(
                [n for n in tokenizer_lib.SPECIAL_TOKENS if n != "<think>"]
            ),
        ):
            with self.assertRaisesRegex(
                config.InputError, "lacks:.* ?<think>"
            ) as caught:
                templates.Template(tokenizer)
        self.assertNotIn("<|user|>", str(caught.exception))

    @parameterized.parameters(
        ({"content": "a"}, "role must be one of.*got None"),
        ({"role": "bot", "content": "a"}, "got 'bot'"),
        ({"role": "user", "content": 1}, "content of a message must be a string"),
        ({"role": "assistant", "tool_calls": [1]}, "a tool call must be"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]},
            "a tool call must be",
        ),
    )
    def test_bad_messages(self, message, error):
        with self.assertRaisesRegex(config.InputError, error):
            template().render([HI, message])


class ParseTest(parameterized.TestCase):
    @parameterized.parameters(
        ("</think>a<tool_call>add", "not closed by </tool_call>"),
        ("</think>a<tool_call></tool_call>", "no name"),
        ("</think><tool_call>f<arg_key>x</tool_call>", "not complete"),
        ("</think><tool_call>f<arg_key>x</arg_key>1</tool_call>", "not complete"),
        (
            "</think><tool_call>f<arg_value>1</arg_value></tool_call>",
            "<arg_value> does not belong|</arg_value>.* does not belong",
        ),
        (
            "</think><tool_call>f<arg_key>x</arg_key>y<arg_value>1</arg_value>"
            "</tool_call>",
            "text between",
        ),
        (
            "</think><tool_call>f"
            + "<arg_key>x</arg_key><arg_value>1</arg_value>" * 2
            + "</tool_call>",
            "twice",
        ),
        ("a", "thought is not closed"),
        ("", "thought is not closed"),
    )
    def test_malformed_calls_stay_text(self, text, error):
        message = template().parse(ids_of(text))
        self.assertNotIn("tool_calls", message)
        self.assertRegex(message["errors"][0], error)
        self.assertEqual(message["content"], text.partition("</think>")[2])

    def test_a_good_call_after_a_bad_one(self):
        ids = ids_of("</think><tool_call>f<tool_call>g</tool_call>end<|user|>ignored")
        message = template().parse(ids)
        self.assertEqual(message["tool_calls"][0]["function"]["name"], "g")
        self.assertEqual(message["content"], "<tool_call>fend")
        self.assertLen(message["errors"], 1)

    @parameterized.parameters(
        ("x", " 12 ", 12),
        ("x", "abc", "abc"),
        ("x", "NaN", "NaN"),
        ("x", "[" * 20000, "[" * 20000),
        ("x", "1" * 5000, "1" * 5000),
        ("x", "[" * 100 + "]" * 100, "[" * 100 + "]" * 100),
        ("x", "[" * 9 + "]" * 9, [[[[[[[[[]]]]]]]]]),
        ("x", '"\\ud800"', '"\\ud800"'),
        ("x", '{"a": [1e999]}', '{"a": [1e999]}'),
        ("s", "12", "12"),
        ("s", " a\n", " a\n"),
        ("other", '{"a": [null]}', {"a": [None]}),
    )
    def test_values(self, key, text, value):
        ids = ids_of(f"<tool_call>add<arg_key>{key}</arg_key><arg_value>")
        ids += [*TOKENIZER.encode(text), *ids_of("</arg_value></tool_call>")]
        message = template(thinking=False).parse(ids, [ADD])
        arguments = message["tool_calls"][0]["function"]["arguments"]
        self.assertEqual(arguments, {key: value})

    def test_any_ids_have_a_message(self):
        ids = [*range(TOKENIZER.vocab_size), *range(TOKENIZER.vocab_size + 5, 0, -1)]
        for start in range(0, TOKENIZER.vocab_size, 7):
            message = template().parse(ids[start:])
            self.assertEqual(message["role"], "assistant")


class TruncateTest(parameterized.TestCase):
    @parameterized.parameters("tools", "consecutive_results", "several_turns")
    def test_cuts_never_tear_messages_that_belong_together(self, name):
        conversation = GOLDEN["conversations"][name]
        ours = template(clear=False)
        whole = ours.render(conversation["messages"], conversation["tools"], end=True)
        size = len(whole.tokens)
        self.assertIs(ours.truncate(whole, size), whole)
        lengths = set()
        for length in range(size):
            cut = ours.truncate(whole, length)
            end = len(cut.tokens)
            lengths.add(end)
            self.assertLessEqual(end, length)
            self.assertEqual(cut.tokens, whole.tokens[:end])
            self.assertEqual(cut.mask, whole.mask[:end])
            text = TOKENIZER.spell(cut.tokens)
            for name_ in ("tool_call", "tool_response", "arg_key", "arg_value"):
                self.assertEqual(text.count(f"<{name_}>"), text.count(f"</{name_}>"))
            last = TOKENIZER.spell(cut.tokens[-1:])
            self.assertNotIn(last, ("<think>", "<|assistant|>", "<|system|>"))
            if last in ("<|user|>", "<|observation|>"):
                self.assertTrue(cut.mask[-1])
        # A cut within a text loses few tokens.
        self.assertGreater(len(lengths), size / 3)

    def test_all_places_of_cuts(self):
        """Marks them with ^; the turn before the last user's is not trained."""
        call = {"function": {"name": "xy", "arguments": {"k": "v"}}}
        roles = ("user", "assistant", "tool", "assistant", "user", "assistant", "user")
        contents = ("ab", "ef", "rs", "ij", "gh", "kl", "mn")
        turns = [
            {"role": role, "content": text}
            for role, text in zip(roles, contents, strict=True)
        ]
        turns[1]["tool_calls"], turns[5]["is_masked"] = [call], True
        turns.append({"role": "assistant", "content": "op"})
        self.assertEqual(
            self.marked(turns),
            "^[gMASK]<sop>^<|user|>a^b^<|assistant|></think>e^f<tool_call>xy<arg_key>k"
            "</arg_key><arg_value>v</arg_value></tool_call>^<|observation|>^"
            "<tool_response>rs</tool_response>^<|assistant|></think>i^j^<|user|>^g^h^"
            "<|assistant|></think>k^l^<|user|>m^n^<|assistant|></think>o^p"
            "<|endoftext|>",
        )

    def test_a_cut_follows_the_stop_of_an_empty_answer(self):
        turns = [HI, {"role": "assistant", "content": ""}, HI]
        self.assertEqual(
            self.marked([*turns, {"role": "assistant", "content": "a"}]),
            "^[gMASK]<sop>^<|user|>H^i^<|assistant|></think>^<|user|>^H^i^"
            "<|assistant|></think>a<|endoftext|>",
        )

    def marked(self, turns):
        """Returns the text of a conversation with ^ where it may be cut."""
        tokenizer = tokenizer_lib.named("byte_chat")
        ours = templates.Template(tokenizer)
        whole = ours.render(turns, (), end=True)
        ends = [len(ours.truncate(whole, n).tokens) for n in range(len(whole.tokens))]
        for n in set(ends):  # a whole prefix needs no fewer tokens
            self.assertLen(ours.truncate(whole, n).tokens, n)
        pieces = [tokenizer.spell([token]) for token in whole.tokens]
        return "".join("^" * (i in ends) + piece for i, piece in enumerate(pieces))


if __name__ == "__main__":
    environment.main()
