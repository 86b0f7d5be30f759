"""Episodes on the pages of the worlds are what their commands print.

A line "..." stands for any lines, and at the end of a line for the rest of it. The
pages: business.md, code.md, frontend.md, function_calls.md, harbor.md, maths.md,
miniwob.md, search.md, slides.md, terminal.md; those that take long are slow.
"""

import contextlib
import pathlib
import re
from unittest import mock

import pytest
from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import play, validate
from tests import environment

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "worlds"
BLOCK = re.compile(
    r"^<!-- run by tests/environments/transcripts_test\.py -->\n```text\n"
    r"\$ python -m glm5_jax\.environments play (\S+) --solution\n(.*?)^```$",
    re.M | re.S,
)
LONG = ("frontend", "miniwob", "search", "slides")
SHOWN = {
    found[1]: found[2]
    for path in sorted(DOCS.glob("*.md"))
    for found in BLOCK.finditer(path.read_text(encoding="utf-8"))
}
QUICK = [x for x in SHOWN if x.partition(":")[0] not in LONG]
SLOW = [name for name in SHOWN if name not in QUICK]


def matches(shown, printed):
    """Returns whether lines that are shown stand for those that were printed."""
    ends = {0}  # numbers of printed lines that those shown so far may stand for
    for line in shown:
        if line == "...":
            ends = set(range(min(ends, default=0), len(printed) + 1)) if ends else ends
        else:
            ends = {i + 1 for i in ends if i < len(printed) and _is(line, printed[i])}
    return len(printed) in ends


def _is(shown, printed):
    if shown.endswith("..."):
        return printed.startswith(shown.removesuffix("..."))
    return shown == printed


class TranscriptsTest(parameterized.TestCase):
    def test_every_world_shows_one(self):
        worlds = {name.partition(":")[0] for name in SHOWN}
        self.assertEqual(
            worlds,
            {
                *("bfcl", "business", "code", "frontend", "harbor", "miniwob"),
                *("python", "search", "slides", "terminal"),
            },
        )

    @parameterized.parameters(*QUICK)
    def test_an_episode_is_what_its_command_prints(self, name):
        self.check(name)

    @parameterized.parameters(*SLOW)
    @pytest.mark.slow  # browsers, a build, an index
    def test_a_long_episode_is_what_its_command_prints(self, name):
        self.check(name)

    def check(self, name):
        """Plays the solution, and compares what is shown with the page."""
        self.enter_context(contextlib.chdir(self.create_tempdir().full_path))
        if name == "harbor:tasks":
            tasks = pathlib.Path("tasks")
            validate.export("terminal:column_sums", "", 0, 1, tasks)
        try:
            environments.make(name)
        except config.InputError as error:
            self.skipTest(str(error))
        said = []
        with mock.patch.object(play, "_say", lambda text: said.append(text.rstrip())):
            play.play(name, "", 0, 0, shows_solution=True)
        shown, printed = SHOWN[name].splitlines(), "\n".join(said).splitlines()
        self.assertTrue(matches(shown, printed), f"{name} prints {said}")

    def test_a_change_is_noticed(self):
        printed = ["a", "b", "c d", "b"]
        for shown in (printed, ["...", "c ...", "b"], ["a", "..."], ["...", "b"]):
            self.assertTrue(matches(shown, printed), shown)
        for shown in (["a", "b"], ["...", "d ...", "b"], ["...", "c"], ["b", "..."]):
            self.assertFalse(matches(shown, printed), shown)

    def test_without_a_solution_there_is_one_message(self):
        name = "tests.environments.service.played:Unsolved"
        with self.assertRaisesRegex(config.InputError, "knows no solution of"):
            play.play(name, "", 0, 0, shows_solution=True)


if __name__ == "__main__":
    environment.main()
