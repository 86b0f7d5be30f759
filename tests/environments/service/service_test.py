"""The service of environments at real sockets: episodes, limits, clients that leave."""

import concurrent.futures
import dataclasses
import json
import os
import socket
import sys
import types
from unittest import mock

from absl.testing import absltest, parameterized

from glm5_jax import api_key, config, environments
from glm5_jax.environments import sandbox
from glm5_jax.environments.service import command, live, remote
from tests import environment
from tests.environments.service import played

LONG = 1000.0  # seconds
TASK_KEYS = {"id", "messages", "tools", "problem", "tag", "pays_when_cut"}
# The taskset, and texts that a task's solution or scorer has.
HIDDEN = (
    ("gcd:4", lambda taskset, task: [json.dumps(task.answer)]),
    ("code:merge", lambda taskset, task: [task.answer.solution, task.answer.check]),
    (
        "terminal:column_sums",
        lambda taskset, task: [
            call["function"]["arguments"]["command"]
            for turn in taskset.attempts(task).right
            for call in turn["tool_calls"]
            if call["function"]["name"] == "shell"
        ],
    ),
)


class Case(parameterized.TestCase):
    def serve(self, taskset=None, **settings):
        server = played.Server(taskset or played.Talk(), **settings)
        self.addCleanup(server.stop)
        return server


class EpisodeTest(Case):
    def test_a_whole_episode(self):
        taskset = played.Talk()
        server = self.serve(taskset)
        _, told = server.ask("GET", "/v1/taskset")
        self.assertEqual(told["splits"], ["train", "held_out"])
        query = "split=train&seed=7&first=3&count=2"
        _, told = server.ask("GET", f"/v1/tasks?{query}")
        self.assertEqual([t["id"] for t in told["tasks"]], ["train/7/3", "train/7/4"])
        place = {"split": "train", "seed": 7, "index": 3, "id": "train/7/3"}
        status, begun = server.ask("POST", "/v1/episodes", place)
        self.assertEqual(status, 201)
        self.assertEqual(begun["task"], told["tasks"][0])
        first = [{"role": "user", "content": "train 7 3"}]
        self.assertEqual(begun["messages"], first)
        path = f"/v1/episodes/{begun['episode']}"
        _, told = server.say(path, "this")
        new = [{"role": "tool", "content": "not this"}]
        self.assertEqual(
            told,
            {"messages": new, "reward": None, "terminated": False, "truncated": False},
        )
        said = [{"role": "assistant", "content": "this"}]
        _, seen = server.ask("GET", path)
        self.assertEqual(seen["messages"], first + said + new)
        self.assertEqual((seen["turns"], seen["is_over"]), (1, False))
        _, told = server.say(path, played.SECRET)
        paid = {"total": 1.0, "parts": {"correct": 1.0, "brevity": 0.5}}
        self.assertEqual((told["reward"], told["terminated"]), (paid, True))
        played.until(lambda: taskset.num_open == 0)  # its sandbox need not wait
        status, told = server.say(path, "more")
        self.assertEqual((status, told["error"]["code"]), (409, "episode_over"))
        self.assertEqual(server.ask("GET", path)[1]["reward"], paid)
        self.assertEqual(server.ask("DELETE", path)[0], 204)
        for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/step")):
            body = {"message": said[0]} if rest else None
            status, told = server.ask(method, path + rest, body)
            self.assertEqual((status, told["error"]["code"]), (404, "unknown_episode"))
        _, figures = server.ask("GET", "/metrics")
        for line in ("live 0", "begun_total 1", "steps_total 2"):
            self.assertIn(f"glm5_jax_episodes_{line}\n", figures)
        self.assertIn('episodes_ended_total{ending="ended"} 1\n', figures)

    def test_a_turn_with_an_endless_number_is_answered_and_seen(self):
        """A model may write it; an error would leave its episode out of training."""
        server = self.serve()
        path = server.begin()
        call = {"function": {"name": "t", "arguments": {"x": [float("inf"), -1.5]}}}
        said = {"role": "assistant", "content": "this", "tool_calls": [call]}
        status, _ = server.ask("POST", f"{path}/step", {"message": said})
        self.assertEqual(status, 200)
        status, seen = server.ask("GET", path)
        self.assertEqual(status, 200)
        call = seen["messages"][1]["tool_calls"][0]
        self.assertEqual(call["function"]["arguments"], {"x": ["Infinity", -1.5]})

    @parameterized.named_parameters((x[0].partition(":")[0], *x) for x in HIDDEN)
    def test_tasks_go_without_what_scores_them(self, name, hidden):
        taskset = environments.make(name)
        server = self.serve(taskset)
        _, told = server.ask("GET", "/v1/tasks?split=train&count=3")
        for index, task in enumerate(told["tasks"]):
            self.assertEqual({*task}, TASK_KEYS)
            for text in hidden(taskset, taskset.task("train", 0, index)):
                self.assertNotIn(str(text), json.dumps(task, ensure_ascii=False))

    def test_nothing_that_goes_out_has_the_answer(self):
        server = self.serve()
        path = server.begin()
        told = [server.ask("GET", "/v1/tasks?split=train&count=2")[1]]
        told += [server.say(path, "a")[1], server.ask("GET", path)[1]]
        told += [server.say(path, "crash"), server.ask("GET", path)]
        told += [server.say(server.begin(), "no reward")]
        for one in told:
            self.assertNotIn(played.SECRET, json.dumps(one))
        self.assertIn("KeyError", json.dumps(told))

    def test_equal_tasks_are_known_by_their_problem(self):
        server = self.serve(played.Twice())
        _, told = server.ask("GET", "/v1/tasks?split=train&count=4")
        one, same, two, _ = (task["problem"] for task in told["tasks"])
        self.assertEqual(one, same)
        self.assertNotEqual(one, two)

    @parameterized.parameters(
        ("crash", 500, "environment_error"),
        ("no reward", 500, "reward_error"),
        ("nan", 500, "reward_error"),
        ("slow", 504, "timeout"),
    )
    def test_a_failure_ends_its_episode_alone(self, word, status, code):
        taskset = played.Talk()
        server = self.serve(taskset, call_seconds=0.3)
        other, path = server.begin(), server.begin()
        found, told = server.say(path, word)
        self.assertEqual((found, told["error"]["code"]), (status, code))
        self.assertEqual(server.ask("GET", path)[0], 404)
        played.until(lambda: taskset.num_open == 1)
        self.assertEqual(server.say(other, "a")[0], 200)
        server.ask("DELETE", other)


