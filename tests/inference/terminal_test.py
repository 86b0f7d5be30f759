"""Conversations in a terminal: a real one through a pty, and programs' pipes."""

import contextlib
import io
import json
import os
import pathlib
import pty
import re
import select
import subprocess
import sys
import time
from unittest import mock

from absl import flags
from absl.testing import absltest, parameterized

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.data.chat import parsing
from glm5_jax.inference import commands, conversation, terminal
from tests import environment
from tests.inference import terminal_child
from tests.serving import scripted

CHILD = pathlib.Path(terminal_child.__file__)
SECONDS = 120


def make(**settings):
    return terminal_child.make_conversation(**settings)


def converse(lines, made=None):
    """Returns what a program that sends lines gets."""
    sink = io.StringIO()
    terminal.Terminal(made or make(), io.StringIO(lines), sink).run()
    return sink.getvalue()


class PipeTest(parameterized.TestCase):
    def test_each_line_is_a_message_and_only_contents_come_back(self):
        self.assertEqual(converse("Hi\n\nHo\r\n"), "Hé!\nHé!\n")

    def test_the_conversation_is_remembered_and_reset(self):
        made = make()
        converse("Hi\nHo\n", made)
        roles = [message["role"] for message in made.messages]
        self.assertEqual(roles, ["user", "assistant"] * 2)
        answer = {"role": "assistant", "reasoning_content": "So", "content": "Hé!"}
        self.assertEqual(made.messages[1], answer)
        converse("/reset\n", made)
        self.assertEmpty(made.messages)

    def test_thinking_is_switched(self):
        made = make()
        self.assertEqual(converse("/think off\nHi\n", made), "Hé!\n")
        self.assertEqual(made.messages[1]["reasoning_content"], "")
        converse("/think on\nHi\n", made)
        self.assertEqual(made.messages[3]["reasoning_content"], "So")

    def test_other_commands(self):
        notes = io.StringIO()
        with contextlib.redirect_stderr(notes):
            self.assertEqual(converse("/what\n/exit\nHi\n"), "")
        self.assertIn("/what is no command", notes.getvalue())
        self.assertIn("/reset", notes.getvalue())

    def test_a_full_conversation_says_so_and_goes_on_after_reset(self):
        made, notes = make(), io.StringIO()
        long = "x" * scripted.CAPACITY
        with contextlib.redirect_stderr(notes):
            self.assertEqual(converse(f"{long}\n/reset\nHi\n", made), "Hé!\n")
        self.assertIn("begin a new one with /reset", notes.getvalue())

    def test_a_failing_engine_leaves_the_messages(self):
        made = make()
        with (
            mock.patch.object(made._engine, "step", side_effect=RuntimeError("lost")),
            self.assertRaisesRegex(RuntimeError, "lost"),
        ):
            made.answer("Hi", lambda event: None)
        self.assertEmpty(made.messages)
        self.assertEqual(made._engine.num_pending, 0)
        made.answer("Hi", lambda event: None)
        self.assertEqual(made.messages[1]["content"], "Hé!")

    def test_an_answer_is_cut_off(self):
        made, began = make(max_new_tokens=5), time.perf_counter()
        outcome = made.answer("Hi", lambda event: None)
        self.assertEqual((outcome.num_tokens, outcome.is_cut), (5, True))
        self.assertFalse(outcome.is_stopped)
        self.assertBetween(outcome.seconds, 1e-6, time.perf_counter() - began)
        # It ends within a letter of two bytes, whose half is told at the end.
        self.assertEqual(made.messages[1]["content"], "H\ufffd")
        with self.assertRaises(config_lib.InputError):
            made.answer("x" * scripted.CAPACITY, lambda event: None)

    def test_an_answer_is_stopped(self):
        made, said = make(), []
        outcome = made.answer("Hi", said.append, lambda: bool(said))
        self.assertEqual((outcome.is_stopped, outcome.is_cut), (True, False))
        self.assertEqual(made._engine.num_pending, 0)

    def test_the_last_room_is_used(self):
        """A prompt may leave room for a single token."""
        made = make()
        made.answer("Hi", lambda event: None)
        prompt = made._template.render(
            [{"role": "user", "content": "x"}], add_generation_prompt=True
        )
        long = "x" * (scripted.CAPACITY - len(prompt.tokens))
        made.reset()
        self.assertEqual(made.answer(long, lambda event: None).num_tokens, 1)
        made.reset()
        with self.assertRaises(config_lib.InputError):
            made.answer(f"{long}x", lambda event: None)


class Screen(io.StringIO):
    """A terminal's screen, on which only what was flushed can be seen."""

    def __init__(self):
        super().__init__()
        self.seen = ""

    def isatty(self):
        return True

    def flush(self):
        super().flush()
        self.seen = self.getvalue()


