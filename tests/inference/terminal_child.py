"""A conversation with the scripted model; as a program, in a terminal of its own."""

import fcntl
import json
import sys
import termios
import time

from glm5_jax.data.chat import templates
from glm5_jax.inference import conversation, engine, terminal
from tests.serving import scripted

SLOW, SECONDS = "slow", 120  # a message, and how long its answer stops after a thought


def make_conversation(**settings):
    """Returns a conversation whose greedy answers are known."""
    made = engine.Engine(
        scripted.params(),
        scripted.MODEL,
        num_slots=1,
        capacity=scripted.CAPACITY,
        chunk=16,
        num_steps=2,
    )
    used = {
        "stop_ids": frozenset([scripted.TOKENIZER.eos_id]),
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 0,
    }
    return conversation.Conversation(
        made,
        templates.Template(scripted.TOKENIZER),
        conversation.Settings(**used | settings),
    )


class _Slow(conversation.Conversation):
    """Answers one message without an end, so that there is time to interrupt."""

    def answer(self, text, on_event, is_stopped=lambda: False):
        shown = []

        def show(event):
            on_event(event)
            shown.append(event.text)

        def wait():
            is_slow = text == SLOW and "So" in "".join(shown)
            deadline = time.monotonic() + SECONDS * is_slow
            while not is_stopped() and time.monotonic() < deadline:
                time.sleep(0.01)
            return is_stopped()

        return super().answer(text, show, wait)


def main():
    """Runs the terminal; tells at the end what was said."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that ctrl-C reaches this process
    made = make_conversation()
    made.__class__ = _Slow
    terminal.Terminal(made).run()
    said = [m["content"] for m in made.messages if m["role"] == "user"]
    sys.stdout.write(f"messages: {json.dumps(said)}\n")


if __name__ == "__main__":
    main()
