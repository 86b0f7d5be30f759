"""The server over real sockets, with the clients that people use."""

import contextlib
import io
import json
import math
import pathlib
import re
import signal
import subprocess
import sys
from concurrent import futures
from typing import ClassVar

import anthropic
import httpx
import openai
import pytest
from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.data.chat import templates
from glm5_jax.http_server import listening
from glm5_jax.inference import engine
from glm5_jax.serving import command
from glm5_jax.weights import quantized_loading
from tests import environment
from tests.processes import launch
from tests.serving import scripted
from tests.serving.scripted import TOKENIZER, wait_until

HI = {"role": "user", "content": "Hi"}
ADD = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"name": "f", "arguments": '{"k": 5}'}
PATHS = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")
LEAD_ATOL = 1e-2  # the random head also tells the two tokens a little apart
LOGPROB_ATOL = 1e-4  # the scripted token's probability is nearly 1


class ClientTest(scripted.ServerTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        key = {"Authorization": f"Bearer {scripted.KEY}"}
        # Plain HTTP needs no certificates, and reading them takes 35 ms.
        made = httpx.Client(base_url=cls.url, verify=False)
        cls.plain = cls.enterClassContext(made)
        made = httpx.Client(base_url=cls.url, headers=key, timeout=60, verify=False)
        cls.http = cls.enterClassContext(made)
        made = openai.OpenAI(
            base_url=f"{cls.url}/v1",
            api_key=scripted.KEY,
            max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=False),
        )
        cls.client = cls.enterClassContext(made)

    def chat(self, **fields):
        fields = {"model": scripted.NAME, "messages": [HI], **fields}
        return self.client.chat.completions.create(**fields)

    def complete(self, prompt, **fields):
        return self.client.completions.create(
            model=scripted.NAME, prompt=prompt, **fields
        )

    @contextlib.contextmanager
    def paused(self):
        """Answers wait while this lasts."""
        self.service.pause().result()
        try:
            yield
        finally:
            self.service.resume().result()