class Keys(io.StringIO):
    """What a user types; `pastes` counts the lines that follow at once."""

    def __init__(self, *lines):
        super().__init__()
        self.lines, self.prompts = list(lines), []

    def isatty(self):
        return True

    def input(self, prompt=""):
        self.prompts.append(prompt)
        line = self.lines.pop(0) if self.lines else EOFError
        if isinstance(line, type):
            raise line
        return line.removesuffix("+")

    def select(self, reads, writes, others, seconds):
        """Tells whether a line that ends with + was read, whose paste goes on."""
        self.seconds = seconds
        return ([self] if self.pasting else [], [], [])


class Said(conversation.Conversation):
    """A conversation with given answers: events, and an outcome or an error."""

    def __init__(self, *answers):
        self.answers, self.heard = list(answers), []
        self.is_thinking = True

    def answer(self, text, on_event, is_stopped=lambda: False):
        self.heard.append(text)
        events, outcome = self.answers.pop(0)
        for event in events:
            on_event(event)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class ScreenTest(parameterized.TestCase):
    """What a terminal shows, to the last character."""

    def shown(self, keys, said):
        screen = Screen()
        pasted = [line.endswith("+") for line in keys.lines if isinstance(line, str)]

        def read(prompt=""):
            line = keys.input(prompt)
            keys.pasting = pasted.pop(0) if pasted else False
            return line

        keys.pasting = False
        with (
            mock.patch("builtins.input", read),
            mock.patch.object(terminal.select, "select", keys.select),
        ):
            terminal.Terminal(said, keys, screen).run()
        self.assertEqual(screen.seen, screen.getvalue())
        return screen.seen

    def outcome(self, **changes):
        fields = {"num_tokens": 6, "seconds": 0.5, "is_cut": False, "is_stopped": False}
        return conversation.Outcome(**fields | changes)

    def test_thought_content_and_calls(self):
        events = [
            parsing.Reasoning("So "),
            parsing.Reasoning("it is."),
            parsing.Content("Hé"),
            parsing.Content("!"),
            parsing.Call("f", {"k": "é"}),
        ]
        keys = Keys("Hi")
        shown = self.shown(keys, Said((events, self.outcome())))
        thought = "\x1b[2mSo it is.\x1b[0m\n"
        call = '\nf({"k": "é"})'
        figures = "\n\x1b[2m[6 tokens, 12 a second]\x1b[0m\n"
        self.assertEqual(shown, f"{thought}Hé!{call}{figures}\n")
        self.assertEqual(keys.prompts, ["> ", "> "])
        self.assertEqual(keys.seconds, 0.05)

    @parameterized.parameters(
        ({"is_stopped": True}, ", stopped"),
        ({"is_cut": True}, ", cut off: no room is left"),
        ({"is_cut": True, "is_stopped": True}, ", cut off: no room is left"),
        ({"seconds": 0.0, "num_tokens": 0}, ""),
    )
    def test_ends(self, changes, why):
        """A thought alone is left, so that what follows is not dim."""
        said = Said(([parsing.Reasoning("So")], self.outcome(**changes)))
        shown = self.shown(Keys("Hi"), said)
        self.assertStartsWith(shown, "\x1b[2mSo\x1b[0m\n\n\x1b[2m[")
        self.assertIn(f" a second{why}]", shown)

    def test_pasted_lines_are_one_message(self):
        said = Said(*[([], self.outcome())] * 2)
        self.shown(Keys("one+", "two+", "three", "", "  ", "four+"), said)
        self.assertEqual(said.heard, ["one\ntwo\nthree", "four"])

    def test_interrupts_drop_a_line(self):
        said = Said(([], self.outcome()))
        shown = self.shown(Keys(KeyboardInterrupt, "Hi"), said)
        self.assertStartsWith(shown, "\n")
        self.assertEqual(said.heard, ["Hi"])

    def test_two_answers_and_an_error(self):
        thought = [parsing.Reasoning("So"), parsing.Content("Hé")]
        error = config_lib.InputError("No room.")
        said = Said((thought, self.outcome()), ([], error), (thought, self.outcome()))
        notes = Screen()
        with contextlib.redirect_stderr(notes):
            shown = self.shown(Keys("1", "2", "3"), said)
        self.assertEqual(shown.count("\x1b[2mSo\x1b[0m\nHé"), 2)
        self.assertEqual(notes.seen, "No room.\n")

    @parameterized.parameters("/exit", "/quit")
    def test_commands(self, end):
        said, notes = Said(), Screen()
        with contextlib.redirect_stderr(notes):
            self.shown(Keys("/think off", "/help", "/think maybe", end, "Hi"), said)
        self.assertFalse(said.is_thinking)
        wanted = f"{terminal.HELP}/think is no command.\n{terminal.HELP}"
        self.assertEqual(notes.seen, wanted)
        self.assertEmpty(said.heard)


