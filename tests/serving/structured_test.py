"""Answers in a form that the request asks for, with the clients that people use."""

import asyncio
import json
from typing import Literal
from unittest import mock

import anthropic
import jsonschema
import pydantic
from absl.testing import parameterized

from glm5_jax.inference import grammars
from glm5_jax.serving import served, structured
from tests import environment
from tests.serving import scripted, server_test

HI = server_test.HI
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "parameters": {
                "type": "object",
                "properties": {
                    "c": {"type": "string", "enum": ["red", "dark blue"]},
                    "size": {"enum": [1, 2]},
                },
                "required": ["c"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
PAINT = TOOLS[0]["function"]["parameters"]
NAMED = {"type": "function", "function": {"name": "paint"}}


class Shade(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    colour: Literal["red", "blue"]
    levels: list[Literal[1, 2, 3]] = pydantic.Field(min_length=2, max_length=3)


SCHEMA = Shade.model_json_schema()
FORMAT = {"type": "json_schema", "json_schema": {"name": "shade", "schema": SCHEMA}}


def tools_of_anthropic():
    functions = [tool["function"] for tool in TOOLS]
    return [
        {"name": f["name"], "input_schema": f.get("parameters", {"type": "object"})}
        for f in functions
    ]


class StructuredTest(server_test.ClientTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        made = anthropic.Anthropic(
            base_url=cls.url, api_key=scripted.KEY, max_retries=0
        )
        cls.other = cls.enterClassContext(made)

    def check_call(self, name, arguments):
        self.assertIn(name, ("paint", "stop"))
        schema = PAINT if name == "paint" else {"maxProperties": 0}
        jsonschema.validate(json.loads(arguments), schema)

    def test_a_model_of_pydantic(self):
        asked = {"model": scripted.NAME, "messages": [HI]}
        answer = self.client.chat.completions.parse(response_format=Shade, **asked)
        (choice,) = answer.choices
        self.assertIsInstance(choice.message.parsed, Shade)
        self.assertEqual(choice.message.reasoning_content, "So")
        self.assertEqual(choice.finish_reason, "stop")

    def test_streams_and_several_answers_at_random(self):
        settings = {"response_format": FORMAT, "n": 2, "seed": 3, "temperature": 1.0}
        settings["logit_bias"] = {str(blank): -100 for blank in b" \t\r\n"}
        whole = [choice.message.content for choice in self.chat(**settings).choices]
        for text in whole:
            Shade.model_validate_json(text)
        streamed = ["", ""]
        for chunk in self.chat(stream=True, **settings):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        self.assertEqual(streamed, whole)

    def test_without_a_thought_the_form_begins_at_once(self):
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        answer = self.chat(response_format=FORMAT, extra_body=off)
        Shade.model_validate_json(answer.choices[0].message.content)

    def test_any_object(self):
        """The object is cut off; its beginning shows the form."""
        form = {"type": "json_object"}
        answer = self.chat(response_format=form, max_completion_tokens=6)
        self.assertStartsWith(answer.choices[0].message.content, "{")
        self.assertEqual(answer.choices[0].finish_reason, "length")

    @parameterized.parameters(
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "x[ab]{3}"}}, "x[ab]{3}"),
        ({"structured_outputs": {"grammar": 'start: "p" | "q"'}}, "p|q"),
        ({"structured_outputs": {"grammar": 'root ::= "r" [0-9]'}}, "r[0-9]"),
        ({"structured_outputs": {"json": '{"enum": [7]}'}}, "7"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "x[ab]{3}"}, "x[ab]{3}"),
        ({"guided_grammar": 'start: "p" | "q"'}, "p|q"),
        ({"guided_json": {"const": "a"}}, '"a"'),
        ({"response_format": FORMAT}, r"\{.*\}"),
    )
    def test_words_of_vllm(self, body, pattern):
        answer = self.complete("Hi", extra_body=body, max_tokens=600)
        self.assertRegex(answer.choices[0].text, f"^(?s:{pattern})$")
        self.assertEqual(answer.choices[0].finish_reason, "stop")

    def test_token_ids_have_both_logprobs(self):
        settings = {"structured_outputs": {"choice": ["only"]}, "logprobs": 1}
        body = {"token_ids": [72], "sampling_params": settings}
        (choice,) = self.http.post("/inference/v1/generate", json=body).json()[
            "choices"
        ]
        *ids, _ = choice["token_ids"]
        self.assertEqual(bytes(ids), b"only")
        for token in choice["logprobs"]["content"][:-1]:
            self.assertAlmostEqual(token["logprob"], 0, delta=1e-6)
            self.assertLess(token["raw_logprob"], -1)

    def test_responses(self):
        answer = self.client.responses.parse(
            model=scripted.NAME, input="Hi", text_format=Shade
        )
        self.assertIsInstance(answer.output_parsed, Shade)

    def test_a_schema_in_anthropic_s_form(self):
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        answer = self.other.messages.create(
            model=scripted.NAME, messages=[HI], max_tokens=600, output_config=form
        )
        Shade.model_validate_json(answer.content[-1].text)

    @parameterized.parameters(
        ("required", "paint|stop"),
        (NAMED, "paint"),
        ({"type": "function", "name": "stop"}, "stop"),
    )
    def test_a_call_is_forced(self, choice, names):
        settings = {"tools": TOOLS, "tool_choice": choice, "temperature": 1.0}
        settings |= {"seed": 1, "n": 2, "parallel_tool_calls": False}
        whole = self.chat(**settings).choices
        for found in whole:
            (call,) = found.message.tool_calls
            self.assertRegex(call.function.name, names)
            self.check_call(call.function.name, call.function.arguments)
            self.assertEqual(found.finish_reason, "tool_calls")
            self.assertEqual(found.message.reasoning_content[:1], "S")
            self.assertIsNone(found.message.content)

    def test_strict_calls_follow_their_schemas_where_the_model_begins_one(self):
        """Its own call would have an argument that `f` does not declare."""
        tool = {"name": "f", "parameters": {"properties": {"n": {"const": 7}}}}
        settings = {"n": 4, "seed": 0, "temperature": 1.0, "max_tokens": 60}
        for strict in (True, False):
            tools = [{"type": "function", "function": {**tool, "strict": strict}}]
            choices = self.chat(tools=tools, **settings).choices
            calls = [c for x in choices for c in x.message.tool_calls or ()]
            self.assertNotEmpty(calls)
            found = {call.function.arguments for call in calls}
            if strict:
                self.assertContainsSubset(found, {"{}", '{"n": 7}'})
            else:
                self.assertEqual(found, {server_test.CALL["arguments"]})

    def test_a_forced_call_in_other_forms(self):
        answer = self.client.responses.create(
            model=scripted.NAME,
            input="Hi",
            tools=[{"type": "function", **tool["function"]} for tool in TOOLS],
            tool_choice={"type": "function", "name": "paint"},
        )
        (call,) = [item for item in answer.output if item.type == "function_call"]
        self.check_call(call.name, call.arguments)
        for choice in ({"type": "any"}, {"type": "tool", "name": "paint"}):
            answer = self.other.messages.create(
                model=scripted.NAME,
                messages=[HI],
                max_tokens=200,
                tools=tools_of_anthropic(),
                tool_choice={**choice, "disable_parallel_tool_use": True},
            )
            self.assertEqual(answer.stop_reason, "tool_use")
            call = answer.content[-1]
            self.check_call(call.name, json.dumps(call.input))

    def test_a_form_leaves_tools_to_the_model(self):
        """Of several draws, each calls or has the form."""
        settings = {"tools": TOOLS, "response_format": FORMAT, "n": 6, "seed": 0}
        kinds = set()
        for choice in self.chat(temperature=3.0, max_tokens=150, **settings).choices:
            if choice.finish_reason == "length":
                continue
            kinds.add(choice.finish_reason)
            for call in choice.message.tool_calls or ():
                self.check_call(call.function.name, call.function.arguments)
            if not choice.message.tool_calls:
                Shade.model_validate_json(choice.message.content)
        self.assertNotEmpty(kinds)

    @parameterized.parameters(
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "objct"}},
                }
            },
            "response_format.json_schema.schema cannot be used: Invalid type: objct",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type must be"),
        ({"response_format": {"type": "json_schema"}}, "must have a schema"),
        ({"structured_outputs": {"regex": "((("}}, "structured_outputs.regex cannot"),
        ({"structured_outputs": {"shape": 1}}, "structured_outputs.shape is not"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json is not JSON"),
        ({"guided_choice": []}, "guided_choice cannot be used: it must list"),
        ({"guided_grammar": "start: x"}, "guided_grammar cannot be used"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "Only one of response_format and guided_regex",
        ),
        ({"tool_choice": "required"}, "tool_choice cannot be used: there are no tools"),
        ({"tool_choice": "must"}, "tool_choice must be"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "fly"}},
            "there is no tool named 'fly'",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"anyOf": []}},
                    }
                ],
                "tool_choice": "required",
            },
            "the parameters of 'f' must list their properties; anyOf",
        ),
    )
    def test_wrong_forms(self, fields, message):
        body = {"messages": [HI], **fields}
        answer = self.http.post("/v1/chat/completions", json=body)
        self.assertEqual(answer.status_code, 400)
        self.assertIn(message, answer.json()["error"]["message"])


class SingleCallTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("form", {"response_format": FORMAT}),
        ("forced", {"tool_choice": "required"}),
        ("strict", {}),
    )
    def test_a_second_call_is_allowed_if_calls_are_parallel(self, asked):
        tok, tools = scripted.TOKENIZER, TOOLS[1:]
        model = mock.Mock(
            spec=served.Served,
            text=tok,
            grammars=grammars.Grammars(tok, tok.vocab_size),
        )
        begin, end = (tok.special_ids[x] for x in ("<tool_call>", "</tool_call>"))
        written = [begin, *tok.encode("stop"), end]
        for is_parallel in (False, True):
            choice = structured.forced(asked.get("tool_choice"), is_parallel)
            calls = structured.Calls(tools, choice, True, is_parallel)
            found = structured.of_chat(
                model,
                next(
                    structured._of_response_format(asked.get("response_format")), None
                ),
                calls,
                [1],
                frozenset([tok.eos_id]),
            )
            matcher = asyncio.run(found).start()
            matcher.consume(written)
            allowed = int(matcher.allowed()[begin // 32]) >> (begin % 32) & 1
            self.assertEqual(bool(allowed), is_parallel)


if __name__ == "__main__":
    environment.main()