class LimitsTest(Case):
    def test_a_key_guards_all_but_health(self):
        server = self.serve(api_key="k")
        for method, path in (
            *(("GET", "/v1/taskset"), ("GET", "/v1/tasks?split=train")),
            *(("POST", "/v1/episodes"), ("GET", "/v1/episodes/x")),
            *(("POST", "/v1/episodes/x/step"), ("DELETE", "/v1/episodes/x")),
            ("GET", "/metrics"),
        ):
            for headers in ({}, {"Authorization": "Bearer l"}):
                status, _ = server.ask(method, path, {}, headers)
                self.assertEqual(status, 401, path)
        self.assertEqual(server.ask("GET", "/health")[0], 200)
        key = {"Authorization": "Bearer k"}
        self.assertEqual(server.ask("GET", "/v1/taskset", None, key)[0], 200)
        with self.assertRaisesRegex(config.InputError, "GLM5_JAX_ENVIRONMENT_KEY"):
            environments.make(server.url)
        variables = {"GLM5_JAX_ENVIRONMENT_KEY": "k"}
        with mock.patch.dict("os.environ", variables):
            environments.make(server.url).task("train", 0, 0)

    @parameterized.parameters("schlüssel", "xyz\n", "xyz ", "x\0z")
    def test_a_key_that_no_header_holds_is_refused_and_not_shown(self, key):
        def refused(where):
            wanted = f"^{where} .* printable ASCII"
            return self.assertRaisesRegex(config.InputError, wanted)

        with refused("--api_key") as caught:
            command.Settings(api_key=key)
        self.assertNotIn(key, str(caught.exception))
        for variable, ask in (
            (api_key.VARIABLE, api_key.given),
            (remote.KEY_VARIABLE, lambda: environments.make("http://127.0.0.1:1")),
        ):
            found = {variable: key}  # the system's own has no NUL
            self.enter_context(mock.patch.object(os, "environ", found))
            with refused(rf"\${variable}") as caught:
                ask()
            self.assertNotIn(key, str(caught.exception))

    def test_a_page_of_another_name_is_refused(self):
        server = self.serve()
        headers = {"Host": "evil.test"}
        self.assertEqual(server.ask("GET", "/v1/taskset", None, headers)[0], 403)
        headers = {"Content-Type": "text/plain"}
        self.assertEqual(server.ask("POST", "/v1/episodes", {}, headers)[0], 415)

    @parameterized.named_parameters(
        ("huge", b'{"split": "' + b"x" * 5000, 413),
        ("not_json", b"{", 400),
        ("nested", b"[" * 4000, 400),
        ("no_object", [], 400),
        ("half_a_character", b'{"split": "\\ud800"}', 400),
        ("no_index", {"split": "train"}, 400),
        ("before_the_first", {"split": "train", "index": -1}, 400),
        ("no_number", {"split": "train", "index": True}, 400),
        ("beyond_all", {"split": "train", "index": 2**70}, 400),
        ("unknown_split", {"split": "test", "index": 0}, 400),
        ("another_task", {"split": "train", "index": 0, "id": "train/0/1"}, 409),
    )
    def test_no_episode_begins_with(self, body, status):
        server = self.serve(max_body_bytes=4096)
        found, told = server.ask("POST", "/v1/episodes", body)
        self.assertEqual(found, status, told)
        self.assertLen(told["error"]["message"].splitlines(), 1)
        self.assertEmpty(server.episodes)

    @parameterized.named_parameters(
        ("nothing", {}),
        ("a_user", {"message": {"role": "user", "content": "a"}}),
        ("a_number", {"message": {"role": "assistant", "content": 5}}),
        ("calls", {"message": {"role": "assistant", "tool_calls": 5}}),
    )
    def test_no_step_is_made_with(self, body):
        server = self.serve()
        path = server.begin()
        self.assertEqual(server.ask("POST", f"{path}/step", body)[0], 400)
        self.assertEqual(server.say(path, "a")[0], 200)  # the episode goes on
        server.ask("DELETE", path)

    @parameterized.parameters(
        "split=test",
        "split=train&count=65",
        "split=train&first=-1",
        "split=train&seed=x",
    )
    def test_no_tasks_of(self, query):
        server = self.serve()
        self.assertEqual(server.ask("GET", f"/v1/tasks?{query}")[0], 400)

    def test_there_is_no_other_route(self):
        server = self.serve()
        self.assertEqual(server.ask("GET", "/v1/solutions")[0], 404)
        self.assertEqual(server.ask("PUT", "/v1/episodes", {})[0], 405)

    def test_episodes_are_bounded(self):
        server = self.serve(max_episodes=1)
        path = server.begin()
        place = {"split": "train", "index": 0}
        status, told = server.ask("POST", "/v1/episodes", place)
        self.assertEqual((status, told["error"]["code"]), (429, "full"))
        server.ask("DELETE", path)
        server.ask("DELETE", server.begin())

    def test_one_that_cannot_be_told_does_not_begin(self):
        class Unspeakable(played.Talk):
            def task(self, split, seed, index):
                task = super().task(split, seed, index)
                return dataclasses.replace(task, messages=({"role": self},))

        server = self.serve(Unspeakable(), max_episodes=1)
        place = {"split": "train", "index": 0}
        for _ in range(2):  # there is room again
            status, told = server.ask("POST", "/v1/episodes", place)
            found = status, told["error"]["code"]
            self.assertEqual(found, (500, "environment_error"))
        self.assertEqual(len(server.episodes), 0)

    def test_one_step_at_a_time(self):
        server = self.serve()
        path = server.begin()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            slow = pool.submit(server.say, path, "slow")
            played.until(lambda: server.episodes.num_steps == 1)
            status, told = server.say(path, "a")
            self.assertEqual((status, told["error"]["code"]), (409, "episode_busy"))
            self.assertEqual(server.ask("DELETE", path)[0], 204)  # ends the step
            self.assertEqual(slow.result(20)[0], 404)

    def test_wrong_settings_are_refused(self):
        with self.assertRaisesRegex(config.InputError, "api_key must be set"):
            command.Settings(host="0.0.0.0")
        with self.assertRaisesRegex(config.InputError, "idle_seconds must be positive"):
            live.Limits(idle_seconds=0.0)

    @parameterized.parameters(
        ("context:5:gcd", "what the model sees"),
        ("gcd+context:5:reverse", "what the model sees"),
        ("python:context:5:gcd", "what the model sees"),
        (f"gcd+{__name__}:Edited", "what the model sees"),
        ("tests.environments.mixture_test:Agents", "programs of their own"),
        ("gcd+tests.environments.mixture_test:Agents", "programs of their own"),
    )
    def test_some_are_not_served(self, name, message):
        with self.assertRaisesRegex(config.InputError, message):
            command.made(name)

    def test_a_module_may_be_called_as_a_wrapper_is(self):
        module = types.ModuleType("my_context")
        module.Tasks = played.Talk
        with mock.patch.dict(sys.modules, my_context=module):
            self.assertIsInstance(command.made("my_context:Tasks"), played.Talk)


