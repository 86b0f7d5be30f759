"""Task folders that others wrote: read, refused, built and proven in our sandbox."""

import asyncio
import os
import pathlib
import unittest
import zipfile
from unittest import mock

from absl.testing import absltest, parameterized

from glm5_jax import config, environments
from glm5_jax.environments import proofs, tool_calls, validate
from glm5_jax.environments.harbor import commands, dockerfile
from glm5_jax.environments.sandbox import bubblewrap
from tests import environment
from tests.environments import episodes

MISSING = bubblewrap.missing()
TOML = """version = "1.0"
[metadata]
category = "files"
[verifier]
timeout_sec = 60.0
[agent]
timeout_sec = 60.0
[environment]
build_timeout_sec = 60.0
cpus = 1
memory = "2G"
storage = "10G"
allow_internet = true
"""
# As people write them: a comment, a line that goes on, variables, a document.
DOCKERFILE = """# syntax=docker/dockerfile:1
FROM public.ecr.aws/docker/library/ubuntu:24.04@sha256:0d39
ARG NAME=data
ENV ROOT=/srv/stock \\
    SEPARATOR=";"
LABEL about="a stock"
RUN apt-get update && apt-get install -y --no-install-recommends \\
    coreutils \\
    # the shell
    bash && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY --chmod=755 tools/ /app/tools
COPY ${NAME}/*.csv ./
COPY <<EOF $ROOT/limits
10
EOF
RUN sort -t "$SEPARATOR" items.csv > sorted.csv && ./tools/count sorted.csv > count
CMD ["bash"]
"""
FILES = {
    "task.toml": TOML,
    "instruction.md": "Write into /app/total the sum of the second column of "
    "items.csv, plus what $ROOT/limits has.\n",
    "environment/Dockerfile": DOCKERFILE,
    "environment/data/items.csv": "b;2\na;3\n",
    "environment/tools/count": "#!/bin/sh\nwc -l < $1\n",
    "solution/solve.sh": "#!/bin/bash\nset -e\ncd /app\n"
    "/solution/sum.sh > total\nexit 0\n",
    "solution/sum.sh": "#!/bin/bash\nsum=$(cat $ROOT/limits)\n"
    "for n in $(cut -d';' -f2 items.csv); do sum=$((sum + n)); done\necho $sum\n",
    "tests/test.sh": "#!/bin/bash\ncd /tests\nif ./check.sh; then echo 1; else echo "
    "0; fi > /logs/verifier/reward.txt\n",
    "tests/check.sh": '#!/bin/bash\n[ "$(cat /app/total)" = 15 ] && '
    '[ "$(cat /app/count)" = 2 ]\n',
    "wrong/1.sh": "cd /app; echo 5 > total\n",
}


class FolderTest(parameterized.TestCase):
    """Makes task folders."""

    def write(self, changes=None, name="stock"):
        """Returns a folder with one task folder; None leaves a file out."""
        root = pathlib.Path(self.create_tempdir().full_path)
        for path, text in {**FILES, **(changes or {})}.items():
            if text is not None:
                file = root / name / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
        return root

    def refusal(self, changes):
        root = self.write(changes)
        with self.assertRaises(config.InputError) as caught:
            environments.make(f"harbor:{root / 'stock'}")
        return str(caught.exception)


