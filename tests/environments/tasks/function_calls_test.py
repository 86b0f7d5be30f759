"""Calls of functions against possible answers; BFCL's own check is the oracle."""

import importlib
import importlib.util
import json
import pathlib
import random
import sys
import types
import unittest
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import protocol, validate
from glm5_jax.environments.tasks import call_check, function_calls
from tests import environment
from tests.environments import episodes

HAS_DATA = importlib.util.find_spec("bfcl_eval") is not None
WANTED = [{"f": {"a": [1, 2], "b": ["New York", ""], "c": [[1.5, "x"]], "d": [True]}}]
GOOD = {"a": 1, "c": [1.5, "X"], "d": True}
ROW = {
    "f": {
        "rows": [[{"k": ["v", ""], "n": [2.0]}]],
        "plain": [{"deep": [{"x": 1}]}],
    }
}


def call(arguments, name="f"):
    return [(name, arguments)]


class CheckTest(parameterized.TestCase):
    def test_a_line_ends_at_a_line_feed_alone(self):
        path = self.create_tempfile(content='["a\u2028b"]\n\n["c\x85d"]\n').full_path
        lines = function_calls._lines(pathlib.Path(path))
        self.assertEqual(lines, [["a\u2028b"], ["c\x85d"]])

    def test_right_calls(self):
        for arguments in (GOOD, {**GOOD, "a": 2}, {**GOOD, "b": "new-york"}):
            self.assertTrue(call_check.is_right(call(arguments), WANTED), arguments)

    @parameterized.named_parameters(
        ("value", {**GOOD, "a": 3}),
        ("type", {**GOOD, "a": "1"}),
        ("text", {**GOOD, "b": "Boston"}),
        ("number_for_text", {**GOOD, "b": 1}),
        ("text_for_list", {**GOOD, "c": "xx"}),
        ("number_in_list", {**GOOD, "c": [2.5, "x"]}),
        ("float", {**GOOD, "a": 1.0}),
        ("truth_value", {**GOOD, "a": True}),
        ("one_for_true", {**GOOD, "d": 1}),
        ("order", {**GOOD, "c": ["x", 1.5]}),
        ("length", {**GOOD, "c": [1.5, "x", "x"]}),
        ("more", {**GOOD, "e": 1}),
        ("less", {k: v for k, v in GOOD.items() if k != "d"}),
        ("name", None),
    )
    def test_wrong_calls(self, arguments):
        calls = call(GOOD, "g") if arguments is None else call(arguments)
        self.assertFalse(call_check.is_right(calls, WANTED))

    def test_calls_match_one_to_one_in_any_order(self):
        wanted = [{"f": {"a": [1]}}, {"f": {"a": [2]}}]
        one, two = ("f", {"a": 1}), ("f", {"a": 2})
        self.assertTrue(call_check.is_right([two, one], wanted))
        for calls in ([one], [one, one], [one, two, two], []):
            self.assertFalse(call_check.is_right(calls, wanted))
        overlapping = [{"f": {"a": [1, 2]}}, {"f": {"a": [1, 3]}}]
        self.assertTrue(call_check.is_right([one, one], overlapping))
        self.assertFalse(call_check.is_right([one, ("f", {"a": 4})], overlapping))
        # The first of them fits both, the second the first alone.
        wide = [{"f": {"a": [1, 2]}}, {"f": {"a": [1]}}]
        for calls in ([one, two], [two, one]):
            self.assertTrue(call_check.is_right(calls, wide))
            self.assertTrue(call_check.is_right(calls, wide[::-1]))
        wider = [{"f": {"a": [1, 2, 3]}}, {"f": {"a": [1, 2]}}, {"f": {"a": [1]}}]
        three = ("f", {"a": 3})
        self.assertTrue(call_check.is_right([one, two, three], wider))
        self.assertFalse(call_check.is_right([two, two, three], wider))

    def test_nested_values(self):
        right = {"rows": [{"n": 2}], "plain": {"deep": {"x": 1}}}
        self.assertTrue(call_check.is_right(call(right), [ROW]))
        for rows in ([{"n": 3}], [{"n": 2, "m": 1}], [{}], [], [{"n": 2}, {"n": 2}]):
            wrong = {**right, "rows": rows}
            self.assertFalse(call_check.is_right(call(wrong), [ROW]), rows)
        for plain in (2, {}, {"deep": {"x": 2}}, {"deep": {"x": 1, "y": 2}}):
            wrong = {**right, "plain": plain}
            self.assertFalse(call_check.is_right(call(wrong), [ROW]), plain)

    def test_a_right_call_is_made_of_the_possible_values(self):
        name, arguments = call_check.right_call(
            {"f": {**ROW["f"], "left_out": [""], "may_be": ["", "given"]}}
        )
        wanted = {
            "rows": [{"k": "v", "n": 2.0}],
            "plain": {"deep": {"x": 1}},
            "may_be": "given",
        }
        self.assertEqual((name, arguments), ("f", wanted))


