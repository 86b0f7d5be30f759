"""Chains of releases: the agent's tree is kept, and each link pays its share."""

import asyncio
import dataclasses
import functools
import json
import pathlib
import tempfile
import unittest
from unittest import mock

import pytest
from absl.testing import absltest

from glm5_jax import config, environments
from glm5_jax.environments import proofs, protocol, sandbox, tool_calls
from glm5_jax.environments.worlds.swe import (
    attempts,
    command,
    copies,
    mine,
    records,
    sources,
)
from glm5_jax.environments.worlds.swe.chain import mine as chain_mine
from glm5_jax.environments.worlds.swe.chain import stored, world
from tests import environment
from tests.environments import episodes
from tests.environments.worlds.swe import packages

# 1.0 has two faults, 1.1 mends the first, 1.2 changes notes alone, 1.3 mends the second
# in the file that 1.1 made. Each release has its own tests.
_TESTS = "import unittest\n\nfrom counts import clamp, pairs\n\n" + "".join(
    f"""
class {name}Test(unittest.TestCase):
    def test_{name.lower()}(self):
        self.assertEqual({call}, {value})
"""
    for name, call, value in (
        ("Inside", "clamp(2, 1, 3)", "2"),
        ("Below", "clamp(0, 1, 3)", "1"),
        ("One", "pairs([1])", "[]"),
        ("None", "pairs([])", "[]"),
    )
)
_ABOVE = """
class AboveTest(unittest.TestCase):
    def test_above(self):
        self.assertEqual(clamp(4, 1, 3), 3)
"""
_ORDER = """
class OrderTest(unittest.TestCase):
    def test_order(self):
        self.assertEqual(pairs([1, 2, 3]), [(1, 2), (2, 3)])
"""
SOLVED = packages.SOURCE
ABOVE_SOLVED = SOLVED.replace("(a, b)", "(b, a)", 1)
BROKEN = ABOVE_SOLVED.replace("return high", "return low")
PICTURE = b"\x89PNG\xff 1.1"


def release(version, source, tests, **more):
    files = {
        "counts.py": source.encode(),
        "CHANGES": f"{version}\n".encode(),
        "tests/test_counts.py": tests.encode(),
        **{name.replace("_", "."): content for name, content in more.items()},
    }
    return sources.Package("counts", version, f"test:{version}", files)


RELEASES = (
    release("1.0", BROKEN, _TESTS, logo_png=b"\x89PNG\xff 1.0"),
    release("1.1", ABOVE_SOLVED, _TESTS + _ABOVE, logo_png=PICTURE),
    release("1.2", ABOVE_SOLVED, _TESTS + _ABOVE, logo_png=PICTURE),
    release("1.3", SOLVED, _TESTS + _ABOVE + _ORDER, logo_png=PICTURE),
)
EDITS = (("return low", "return high"), ("(b, a)", "(a, b)"))


@functools.cache
def mined():
    """Returns the folder of a chain, its releases, and what the command told twice."""
    root = pathlib.Path(tempfile.mkdtemp())
    names = []
    for one in RELEASES:
        at = root / one.version / "counts"
        names.append(str(at))
        for path, content in one.files.items():
            (at / path).parent.mkdir(parents=True, exist_ok=True)
            (at / path).write_bytes(content)
    arguments = "->".join(names), str(root / "out"), 1, 0
    told = [list(command.run(*arguments))[-1] for _ in range(2)]
    return records.Folder(root / "out"), [sources.fetch(name) for name in names], told


def folder():
    return mined()[0]


def taskset():
    return world.SweChain(f"{world.PREFIX}{folder().path}")


def mended(number):
    """Returns a turn that mends a fault, in the shell."""
    old, new = EDITS[number]
    if number == 0:  # the last of three
        code = "i = s.rindex('return low'); s = s[:i] + 'return high' + s[i + 10:]"
    else:
        code = f"s = s.replace({old!r}, {new!r}, 1)"
    program = f"p = 'counts.py'; s = open(p).read(); {code}; open(p, 'w').write(s)"
    return tool_calls.turn("shell", command=f'python3 -c "{program}"')


SUBMIT = tool_calls.turn("submit")


