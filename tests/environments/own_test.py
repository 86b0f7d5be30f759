"""The user's own tasksets, by module:Class: the example of docs and broken ones."""

import os
import pathlib
import re
import sys
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.data.chat import conversations
from tests import environment
from tests.environments import episodes

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "rl.md"
HEAD = """
from glm5_jax.environments import protocol
from glm5_jax.environments.tasks import ladder
class Base:
    name = "base"
    def task(self, split, seed, index):
        return protocol.Task("a", ({"role": "user", "content": "b"},))
    def environment(self):
        return ladder.SingleTurn(ladder.exact)
    def demonstration(self, task):
        return None
"""
BROKEN = (
    ("no_class", "class Other: pass", "my_env_.*py has no class Bits"),
    ("does_not_run", "1 / 0", "importing .* raised ZeroDivisionError"),
    ("imports_nothing", "import nowhere_at_all", "raised ModuleNotFoundError"),
    (
        "takes_arguments",
        "class Bits(Base):\n    def __init__(self, x): pass",
        r"Bits\(\) raised TypeError",
    ),
    ("lacks_methods", "class Bits: name = 'bits'", "Bits lacks task, environment"),
    (
        "its_environment_lacks_some",
        "class Bits(Base):\n    def environment(self): return object()",
        "object lacks reset, step, close",
    ),
    (
        "blocks",
        "class Bits(Base):\n    def environment(self): return self\n"
        "    async def reset(self, task): pass\n    def step(self, message): pass\n"
        "    def close(self): pass",
        "step, close of Bits must be `async def`",
    ),
    (
        "no_task",
        "class Bits(Base):\n    def task(self, split, seed, index): return 5",
        r"task\(\) must return a protocol.Task, got int",
    ),
    (
        "task_raises",
        "class Bits(Base):\n    def task(self, split, seed, index): raise KeyError(7)",
        "first task or environment raised KeyError: 7",
    ),
    ("no_name", "class Bits(Base): name = None", "`name` must be a string"),
)


class OwnTest(parameterized.TestCase):
    def module(self, text):
        """Writes a module into a folder on the path; returns its name."""
        folder = self.create_tempdir().full_path
        name = "my_env_" + re.sub(r"\W", "_", self.id().split(".")[-1])
        (pathlib.Path(folder) / f"{name}.py").write_text(text)
        sys.path.append(folder)
        self.addCleanup(sys.path.remove, folder)
        self.addCleanup(sys.modules.pop, name, None)
        return name

    def test_the_one_of_the_documents_is_played_and_shown(self):
        blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
        (text,) = [block for block in blocks if "class Bits" in block]
        name = f"{self.module(text)}:Bits"
        taskset = environments.make(name)
        task = taskset.task("train", 0, 5)
        self.assertNotEqual(task.messages, taskset.task("held_out", 0, 5).messages)
        (result,) = episodes.play(taskset, task, task.answer)
        self.assertEqual(result.reward.total, 1)
        found = conversations.read_conversations(f"tasks:{name}")
        self.assertGreater(len(found), 100)
        self.assertEqual(found[0].messages[-1]["role"], "assistant")

    @parameterized.named_parameters(*BROKEN)
    def test_a_broken_environment_is_one_message(self, text, message):
        name = self.module(f"{HEAD}{text}\n")
        with self.assertRaisesRegex(config.InputError, message) as caught:
            environments.make(f"{name}:Bits")
        self.assertLen(str(caught.exception).splitlines(), 1)

    def test_a_module_of_the_current_folder_needs_no_path(self):
        name = self.module(HEAD)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(sys.path[-1])
        others = [path for path in sys.path[:-1] if path]
        with mock.patch.object(sys, "path", others):
            self.assertEqual(environments.make(f"{name}:Base").name, "base")

    def test_no_such_module(self):
        with self.assertRaisesRegex(config.InputError, "there is none.*PYTHONPATH"):
            environments.make("nowhere_at_all:Bits")

    def test_without_demonstrations_there_is_no_sft(self):
        name = self.module(HEAD)
        with self.assertRaisesRegex(config.InputError, "no demonstration of its task"):
            conversations.read_conversations(f"tasks:{name}:Base")


if __name__ == "__main__":
    environment.main()