class RefusalTest(FolderTest):
    @parameterized.named_parameters(
        ("image", "FROM ghcr.io/org/x:1\nWORKDIR /app", "image ghcr.io/org/x:1"),
        ("stages", "FROM debian AS a\nFROM debian\nWORKDIR /app", "a second FROM"),
        ("python", "FROM python:2.7\nWORKDIR /app", "python:2.7 is not here"),
        ("fetch", "FROM debian\nRUN true && curl -s http://x.y", "`curl -s` needs the"),
        ("clone", "FROM debian\nRUN git clone https://x.y/z", "`git clone` needs the"),
        ("pip", "FROM debian\nRUN pip install ./wheel.whl", "install ./wheel.whl` is"),
        ("list", "FROM debian\nRUN pip3 install -r a.txt", "`pip install -r` is not"),
        ("apt", "FROM debian\nRUN apt-get install -y no-such", "packages no-such"),
        ("rights", "FROM debian\nRUN useradd -m me", "`useradd` needs rights"),
        ("user", "FROM debian\nUSER me", "the user me: a box has one user"),
        ("volume", "FROM debian\nVOLUME /data", "VOLUME is not done here"),
        ("stage_file", "FROM debian\nCOPY --from=a /x /app/", "--from is not done"),
        ("address", "FROM debian\nADD https://x.y/z /app/z", "fetched or unpacked by"),
        ("fixed", "FROM debian\nCOPY data /usr/share/x", "/usr/share/x/items.csv is"),
        ("absent", "FROM debian\nCOPY nothing /app/", "nothing is not in environment"),
        ("above", "FROM debian\nCOPY ../solution /app/", "../solution is not in"),
        ("no_folder", "FROM debian\nRUN true", "a WORKDIR"),
        ("system_folder", "FROM debian\nWORKDIR /etc/x", "cannot work in /etc/x"),
        ("quote", "FROM debian\nWORKDIR '/app", "WORKDIR cannot be read"),
        ("texts", "FROM debian\nCOPY <<a <<b /x/\n1\na\n2\nb", "several documents in"),
    )  # fmt: skip
    def test_a_dockerfile_that_cannot_be_done(self, text, told):
        self.assertIn(told, self.refusal({"environment/Dockerfile": text + "\n"}))

    @parameterized.named_parameters(
        (
            "health",
            '[environment.healthcheck]\ncommand = "x"',
            "healthcheck = ...: this",
        ),
        ("image", '[environment]\ndocker_image = "x"', "there are no images here"),
        ("devices", "[environment]\ngpus = 1", "gpus = 1: this is not done here"),
        ("secret", '[verifier.env]\nK = "${API_KEY}"', "env needs API_KEY"),
        ("apart", '[verifier]\nenvironment_mode = "separate"', "in its own box"),
        ("user", '[agent]\nuser = "me"', "a box has one user"),
        ("steps", '[[steps]]\nname = "a"', "several steps"),
        ("syntax", "[environment", "cannot be read"),
        ("section", "agent = 1", "agent must be a section"),
    )
    def test_settings_that_a_box_does_not_have(self, text, told):
        self.assertIn(told, self.refusal({"task.toml": text + "\n"}))

    @parameterized.named_parameters(
        ("no_tests", {"tests/test.sh": None}, "tests/test.sh, which is missing"),
        ("no_solution", {"solution/solve.sh": None}, "solution/solve.sh, which is"),
        ("no_dockerfile", {"environment/Dockerfile": None}, "Dockerfile"),
        (
            "tests_fetch",
            {"tests/test.sh": "set -e\ncurl -LsSf https://x.y/z | sh\nuvx pytest\n"},
            "the network, for tests/test.sh: `curl -LsSf`, `uvx pytest`",
        ),
        ("compose", {"environment/docker-compose.yaml": "x"}, "several containers"),
    )
    def test_files_that_are_missing_or_too_much(self, changes, told):
        self.assertIn(told, self.refusal(changes))

    def test_what_dockerignore_leaves_out_is_not_copied(self):
        ignored = {"environment/.dockerignore": "# notes\n**/*.csv\ntools/\n"}
        told = self.refusal(ignored)
        self.assertIn("data/*.csv is not in environment", told)
        kept = {"environment/.dockerignore": "*\n!data\n"}
        self.assertIn(".dockerignore has !data", self.refusal(kept))

    def test_links_out_of_the_folder_are_not_followed(self):
        root = self.write({"environment/data/items.csv": None})
        (root / "stock/environment/data/items.csv").parent.mkdir(exist_ok=True)
        (root / "stock/environment/data/items.csv").symlink_to("/etc/hosts")
        with self.assertRaisesRegex(config.InputError, "data/.*csv is not in environ"):
            environments.make(f"harbor:{root}")

    def test_all_reasons_are_told_at_once(self):
        told = self.refusal(
            {
                "task.toml": "[environment]\ngpus = 2\n",
                "environment/Dockerfile": "FROM alpine\nRUN wget x\nWORKDIR /app\n",
            }
        )
        for part in ("gpus = 2", "Dockerfile:1", "Dockerfile:2: `wget x`"):
            self.assertIn(part, told)

    def test_a_folder_among_others_is_left_out_and_named(self):
        root = self.write()
        self.write({"environment/Dockerfile": "FROM alpine\n"})
        (root / "bad").mkdir()
        (root / "bad" / "task.toml").write_text(TOML)
        with self.assertLogs(level="WARNING") as logged:
            made = environments.make(f"harbor:{root}")
        self.assertEqual([*made.by_id], ["stock"])
        self.assertIn("bad cannot be read", "".join(logged.output))
        with self.assertRaisesRegex(config.InputError, "has a task.toml"):
            environments.make(f"harbor:{root / 'nowhere'}")


