"""Agents that are programs: real clients ask by a base URL, and their ids are kept."""

import asyncio
import collections
import dataclasses
import importlib
import importlib.util
import io
import json
import time
from unittest import mock

import aiohttp
from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import mixture, protocol
from glm5_jax.inference import requests
from glm5_jax.rl import (
    agent_session,
    at_once,
    completer,
    doors,
    entrance,
    gateway,
    held_out,
    rollouts,
)
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl.actors import groups, monitor, orchestrator
from tests import environment
from tests.data import templates_test
from tests.rl import faults

TEMPLATE = templates_test.template(clear=False)
Label = protocol.Label
CALL = "</think><tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value>"
CALL += "<arg_key>b</arg_key><arg_value>3</arg_value></tool_call><|observation|>"
ANSWERS = ("so</think>five<|user|>", "</think>six<|user|>")
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


class Engine:
    """Answers with given texts, one after another."""

    capacity = 2048

    def __init__(self, *texts):
        self.texts, self.prompts = list(texts), []

    async def complete(self, request):
        self.prompts.append([*request.prompt])
        text = self.texts.pop(0) if self.texts else None
        if text is None:
            raise completer.EngineError("the engine is gone")
        tokens = templates_test.ids_of(text)
        size = len(tokens)
        return requests.Completion(tokens, [-0.5] * size, "stop", [3] * size)


class Tasks:
    """Tasks whose agent is a coroutine function of a base URL.

    It returns a reward, or all that `play` returns.
    """

    name, has_agents = "agents", True

    def __init__(self, play):
        self._play, self.num_closed = play, 0

    def task(self, split, seed, index):
        return protocol.Task(str(index), ({"role": "user", "content": "2 + 3?"},))

    def environment(self):
        return self

    async def play(self, task, base_url):
        found = await self._play(task, base_url)
        if isinstance(found, float):
            return protocol.StepResult((), protocol.Reward(found), True, False)
        return found

    async def close(self):
        self.num_closed += 1

    def demonstration(self, task):
        return None


def run(play, *texts, **changes):
    """Returns the episode of an agent, and the engine that it asked.

    What the agent asserts counts, though an agent that fails ends no run.
    """
    failures = []

    async def watched(task, base_url):
        try:
            return await play(task, base_url)
        except AssertionError as error:
            failures.append(error)
            raise

    engine, tasks = Engine(*texts), Tasks(watched)
    settings = episodes_lib.Settings(
        max_new_tokens=64, max_turns=4, num_concurrent=1, episode_timeout=20.0
    )
    settings = dataclasses.replace(settings, **changes)
    context = episodes_lib.Context(engine, tasks, TEMPLATE, settings)

    async def played():
        async with entrance.of(context) as opened:
            job = episodes_lib.Job(tasks.task("train", 0, 0), 0, 40)
            return await episodes_lib.run(opened, job)

    try:
        return asyncio.run(played()), engine
    finally:
        assert tasks.num_closed == 1
        assert not failures, failures[0]


async def chat(base_url, messages, **fields):
    """Returns status and JSON of an answer."""
    body = {"model": "any", "messages": messages, **fields}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{base_url}/chat/completions", json=body) as answer,
    ):
        return answer.status, await answer.json()


class AgentsTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        """Imports the clients: collecting the tests of all files need not wait."""
        super().setUpClass()
        cls.anthropic = importlib.import_module("anthropic")
        cls.openai = importlib.import_module("openai")
        cls.pydantic_ai = importlib.import_module("pydantic_ai")
        cls.models = importlib.import_module("pydantic_ai.models.openai")
        cls.providers = importlib.import_module("pydantic_ai.providers.openai")

    def test_a_program_of_openai_plays_two_turns_of_one_sample(self):
        async def play(task, base_url):
            client = self.openai.AsyncOpenAI(base_url=base_url, api_key="none")
            messages = [dict(message) for message in task.messages]
            async with client:
                for question in ("And 3 + 3?", None):
                    answer = await client.chat.completions.create(
                        model="gpt", messages=messages
                    )
                    said = answer.choices[0].message
                    messages.append({"role": "assistant", "content": said.content})
                    if question:
                        messages.append({"role": "user", "content": question})
            return float(said.content == "six")

        episode, engine = run(play, *ANSWERS)
        self.assertEqual((episode.label, episode.reward.total), (Label.OK, 1.0))
        self.assertEqual((episode.num_turns, episode.num_forks), (2, 0))
        (sample,) = episode.samples
        first, second = map(templates_test.ids_of, ANSWERS)
        self.assertEqual(sum(sample.mask), len(first) + len(second))
        # The second prompt extends what was sampled, the thought included.
        size = len(engine.prompts[0]) + len(first)
        self.assertEqual(engine.prompts[1][:size], engine.prompts[0] + first)
        trained = [t for t, m in zip(sample.tokens, sample.mask, strict=True) if m]
        self.assertEqual(trained, first + second)
        self.assertEqual({v for v in sample.versions if v >= 0}, {3})
        roles = [message["role"] for message in episode.transcript]
        self.assertEqual(roles, ["user", "assistant", "user", "assistant"])

    def test_an_agent_from_pypi_completes_a_tool_loop_unchanged(self):
        used = []

        def add(a: int, b: int) -> int:
            used.append((a, b))
            return a + b

        async def play(task, base_url):
            async with self.openai.AsyncOpenAI(
                base_url=base_url, api_key="-"
            ) as client:
                provider = self.providers.OpenAIProvider(openai_client=client)
                model = self.models.OpenAIChatModel("any", provider=provider)
                agent = self.pydantic_ai.Agent(model, tools=[add])
                found = await agent.run(task.messages[0]["content"])
            return float(found.output == "five")

        episode, engine = run(play, CALL, ANSWERS[0])
        self.assertEqual((episode.label, episode.reward.total), (Label.OK, 1.0))
        self.assertEqual(used, [(2, 3)])
        self.assertEqual((episode.num_turns, episode.num_forks), (2, 0))
        first = templates_test.ids_of(CALL)
        size = len(engine.prompts[0]) + len(first)
        self.assertEqual(engine.prompts[1][:size], engine.prompts[0] + first)
        self.assertLen(episode.samples, 1)

    @parameterized.parameters(False, True)
    def test_a_program_of_anthropic_completes_a_tool_loop(self, is_streamed):
        tool = {"name": "add", "input_schema": TOOL["function"]["parameters"]}

        async def ask(client, messages):
            given = {
                "model": "any",
                "max_tokens": 64,
                "system": "Be brief.",
                "messages": messages,
                "tools": [tool],
            }
            if not is_streamed:
                return await client.messages.create(**given)
            async with client.messages.stream(**given) as stream:
                return await stream.get_final_message()

        async def play(task, base_url):
            url = base_url.removesuffix("/v1")  # the client adds it
            messages = [{"role": "user", "content": task.messages[0]["content"]}]
            async with self.anthropic.AsyncAnthropic(
                base_url=url, api_key="-"
            ) as client:
                called = await ask(client, messages)
                (block,) = called.content
                self.assertEqual(called.stop_reason, "tool_use")
                self.assertEqual((block.name, block.input), ("add", {"a": 2, "b": 3}))
                result = {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": "5",
                }
                messages += [
                    {"role": "assistant", "content": called.content},
                    {"role": "user", "content": [result]},
                ]
                said = await ask(client, messages)
            thought, text = said.content
            self.assertEqual((thought.thinking, text.text), ("so", "five"))
            self.assertEqual(said.stop_reason, "end_turn")
            self.assertGreater(said.usage.output_tokens, 0)
            self.assertEqual(said.usage.input_tokens, 0)  # not counted
            return 1.0

        episode, engine = run(play, CALL, ANSWERS[0])
        self.assertEqual((episode.label, episode.reward.total), (Label.OK, 1.0))
        self.assertEqual((episode.num_turns, episode.num_forks), (2, 0))
        first = templates_test.ids_of(CALL)
        size = len(engine.prompts[0]) + len(first)
        self.assertEqual(engine.prompts[1][:size], engine.prompts[0] + first)
        roles = [message["role"] for message in episode.transcript]
        self.assertEqual(roles, ["system", "user", "assistant", "tool", "assistant"])

    def test_wrong_requests_of_anthropic_are_told_and_end_nothing(self):
        async def play(task, base_url):
            image = [{"type": "image", "source": {}}]
            async with aiohttp.ClientSession() as session:
                for message, words in (
                    ({"role": "user", "content": image}, "'image' is not supported"),
                    ("hi", "messages[0] must be an object, got 'hi'"),
                ):
                    body = {"messages": [message]}
                    url = f"{base_url}/messages"
                    async with session.post(url, json=body) as answer:
                        self.assertEqual(answer.status, 400)
                        told = (await answer.json())["error"]["message"]
                        self.assertIn(words, told)
            await chat(base_url, [*task.messages])
            return 1.0

        episode, _ = run(play, ANSWERS[0])
        self.assertEqual((episode.num_turns, episode.reward.total), (1, 1.0))

    def test_a_stream_is_whole(self):
        async def play(task, base_url):
            client = self.openai.AsyncOpenAI(base_url=base_url, api_key="none")
            text, reasons = "", []
            async with client:
                stream = await client.chat.completions.create(
                    model="gpt", messages=[*task.messages], stream=True
                )
                async for chunk in stream:
                    (choice,) = chunk.choices
                    text += choice.delta.content or ""
                    reasons.append(choice.finish_reason)
            self.assertEqual((text, reasons), ("five", [None, "stop"]))
            return 1.0

        episode, _ = run(play, ANSWERS[0])
        self.assertIs(episode.label, Label.OK)

    def test_a_changed_history_forks(self):
        async def play(task, base_url):
            await chat(base_url, [*task.messages])
            changed = [
                *task.messages,
                {"role": "assistant", "content": "seven"},
                {"role": "user", "content": "Sure?"},
            ]
            await chat(base_url, changed)
            await chat(base_url, changed, tools=[TOOL])
            return 0.5

        episode, _ = run(play, *ANSWERS, ANSWERS[0])
        self.assertEqual((episode.num_turns, episode.num_forks), (3, 2))
        self.assertLen(episode.samples, 3)
        self.assertEqual(episode.reward.total, 0.5)

    def test_no_turn_follows_the_last_one(self):
        statuses = []

        async def play(task, base_url):
            for _ in range(3):
                status, answer = await chat(base_url, [*task.messages])
                statuses.append(status)
            self.assertEqual(answer["error"]["type"], "episode_over")
            raise RuntimeError("the agent fell over")

        episode, _ = run(play, *ANSWERS, max_turns=2)
        self.assertEqual(statuses, [200, 200, 400])
        self.assertIs(episode.label, Label.TRUNCATED)
        self.assertEqual(episode.reward.total, 0.0)
        self.assertIn("no end in 2 turns", episode.reason)

    @parameterized.named_parameters(
        ("crash", RuntimeError("boom"), Label.ENV_ERROR, "boom"),
        ("no_reward", None, Label.REWARD_ERROR, "reward"),
    )
    def test_a_failing_agent_does_not_count(self, error, label, words):
        async def play(task, base_url):
            await chat(base_url, [*task.messages])
            if error is not None:
                raise error
            return float("nan")

        episode, _ = run(play, ANSWERS[0])
        self.assertIs(episode.label, label)
        self.assertIsNone(episode.reward)
        self.assertIn(words, episode.reason)

    def test_a_silent_agent_does_not_count(self):
        async def play(task, base_url):
            return 1.0

        episode, _ = run(play)
        self.assertIs(episode.label, Label.ENV_ERROR)
        self.assertIn("asked for no turn", episode.reason)

    @parameterized.parameters((4, "the agent gave up"), (1, "no end in 1 turns"))
    def test_an_agent_that_gives_up_is_truncated_and_paid(self, max_turns, reason):
        async def play(task, base_url):
            for _ in range(2):
                await chat(base_url, [*task.messages])
            return protocol.StepResult((), protocol.Reward(0.25), False, True)

        episode, _ = run(play, *ANSWERS, max_turns=max_turns)
        self.assertIs(episode.label, Label.TRUNCATED)
        self.assertEqual(episode.reward.total, 0.25)
        self.assertEqual(episode.reason, reason)

    def test_an_agent_must_return_a_result(self):
        async def play(task, base_url):
            await chat(base_url, [*task.messages])
            return "five"

        episode, _ = run(play, ANSWERS[0])
        self.assertIs(episode.label, Label.ENV_ERROR)
        self.assertEqual(episode.reason, "play returned 'five'")

    def test_an_endless_agent_is_cut_off(self):
        async def play(task, base_url):
            await asyncio.sleep(1e6)

        episode, _ = run(play, episode_timeout=0.2)
        self.assertIs(episode.label, Label.TIMEOUT)

    def test_a_lost_engine_is_the_engines_fault(self):
        found = []

        async def play(task, base_url):
            found.append(await chat(base_url, [*task.messages]))
            return 0.0

        with self.assertRaises(completer.EngineError):
            run(play, None)
        ((status, answer),) = found
        self.assertEqual(
            (status, answer["error"]["message"]), (503, "the engine is gone")
        )

    @parameterized.named_parameters(
        ("misaligned", gateway.MisalignedError, "1 log-probs"),
        ("refused", config.InputError, "no such token"),
        ("unknown", ZeroDivisionError, "a fault of ours"),
    )
    def test_a_mistake_of_the_engine_is_not_the_agent_s(self, kind, words):
        """It ends the run, as for episodes without a program."""
        found = []

        async def play(task, base_url):
            found.append(await chat(base_url, [*task.messages]))
            raise RuntimeError("the agent fell over")

        async def wrong(engine, request):
            if kind is gateway.MisalignedError:
                tokens = templates_test.ids_of(ANSWERS[0])
                return requests.Completion(tokens, [-0.5], "stop", [3] * len(tokens))
            raise kind(words)

        with (
            mock.patch.object(Engine, "complete", wrong),
            self.assertRaisesRegex(kind, words),
        ):
            run(play)
        ((status, answer),) = found
        self.assertEqual(status, 503)
        self.assertIn(words, answer["error"]["message"])

    def test_an_address_cannot_be_guessed(self):
        """It has 16 random bytes."""

        async def tokens():
            found = set()
            async with doors.serving() as opened:
                for _ in range(3):
                    async with opened.opened(self.session()[0]) as url:
                        found.add(url.split("/")[-2])
            return found

        found = asyncio.run(tokens())
        self.assertLen(found, 3)
        self.assertEqual({len(token) for token in found}, {22})

    def test_two_processes_have_ports_of_their_own(self):
        async def ports():
            async with doors.serving() as one, doors.serving() as other:
                return one.port, other.port

        one, other = asyncio.run(ports())
        self.assertNotEqual(one, other)
        self.assertGreater(min(one, other), 1023)

    def test_the_model_has_a_name(self):
        found = []

        async def play(task, base_url):
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{base_url}/models") as answer,
            ):
                found.append(await answer.json())
            await chat(base_url, [*task.messages])
            return 1.0

        run(play, ANSWERS[0])
        model = {"id": "policy", "object": "model", "created": 0}
        model |= {"owned_by": "glm5_jax"}
        self.assertEqual(found, [{"object": "list", "data": [model]}])

    def test_requests_have_16_mib(self):
        found = []

        async def ask(session, url, body):
            try:
                async with session.post(url, data=io.BytesIO(body.encode())) as answer:
                    return answer.status
            except (aiohttp.ClientError, OSError):  # closed before it is read
                return 413

        async def play(task, base_url):
            url = f"{base_url}/chat/completions"
            for size in (2**24, 2**24 - 1000):
                body = json.dumps({"messages": [*task.messages], "x": "x" * size})
                async with aiohttp.ClientSession() as session:
                    found.append(await ask(session, url, body))
            return 1.0

        run(play, *ANSWERS)
        self.assertEqual(found, [413, 200])

    def test_a_call_with_words_is_the_same_in_a_stream(self):
        text = f"so</think>Let me see.{CALL.removeprefix('</think>')}"
        found, events = [], []

        async def play(task, base_url):
            given = {"tools": [TOOL]}
            found.append(await chat(base_url, [*task.messages], **given))
            body = {"messages": [*task.messages], "stream": True, **given}
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{base_url}/chat/completions", json=body) as answer,
            ):
                events.extend((await answer.text()).split("\n\n"))
            return 1.0

        run(play, text, text)
        ((status, answer),) = found
        (choice,) = answer["choices"]
        self.assertEqual((status, choice["finish_reason"]), (200, "tool_calls"))
        message = choice["message"]
        (call,) = message["tool_calls"]
        self.assertEqual(
            message,
            {
                "role": "assistant",
                "content": "Let me see.",
                "reasoning_content": "so",
                "tool_calls": [call],
            },
        )
        self.assertEqual(call["function"]["name"], "add")
        self.assertEqual(json.loads(call["function"]["arguments"]), {"a": 2, "b": 3})

        first, last, done, nothing = events
        self.assertEqual((done, nothing), ("data: [DONE]", ""))
        first, last = (json.loads(e.removeprefix("data: ")) for e in (first, last))
        ((begun,), (ended,)) = first["choices"], last["choices"]
        self.assertEqual((begun["index"], begun["finish_reason"]), (0, None))
        (streamed,) = begun["delta"].pop("tool_calls")
        self.assertEqual(streamed["index"], 0)
        self.assertEqual(streamed["function"], call["function"])
        del message["tool_calls"]
        self.assertEqual(begun["delta"], message)
        self.assertEqual((ended["delta"], ended["index"]), ({}, 0))
        self.assertEqual(ended["finish_reason"], "tool_calls")

    def test_an_answer_without_a_thought_shows_none(self):
        found = []

        async def play(task, base_url):
            found.append(await chat(base_url, [*task.messages]))
            return 1.0

        run(play, ANSWERS[1])
        message = found[0][1]["choices"][0]["message"]
        self.assertEqual(message, {"role": "assistant", "content": "six"})

    def test_agents_need_the_extra(self):
        settings = episodes_lib.Settings(
            max_new_tokens=64, max_turns=4, num_concurrent=1
        )
        context = episodes_lib.Context(Engine(), Tasks(None), TEMPLATE, settings)

        async def opened(context):
            async with entrance.of(context) as found:
                return found

        words = r'A taskset of agents needs .*\(aiohttp, .*"glm5_jax\[serve\]"'
        with mock.patch.object(importlib.util, "find_spec", return_value=None):
            with self.assertRaisesRegex(config.InputError, words):
                asyncio.run(opened(context))
            tasks = faults.FaultyTaskset(faults.Fault.NONE)
            plain = dataclasses.replace(context, taskset=tasks)
            self.assertIs(asyncio.run(opened(plain)), plain)

    def test_tokens_are_counted(self):
        found = []

        async def play(task, base_url):
            found.append(await chat(base_url, [*task.messages]))
            return 1.0

        run(play, ANSWERS[0])
        ((_, answer),) = found
        number = len(templates_test.ids_of(ANSWERS[0]))
        wanted = {"prompt_tokens": 0, "completion_tokens": number}
        self.assertEqual(answer["usage"], wanted | {"total_tokens": number})
        self.assertEqual(answer["choices"][0]["index"], 0)
        self.assertBetween(answer["created"], time.time() - 600, time.time())

    @parameterized.named_parameters(
        ("no_messages", {"messages": []}, "at least one message"),
        ("bad_role", {"messages": [{"role": "cook", "content": ""}]}, "role must be"),
        ("no_field", {}, "messages"),
        ("no_object", {"messages": ["hi"]}, "messages[0] must be an object, got 'hi'"),
        ("bad_tool", {"messages": [{"role": "user"}], "tools": [1]}, "function"),
    )
    def test_wrong_requests_are_named_and_cost_no_turn(self, body, words):
        async def play(task, base_url):
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{base_url}/chat/completions", json=body) as answer,
            ):
                self.assertEqual(answer.status, 400)
                self.assertIn(words, json.dumps(await answer.json()))
            await chat(base_url, [*task.messages])
            return 1.0

        episode, _ = run(play, ANSWERS[0])
        self.assertEqual((episode.label, episode.num_turns), (Label.OK, 1))

    def test_the_address_ends_with_the_episode(self):
        kept = []

        async def play(task, base_url):
            kept.append(base_url)
            await chat(base_url, [*task.messages])
            return 1.0

        tasks = Tasks(play)
        settings = episodes_lib.Settings(
            max_new_tokens=64, max_turns=4, num_concurrent=1
        )
        context = episodes_lib.Context(Engine(*ANSWERS), tasks, TEMPLATE, settings)

        async def late():
            async with entrance.of(context) as opened:
                job = episodes_lib.Job(tasks.task("train", 0, 0), 0, 0)
                await episodes_lib.run(opened, job)
                return await chat(kept[0], [{"role": "user", "content": "Hi"}])

        status, answer = asyncio.run(late())
        self.assertEqual(status, 404)
        self.assertIn("is over", answer["error"]["message"])

    def test_a_turn_that_an_agent_left_behind_changes_no_finished_episode(self):
        asked, free, ends = asyncio.Event(), asyncio.Event(), []

        class Slow(Engine):
            async def complete(self, request):
                if request.id > 0:
                    asked.set()
                    try:
                        await free.wait()
                    finally:
                        ends.append(free.is_set())
                return await super().complete(request)

        async def play(task, base_url):
            await chat(base_url, [*task.messages])
            left = asyncio.create_task(chat(base_url, [*task.messages]))
            await asked.wait()
            left.cancel()
            return 1.0

        tasks = Tasks(play)
        settings = episodes_lib.Settings(
            max_new_tokens=64, max_turns=4, num_concurrent=1
        )
        context = episodes_lib.Context(Slow(*ANSWERS), tasks, TEMPLATE, settings)

        async def played():
            async with entrance.of(context) as opened:
                job = episodes_lib.Job(tasks.task("train", 0, 0), 0, 0)
                episode = await episodes_lib.run(opened, job)
                free.set()
                await asyncio.sleep(0.1)
                return episode

        episode = asyncio.run(played())
        self.assertEqual((episode.label, episode.num_turns), (Label.OK, 1))
        number = len(templates_test.ids_of(ANSWERS[0]))
        self.assertEqual([sum(s.mask) for s in episode.samples], [number])
        self.assertEqual(ends, [False])  # cancelled before the episode was over

    def test_a_group_begins_again_after_a_lost_answer(self):
        """The turn of the other episode is under way as the answer is lost."""
        ids, (both, again, left) = [], (asyncio.Event() for _ in range(3))

        class Lossy(Endless):
            async def complete(self, request):
                ids.append(request.id)
                number = len(ids)
                if number == 1:
                    await both.wait()
                    raise completer.EngineError("a server is lost")
                if number == 2:
                    both.set()
                    try:
                        await again.wait()
                    finally:
                        left.set()
                if number == 4:
                    again.set()
                await left.wait()
                return await super().complete(request)

        async def play(task, base_url):
            status, _ = await chat(base_url, [*task.messages])
            return float(status == 200)

        tasks = Tasks(play)
        settings = episodes_lib.Settings(
            max_new_tokens=64, max_turns=4, num_concurrent=2
        )
        context = episodes_lib.Context(Lossy(), tasks, TEMPLATE, settings)

        async def taken():
            async with entrance.of(context) as opened:
                made = orchestrator.Orchestrator(
                    opened,
                    lambda index: [
                        episodes_lib.Job(tasks.task("train", 0, index), index, 4 * i)
                        for i in range(2)
                    ],
                    groups.Groups(1, 0),
                    drop_equal=False,
                )
                playing = asyncio.create_task(made.run())
                try:
                    ((_, group),) = await made.take(20.0)
                    return group
                finally:
                    playing.cancel()
                    await asyncio.wait({playing})

        with mock.patch.object(orchestrator, "_RETRY_SECONDS", 0.0):
            group = asyncio.run(taken())
        self.assertEqual([e.reward.total for e in group], [1.0, 1.0])
        self.assertCountEqual(ids, [0, 4, 0, 4])

    def test_two_turns_at_once_take_their_turn(self):
        async def play(task, base_url):
            both = (chat(base_url, [*task.messages]) for _ in range(2))
            found = await asyncio.gather(*both)
            return float(all(status == 200 for status, _ in found))

        episode, _ = run(play, *ANSWERS)
        self.assertEqual((episode.num_turns, episode.reward.total), (2, 1.0))

    def test_a_taskset_of_agents_is_accepted_by_name(self):
        taskset = environments.make("tests.rl.agents_test:Named")
        self.assertTrue(taskset.has_agents)

    def test_an_agent_session_needs_no_server(self):
        session = agent_session.AgentSession(
            Engine(*ANSWERS),
            TEMPLATE,
            request_id=0,
            max_turns=1,
            max_new_tokens=8,
            temperature=1.0,
        )
        asyncio.run(session.answer([{"role": "user", "content": "2 + 3?"}]))
        with self.assertRaisesRegex(agent_session.OverError, "no end in 1 turns"):
            asyncio.run(session.answer([{"role": "user", "content": "Again"}]))

    def session(self, *texts, capacity=2048, max_new_tokens=8):
        engine = Engine(*texts)
        engine.capacity = capacity
        made = agent_session.AgentSession(
            engine,
            TEMPLATE,
            request_id=40,
            max_turns=3,
            max_new_tokens=max_new_tokens,
            temperature=0.5,
        )
        return made, engine

    def test_a_prompt_may_leave_room_for_one_token(self):
        asked = [{"role": "user", "content": "2 + 3?"}]
        end = "<|user|>"
        session, engine = self.session(end)
        asyncio.run(session.answer(asked))
        size = len(engine.prompts[0])
        session, _ = self.session(end, capacity=size + 1)
        asyncio.run(session.answer(asked))
        self.assertEqual((session.num_turns, session.over), (1, ""))
        session, _ = self.session(end, capacity=size)
        with self.assertRaisesRegex(agent_session.OverError, f"of {size} tokens does"):
            asyncio.run(session.answer(asked))
        self.assertEqual(session.samples(), [])

    def test_the_order_of_a_tool_s_words_does_not_fork(self):
        session, _ = self.session("<|user|>", "<|user|>", "<|user|>")
        asked = [{"role": "user", "content": "2 + 3?"}]
        function = TOOL["function"]
        again = {"function": dict(reversed(function.items())), "type": "function"}
        other = {"function": function | {"name": "plus"}, "type": "function"}
        for tool, num_forks in ((TOOL, 0), (again, 0), (other, 1)):
            message, _ = asyncio.run(session.answer(asked, [tool]))
            asked += [message, {"role": "user", "content": "And now?"}]
            self.assertEqual(session.num_forks, num_forks)
        self.assertLen(session.samples(), 2)

    def test_calls_that_are_not_ours_are_shown(self):
        session, engine = self.session("<|user|>")
        function = {"name": "add", "arguments": {"a": 2, "b": 3}}
        said = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "2 + 3?"},
            {
                "role": "assistant",
                "content": "I add.",
                "tool_calls": [{"function": function}],
            },
            {"role": "tool", "content": "5"},
        ]
        given = [{"function": {**function, "arguments": json.dumps({"a": 2, "b": 3})}}]
        asked = [*said[:2], said[2] | {"tool_calls": given}, said[3]]
        asyncio.run(session.answer(asked, [TOOL]))
        said[0] = {"role": "system", "content": "Be brief."}
        wanted = TEMPLATE.render(said, [TOOL], add_generation_prompt=True)
        self.assertEqual(engine.prompts, [wanted.tokens])

    @parameterized.parameters("two", "five")
    def test_examples_before_the_question_fork_nothing(self, example):
        """Also one that has the words of an answer."""
        session, _ = self.session(*[ANSWERS[0]] * 3)
        asked = [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": example},
            {"role": "user", "content": "2 + 3?"},
        ]
        for _ in range(3):
            message, _ = asyncio.run(session.answer(asked))
            asked.append({"role": "assistant", "content": message["content"]})
            asked.append({"role": "user", "content": "Sure?"})
        self.assertEqual((session.num_turns, session.num_forks), (3, 0))
        said = [m for m in session.transcript if m["role"] == "assistant"]
        thoughts = [message.get("reasoning_content") for message in said]
        self.assertEqual(thoughts, [None, "so", "so", "so"])

    def test_what_an_agent_left_out_is_no_example(self):
        """The second answer is still known without the first one."""
        session, _ = self.session(*ANSWERS, ANSWERS[0])
        asked = [{"role": "user", "content": "2 + 3?"}]
        asyncio.run(session.answer(asked))
        message, _ = asyncio.run(session.answer(asked))
        asked.append({"role": "assistant", "content": message["content"]})
        asyncio.run(session.answer([*asked, {"role": "user", "content": "Sure?"}]))
        self.assertEqual((session.num_turns, session.num_forks), (3, 1))
        self.assertIs(session.transcript[1], message)

    def test_wrong_messages_fork_nothing(self):
        session, _ = self.session("<|user|>")
        asked = [{"role": "user", "content": "2 + 3?"}]
        for wrong, tools in (([{"role": "cook", "content": ""}], []), (asked, [1])):
            with self.assertRaises(config.InputError):
                asyncio.run(session.answer(wrong, tools))
        asyncio.run(session.answer(asked, [TOOL]))
        self.assertEqual((session.num_turns, session.num_forks), (1, 0))

    def test_turns_count_their_requests_upwards(self):
        """The ids below are those of the episode before."""
        session, engine = self.session(*["<|user|>"] * 3)
        complete, ids = engine.complete, []

        async def noted(request):
            ids.append(request.id)
            return await complete(request)

        engine.complete = noted
        asked = [{"role": "user", "content": "2 + 3?"}]
        for _ in range(3):
            message, _ = asyncio.run(session.answer(asked))
            asked += [message, {"role": "user", "content": "And now?"}]
        self.assertEqual(ids, [40, 41, 42])