class WithoutTest(parameterized.TestCase):
    def test_the_package_is_named(self):
        function_calls._read.cache_clear()
        with (
            mock.patch.object(importlib.util, "find_spec", return_value=None),
            self.assertRaisesRegex(config.InputError, "--no-deps bfcl-eval"),
        ):
            environments.make("bfcl")
        with self.assertRaisesRegex(config.InputError, "no category 'vim'.*parallel"):
            environments.make("bfcl:vim")


def function(name, required=(), **types):
    """Returns a function as the package's data describes it."""
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "dict", "properties": properties, "required": [*required]}
    return {"name": name, "description": f"Does {name}.", "parameters": parameters}


AREA = function("math.area", ["side"], side="integer", unit="string", more="any")
AREA["parameters"]["properties"]["ends"] = {"type": "tuple", "items": {"type": "float"}}
# By category, the functions of each task and its possible answers.
DATA = {
    "simple_python": [
        ([AREA], [{"math.area": {"side": [5.0, ""], "unit": ["m", ""], "old": [""]}}]),
        ([AREA], [{"math.area": {"side": [5], "old": ["x"]}}]),  # nothing is right
        ([AREA], [{"math.area": {"side": [""], "more": [5.0, 2.5]}}]),
    ],
    "parallel": [
        (
            [function("f", x="float"), function("g")],
            [{"f": {"x": [1.5]}}, {"g": {}}],
        )
    ],
    "irrelevance": [([AREA], None), ([], None)],
}


