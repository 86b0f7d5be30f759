"""Projects of React and Vue: pinned packages, confined builds, confirmed labels."""

import asyncio
import dataclasses
import json
import os
import pathlib
import unittest
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from glm5_jax import config, environments, messages
from glm5_jax.environments import browser, sandbox, tool_calls
from glm5_jax.environments.worlds.frontend import families, oracle, traces
from glm5_jax.environments.worlds.frontend.projects import build, frameworks, kit
from tests import environment
from tests.environments import episodes


class DraftsTest(parameterized.TestCase):
    @parameterized.parameters(*families.PROJECTS)
    def test_every_number_makes_a_whole_task(self, family):
        for number in range(20):
            made = traces.draft(family, number)
            names = [item.name for item in made.items]
            self.assertLen(set(names), len(names))
            self.assertLen(made.submissions(), 1 + len(made.flaws))
            for flaw in made.flaws:
                self.assertContainsSubset(flaw.fails, names)
            self.assertNotRegex(made.page, r"\b(FIRST|GOOD|SMALL|LARGE|LEAST)\b")

    def test_six_briefs_have_sixty_items(self):
        made = [traces.draft(family, 0) for family in families.PROJECTS]
        self.assertLen(made, 6)
        self.assertEqual(sum(len(one.items) for one in made), 64)
        for framework in frameworks.ALL:
            self.assertLen([x for x in made if x.framework == framework], 3)


class KitTest(absltest.TestCase):
    def test_the_lock_is_of_these_versions(self):
        lock = json.loads(kit.LOCK.read_text(encoding="utf-8"))
        wanted = json.loads(kit.package())["dependencies"]
        self.assertEqual(lock["packages"][""]["dependencies"], wanted)
        for path, package in lock["packages"].items():
            if path:
                self.assertIn("integrity", package, path)
            self.assertNotIn("resolved", package)  # each machine has its registry

    def test_what_is_missing_is_said(self):
        self.addCleanup(kit.folder.cache_clear)
        home = self.create_tempdir().full_path
        npm = self.create_tempdir()
        npm.create_file("npm", "#!/bin/sh\necho no network >&2; exit 1\n")
        os.chmod(pathlib.Path(npm.full_path) / "npm", 0o755)
        for variables, said in (
            ({"PATH": npm.full_path}, "no network.*need node and npm"),
            ({"PATH": home}, "need node and npm .apt-get install npm"),
        ):
            kit.folder.cache_clear()
            with (
                mock.patch.dict(os.environ, {"HOME": home, **variables}),
                mock.patch("shutil.which", return_value="/usr/bin/node"),
            ):
                self.assertRegex(kit.missing(), said)
        self.assertEmpty([*(pathlib.Path(home) / ".cache/glm5_jax/frontend").iterdir()])
        kit.folder.cache_clear()
        with mock.patch("shutil.which", return_value=None):
            self.assertRegex(kit.missing(), "no node in /usr/bin")

    @unittest.skipIf(browser.missing(), browser.missing())
    def test_a_world_of_projects_needs_them_and_one_of_pages_does_not(self):
        with mock.patch.object(kit, "missing", return_value="there is no node."):
            with self.assertRaisesRegex(config.InputError, "cannot be built.*no node"):
                environments.make("frontend:vue")
            self.assertLen(environments.make("frontend").families, 11)


class BuildTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        """Fetches the packages, the first time on a machine."""
        super().setUpClass()
        if not sandbox.describe().startswith("bubblewrap"):
            raise unittest.SkipTest("bubblewrap does not work here")
        if reason := browser.missing() or kit.missing():
            raise unittest.SkipTest(reason)
        cls.world = environments.make("frontend:react")
        cls.addClassCleanup(cls.world.close)

    def failing(self, files, made):
        decided = oracle.decide(self.world.browser, files, made.items, made.framework)
        builds, passed = asyncio.run(decided)
        return builds, {name for name, is_good in passed.items() if not is_good}

    @parameterized.parameters(("react_board", "full"), ("vue_order", "cheaper"))
    def test_a_project_is_built_and_its_flaw_found(self, family, flaw):
        made = traces.draft(family, 0)
        few = [
            item for item in made.items if item.name in ("first", "next", "on", flaw)
        ]
        made = dataclasses.replace(made, items=tuple(few))
        files = asyncio.run(traces.site(made, made.submissions()[flaw]))
        self.assertEqual(self.failing(files, made), (True, {flaw}))

    @parameterized.parameters(*families.PROJECTS)
    @pytest.mark.slow  # five minutes
    def test_the_oracle_confirms_every_label(self, family):
        made = traces.draft(family, 0)
        for name, text in made.submissions().items():
            files = asyncio.run(traces.site(made, text))
            named = set() if name == "reference" else {*name.split("+")}
            self.assertEqual(self.failing(files, made), (True, named), name)

    def test_another_page_is_no_project_of_the_framework(self):
        made = traces.draft("react_board", 0)
        page = b"<!doctype html><div id=root><p>a page of its own</p></div>"
        with mock.patch.object(oracle, "_WAIT", 500):
            builds, failing = self.failing({"index.html": page}, made)
        self.assertFalse(builds)
        self.assertLen(failing, len(made.items))

    @parameterized.parameters(
        "package.json",
        "index.html",
        "./src/main.jsx",
        ".npmrc",
        "postcss.config.js",
        "src/node_modules/react-dom/client.js",
    )
    def test_what_builds_and_mounts_a_project_cannot_be_written(self, path):
        """A page of plain scripts counted as one of React."""
        task = self.world.task("train", 0, 0)
        write = tool_calls.turn("write", path=path, content="1")
        (refused,) = episodes.play(self.world, task, write)
        self.assertIn("cannot be written", _said(refused))

    def test_what_is_not_built_earns_nothing_and_is_said(self):
        task = self.world.task("train", 0, 0)
        component = frameworks.ALL["react"].component
        turns = (
            tool_calls.turn("write", path="node_modules/vite/x.js", content="1"),
            tool_calls.turn("write", path="../x.js", content="1"),
            tool_calls.turn("write", path=component, content="export default <p>;"),
            tool_calls.turn("build"),
            tool_calls.turn("submit"),
        )
        first, second, third, built, last = episodes.play(self.world, task, *turns)
        for refused in (first, second):
            self.assertIn("cannot be written", _said(refused))
        self.assertEqual(_said(third), f"wrote {component}")
        self.assertIn("src/App.jsx:1:", _said(built))
        self.assertEqual(last.reward.total, 0.0)
        self.assertEqual(last.reward.parts, {"builds": 0.0, "checklist": 0.0})
        self.assertIn("src/App.jsx:1:", last.info["build"])

    def test_files_that_cannot_lie_so_are_no_failure_of_the_sandbox(self):
        files = {"src": "a file", "src/App.jsx": "another"}
        found = asyncio.run(build.build(files))
        self.assertEqual(found.files, {})
        self.assertIn("cannot lie so", found.log)

    def test_a_build_reaches_no_network_and_no_packages_of_others(self):
        script = (
            "import fs from 'fs'; import net from 'net';\n"
            "const vite = fs.realpathSync('node_modules/vite');\n"
            "try { fs.writeFileSync(vite + '/x', ''); }\n"
            "catch (error) { console.log(error.code); }\n"
            "net.connect(80, '192.0.2.1').on('error', e => console.log(e.code));\n"
        )
        package = {"scripts": {"build": "node x.mjs"}}
        files = {"package.json": json.dumps(package), "x.mjs": script}
        found = asyncio.run(build.build(files))
        self.assertIn("EROFS", found.log)
        self.assertIn("ENETUNREACH", found.log)

    def test_a_build_whose_file_cannot_be_read_has_failed(self):
        package = {"scripts": {"build": "mkdir -m 700 dist; umask 777; echo > dist/x"}}
        found = asyncio.run(build.build({"package.json": json.dumps(package)}))
        self.assertEqual(found.files, {})
        self.assertIn("dist/x could not be read", found.log)


def _said(result):
    return messages.text_of(result.messages[0], "content")


if __name__ == "__main__":
    environment.main()