@unittest.skipIf(packages.MISSING, packages.MISSING)
class MineTest(absltest.TestCase):
    def test_a_release_without_a_failing_test_is_skipped(self):
        (chain,) = stored.read(folder()).values()
        versions = [release.version for release in mined()[1]]
        links = [link.version for link in chain.links]
        self.assertEqual(links, [versions[1], versions[3]])
        outcomes = mine.Log(folder()).outcomes
        name = "-".join(["counts", *versions])
        self.assertEqual(outcomes[name, versions[2]], "no test fails")
        self.assertEqual(outcomes[name, "chain"], mine.MADE)

    def test_the_agent_starts_from_the_first_release_alone(self):
        (chain,) = stored.read(folder()).values()
        first, second = (folder().agent_tree(link) for link in chain.links)
        wanted = {**RELEASES[0].files}
        del wanted["tests/test_counts.py"]
        self.assertEqual(first, wanted)
        # After the first link its solution is all that differs: no notes, no pictures.
        self.assertEqual(second, {**wanted, "counts.py": ABOVE_SOLVED.encode()})
        for link, solved in zip(chain.links, (ABOVE_SOLVED, SOLVED), strict=True):
            tree = folder().solved_tree(link)
            self.assertEqual(tree, {**wanted, "counts.py": solved.encode()})

    def test_a_link_has_the_tests_that_its_release_mends(self):
        (chain,) = stored.read(folder()).values()
        failing = [link.FAIL_TO_PASS for link in chain.links]
        name = "test_counts.{0}Test.test_{1}"
        wanted = [
            (name.format("Above", "above"),),
            (name.format("Order", "order"),),
        ]
        self.assertEqual(failing, wanted)
        self.assertIn(failing[0][0], chain.links[1].PASS_TO_PASS)
        self.assertNotIn("pairs", chain.links[0].problem_statement)
        self.assertIn("pairs([1, 2, 3])", chain.links[1].problem_statement)

    def test_a_statement_tells_nothing_of_later_links(self):
        """The log of the first link happens to show what the second one adds."""
        (chain,) = stored.read(folder()).values()
        log = "# told by more(1)\n# told by the rest(2)\n"
        links = [
            chain_mine._Link(
                dataclasses.replace(link, patch=f"--- a/x\n+++ b/x\n+{line}\n"),
                log if number == 0 else "",
                "",
                {},
            )
            for number, (link, line) in enumerate(
                zip(chain.links, ("the rest(2)", "more(1) + 1"), strict=True)
            )
        ]
        first, _ = chain_mine._told(links)
        self.assertNotIn("the rest(2)", first.problem_statement)
        self.assertIn("more(1)", first.problem_statement)
        links[1] = dataclasses.replace(
            links[1],
            record=dataclasses.replace(links[1].record, patch="+++ b/x\n+by more(1)\n"),
        )
        first, _ = chain_mine._told(links)
        self.assertNotIn("more(1)", first.problem_statement)

    def test_fewer_than_two_links_are_no_chain(self):
        with tempfile.TemporaryDirectory() as name:
            made = records.Folder(name)
            asyncio.run(chain_mine.mine_chain(RELEASES[:3], made))
            outcomes = mine.Log(made).counts(of_packages=False)
            self.assertEqual(
                outcomes,
                {"a link": 1, "no test fails": 1, "fewer than 2 links": 1},
            )
            with self.assertRaisesRegex(config.InputError, "environments mine"):
                world.SweChain(f"{world.PREFIX}{name}")
            pathlib.Path(name, stored.CHAINS).write_text('{"links": [{}]}\n')
            with self.assertRaisesRegex(config.InputError, "mine the releases anew"):
                world.SweChain(f"{world.PREFIX}{name}")

    def test_a_release_that_an_earlier_tree_solves_is_no_link(self):
        """1.1 breaks what 1.2 mends: who did nothing would be paid for 1.2."""
        other = SOLVED.replace("return low", "return 7")
        seven = _TESTS.replace("clamp(0, 1, 3), 1", "clamp(0, 1, 3), 7")
        releases = (
            release("1.0", other, _TESTS),
            release("1.1", ABOVE_SOLVED, _TESTS),
            release("1.2", other, seven + _ORDER),
        )
        with tempfile.TemporaryDirectory() as name:
            made = records.Folder(name)
            asyncio.run(chain_mine.mine_chain(releases, made))
            outcomes = mine.Log(made).outcomes
        self.assertEqual(
            outcomes["counts-1.0-1.1-1.2", "1.2"], "an earlier tree solves it"
        )

    def test_names(self):
        self.assertEqual(
            command._releases("a==1.0->1.1->1.2"), ["a==1.0", "a==1.1", "a==1.2"]
        )
        self.assertEqual(command._releases("x/a->x/b->c"), ["x/a", "x/b", "c"])
        self.assertEqual(command._releases("debian:a"), ["debian:a"])

    def test_the_command_makes_a_chain_once(self):
        first, second = mined()[2]
        self.assertEqual(json.loads(first)["tasks"], 1)
        self.assertEqual(first, second)