class SubstituteTest(parameterized.TestCase):
    """The tasks of a package with a few rows in its form."""

    def setUp(self):
        super().setUp()
        folder = self.create_tempdir()
        folder.create_file("bfcl_eval/__init__.py")
        for category in function_calls.CATEGORIES:
            rows, answers = [], []
            for i, (functions, right) in enumerate(DATA.get(category, ())):
                row = {"id": f"{category}_{i}", "function": functions}
                said = {"role": "user", "content": f"{category} {i}"}
                rows.append(row | {"question": [[said], [{"role": "later"}]]})
                answers.append({"id": row["id"], "ground_truth": right})
            name = f"BFCL_v4_{category}.json"
            files = {f"bfcl_eval/data/{name}": rows}
            if "irrelevance" not in category:
                files[f"bfcl_eval/data/possible_answer/{name}"] = answers
            for file, content in files.items():
                folder.create_file(file, content="\n\n".join(map(json.dumps, content)))
        self.enter_context(
            mock.patch.object(sys, "path", [folder.full_path, *sys.path])
        )
        function_calls._read.cache_clear()
        self.addCleanup(function_calls._read.cache_clear)

    def test_a_task_says_all_of_its_row(self):
        taskset = environments.make("bfcl:simple_python")
        self.assertEqual(taskset.size("held_out"), 2)
        self.assertEqual(taskset.size("train"), 0)
        first, last = (taskset.task("held_out", 0, i) for i in range(2))
        self.assertEqual(taskset.task("held_out", 9, 5), last)
        properties = {
            "side": {"type": "integer"},
            "unit": {"type": "string"},
            "more": {},
            "ends": {"type": "array", "items": {"type": "number"}},
        }
        parameters = {"type": "object", "properties": properties, "required": ["side"]}
        described = {"name": "math_area", "description": "Does math.area."}
        tool = {"type": "function", "function": described | {"parameters": parameters}}
        self.assertEqual(
            first,
            protocol.Task(
                "simple_python_0",
                ({"role": "user", "content": "simple_python 0"},),
                [{"math_area": {"side": [5], "unit": ["m", ""]}}],
                (tool,),
                "simple_python_0",
                "simple_python",
            ),
        )
        self.assertIs(type(first.answer[0]["math_area"]["side"][0]), int)
        self.assertEqual(
            last.answer, [{"math_area": {"side": [""], "more": [5.0, 2.5]}}]
        )

    def test_categories_come_in_turn_while_they_last(self):
        taskset = environments.make("bfcl")
        tasks = [
            taskset.task("held_out", 0, i) for i in range(taskset.size("held_out"))
        ]
        self.assertEqual(
            [task.tag for task in tasks],
            [
                "simple_python",
                "parallel",
                "irrelevance",
                "simple_python",
                "irrelevance",
            ],
        )
        with self.assertRaisesRegex(config.InputError, "no tasks in train"):
            taskset.task("train", 0, 0)

    def test_turns(self):
        taskset = environments.make("bfcl")
        one, two, none = (taskset.task("held_out", 0, i) for i in range(3))
        both = [
            {"function": {"name": "g", "arguments": {}}},
            {"function": {"name": "f", "arguments": '{"x": 1.5}'}},
        ]
        for task, content, calls, reward in (
            (one, "m", [], 0.0),
            (two, "", both, 1.0),
            (two, "Both.", both, 1.0),
            (two, "", both[:1], 0.0),
            (two, "", [{"function": {"name": ""}}], 0.0),
            (none, "None fits.", None, 1.0),
            (none, "", both, 0.0),
            (none, " ", [], 0.0),
            (none, None, [], 0.0),
            (none, "None fits.", [{"function": {}}], 0.0),
        ):
            turn = {"role": "assistant", "content": content, "tool_calls": calls}
            (result,) = episodes.play(taskset, task, turn)
            paid = protocol.Reward(reward, {"correct": reward})
            self.assertEqual(result, protocol.StepResult((), paid, True, False), turn)

    def test_attempts(self):
        taskset = environments.make("bfcl")
        tasks = [taskset.task("held_out", 0, i) for i in range(5)]
        found = []
        for task in tasks:
            attempts = taskset.attempts(task)
            (right,) = attempts.right
            self.assertEqual(taskset.demonstration(task), (*task.messages, right))
            wrong = [turn for (turn,) in attempts.wrong]
            for turn, reward in ((right, 1.0), *((turn, 0.0) for turn in wrong)):
                (result,) = episodes.play(taskset, task, turn)
                self.assertEqual(result.reward.total, reward, turn)
            found.append([[*calls_of(turn)] for turn in (right, *wrong)])
        f, g = ("f", {"x": 1.5}), ("g", {})
        other = ("a_function_of_nobody", {})
        self.assertEqual(
            found[1],
            [
                [f, g],
                [f, g, f],
                [other, g],
                [("f", {"x": 1.5, "more": 1}), g],
                [("f", {"x": ["changed"]}), g],
                [],
            ],
        )
        changed = [("math_area", {"side": ["changed"], "unit": "m"})]
        self.assertEqual(found[0][-2], changed)
        self.assertEqual(found[2], [[], [("math_area", {})]])
        self.assertEqual(found[4], [[], [other]])


def calls_of(turn):
    for made in turn.get("tool_calls", ()):
        yield made["function"]["name"], made["function"]["arguments"]


