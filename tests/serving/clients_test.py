"""Programs of others that ask the server: a trainer's client, and agents."""

import asyncio
import json
import os
import pathlib
import subprocess
import sys

import openai
import pydantic_ai
from absl.testing import parameterized
from pydantic_ai.models import openai as openai_models
from pydantic_ai.providers import openai as openai_providers
from renderers import client as renderers_client
from renderers import configs, glm5

from tests import environment
from tests.serving import parity_test, scripted
from tests.serving.scripted import TOKENIZER

HI = {"role": "user", "content": "Hi"}
TOOL = {"name": "f", "description": "", "parameters": {"type": "object"}}
CALLS = 40  # draws, of which one in three calls
TOOLS = """
def weather(city: str) -> str:
    "Weather of a city."
    with open("asked", "a") as file:
        print(city, file=file)
    return "21 °C"
"""


class HfTokenizer:
    """Our tokenizer by the names that transformers' have."""

    name_or_path = "scripted"
    unk_token_id = None
    eos_token_id = TOKENIZER.eos_id

    def convert_tokens_to_ids(self, name):
        return TOKENIZER.special_ids.get(name)

    def encode(self, text, add_special_tokens=True):
        return TOKENIZER.encode(text)

    def decode(self, ids, skip_special_tokens=False):
        return TOKENIZER.spell(ids)


class TrainerTest(scripted.ServerTest):
    """PyPI's renderers: strict about ids, log-probs and their order."""

    def ask(self, messages, tools=None, thinking=True, **params):
        renderer = glm5.GLM5Renderer(
            HfTokenizer(), configs.GLM5RendererConfig(enable_thinking=thinking)
        )

        async def run():
            url = f"{self.url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=scripted.KEY) as client:
                return await renderers_client.generate(
                    client=client,
                    renderer=renderer,
                    messages=messages,
                    model=scripted.NAME,
                    tools=tools,
                    sampling_params={"max_tokens": 64, **params},
                )

        return asyncio.run(run())

    def test_an_answer(self):
        answer = self.ask([HI])
        self.assertEqual(answer["reasoning_content"], "So")
        self.assertEqual(answer["content"], "Hé!")
        self.assertEqual(answer["finish_reason"], "stop")
        self.assertEqual(
            answer["prompt_ids"], self.model.chat.render([HI], (), True).tokens
        )
        self.assertLen(answer["completion_logprobs"], len(answer["completion_ids"]))

    def test_without_thinking(self):
        answer = self.ask([HI], thinking=False)
        self.assertFalse(answer["reasoning_content"])
        self.assertEqual(answer["content"], "Hé!")

    def test_a_loop_of_tools(self):
        for seed in range(CALLS):
            answer = self.ask([HI], [TOOL], temperature=1.0, seed=seed)
            if answer["tool_calls"]:
                break
        (call,) = answer["tool_calls"]
        self.assertEqual((call.name, call.arguments), ("f", {"k": 5}))
        self.assertEqual(answer["finish_reason"], "tool_calls")
        function = {"name": "f", "arguments": {"k": 5}}
        said = [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": function}],
            },
            {"role": "tool", "content": "7"},
        ]
        self.assertEqual(self.ask([HI, *said], [TOOL])["content"], "Hé!")

    def test_a_prompt_that_is_too_long(self):
        """The client learns the room from /v1/models and does not ask."""
        with self.assertRaises(renderers_client.OverlongPromptError):
            self.ask([{"role": "user", "content": "x" * scripted.CAPACITY}])

    def test_a_client_that_cancels(self):
        before = self.service.stats().ended.get("abort", 0)
        self.service.pause().result()
        try:
            with self.assertRaises(openai.APITimeoutError):
                asyncio.run(self._ask_in_vain())
            scripted.wait_until(
                lambda: self.service.stats().ended.get("abort", 0) == before + 1
            )
        finally:
            self.service.resume().result()

    async def _ask_in_vain(self):
        made = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=scripted.KEY, timeout=0.2, max_retries=0
        )
        async with made as client:
            await client.completions.create(model=scripted.NAME, prompt="x")


class AgentTest(parameterized.TestCase):
    """PyPI's pydantic-ai and llm, with a model that learned to call their tool."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        started = scripted.serving_folder(parity_test.FOLDER)
        cls.url, _ = cls.enterClassContext(started)

    async def run_agent(self, is_stream):
        """Returns the agent's answer, its number of requests, and what its tool got."""
        url = f"{self.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=scripted.KEY) as client:
            provider = openai_providers.OpenAIProvider(openai_client=client)
            model = openai_models.OpenAIChatModel(scripted.NAME, provider=provider)
            agent = pydantic_ai.Agent(model, system_prompt="You know the weather.")
            asked = []

            @agent.tool_plain
            def weather(city: str) -> str:
                """Weather of a city."""
                asked.append(city)
                return "21 °C"

            said = "Wetter in Köln?"
            if not is_stream:
                result = await agent.run(said)
                return result.output, result.usage.requests, asked
            async with agent.run_stream(said) as result:
                texts = [text async for text in result.stream_text(delta=True)]
            return "".join(texts), result.usage.requests, asked

    @parameterized.parameters(False, True)
    def test_a_loop_of_tools(self, is_stream):
        answer, num_requests, asked = asyncio.run(self.run_agent(is_stream))
        self.assertEqual(asked, ["Köln"])
        self.assertEqual(answer, "21 °C.")
        self.assertEqual(num_requests, 2)

    @parameterized.parameters((), ("--no-stream",))
    def test_a_program_calls_its_tool(self, *how):
        """PyPI's llm, as its users type it: the tool is a Python file of theirs."""
        home = pathlib.Path(self.create_tempdir().full_path)
        server = {"model_id": "ours", "model_name": scripted.NAME}
        server |= {"api_base": f"{self.url}/v1", "api_key_name": "ours"}
        models = home / "extra-openai-models.yaml"
        models.write_text(json.dumps([server | {"supports_tools": True}]))
        (home / "tools.py").write_text(TOOLS)
        words = ["--model=ours", "--system=You know the weather.", *how]
        words += [f"--functions={home}/tools.py", f"--key={scripted.KEY}"]
        done = subprocess.run(
            [sys.executable, "-m", "llm", *words, "Wetter in Köln?"],
            env={**os.environ, "LLM_USER_PATH": str(home), "PYTHONUTF8": "1"},
            cwd=home,
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.split(), ["21", "°C."])
        self.assertEqual((home / "asked").read_text(), "Köln\n")


if __name__ == "__main__":
    environment.main()