class CopyTest(FolderTest):
    @parameterized.named_parameters(
        ("here", "WORKDIR /app\nCOPY data/items.csv .", "/app/items.csv"),
        ("workdir", "WORKDIR /app\nCOPY data/items.csv /app", "/app/items.csv"),
        ("above", "WORKDIR /app/a\nCOPY data/items.csv ..", "/app/items.csv"),
        ("copied", "COPY tools /x/y\nCOPY data/items.csv /x", "/x/items.csv"),
        ("made", "RUN mkdir -p /x/y\nCOPY data/items.csv /x/y", "/x/y/items.csv"),
        ("base", "COPY data/items.csv /srv", "/srv/items.csv"),
        ("dot", "COPY data/items.csv /x/.", "/x/items.csv"),
        ("new", "WORKDIR /app\nCOPY data/items.csv items", "/app/items"),
        ("document", "WORKDIR /app\nCOPY <<EOF .\n1\nEOF", "/app/EOF"),
    )
    def test_a_folder_that_is_there_gets_the_file(self, steps, path):
        """As with Docker, also where the target does not end with a slash."""
        file = self.write({"environment/Dockerfile": f"FROM debian\n{steps}\n"})
        build = dockerfile.read(file / "stock/environment/Dockerfile")
        self.assertEqual([*build.steps[-1].files], [path])
        self.assertEmpty(build.refusals)

    @parameterized.parameters(
        ('python3 -c "print(1 << n)"',),
        ("cat <<< hello > x",),
        ("cat <<<hello > x",),
        ("echo $((1<<n)) $((1 << n))",),
        ("echo '<<EOF' \\<<EOF",),
    )
    def test_what_is_no_document_has_no_lines(self, command):
        text = f"FROM debian\nWORKDIR /app\nRUN {command}\nCOPY tools .\n"
        file = self.write({"environment/Dockerfile": text})
        build = dockerfile.read(file / "stock/environment/Dockerfile")
        self.assertEqual(build.steps[1].command, command)
        self.assertEqual([*build.steps[2].files], ["/app/count"])

    @parameterized.parameters(
        ("RUN <<EOF\n  a\nb\nEOF", "  a\nb"),
        ("RUN cat > x <<-'E.O' && c\na\nE.O", "cat > x <<-'E.O' && c\na\nE.O"),
        ("RUN cat 'a' <<A 3<<\"B\"\na\nA\nb\nB", "cat 'a' <<A 3<<\"B\"\na\nA\nb\nB"),
    )
    def test_documents_go_to_their_ends(self, step, command):
        text = f"FROM debian\nWORKDIR /app\n{step}\nCOPY tools .\n"
        file = self.write({"environment/Dockerfile": text})
        build = dockerfile.read(file / "stock/environment/Dockerfile")
        self.assertEqual(build.steps[1].command, command)
        self.assertLen(build.steps, 3)

    def test_a_document_without_an_end_is_refused(self):
        text = "FROM debian\nWORKDIR /app\nRUN cat <<EOF > x\na\nEOF2\nRUN true\n"
        told = self.refusal({"environment/Dockerfile": text})
        self.assertIn("Dockerfile:3: the document's last line, EOF, is missing", told)