@unittest.skipUnless(HAS_DATA, "bfcl-eval is not installed")
class TasksTest(parameterized.TestCase):
    def test_tasks_of_all_categories_are_proven(self):
        settings = validate.Settings(num_tasks=200, num_repeats=1)
        figures = validate.validate("bfcl", settings, None)
        self.assertEqual((figures["proven"], figures["failures"]), (200, {}))
        self.assertEqual({*figures["proven_by_tag"]}, {*function_calls.CATEGORIES})

    def test_tools_have_types_and_names_that_every_form_allows(self):
        taskset = environments.make("bfcl")
        self.assertEqual(taskset.size("held_out"), 3471)
        for i in range(taskset.size("held_out")):
            for tool in taskset.task("held_out", 0, i).tools:
                self.assertNotIn(".", tool["function"]["name"])
                self.assertEqual(tool["function"]["parameters"]["type"], "object")
        with self.assertRaisesRegex(config.InputError, "no tasks in train"):
            taskset.task("train", 0, 0)

    def test_where_no_function_fits_a_text_is_right(self):
        taskset = environments.make("bfcl:irrelevance")
        task = taskset.task("held_out", 0, 0)
        for text, paid in (("None of them can do it.", 1.0), ("", 0.0)):
            (result,) = episodes.play(taskset, task, text)
            self.assertEqual(result.reward.total, paid)

    def test_verdicts_are_those_of_the_package(self):
        """On right calls, and on calls with a value changed, left out or added."""
        theirs, python = _their_check(self)
        rng, verdicts = random.Random(0), []
        for category in function_calls.CATEGORIES[:4]:
            origin = importlib.util.find_spec("bfcl_eval").origin
            file = pathlib.Path(origin).parent / "data" / f"BFCL_v4_{category}.json"
            rows = function_calls._lines(file)[:100]
            tasks = function_calls._read(category)[:100]
            for row, task in zip(rows, tasks, strict=True):
                functions = [
                    {**f, "name": f["name"].replace(".", "_")} for f in row["function"]
                ]
                calls = _changed(rng, [*map(call_check.right_call, task.answer)])
                said = [{name: arguments} for name, arguments in calls]
                verdict = theirs(functions, said, task.answer, python, category, "m")
                ours = call_check.is_right(calls, task.answer)
                self.assertEqual(ours, verdict["valid"], (row["id"], calls))
                verdicts.append(ours)
        self.assertBetween(sum(verdicts), 80, 320)  # of 400


def _changed(rng, calls):
    """Returns calls of which some differ in a value."""
    (name, arguments), *rest = calls
    keys = sorted(arguments)
    what = rng.choice(["nothing", "less", "more", "value", "case", "call"])
    if what == "call":
        return [*rest, (name, arguments)] if rng.random() < 0.5 else rest
    if what == "more":
        arguments = {**arguments, "more_of_it": 1}
    elif keys and what != "nothing":
        key = rng.choice(keys)
        value = arguments[key]
        if what == "less":
            arguments = {k: v for k, v in arguments.items() if k != key}
        elif what == "case" and isinstance(value, str):
            arguments = {**arguments, key: f" {value.upper()}."}
        elif what == "value" and type(value) in (int, float):
            arguments = {**arguments, key: value + 1}
    return [(name, arguments), *rest]


def _their_check(test):
    """Returns BFCL's check; what it imports of models and languages is not needed."""

    class Models(dict):
        def __missing__(self, key):
            return types.SimpleNamespace(underscore_to_dot=False)

    stubs = {
        "constants.model_config": {"MODEL_CONFIG_MAPPING": Models()},
        "eval_checker.ast_eval.type_convertor.java_type_converter": {
            "java_type_converter": None
        },
        "eval_checker.ast_eval.type_convertor.js_type_converter": {
            "js_type_converter": None
        },
    }
    modules = {}
    for name, content in stubs.items():
        modules[f"bfcl_eval.{name}"] = module = types.ModuleType(name)
        vars(module).update(content)
    test.enterContext(mock.patch.dict(sys.modules, modules))
    module = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    return module.ast_checker, module.Language.PYTHON


if __name__ == "__main__":
    environment.main()