@unittest.skipIf(packages.MISSING, packages.MISSING)
class EpisodeTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.world = taskset()
        (self.chain,) = self.world.by_id.values()
        self.task = self.world.task_of(self.chain)

    def play(self, *turns):
        return episodes.play(self.world, self.task, *turns)

    def parts(self, *turns):
        return dict(self.play(*turns)[-1].reward.parts)

    def test_the_tree_is_kept_from_link_to_link(self):
        """The shell's own edits, not the solution of the package, solve both."""
        first, told, *_, last = self.play(mended(0), SUBMIT, mended(1), SUBMIT)
        self.assertIsNone(first.reward)
        self.assertIsNone(told.reward)
        (issue,) = told.messages
        self.assertEqual(issue["role"], "tool")
        self.assertIn(self.chain.links[1].problem_statement, issue["content"])
        self.assertTrue(last.terminated)
        wanted = {"solved": 1.0, "link_1": 1.0, "link_2": 1.0}
        self.assertEqual((last.reward.total, last.reward.parts), (1.0, wanted))

    def test_links_are_paid_one_by_one(self):
        half = {"solved": 0.0, "link_1": 1.0, "link_2": 0.0}
        self.assertEqual(self.parts(mended(0), SUBMIT, SUBMIT), half)
        # The second release's tests have those of the first.
        nothing = {"solved": 0.0, "link_1": 0.0, "link_2": 0.0}
        self.assertEqual(self.parts(SUBMIT, mended(1), SUBMIT), nothing)
        late = {"solved": 0.0, "link_1": 0.0, "link_2": 1.0}
        self.assertEqual(self.parts("", mended(0), mended(1), SUBMIT), late)

    def test_a_turn_without_a_call_gets_the_next_issue_as_a_users_message(self):
        first, last = self.play("I am done.", "So am I.")
        (said,) = first.messages
        self.assertEqual(said["role"], "user")
        self.assertIn("Issue 2 of 2", said["content"])
        self.assertEqual((last.terminated, last.reward.total), (True, 0.0))

    def test_calls_after_submit_are_answered_and_not_done(self):
        calls = [
            {"id": str(number), **turn["tool_calls"][0]}
            for number, turn in enumerate((mended(0), SUBMIT, mended(1)))
        ]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        first, last = self.play(message, SUBMIT)
        ids = [said["tool_call_id"] for said in first.messages]
        self.assertEqual(ids, ["0", "1", "2"])
        self.assertIn("nothing is done", first.messages[2]["content"])
        self.assertEqual(last.reward.parts["link_2"], 0.0)

    def test_an_episode_that_is_cut_pays_the_links_it_reached(self):
        async def episode():
            played = world.Environment(self.world, max_turns=1)
            try:
                await played.reset(self.task)
                return [await played.step(mended(0)), await played.step(mended(1))]
            finally:
                await played.close()

        last = asyncio.run(episode())[-1]
        self.assertTrue(last.truncated)
        # Both faults are mended in the tree of the first link, which is scored.
        self.assertEqual(last.reward.total, 0.5)

    @pytest.mark.slow
    def test_chains_are_proven(self):
        """The solution, nothing, cheats, each part, and a search at each link."""
        self.assertIsInstance(self.world.environment(), protocol.Environment)
        proof = asyncio.run(proofs.prove(self.world, self.task, num_repeats=2))
        self.assertEmpty(proof.failures)

    def test_parts_are_proven(self):
        """As above without the cheats, which the world of single tasks tries."""
        found = self.world.attempts(self.task)
        self.world.attempts = lambda task: dataclasses.replace(found, wrong=())
        proof = asyncio.run(proofs.prove(self.world, self.task, num_repeats=1))
        self.assertEmpty(proof.failures)
        self.assertEqual([wanted for _, wanted in found.partial], [0.5, 0.5])

    def test_what_an_agent_could_read_of_a_later_release_is_found(self):
        async def look():
            played = self.world.environment()
            await played.reset(self.task)
            text = SOLVED.replace("'", "'\\''")
            put = f"mkdir old; printf %s '{text}' > old/counts.py"
            await played.step(tool_calls.turn("shell", command=put))
            try:
                return await self.world.leaks(played, self.task)
            finally:
                await played.close()

        place = "/work/repo/old/counts.py"
        self.assertEqual(asyncio.run(look()), [place, place])

    def test_copies_of_later_releases_on_the_machine_are_hidden(self):
        usr = pathlib.Path(self.create_tempdir().full_path)
        (usr / "counts.py").write_text(SOLVED)

        async def start(image, limits):
            del limits
            self.assertEqual(image.hidden, (usr / "counts.py",))
            raise ConnectionError

        with (
            mock.patch.object(copies, "USR", usr),
            mock.patch.object(sandbox, "start", start),
            self.assertRaises(ConnectionError),
        ):
            asyncio.run(self.world.environment().reset(self.task))

    def test_a_demonstration_has_every_issue(self):
        shown = self.world.demonstration(self.task)
        told = "\n".join(m["content"] for m in shown if m["role"] != "assistant")
        for link in self.chain.links:
            self.assertIn(link.problem_statement, told)
        submits = [m for m in shown if m.get("tool_calls") == SUBMIT["tool_calls"]]
        self.assertLen(submits, 2)

    def test_it_has_a_name(self):
        made = environments.make(f"swe_chain:{folder().path}")
        sizes = sum(made.size(split) for split in protocol.SPLITS)
        self.assertEqual(sizes, 1)
        self.assertEqual(attempts.right(folder(), self.chain.links[0])[-1], SUBMIT)


if __name__ == "__main__":
    environment.main()