class Edited(played.Talk):
    """The model sees the last message alone."""

    def environment(self):
        made = super().environment()
        made.shown = lambda history: history[-1:]
        return made


class LeavingTest(Case):
    def test_a_client_that_leaves_in_a_step_ends_its_episode(self):
        taskset = played.Talk()
        server = self.serve(taskset)
        path = server.begin()
        body = json.dumps({"message": {"role": "assistant", "content": "slow"}})
        head = (
            f"POST {path}/step HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", server.port)) as link:
            link.sendall((head + body).encode())
            played.until(lambda: server.episodes.num_steps == 1)
        played.until(lambda: taskset.num_open == 0)
        self.assertEqual(server.episodes.endings, {live.LEFT: 1})
        self.assertEqual(server.ask("GET", path)[0], 404)

    def test_an_idle_episode_ends(self):
        taskset = played.Talk()
        server = self.serve(taskset, idle_seconds=LONG)
        path = server.begin()
        (episode,) = server.episodes._all.values()
        timers = [episode.timer]
        for _ in range(3):  # each request gives it as long again
            self.assertEqual(server.say(path, "a")[0], 200)
            timers.append(episode.timer)
        ends = [timer.when() for timer in timers]
        self.assertEqual(ends, sorted(set(ends)))
        is_over = [timer.cancelled() for timer in timers]
        self.assertEqual(is_over, [True, True, True, False])
        self.assertEqual(server.shorten_idleness(path, 0.1)[0], 200)
        played.until(lambda: taskset.num_open == 0)
        self.assertEqual(server.ask("GET", path)[0], 404)
        self.assertEqual(server.episodes.endings, {live.IDLE: 1})

    @absltest.skipUnless(
        sandbox.describe().startswith("bubblewrap"), "bubblewrap does not work here"
    )
    def test_the_sandbox_of_an_idle_episode_ends(self):
        taskset = environments.make("terminal:column_sums")
        server = self.serve(taskset, idle_seconds=LONG)
        before = played.children()
        path = server.begin()
        call = {"function": {"name": "shell", "arguments": {"command": "echo a b"}}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        _, told = server.ask("POST", f"{path}/step", {"message": message})
        self.assertEqual(told["messages"][0]["content"], "a b")
        self.assertNotEmpty(played.children() - before)
        server.shorten_idleness(path, 0.1)
        played.until(lambda: not played.children() - before)
        self.assertEqual(server.episodes.endings, {live.IDLE: 1})


if __name__ == "__main__":
    environment.main()