class ChatTest(ClientTest):
    def test_a_whole_answer(self):
        answer = self.chat()
        (choice,) = answer.choices
        self.assertEqual(choice.message.reasoning_content, "So")
        self.assertEqual(choice.message.content, "Hé!")
        self.assertIsNone(choice.message.tool_calls)
        self.assertEqual(choice.finish_reason, "stop")
        prompt = templates.Template(TOKENIZER).render([HI], (), True).tokens
        self.assertEqual(answer.usage.prompt_tokens, len(prompt))
        self.assertEqual(answer.usage.completion_tokens, 8)
        self.assertEqual(answer.usage.completion_tokens_details.reasoning_tokens, 3)

    def test_the_program_of_the_page(self):
        page = pathlib.Path(__file__).parents[2] / "docs" / "serving.md"
        (block,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.S)
        for text, used in (
            ("http://localhost:8000", self.url),
            ("any", scripted.KEY),
            ("NAME", scripted.NAME),
        ):
            self.assertIn(text, block)
            block = block.replace(text, used)
        names = {}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(block, names)
        names["client"].close()
        self.assertEqual(printed.getvalue(), "So Hé!\n")

    def test_a_prompt_in_the_cache_is_counted(self):
        self.chat()
        usage = self.chat().usage
        self.assertGreater(usage.prompt_tokens_details.cached_tokens, 0)

    def test_a_stream(self):
        options = {"include_usage": True}
        chunks = [*self.chat(stream=True, stream_options=options)]
        *parts, last, counted = chunks
        self.assertEqual(parts[0].choices[0].delta.role, "assistant")
        deltas = [chunk.choices[0].delta for chunk in parts]
        thought = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
        self.assertEqual(thought, "So")
        self.assertEqual("".join(d.content or "" for d in deltas), "Hé!")
        self.assertTrue(all(chunk.choices[0].finish_reason is None for chunk in parts))
        self.assertEqual(last.choices[0].finish_reason, "stop")
        self.assertIsNone(last.choices[0].delta.content)
        self.assertEqual(counted.usage.completion_tokens, 8)
        self.assertLen({chunk.id for chunk in chunks}, 1)

    @parameterized.parameters(
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "none"},
    )
    def test_thinking_is_switched_off(self, **field):
        message = self.chat(extra_body=field).choices[0].message
        self.assertNotIn("reasoning_content", message.model_dump())
        self.assertEqual(message.content, "Hé!")

    def test_tool_calls(self):
        """Some of four draws call; the thought is not closed before the call."""
        settings = {"tools": [ADD], "n": 4, "seed": 0, "temperature": 1}
        whole = self.chat(**settings).choices
        called = [choice for choice in whole if choice.message.tool_calls]
        self.assertBetween(len(called), 1, 3)
        for choice in called:
            self.assertEqual(choice.finish_reason, "tool_calls")
            self.assertEqual(choice.message.reasoning_content, "So")
            (call,) = choice.message.tool_calls
            self.assertEqual(call.function.model_dump(), CALL)
        streamed = {choice.index: [] for choice in whole}
        for chunk in self.chat(stream=True, **settings):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.tool_calls or []
        for choice in whole:
            parts = streamed[choice.index]
            if not choice.message.tool_calls:
                self.assertEmpty(parts)
                continue
            name, arguments = parts  # the name once and whole, then the arguments
            self.assertEqual(name.function.name, "f")
            self.assertTrue(name.id)
            self.assertIsNone(arguments.id)
            self.assertEqual(arguments.function.arguments, CALL["arguments"])

    def test_a_tool_s_result_is_part_of_the_next_prompt(self):
        call = {"id": "call_1", "type": "function", "function": CALL}
        said = [
            HI,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "7"},
        ]
        body = {"messages": said, "tools": [ADD]}
        ids = self.http.post("/tokenize", json=body).json()["tokens"]
        text = TOKENIZER.spell(ids)
        self.assertIn("f<arg_key>k</arg_key><arg_value>5</arg_value></tool_call>", text)
        self.assertEndsWith(
            text,
            "<|observation|><tool_response>7</tool_response><|assistant|><think>",
        )
        self.assertEqual(self.chat(**body).choices[0].message.content, "Hé!")

    def test_an_answer_ends_before_a_stop_string_or_at_its_length(self):
        stopped = self.chat(stop=["é!"]).choices[0]
        self.assertEqual(stopped.message.content, "H")
        self.assertEqual(stopped.finish_reason, "stop")
        short = self.chat(max_completion_tokens=4).choices[0]
        self.assertEqual(short.message.content, "H")
        self.assertEqual(short.finish_reason, "length")

    def test_token_ids_and_logprobs(self):
        answer = self.chat(logprobs=True, extra_body={"return_token_ids": True})
        (choice,) = answer.choices
        prompt = templates.Template(TOKENIZER).render([HI], (), True).tokens
        self.assertEqual(answer.prompt_token_ids, prompt)
        self.assertEqual(
            choice.token_ids, TOKENIZER.encode_spelt("So</think>Hé!<|user|>")
        )
        rows = choice.logprobs.content
        self.assertEqual([row.token for row in rows][:3], ["S", "o", "</think>"])
        self.assertEqual(rows[4].bytes + rows[5].bytes, [*"é".encode()])
        self.assertAlmostEqual(rows[0].logprob, 0, delta=LOGPROB_ATOL)

    def test_alternatives(self):
        row = self.chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content[2]
        close, call = row.top_logprobs
        self.assertEqual((close.token, close.logprob), (row.token, row.logprob))
        self.assertEqual(call.token, "<tool_call>")
        self.assertAlmostEqual(
            close.logprob - call.logprob, scripted.LEAD, delta=LEAD_ATOL
        )

    def test_a_bias_changes_the_answer_and_not_its_raw_logprobs(self):
        call = str(TOKENIZER.special_ids["<tool_call>"])
        answer = self.chat(logit_bias={call: 5}, logprobs=True, tools=[ADD])
        (choice,) = answer.choices
        self.assertLen(choice.message.tool_calls, 1)
        rate = math.exp(choice.logprobs.content[2].logprob)
        self.assertAlmostEqual(rate, 1 / (1 + math.exp(scripted.LEAD)), delta=LEAD_ATOL)

    def test_seeds(self):
        draw = lambda seed: self.chat(seed=seed, temperature=6).choices[0].message
        self.assertEqual(draw(1), draw(1))
        self.assertNotEqual(draw(1), draw(2))


