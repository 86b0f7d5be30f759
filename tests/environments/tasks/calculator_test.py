"""The calculator: calls over several turns, wrong calls, the task without a tool."""

from absl.testing import parameterized

from glm5_jax import environments
from glm5_jax.environments.tasks import problems
from tests import environment
from tests.environments import episodes

PRODUCT, VALUE = "71*54", "3834"  # the first task


def call(expression=PRODUCT, name="calc", **more):
    function = {"name": name, "arguments": {"expression": expression}}
    return {"function": function} | more


def calling(*calls, content=""):
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def play(*turns, name="calculator"):
    taskset = environments.make(name)
    task = taskset.task("train", 0, 0)
    assert task.messages[-1]["content"] == PRODUCT
    return episodes.play(taskset, task, *turns)


class CalculatorTest(parameterized.TestCase):
    @parameterized.parameters("calculator", "calculator_untold")
    def test_call_then_answer(self, name):
        first, last = play(calling(call()), VALUE, name=name)
        self.assertEqual(first.messages, ({"role": "tool", "content": VALUE},))
        self.assertIsNone(first.reward)
        self.assertFalse(first.terminated or first.truncated)
        self.assertEqual((last.reward.total, last.terminated), (1.0, True))

    def test_only_the_answer_earns(self):
        self.assertEqual(play(VALUE)[-1].reward.total, 1.0)
        self.assertEqual(play("3835")[-1].reward.total, 0.0)
        self.assertEqual(play(calling(call()), "done")[-1].reward.total, 0.0)
        self.assertEqual(play(calling(call()), "")[-1].reward.total, 0.0)
        # What is beside a call is no answer yet.
        result = play(calling(call(), content=VALUE))[-1]
        self.assertIsNone(result.reward)

    def test_the_fourth_turn_must_answer(self):
        turns = [calling(call())] * 4
        *before, last = play(*turns)
        self.assertTrue(all(result.reward is None for result in before))
        self.assertEqual((last.reward.total, last.terminated), (0.0, False))
        self.assertTrue(last.truncated)
        self.assertEqual(last.messages, ())
        last = play(*turns[:3], VALUE)[-1]
        self.assertEqual((last.reward.total, last.truncated), (1.0, False))

    def test_an_unknown_tool_s_name_is_cut(self):
        (result,) = play(calling(call(name="x" * 41)))
        (said,) = result.messages
        self.assertIn(f"'{'x' * 40}'", said["content"])

    @parameterized.named_parameters(
        ("division", call("1//0"), "error: division by zero"),
        ("power", call("9**9**9"), "error: only integers, + - * // % and parentheses"),
        ("code", call("__import__('os')"), "error: only integers, + - * // % and pare"),
        ("long", call("1+" * 10_000 + "1"), "error: too long"),
        ("half", call("17*"), "error: not an expression"),
        ("unknown", call(name="shell"), "error: no tool 'shell', only 'calc'"),
        ("no_name", {"function": {"arguments": {}}}, "error: no tool 'None'"),
        ("no_function", {}, "error: no tool 'None'"),
        (
            "no_argument",
            {"function": {"name": "calc", "arguments": {}}},
            "error: calc needs 'expression'",
        ),
        (
            "text_for_arguments",
            {"function": {"name": "calc", "arguments": PRODUCT}},
            "error: calc needs 'expression'",
        ),
        ("number", call(5), "5"),  # a parser may have read it as JSON
    )
    def test_wrong_calls_come_back(self, bad, expected):
        first, last = play(calling(bad), VALUE)
        (message,) = first.messages
        self.assertEqual(message["role"], "tool")
        self.assertStartsWith(message["content"], expected)
        self.assertLess(len(message["content"]), 100)
        self.assertEqual(last.reward.total, 1.0)  # it may still get there

    def test_a_name_of_a_megabyte_is_not_echoed(self):
        (result,) = play(calling(call(name="x" * 1_000_000)))
        self.assertLess(len(result.messages[0]["content"]), 100)

    def test_several_calls_of_a_turn(self):
        calls = [call(f"{i}+1", id=f"call_{i}") for i in range(6)]
        (result,) = play(calling(*calls))
        contents = [m["content"] for m in result.messages]
        self.assertEqual(contents, ["1", "2", "3", "4", *["error: too many calls"] * 2])
        ids = [m["tool_call_id"] for m in result.messages]
        self.assertEqual(ids, [c["id"] for c in calls])

    def test_calling_for_ever_is_cut_off(self):
        results = play(*[calling(call())] * 4)
        self.assertEqual([r.truncated for r in results], [False, False, False, True])
        self.assertEqual((results[-1].reward.total, results[-1].messages), (0.0, ()))

    def test_an_environment_can_be_reset(self):
        taskset = environments.make("calculator")
        task = taskset.task("train", 0, 0)
        for _ in range(2):
            results = episodes.play(taskset, task, *[calling(call())] * 3, VALUE)
            self.assertEqual(results[-1].reward.total, 1.0)


class WithoutToolTest(parameterized.TestCase):
    def test_same_tasks(self):
        names = ("calculator", "calculator_untold", "calculator_without_tool")
        for i in range(20):
            told, untold, none = (
                environments.make(name).task("held_out", 5, i) for name in names
            )
            self.assertEqual(told.messages, none.messages)
            self.assertEqual(told.messages, untold.messages)
            self.assertEqual(told.answer, none.answer)
            self.assertEqual(told.tools, (problems.CALC_TOOL,))
            self.assertEqual((untold.tools, none.tools), ((), ()))

    def test_a_call_gets_nothing(self):
        (result,) = play(calling(call()), name="calculator_without_tool")
        self.assertEqual((result.reward.total, result.terminated), (0.0, True))
        self.assertEqual(result.messages, ())

    def test_demonstrations(self):
        for name, count in (("calculator_without_tool", 2), ("calculator_untold", 4)):
            taskset = environments.make(f"{name}:2")
            task = taskset.task("train", 0, 3)
            self.assertLen(taskset.demonstration(task), count)
            self.assertEqual(taskset.demonstration(task)[:1], task.messages)


if __name__ == "__main__":
    environment.main()