class ConversationTest(absltest.TestCase):
    def test_a_request(self):
        """Of the second answer; the settings' stop ids add to the template's."""
        made = make(stop_ids=frozenset([7]), temperature=0.5, top_p=0.9, seed=11)
        made.answer("Hi", lambda event: None)
        submit = made._engine.submit
        with mock.patch.object(made._engine, "submit", wraps=submit) as submitted:
            made.answer("Hi", lambda event: None)
        (request,) = submitted.call_args.args
        special = scripted.TOKENIZER.special_ids
        names = ("<|user|>", "<|observation|>", "<|endoftext|>")
        self.assertEqual(request.stop_ids, {7, *(special[name] for name in names)})
        self.assertEqual((request.id, request.seed), (2, 12))
        self.assertEqual((request.temperature, request.top_p), (0.5, 0.9))
        room = scripted.CAPACITY - len(request.prompt)
        self.assertEqual(request.max_new_tokens, room)


class CommandTest(parameterized.TestCase):
    def test_a_folder_with_its_template_and_defaults(self):
        path = CHILD.parents[1] / "golden" / "chat_model"
        sampling = commands.Sampling(top_p=0.5, seed=3)
        with mock.patch.object(terminal, "Terminal") as started:
            commands.converse(str(path), (), "glm5.1", sampling)
        (talk,) = started.call_args.args
        started.return_value.run.assert_called_once()
        self.assertEqual(talk._template.version, "glm5.1")
        self.assertEqual(talk._settings.temperature, 0.7)  # generation_config.json
        self.assertEqual((talk._settings.top_p, talk._settings.seed), (0.5, 3))
        self.assertIsNone(talk._settings.max_new_tokens)
        self.assertEqual(talk._engine.num_free_slots, 1)  # for one conversation

    @parameterized.parameters(
        ([], None), (["--chat"], "auto"), (["--chat=glm5.1"], "glm5.1")
    )
    def test_the_flag_needs_no_value(self, given, value):
        values = flags.FlagValues()
        flag = command_line.OptionalEnum("chat", ["auto", "glm5.1"], "Help.")
        flags.DEFINE_flag(flag, values)
        values(["program", *given])
        self.assertEqual(values.chat, value)
        with self.assertRaises(flags.IllegalFlagValueError):
            values(["program", "--chat=other"])


class PtyTest(parameterized.TestCase):
    """One real terminal, whose user types, pastes and interrupts."""

    def setUp(self):
        super().setUp()
        self.user, far = pty.openpty()
        root = CHILD.parents[2]
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.inference.terminal_child"],
            stdin=far,
            stdout=far,
            stderr=subprocess.DEVNULL,
            cwd=root,
            env={**os.environ, "TERM": "xterm"},
            start_new_session=True,
        )
        os.close(far)
        self.addCleanup(os.close, self.user)
        self.addCleanup(self.child.wait)
        self.addCleanup(self.child.kill)
        self.screen = ""

    def wait_for(self, pattern):
        """Reads until the screen shows a pattern; returns the text up to there."""
        deadline = time.monotonic() + SECONDS
        while not (found := re.search(pattern, self.screen, re.S)):
            self.assertLess(time.monotonic(), deadline, self.screen)
            if select.select([self.user], [], [], 0.1)[0]:
                self.screen += os.read(self.user, 4096).decode()
        text, self.screen = self.screen[: found.end()], self.screen[found.end() :]
        return text

    def say(self, text):
        os.write(self.user, text.encode())

    def interrupt(self):
        """Presses ctrl-C until something is shown, as a user does.

        CPython loses a ctrl-C at its prompt that comes just before it waits for input:
        readline has read the last key, and `select` has not begun.
        """
        for _ in range(SECONDS):
            self.say("\x03")
            if select.select([self.user], [], [], 1.0)[0]:
                return

    def test_a_user(self):
        self.wait_for("> ")
        self.say("Hi\r")
        shown = self.wait_for(r"> $")
        self.assertIn("\x1b[2mSo\x1b[0m\r\nHé!", shown)  # the thought is dim
        self.assertRegex(shown, r"\[8 tokens, \d+ a second\]")
        self.say("\x1b[200~one\ntwo\x1b[201~\r")  # pasted
        self.wait_for(r"Hé!.*> $")
        self.say("three\nfour\n")  # pasted in a terminal that does not tell
        self.wait_for(r"Hé!.*> $")
        self.say("/think off\r")
        self.wait_for(r"> $")
        self.say("\x1b[A" * 5 + "Ho\r")  # the first line, edited
        self.assertNotIn("So", self.wait_for(r"Hé!.*> $"))
        self.say("/think on\r")
        self.wait_for(r"> $")
        self.say("slow\r")
        self.wait_for("So")
        self.say("\x03")  # ctrl-C stops the answer, not the program
        self.wait_for(r"stopped\].*> $")
        self.say("half a line")
        self.wait_for("half a line")
        self.interrupt()
        self.wait_for(r"> $")
        self.say("\x04")
        self.wait_for("messages: ")
        said = json.loads(self.wait_for(r"\n"))
        self.assertEqual(said, ["Hi", "one\ntwo", "three\nfour", "HiHo", "slow"])
        self.assertEqual(self.child.wait(SECONDS), 0)


if __name__ == "__main__":
    environment.main()