class CompletionTest(ClientTest):
    def test_texts_and_ids(self):
        answer = self.complete(["a", "b"])
        self.assertEqual([c.text for c in answer.choices], ["bcd", "cd"])
        self.assertEqual({c.finish_reason for c in answer.choices}, {"stop"})
        self.assertEqual(answer.usage.prompt_tokens, 2)
        self.assertEqual(self.complete(TOKENIZER.encode("c")).choices[0].text, "d")
        self.assertEqual(self.complete("x", max_tokens=5).choices[0].text, "yxyxy")

    def test_penalties(self):
        """Over several dispatches; the prompt counts for repetition alone."""
        settings = {"max_tokens": 40, "extra_body": {"return_token_ids": True}}
        drawn = self.complete("x", frequency_penalty=100, **settings).choices[0]
        self.assertStartsWith(drawn.text, "yx")
        self.assertLen({*drawn.token_ids}, len(drawn.token_ids))
        settings = {"max_tokens": 2, "extra_body": {"repetition_penalty": 100}}
        drawn = self.complete("x", **settings).choices[0].text
        self.assertStartsWith(drawn, "y")
        self.assertNotIn("x", drawn)

    def test_the_model_s_own_end_is_ignored(self):
        settings = {"max_tokens": 9, "extra_body": {"ignore_eos": True}}
        answer = self.complete("a", **settings)
        self.assertStartsWith(answer.choices[0].text, "bcd")
        self.assertEqual(answer.choices[0].finish_reason, "length")
        self.assertEqual(answer.usage.completion_tokens, 9)

    def test_a_stream(self):
        chunks = [*self.complete("a", stream=True, stop="d")]
        self.assertEqual("".join(c.choices[0].text for c in chunks), "bc")
        reasons = [c.choices[0].finish_reason for c in chunks]
        self.assertEqual(reasons, [None] * (len(chunks) - 1) + ["stop"])

    def test_logprobs(self):
        found = self.complete("a", logprobs=1).choices[0].logprobs
        self.assertEqual(found.tokens, ["b", "c", "d", "<|endoftext|>"])
        self.assertEqual(found.text_offset, [0, 1, 2, 3])
        self.assertLen(found.token_logprobs, 4)


class ResponsesTest(ClientTest):
    tool: ClassVar = {"type": "function", "name": "f", "parameters": {}}

    def respond(self, said="Hi", **more):
        return self.client.responses.create(
            model=scripted.NAME, input=said, tools=[self.tool], **more
        )

    def test_a_whole_response(self):
        answer = self.respond(instructions="Be short.")
        thought, message = answer.output
        self.assertEqual((thought.type, message.type), ("reasoning", "message"))
        self.assertEqual(thought.content[0].text, "So")
        self.assertEqual(answer.output_text, "Hé!")
        self.assertEqual(answer.status, "completed")
        self.assertEqual(answer.usage.output_tokens_details.reasoning_tokens, 3)
        quiet = self.respond(reasoning={"effort": "none"}, max_output_tokens=1)
        self.assertEqual(quiet.output_text, "H")
        self.assertEqual(quiet.status, "incomplete")
        self.assertEqual(quiet.incomplete_details.reason, "max_output_tokens")

    def test_a_stream(self):
        with self.client.responses.stream(model=scripted.NAME, input="Hi") as stream:
            events = [*stream]
            answer = stream.get_final_response()
        self.assertEqual(answer.output_text, "Hé!")
        self.assertEqual(answer.output[0].content[0].text, "So")
        numbers = [event.sequence_number for event in events]
        self.assertEqual(numbers, sorted(numbers))
        kinds = [event.type for event in events]
        self.assertEqual(kinds[0], "response.created")
        self.assertEqual(kinds[-1], "response.completed")
        self.assertEqual(kinds.count("response.output_item.added"), 2)
        self.assertEqual(kinds.count("response.output_item.done"), 2)

    def test_a_loop_of_tools(self):
        fields = {"model": scripted.NAME, "input": "Hi", "tools": [self.tool]}
        for _ in range(40):
            with self.client.responses.stream(**fields, temperature=1.0) as stream:
                answer = stream.get_final_response()
            if answer.output[-1].type == "function_call":
                break
        call = answer.output[-1]
        self.assertEqual((call.name, call.arguments), ("f", CALL["arguments"]))
        result = {"type": "function_call_output", "call_id": call.call_id}
        output = [item.model_dump(exclude_none=True) for item in answer.output]
        said = [HI, *output, {**result, "output": "7"}]
        self.assertEqual(self.respond(said).output_text, "Hé!")

    def test_errors(self):
        for fields, message in (
            ({"previous_response_id": "resp_1"}, "keeps no conversations"),
            ({"tool_choice": "must"}, "tool_choice must be"),
            ({"said": [{"type": "computer_call"}]}, "'computer_call' is not"),
            ({"said": [{"role": "user", "content": [{"type": "file"}]}]}, "parts of"),
        ):
            with self.assertRaisesRegex(openai.BadRequestError, message):
                self.respond(**fields)