class Turns(faults.FaultyTaskset):
    """Tasks that are played turn by turn, each paid 1, beside those of `Tasks`."""

    def __init__(self):
        super().__init__(faults.Fault.NONE)
        self.name = "turns"


class Endless(Engine):
    """Says the same for ever."""

    async def complete(self, request):
        self.texts = [ANSWERS[1]]
        return await super().complete(request)


class MixtureTest(parameterized.TestCase):
    """A taskset of agents and another one, two groups of it for each of theirs."""

    def setUp(self):
        super().setUp()
        self.played = []  # ids of tasks that agents got

        async def play(task, base_url):
            self.played.append(task.id)
            status, _ = await chat(base_url, [*task.messages])
            return 0.25 if status == 200 else 0.0

        parts = {"agents": Tasks(play), "turns": Turns()}
        self.parts = parts
        self.taskset = mixture.Mixture("2*turns+agents", parts.get)
        settings = episodes_lib.Settings(
            max_new_tokens=64, max_turns=2, num_concurrent=6, concurrency=(0, 2)
        )
        self.context = episodes_lib.Context(Endless(), self.taskset, TEMPLATE, settings)

    def jobs(self, split, index, size):
        task = self.taskset.task(split, 0, index)
        return [episodes_lib.Job(task, index, 64 * index + 2 * i) for i in range(size)]

    def check(self, episodes, num_agents, num_others):
        found = collections.Counter(
            (e.task.tag, e.label, e.reward.total, e.num_turns) for e in episodes
        )
        agents, others = ("agents", Label.OK, 0.25, 1), ("turns", Label.OK, 1.0, 1)
        self.assertEqual(found, {agents: num_agents, others: num_others})
        for episode in episodes:
            (sample,) = episode.samples
            self.assertEqual(sum(sample.mask), len(templates_test.ids_of(ANSWERS[1])))

    def test_a_run_plays_both(self):
        async def main():
            async with entrance.of(self.context) as opened:
                made = orchestrator.Orchestrator(
                    opened,
                    lambda index: self.jobs("train", index, 2),
                    groups.Groups(3, 0),
                    drop_equal=False,
                    # These turns are paid whatever they say.
                    watch=monitor.Settings(quarantine="off"),
                )
                playing, taken = asyncio.create_task(made.run()), []
                try:
                    for step in range(3):
                        taken += await made.take(20.0)
                        made.published(step + 1)
                finally:
                    playing.cancel()
                    await asyncio.wait({playing})
                return [episode for _, group in taken for episode in group]

        found = asyncio.run(main())
        self.check(found, num_agents=6, num_others=12)
        self.assertEqual(collections.Counter(self.played), {"0": 2, "1": 2, "2": 2})
        self.assertEqual(self.parts["agents"].num_closed, 6)
        figures = rollouts.metrics(found)
        self.assertEqual(figures["rollout/reward/agents"], 0.25)
        self.assertEqual(figures["rollout/reward/turns"], 1.0)

    def test_an_evaluation_plays_both(self):
        jobs = [job for i in range(9) for job in self.jobs("held_out", i, 1)]

        async def main():
            async with entrance.of(self.context) as opened:
                return await at_once.run_all(opened, jobs)

        found = asyncio.run(main())
        self.assertEqual([e.group for e in found], [*range(9)])
        self.check(found, num_agents=3, num_others=6)
        success = held_out.figures(found)
        self.assertEqual(success["eval/success/agents"], 0.0)
        self.assertEqual(success["eval/success/turns"], 1.0)


class Named(Tasks):
    """Agents by "module:Class"."""

    def __init__(self):
        super().__init__(None)


if __name__ == "__main__":
    environment.main()
