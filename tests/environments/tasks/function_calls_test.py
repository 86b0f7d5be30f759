"""Calls of functions against possible answers; BFCL's own check is the oracle."""

import importlib
import importlib.util
import pathlib
import random
import sys
import types
import unittest
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import validate
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
    def test_right_calls(self):
        for arguments in (GOOD, {**GOOD, "a": 2}, {**GOOD, "b": "new-york"}):
            self.assertTrue(call_check.is_right(call(arguments), WANTED), arguments)

    @parameterized.named_parameters(
        ("value", {**GOOD, "a": 3}),
        ("type", {**GOOD, "a": "1"}),
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

    def test_nested_values(self):
        right = {"rows": [{"n": 2}], "plain": {"deep": {"x": 1}}}
        self.assertTrue(call_check.is_right(call(right), [ROW]))
        for rows in ([{"n": 3}], [{"n": 2, "m": 1}], [{}], [], [{"n": 2}, {"n": 2}]):
            wrong = {**right, "rows": rows}
            self.assertFalse(call_check.is_right(call(wrong), [ROW]), rows)


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