class AnthropicTest(ClientTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        made = anthropic.Anthropic(
            base_url=cls.url, api_key=scripted.KEY, max_retries=0
        )
        cls.anthropic = cls.enterClassContext(made)

    def fields(self, **more):
        return {
            "model": scripted.NAME,
            "max_tokens": 5000,
            "messages": [HI],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            **more,
        }

    def test_a_whole_answer(self):
        answer = self.anthropic.messages.create(**self.fields())
        thought, text = answer.content
        self.assertEqual((thought.type, thought.thinking), ("thinking", "So"))
        self.assertEqual((text.type, text.text), ("text", "Hé!"))
        self.assertEqual(answer.stop_reason, "end_turn")
        usage = answer.usage
        size = usage.input_tokens + usage.cache_read_input_tokens
        counted = self.anthropic.messages.count_tokens(
            model=scripted.NAME, messages=[HI], tools=self.fields()["tools"]
        )
        self.assertEqual(counted.input_tokens, size)

    def test_a_stream(self):
        with self.anthropic.messages.stream(**self.fields()) as stream:
            self.assertEqual("".join(stream.text_stream), "Hé!")
            answer = stream.get_final_message()
        self.assertEqual([x.type for x in answer.content], ["thinking", "text"])
        self.assertEqual(answer.content[0].thinking, "So")
        self.assertEqual(answer.usage.output_tokens, 8)

    def test_stops(self):
        quiet = {"thinking": {"type": "disabled"}}
        fields = self.fields(stop_sequences=["!"], **quiet)
        answer = self.anthropic.messages.create(**fields)
        self.assertEqual([x.text for x in answer.content], ["Hé"])
        self.assertEqual(answer.stop_reason, "stop_sequence")
        self.assertEqual(answer.stop_sequence, "!")
        answer = self.anthropic.messages.create(**self.fields(max_tokens=4))
        self.assertEqual(answer.stop_reason, "max_tokens")

    def test_a_loop_of_tools(self):
        """One draw in three calls; the result leads to the next prompt."""
        for _ in range(40):
            drawn = self.fields(extra_body={"temperature": 1.0})
            with self.anthropic.messages.stream(**drawn) as stream:
                answer = stream.get_final_message()
            if answer.stop_reason == "tool_use":
                break
        thought, call = answer.content
        self.assertEqual((thought.type, call.type), ("thinking", "tool_use"))
        self.assertEqual((call.name, call.input), ("f", {"k": 5}))
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "7"}
        said = [
            HI,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        answer = self.anthropic.messages.create(**self.fields(messages=said))
        self.assertEqual(answer.content[-1].text, "Hé!")

    def test_errors(self):
        with self.assertRaisesRegex(anthropic.NotFoundError, "'other' does not exist"):
            self.anthropic.messages.create(**self.fields(model="other"))
        image = {"role": "user", "content": [{"type": "image", "source": {}}]}
        with self.assertRaisesRegex(anthropic.BadRequestError, "'image' is not"):
            self.anthropic.messages.create(**self.fields(messages=[image]))
        forced = self.fields(tool_choice={"type": "must"})
        with self.assertRaisesRegex(anthropic.BadRequestError, "tool_choice must be"):
            self.anthropic.messages.create(**forced)

    def test_malformed_bodies(self):
        def said(role, content):
            return {"messages": [HI, {"role": role, "content": content}]}

        result = lambda content: [{"type": "tool_result", "content": content}]
        wrong = r"messages\[1\]: content must be a string or a list of blocks"
        inner = r"messages\[1\]: content of a tool_result must be"
        other = r"messages\[1\]: A block of type .* is not supported in content of role"
        for body, words in (
            (said("user", [{"type": []}]), other),
            (said("user", [{"type": "tool_use", "name": "f", "input": {}}]), other),
            (said("user", [{"type": "thinking", "thinking": "a"}]), other),
            (said("assistant", result("7")), other),
            (said("user", result(["abc"])), inner),
            (said("user", result(5)), inner),
            (said("user", result({"a": 1})), inner),
            (said("system", ["x"]), wrong),
            (said("system", {"x": 1}), wrong),
            (said("user", {"x": 1}), wrong),
            ({"messages": [HI], "tool_choice": {"type": []}}, "tool_choice must be"),
        ):
            answer = self.http.post("/v1/messages", json={**body, "max_tokens": 3})
            self.assertEqual(answer.status_code, 400, body)
            self.assertRegex(answer.json()["error"]["message"], words)
        thought = {"type": "redacted_thinking", "data": "x"}
        body = said("assistant", [thought, {"type": "text", "text": "a"}])
        answer = self.http.post("/v1/messages", json={**body, "max_tokens": 3})
        self.assertEqual(answer.status_code, 200)


class TokenIdsTest(ClientTest):
    def test_ids_in_and_out(self):
        ids = TOKENIZER.encode("a")
        params = {"max_tokens": 8, "logprobs": 1, "temperature": 0.0}
        body = {"token_ids": ids, "sampling_params": params}
        answer = self.http.post("/inference/v1/generate", json=body).json()
        (choice,) = answer["choices"]
        self.assertEqual(
            choice["token_ids"], [*TOKENIZER.encode("bcd"), TOKENIZER.eos_id]
        )
        self.assertEqual(choice["finish_reason"], "stop")
        rows = choice["logprobs"]["content"]
        self.assertEqual([r["token"] for r in rows][:2], ["token_id:98", "token_id:99"])
        self.assertEqual(choice["weight_versions"], [0] * 4)
        params |= {"temperature": 0.5, "logprobs": 3, "max_tokens": 1}
        body["token_ids"] = TOKENIZER.encode("o")
        (choice,) = self.http.post("/inference/v1/generate", json=body).json()[
            "choices"
        ]
        row = choice["logprobs"]["content"][0]
        self.assertLess(row["raw_logprob"], row["logprob"])  # it was drawn colder
        self.assertEqual(row["top_logprobs"][0]["logprob"], row["raw_logprob"])
        self.assertLen(row["top_logprobs"], 2)

    def test_tokenize(self):
        ids = self.http.post("/tokenize", json={"prompt": "<think>é"}).json()
        self.assertEqual(ids["tokens"], TOKENIZER.encode("<think>é"))
        self.assertEqual(ids["max_model_len"], scripted.CAPACITY)
        body = {"tokens": [TOKENIZER.special_ids["<think>"], *"é".encode()]}
        text = self.http.post("/detokenize", json=body).json()["prompt"]
        self.assertEqual(text, "<think>é")


class StatusTest(ClientTest):
    def test_pause_and_resume(self):
        post = lambda path: self.http.post(path, headers=JSON).status_code
        is_paused = lambda: self.http.get("/is_paused").json()["is_paused"]
        self.assertEqual(post("/pause?mode=abort&clear_cache=true"), 200)
        wait_until(is_paused)
        self.assertEqual(post("/pause?mode=other"), 400)
        self.assertEqual(post("/resume"), 200)
        wait_until(lambda: not is_paused())

    @parameterized.product(path=("/v1/messages", "/v1/responses"), stream=(False, True))
    def test_an_answer_that_is_cut_off_is_an_error(self, path, stream):
        """Neither form has a word for it, and an agent takes an end for the end."""
        said = [{"role": "user", "content": "x"}]
        body = {"messages": said, "max_tokens": 9, "stream": stream}
        if path == "/v1/responses":
            body = {"input": "x", "stream": stream}
        control = lambda name: self.http.post(name, headers=JSON).status_code
        self.assertEqual(control("/pause?mode=keep"), 200)
        with futures.ThreadPoolExecutor() as pool:
            asked = pool.submit(self.http.post, path, json=body)
            wait_until(lambda: self.service.stats().waiting == 1)
            self.assertEqual(control("/pause?mode=abort"), 200)
            answer = asked.result()
        self.assertEqual(control("/resume"), 200)
        self.assertEqual(answer.status_code, 200 if stream else 503)
        self.assertIn("The answer was cut off; send the", answer.text)
        for end in ("end_turn", "message_stop", "response.completed"):
            self.assertNotIn(end, answer.text)

    def test_the_page(self):
        answer = self.http.get("/")
        self.assertStartsWith(answer.headers["Content-Type"], "text/html")
        self.assertIn(PATHS[0], answer.text)

    def test_health_models_and_metrics(self):
        self.assertEqual(self.plain.get("/health").json(), {"status": "ok"})
        (model,) = self.client.models.list()
        self.assertEqual(model.id, scripted.NAME)
        self.assertEqual(self.client.models.retrieve(scripted.NAME), model)
        self.complete("a")
        lines = self.http.get("/metrics").text.splitlines()
        figures = dict(line.split() for line in lines if not line.startswith("#"))
        self.assertGreaterEqual(float(figures["glm5_jax_generated_tokens_total"]), 4)
        self.assertEqual(figures["glm5_jax_drafts_per_round"], "0")
        ended = 'glm5_jax_requests_ended_total{reason="stop"}'
        self.assertGreaterEqual(int(figures[ended]), 1)


class DraftsTest(ClientTest):
    bounds = scripted.DRAFTING

    def figures(self):
        lines = self.http.get("/metrics").text.splitlines()
        pairs = (line.split() for line in lines if not line.startswith("#"))
        return {name.removeprefix("glm5_jax_"): value for name, value in pairs}

    def test_drafts_are_counted_by_position(self):
        """The prompt draws b; what follows it is not foreseen, the others are."""
        self.assertEqual(self.complete("a").choices[0].text, "bcd")
        figures = self.figures()
        found = {
            name: [
                int(figures[f'drafts_{name}_total{{position="{i}"}}']) for i in "012"
            ]
            for name in ("judged", "accepted")
        }
        # Rounds: c after wrong drafts; d and the end, of three drafts.
        self.assertEqual(found, {"judged": [2, 2, 1], "accepted": [1, 1, 0]})
        self.assertEqual(figures["draft_rounds_total"], "2")
        self.assertEqual(figures["drafts_per_round"], "3")
        self.assertEqual(figures["draft_acceptance_low"], "0")


class RefusalTest(ClientTest):
    limits = {"max_body_bytes": 10_000}  # noqa: RUF012

    def post(self, path=PATHS[0], **content):
        """Returns status and message, which every refusal has."""
        answer = self.http.post(path, **content)
        return answer.status_code, answer.json()["error"]["message"]

    @parameterized.parameters(
        ({"messages": []}, 400, "at least one message"),
        ({}, 400, "at least one message"),
        ({"messages": "Hi"}, 400, "messages: .*valid list"),
        ({"messages": [1]}, 400, "messages.0: .*valid dict"),
        ({"messages": [{"role": "bot", "content": ""}]}, 400, "got 'bot'"),
        ({"messages": [HI], "model": "other"}, 404, "'other' does not exist"),
        ({"messages": [HI], "temperature": "hot"}, 400, "temperature: .*number"),
        ({"messages": [HI], "temperature": -1}, 400, "temperature must be finite"),
        ({"messages": [HI], "max_tokens": 0}, 400, "max_new_tokens must be at least 1"),
        ({"messages": [HI], "max_tokens": 9999}, 400, "at most .* more fit"),
        ({"messages": [HI | {"content": "x" * 1000}]}, 400, "Shorten the prompt"),
        ({"messages": [HI], "n": 0}, 400, "n must lie"),
        ({"messages": [HI], "logit_bias": {"a": 1}}, 400, "ids as its keys"),
        ({"messages": [HI], "logit_bias": {"9999": 1}}, 400, "logit_bias must have"),
        ({"messages": [HI], "presence_penalty": 101}, 400, "presence_penalty must"),
        ({"messages": [HI], "top_logprobs": 2}, 400, "needs logprobs"),
        ({"messages": [HI], "stop": [""]}, 400, "stop must have"),
        ({"messages": [HI], "stop_token_ids": [9999]}, 400, "stop_ids must be"),
        ({"messages": [HI], "tools": [{}]}, 400, "a function with a name"),
        ({"messages": [HI], "tool_choice": "required"}, 400, "there are no tools"),
        (
            {"messages": [HI], "response_format": {"type": "xml"}},
            400,
            "json_schema, got 'xml'",
        ),
        ({"messages": [HI | {"content": "\ud800"}]}, 400, "half of a surrogate"),
        ({"messages": [HI], "reasoning_effort": "much"}, 400, "reasoning_effort"),
    )
    def test_wrong_fields(self, body, status, message):
        got, text = self.post(content=json.dumps(body), headers=JSON)
        self.assertEqual(got, status)
        self.assertRegex(text, message)

    @parameterized.parameters(
        ("{", "not JSON"),
        ("[" * 9000, "body"),
        ('{"messages": [], "temperature": NaN}', "message"),
        ("null", "body"),
        ("", "body"),
    )
    def test_malformed_bodies(self, text, message):
        for path in PATHS:
            status, got = self.post(path, content=text, headers=JSON)
            self.assertEqual(status, 400)
            if path == PATHS[0]:
                self.assertRegex(got, message)

    def test_a_huge_body(self):
        huge = b'{"prompt": "' + b"x" * 20_000
        self.assertEqual(self.post(content=huge, headers=JSON)[0], 413)
        pieces = (huge[i : i + 999] for i in range(0, len(huge), 999))  # no length
        self.assertEqual(self.post(content=pieces, headers=JSON)[0], 413)

    def test_other_forms(self):
        self.assertEqual(
            self.post(content="{}", headers={"Content-Type": "a/b"})[0], 415
        )
        self.assertEqual(self.post("/v1/other", json={})[0], 404)
        self.assertEqual(self.http.get(PATHS[0]).status_code, 405)

    def test_keys(self):
        for path in (*PATHS, "/metrics", "/v1/models", "/openapi.json", "/docs"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": ""}):
                answer = self.plain.get(path, headers=headers)
                self.assertEqual(answer.status_code, 401, path)
                self.assertIn("key", answer.json()["error"]["message"])
        for shown in (
            {"headers": {"x-api-key": scripted.KEY}},
            {"auth": ("anybody", scripted.KEY)},
        ):
            answer = self.plain.get("/v1/models", **shown)
            self.assertEqual(answer.status_code, 200)

    def test_a_client_s_error(self):
        with self.assertRaisesRegex(openai.NotFoundError, "'other' does not exist"):
            self.chat(model="other")


JSON = {"Content-Type": "application/json"}


class OpenTest(ClientTest):
    limits = {"api_key": None}  # noqa: RUF012

    def test_without_a_key_only_names_of_this_machine_are_answered(self):
        for host, status in (
            ("localhost", 200),
            ("127.0.0.1:80", 200),
            ("[::1]:80", 200),
            ("evil.example", 403),
            ("localhost.evil.example:80", 403),
        ):
            answer = self.plain.get("/v1/models", headers={"Host": host})
            self.assertEqual(answer.status_code, status, host)


class LimitsTest(ClientTest):
    limits = {"max_concurrency": 1}  # noqa: RUF012

    def num_aborted(self):
        return self.service.stats().ended.get("abort", 0)

    @parameterized.parameters(False, True)
    def test_a_client_that_leaves_is_aborted(self, is_stream):
        before = self.num_aborted()
        body = {"prompt": "x", "max_tokens": 200, "stream": is_stream}
        with self.paused():
            with self.assertRaises(httpx.ReadTimeout):
                self.http.post("/v1/completions", json=body, timeout=0.2)
            wait_until(lambda: self.num_aborted() == before + 1)
            self.assertEqual(self.service.stats().waiting, 0)

    def test_one_request_after_another_is_one_at_a_time(self):
        """Even where a client asks before the server has left the last answer."""
        for is_stream in [False, True] * 20:
            body = {"prompt": "a", "max_tokens": 1, "stream": is_stream}
            answer = self.http.post("/v1/completions", json=body)
            self.assertEqual(answer.status_code, 200)

    def test_too_many_requests(self):
        with futures.ThreadPoolExecutor() as pool, self.paused():
            first = pool.submit(self.complete, "a")
            wait_until(lambda: self.service.stats().waiting == 1)
            answer = self.http.post("/v1/completions", json={"prompt": "a"})
            self.assertEqual(answer.status_code, 429)
            self.assertEqual(answer.headers["Retry-After"], "1")
            self.assertEqual(self.plain.get("/health").status_code, 200)
            self.service.resume().result()
            self.assertEqual(first.result().choices[0].text, "bcd")


class TimeTest(ClientTest):
    limits = {"max_seconds": 0.05}  # noqa: RUF012

    def test_an_answer_that_takes_too_long(self):
        with self.paused():
            with self.assertRaisesRegex(openai.InternalServerError, "time limit"):
                self.complete("a")
            with self.assertRaisesRegex(openai.APIError, "time limit"):
                [*self.complete("a", stream=True)]
        wait_until(lambda: self.service.stats().waiting == 0)


class EndTest(ClientTest):
    def test_answers_under_way_are_finished(self):
        with futures.ThreadPoolExecutor() as pool, self.paused():
            answer = pool.submit(self.complete, "a")
            wait_until(lambda: self.service.stats().waiting == 1)
            self.server.should_exit = True  # as SIGTERM does
            wait_until(lambda: not can_connect(self.url))
            self.service.resume().result()
            self.assertEqual(answer.result().choices[0].text, "bcd")


class CommandTest(parameterized.TestCase):
    def test_a_folder_with_its_texts_and_defaults(self):
        path = pathlib.Path(__file__).parents[1] / "golden" / "chat_model"
        options = command.Options(
            capacity=32, num_slots=1, num_pages=3, template="glm5.1"
        )
        with command.loaded(str(path), (), options) as model:
            self.assertEqual(model.name, "chat_model")
            self.assertEqual(model.service.capacity, 32)
            self.assertEqual(model.service.stats().free_pages, 3)
            self.assertEqual(model.chat.version, "glm5.1")
            self.assertIn(model.text.eos_id, model.stop_ids)
            self.assertEqual(model.defaults, {"temperature": 0.7})

    @pytest.mark.slow
    def test_sigterm_finishes_the_answer_under_way(self):
        """Twenty seconds, of which most go to compiling."""
        path = pathlib.Path(__file__).parents[1] / "golden" / "chat_model"
        port = launch.free_port()
        flags = [f"--checkpoint={path}", f"--port={port}", "--capacity=2048"]
        flags += ["--num_slots=1", "--config.model.max_position_embeddings=2048"]
        child = subprocess.Popen([sys.executable, "-m", "glm5_jax.serve", *flags])
        with child, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            wait_until(lambda: can_connect(http.base_url), seconds=240)
            body = {"prompt": "a", "max_tokens": 2000}
            with futures.ThreadPoolExecutor() as pool:
                url = "/v1/completions"
                answer = pool.submit(http.post, url, json=body, timeout=240)
                wait_until(lambda: self.num_begun(http), seconds=240)
                child.send_signal(signal.SIGTERM)
                self.assertEqual(answer.result().status_code, 200)
            self.assertEqual(child.wait(60), 0)

    def num_begun(self, http):
        """Returns the requests that the engine has begun."""
        figures = re.findall(r"^(glm5_jax_\S+) (\d+)$", http.get("/metrics").text, re.M)
        return int(dict(figures)["glm5_jax_requests_running"])

    @pytest.mark.slow
    def test_the_command_serves_quantized_weights(self):
        """Greedy ids over a socket are those of an engine with the same codes."""
        path = pathlib.Path(__file__).parents[1] / "golden" / "chat_model"
        port = launch.free_port()
        flags = [f"--checkpoint={path}", f"--port={port}", "--quantize=w4a16"]
        flags += ["--capacity=64", "--num_slots=1"]
        prompt = [5, 9, 2, 33, 7]
        child = subprocess.Popen([sys.executable, "-m", "glm5_jax.serve", *flags])
        with child, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            try:
                wait_until(lambda: can_connect(http.base_url), seconds=240)
                settings = {"temperature": 0, "max_tokens": 8, "logprobs": 1}
                body = {"token_ids": prompt, "sampling_params": settings}
                url = "/inference/v1/generate"
                answer = http.post(url, json=body, timeout=240).raise_for_status()
            finally:
                child.send_signal(signal.SIGTERM)
            self.assertEqual(child.wait(60), 0)
        model, params, _ = quantized_loading.load_model(path, scheme="w4a16")
        (want,) = engine.generate(
            params, model, [prompt], max_new_tokens=8, temperature=0.0
        )
        ids = answer.json()["choices"][0]["token_ids"]
        self.assertEqual(ids, want.tokens[: len(ids)])
        self.assertNotEmpty(ids)


class OptionsTest(parameterized.TestCase):
    def test_other_machines_need_a_key(self):
        with self.assertRaisesRegex(config.InputError, "--api_key must be set"):
            command.Options(host="0.0.0.0")
        with self.assertRaisesRegex(config.InputError, "--api_key is empty"):
            command.Options(api_key=" ")
        self.assertFalse(command.Options(host="0.0.0.0", api_key="a").is_loopback)

    def test_addresses_that_cannot_be_used(self):
        with contextlib.closing(listening.bind("127.0.0.1", 0)) as taken:
            taken.listen()
            port = taken.getsockname()[1]
            with self.assertRaisesRegex(config.InputError, "cannot be used"):
                listening.bind("127.0.0.1", port)
        with self.assertRaisesRegex(config.InputError, "--port must lie"):
            listening.bind("127.0.0.1", 70_000)


def can_connect(url):
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    environment.main()
