"""The server beside transformers: the same folder, conversations and greedy answers."""

import json
import pathlib

import openai
from absl.testing import parameterized

from glm5_jax.data.chat import templates
from tests import environment
from tests.serving import scripted

FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "served"
ANSWERS = json.loads((FOLDER / "answers.json").read_text(encoding="utf-8"))


def switches(asked):
    """Returns the template's switches as chat completions have them."""
    given = dict(asked["switches"])
    effort = given.pop("reasoning_effort", None)
    found = {"chat_template_kwargs": given} if given else {}
    return found | ({"reasoning_effort": effort} if effort else {})


def messages_of(asked):
    """Returns messages as a client sends them: with arguments as JSON, and ids."""
    said = []
    for message in asked["messages"]:
        message = dict(message)
        for call in message.get("tool_calls", ()):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            function = {"name": call["function"]["name"], "arguments": arguments}
            call = {"id": "call_1", "type": "function", "function": function}
            message["tool_calls"] = [call]
        if message["role"] == "tool":
            message["tool_call_id"] = "call_1"
        said.append(message)
    return said


class ParityTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.url, _ = cls.enterClassContext(scripted.serving_folder(FOLDER))
        made = openai.OpenAI(
            base_url=f"{cls.url}/v1", api_key=scripted.KEY, max_retries=0
        )
        cls.client = cls.enterClassContext(made)

    def ask(self, asked, **more):
        return self.client.chat.completions.create(
            model=scripted.NAME,
            messages=messages_of(asked),
            tools=asked["tools"] or openai.omit,
            extra_body={"return_token_ids": True, **switches(asked)},
            **more,
        )

    @parameterized.parameters(*((name,) for name in ANSWERS))
    def test_an_answer_is_that_of_transformers(self, name):
        asked = ANSWERS[name]
        answer = self.ask(asked)
        (choice,) = answer.choices
        self.assertEqual(answer.prompt_token_ids, asked["prompt"])
        self.assertEqual(choice.token_ids, asked["ids"])
        self.assertEqual(choice.message.content or "", asked["content"])
        thought = getattr(choice.message, "reasoning_content", "")
        self.assertEqual(thought, asked["reasoning_content"])
        calls = [
            {"name": c.function.name, "arguments": json.loads(c.function.arguments)}
            for c in choice.message.tool_calls or ()
        ]
        self.assertEqual(calls, asked["tool_calls"])
        self.assertEqual(choice.finish_reason, "tool_calls" if calls else "stop")

    def test_the_folder_s_own_template_is_of_another_version_than_the_default(self):
        found = templates.released_version((FOLDER / "chat_template.jinja").read_text())
        self.assertEqual(found, "glm5.2")


if __name__ == "__main__":
    environment.main()