class CommandsTest(absltest.TestCase):
    def test_what_the_machine_has_is_left_out(self):
        judged = commands.judge("apt-get update && pip install -U 'a[b]>=1,<2'; make x")
        self.assertEqual((judged.reasons, judged.modules), ((), ("a[b]>=1,<2",)))
        self.assertEqual(
            [part.strip() for part in judged.text.replace("&&", ";").split(";")],
            ["true", "true", "make x"],
        )

    def test_words_in_quotes_are_no_commands(self):
        for text in (
            "echo 'a; curl b; c'",
            'echo "x; wget y | z"',
            "grep -c 'wget x' log",
            "git log | head",
        ):
            self.assertEqual(commands.judge(text), commands.Judged(text))

    def test_a_server_on_the_machine_is_no_network(self):
        self.assertEmpty(commands.needs_network("curl -s http://localhost:80/\n"))
        self.assertEqual(
            commands.needs_network("if true; then A=1 wget http://x; fi\n"),
            ("wget http://x",),
        )


class ModulesTest(FolderTest):
    """pip itself, which finds one wheel and no network."""

    def setUp(self):
        super().setUp()
        wheels = pathlib.Path(self.create_tempdir().full_path)
        about = "Metadata-Version: 2.1\nName: tiny\nVersion: 1.2\n"
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        with zipfile.ZipFile(wheels / "tiny-1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny.py", "def main():\n    print('hello')\n")
            wheel.writestr("tiny-1.2.dist-info/METADATA", about)
            wheel.writestr("tiny-1.2.dist-info/WHEEL", tag)
            scripts = "[console_scripts]\ntiny = tiny:main\n"
            wheel.writestr("tiny-1.2.dist-info/entry_points.txt", scripts)
            wheel.writestr("tiny-1.2.dist-info/RECORD", "")
        environ = {
            "HOME": self.create_tempdir().full_path,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
        }
        self.enter_context(mock.patch.dict(os.environ, environ))

    def dockerfile(self, requirement):
        text = f"FROM debian\nWORKDIR /app\nRUN pip install {requirement} && tiny > a\n"
        return {"environment/Dockerfile": text}

    @unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
    def test_a_module_that_pip_installs_is_in_the_box(self):
        made = environments.make(f"harbor:{self.write(self.dockerfile('tiny==1.2'))}")
        task = made.task_of(made.by_id["stock"])
        look = tool_calls.turn("shell", command="cat a; python3 -c 'import tiny'; tiny")
        (result,) = episodes.play(made, task, look)
        self.assertEqual(result.messages[0]["content"], "hello\nhello")

    def test_a_module_that_there_is_not_is_refused(self):
        told = self.refusal(self.dockerfile("tiny==1.3"))
        self.assertIn("pip cannot install tiny==1.3 for /usr/bin/python3", told)


@unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
class EpisodeTest(FolderTest):
    def proof(self, changes=None, num_repeats=1):
        made = environments.make(f"harbor:{self.write(changes)}")
        task = made.task_of(made.by_id["stock"])
        return asyncio.run(proofs.prove(made, task, num_repeats))

    def play(self, changes, *turns):
        made = environments.make(f"harbor:{self.write(changes)}")
        return episodes.play(made, made.task_of(made.by_id["stock"]), *turns)

    def shell(self, command):
        return tool_calls.turn("shell", command=command)

    def test_a_folder_is_proven(self):
        """The solution, a wrong one of the folder's, the cheats and nothing."""
        proof = self.proof(num_repeats=2)
        self.assertEmpty(proof.failures)
        self.assertEqual(proof.num_episodes, 2 + 1 + 5 + 1)
        self.assertEqual(proof.tag, "files")

    def test_the_build_is_what_docker_makes(self):
        look = (
            "pwd; echo $ROOT $SEPARATOR $HOME; cat $ROOT/limits sorted.csv count; "
            "stat -c '%a %n' tools/count items.csv; ls -A / /work | tr '\\n' ' '"
        )
        (said,) = self.play(None, self.shell(look))[0].messages
        lines = said["content"].split("\n")
        self.assertEqual(lines[:3], ["/app", "/srv/stock ; /root", "10"])
        self.assertEqual(lines[3:6], ["a;3", "b;2", "2"])
        self.assertEqual(lines[6:8], ["755 tools/count", "644 items.csv"])
        self.assertNotIn(".build", lines[8])

    def test_a_shell_that_ended_is_followed_by_one_like_it(self):
        results = self.play(None, self.shell("exit 3"), self.shell("pwd; echo $ROOT"))
        self.assertEqual(results[1].messages[0]["content"], "/app\n/srv/stock")

    def test_a_build_in_work_does_not_see_the_files_to_come(self):
        text = "FROM debian\nWORKDIR /work\nRUN ls -A > names\nCOPY data /work/data\n"
        look = self.shell("ls -A; cat names; ls -A /logs")
        (result,) = self.play({"environment/Dockerfile": text}, look)
        wanted = "data\nnames\nnames\nagent\nartifacts\nverifier"
        self.assertEqual(result.messages[0]["content"], wanted)

    def test_a_command_does_not_answer_in_the_place_of_the_tests(self):
        """Where shell and holder share a socket, and where the shell has two pipes."""
        cheat = """
in=10 out=11; [ -S /proc/$$/fd/10 ] && out=10; number=$out; said='done 0'
[ $out = 10 ] && said=ended; printf "$said\\n" >&$out
while IFS= read -r line <&$in; do
  case $line in
  start) continue ;;
  *base64*reward.json*) printf 'done 1\\n' >&$out; continue ;;
  *base64*reward.txt*) echo MQ== ;;
  esac
  if [ $number = 10 ]; then printf 'ended\\n' >&$out; else printf 'done 0\\n' >&$out; fi
  number=0
done"""
        *_, last = self.play(None, self.shell(cheat), tool_calls.turn("submit"))
        self.assertEqual(last.reward.total, 0.0)

    def test_a_search_for_leaks_that_takes_too_long_is_no_search(self):
        made = environments.make(f"harbor:{self.write()}")
        task = made.task_of(made.by_id["stock"])

        async def look():
            env = made.environment()
            try:
                await env.reset(task)
                await env.box.run("find() { sleep 100; }")
                episodes.hurry(env.box, 1.0)
                return await made.leaks(env, task)
            finally:
                await env.close()

        with self.assertRaises(TimeoutError):
            asyncio.run(look())

    def test_programs_that_an_agent_plants_do_not_answer_for_the_tests(self):
        """A folder of PATH is the agent's, who may have programs in it at any time."""
        text = "FROM debian\nENV PATH=/opt/bin:$PATH\nWORKDIR /app\n"
        text += "RUN mkdir -p /opt/bin\n"
        planted = self.shell(
            "cd /opt/bin; for name in find chmod mkdir dirname; do printf '#!/bin/sh\\n"
            "exit 0' > $name; done; printf '#!/bin/sh\\necho MQ==' > base64; chmod +x *"
        )
        kept = "#!/bin/sh\necho 0 > /logs/verifier/reward.txt\n"
        changes = {"environment/Dockerfile": text, "tests/test.sh": kept}
        *_, last = self.play(changes, planted, tool_calls.turn("submit"))
        self.assertEqual((last.reward.total, last.info.get("problem")), (0.0, None))

    def test_a_process_of_the_tests_does_not_answer_for_them(self):
        test = "#!/bin/bash\necho 0 > /logs/verifier/reward.txt\n/app/own &\nsleep 1\n"
        lines = (
            "#!/bin/bash",
            "exec 8>/proc/1/fd/1 9>/proc/1/fd/11",  # of the shell
            "while :; do echo MQ== >&8; echo done 0 >&9; sleep .001; done",
        )
        words = " ".join(f"'{line}'" for line in lines)
        plant = self.shell(f"printf '%s\\n' {words} > own; chmod +x own")
        *_, last = self.play({"tests/test.sh": test}, plant, tool_calls.turn("submit"))
        self.assertEqual((last.reward.total, last.info.get("problem")), (0.0, None))

    @parameterized.named_parameters(
        (
            "json",
            'echo \'{"reward": 0.5, "tidy": 1}\' > /logs/verifier/reward.json',
            0.5,
            {"reward": 0.5, "tidy": 1.0},
            "",
        ),
        ("text", "echo 0.25 > /logs/verifier/reward.txt", 0.25, {"reward": 0.25}, ""),
        ("none", "true", 0.0, {}, "write neither"),
        ("no_number", "echo nan > /logs/verifier/reward.txt", 0.0, {}, "finite"),
        ("two", "echo '{\"a\": 1, \"b\": 1}' > /logs/verifier/reward.json", 0.0,
         {}, "no `reward` among a, b"),
    )  # fmt: skip
    def test_rewards(self, script, total, parts, problem):
        test = f"#!/bin/bash\n{script}\necho said\n"
        (result,) = self.play({"tests/test.sh": test}, tool_calls.turn("submit"))
        self.assertTrue(result.terminated)
        self.assertEqual(result.reward.total, total)
        self.assertEqual(result.info["output"], "said")
        self.assertIn(problem, result.info.get("problem", ""))
        self.assertEqual(result.reward.parts, {} if problem else parts)

    @parameterized.named_parameters(
        (
            "solution",
            {"solution/sum.sh": "#!/bin/sh\necho 14\n"},
            "the solution, run 1 earns 0.0",
        ),
        (
            "tests_and_a_leak",
            {
                "tests/check.sh": "#!/bin/sh\n[ -e /app/total ]\n",
                "environment/tools/sum": FILES["solution/sum.sh"],
            },
            "wrong attempt 1 earns 1.0",
            "an agent can read /app/tools/sum",
        ),
        (
            "planted",
            {"tests/test.sh": "cd /app; python3 -m unittest && echo 1 "
             "> /logs/verifier/reward.txt\n"},
            "wrong attempt 5 earns 1.0",
        ),
        (
            "build",
            {"environment/Dockerfile": "FROM debian\nWORKDIR /app\nRUN false\n"},
            "RuntimeError: the Dockerfile's RUN false",
        ),
        (
            "lost",
            {"environment/Dockerfile": "FROM debian\nWORKDIR /app\nRUN cd / && "
             "touch afile\n"},
            "leaves /afile, which a box does not keep",
        ),
    )  # fmt: skip
    def test_what_is_wrong_with_a_task_is_said(self, changes, *told):
        failures = "; ".join(self.proof(changes).failures)
        for words in told:
            self.assertIn(words, failures)

    def test_an_exported_task_is_read_and_proven(self):
        """Its checks, near misses and setup are those of the family."""
        out = pathlib.Path(self.create_tempdir().full_path) / "tasks"
        validate.export("terminal:git_revert", "train", 0, 1, out)
        made = environments.make(f"harbor:{out}")
        ((name, read),) = made.by_id.items()
        self.assertStartsWith(name, "git_revert_")
        self.assertGreaterEqual(len(read.wrong), 3)
        proof = asyncio.run(proofs.prove(made, made.task_of(read), 1))
        self.assertEmpty(proof.failures)
        (result,) = episodes.play(made, made.task_of(read), tool_calls.turn("submit"))
        self.assertRegex(result.info["output"], "check 1 fails: it must print .*, and ")


if __name__ == "__main__":
    environment.main()
