"""Conversations on disk to batches: trained tokens, truncation, refused input."""

import dataclasses
import gzip
import itertools
import json
import pathlib
import re
import subprocess
import sys
from unittest import mock

import numpy as np
from absl.testing import parameterized

from glm5_jax import config, environments, messages
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import conversations, templates, view
from glm5_jax.data.rows import sft
from glm5_jax.environments import protocol
from glm5_jax.environments.tasks import problems
from tests import environment

ROOT = pathlib.Path(__file__).parent.parent.parent
CALL = {"function": {"name": "add", "arguments": '{"x": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **rest):
    return {"role": "assistant", "content": text, **rest}


def make_conversation(i):
    turns = [user(f"What is {i} + 1?"), assistant("", tool_calls=[CALL])]
    turns += [{"role": "tool", "content": f"{i + 1}"}, assistant(f"It is {i + 1}.")]
    if i % 3 == 0:
        turns += [user("Thanks"), assistant("Bye." * (i % 7), is_masked=i % 2 == 0)]
    return {"messages": turns, "tools": TOOLS}


class Endless:
    """Tasks without end, each with its own demonstration."""

    def task(self, split, seed, index):
        asked = user(f"{split} {seed} {index}")
        return protocol.Task(str(index), (asked,))

    def demonstration(self, task):
        return (*task.messages, assistant("a"))


class ConversationsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.file = pathlib.Path(self.create_tempdir().full_path) / "a.jsonl"
        self.records = [make_conversation(i) for i in range(40)]
        self.write(self.records)
        self.data = config.DataConfig(
            source=str(self.file),
            tokenizer="byte_chat",
            sequence_length=700,
            batch_size=2,
            held_out_percent=20,
            cache_dir=self.create_tempdir().full_path,
            enable_thinking=False,
        )

    def write(self, records):
        lines = "".join(json.dumps(record) + "\n\n" for record in records)
        self.file.write_text(lines, encoding="utf-8")

    def make(self, seed=0, **changes):
        data = dataclasses.replace(self.data, **changes)
        return sft.make_pipeline(data, seed)

    def test_a_compressed_file_holds_the_same_conversations(self):
        found = conversations.read_conversations(str(self.file))
        packed = self.file.with_name("a.jsonl.gz")
        packed.write_bytes(gzip.compress(self.file.read_bytes()))
        self.file.unlink()
        for source in (packed, packed.parent):
            self.assertEqual(conversations.read_conversations(str(source)), found)

    def documents(self, batches):
        """Returns (ids with last target, trained positions) of each document."""
        found = []
        for batch in batches:
            for tokens, targets, mask, segments, positions in zip(
                *(
                    batch[key]
                    for key in (
                        *("tokens", "targets", "loss_mask"),
                        *("segment_ids", "positions"),
                    )
                ),
                strict=True,
            ):
                for segment in range(1, segments.max() + 1):
                    where = segments == segment
                    ids = [*tokens[where], targets[where][-1]]
                    self.assertEqual(ids[1:], targets[where].tolist())
                    np.testing.assert_array_equal(
                        positions[where], np.arange(where.sum())
                    )
                    trained = tuple(np.flatnonzero(mask[where]) + 1)
                    found.append((tuple(map(int, ids)), trained))
        return found

    def test_every_conversation_is_whole_and_on_one_side(self):
        pipeline = self.make()
        train = self.documents(itertools.islice(pipeline.train_iterator(), 40))
        held_out = self.documents(pipeline.eval_batches(100))
        self.assertEmpty(set(train) & set(held_out))
        template = templates.Template(pipeline.tokenizer, enable_thinking=False)
        expected = set()
        for record in self.records:
            rendered = template.render(record["messages"], record["tools"], end=True)
            trained = tuple(i for i, m in enumerate(rendered.mask) if m)
            expected.add((tuple(rendered.tokens), trained))
        self.assertEqual(set(train) | set(held_out), expected)
        self.assertLen(held_out, len(set(held_out)))

    def test_held_out_bytes_are_those_of_trained_text(self):
        pipeline = self.make()
        batches = list(pipeline.eval_batches(100))
        pieces = pipeline.tokenizer.pieces
        total = sum(
            len(pieces[ids[i]])
            for ids, trained in self.documents(batches)
            for i in trained
        )
        num_bytes = sum((b["num_bytes"] * b["loss_mask"]).sum() for b in batches)
        self.assertEqual(num_bytes, total)

    def test_batches_are_a_function_of_seed_and_step(self):
        first, second, other = self.make(1), self.make(1), self.make(2)
        for step in (0, 5):
            for key, value in first.train_batch(step).items():
                np.testing.assert_array_equal(value, second.train_batch(step)[key])
        (from_5,) = itertools.islice(second.train_iterator(5), 1)
        np.testing.assert_array_equal(from_5["tokens"], first.train_batch(5)["tokens"])
        self.assertEqual(first.fingerprint, second.fingerprint)
        # A new version invalidates every run; raise it only for a new order.
        self.assertIn("order_version=1", first.fingerprint.split())
        digests = "^corpus=[0-9a-f]{16} tokenizer=[0-9a-f]{16} "
        self.assertRegex(first.fingerprint, digests)
        self.assertNotEqual(first.fingerprint, other.fingerprint)
        for changes in ({"chat_template": "glm5.2"}, {"clear_thinking": False}):
            self.assertNotEqual(self.make(1, **changes).fingerprint, first.fingerprint)
        self.write(self.records[1:])
        self.assertNotEqual(self.make(1).fingerprint, first.fingerprint)

    def test_long_ones_are_cut_and_useless_ones_dropped(self):
        records = [make_conversation(i) for i in range(20)]
        for i in range(20):
            text = f"{i}" * 600
            records.append({"messages": [user(text), assistant("never seen")]})
            records.append({"messages": [user("Go"), assistant(text)]})
        self.write(records)
        with self.assertLogs("absl", "INFO") as logs:
            pipeline = self.make(sequence_length=500)
        log = "".join(logs.output)
        self.assertRegex(log, r"\d+ are cut to 500 tokens; \d+ have nothing to train")
        documents = self.documents(pipeline.eval_batches(100))
        self.assertEqual(max(len(ids) for ids, _ in documents), 501)
        self.assertTrue(all(trained for _, trained in documents))

    @parameterized.parameters(True, False)
    def test_only_a_terminal_shows_how_far_it_is(self, is_terminal):
        with (
            mock.patch.object(sys.stderr, "isatty", return_value=is_terminal),
            mock.patch.object(sys.stderr, "write") as written,
        ):
            self.make()
        shown = "".join(call.args[0] for call in written.call_args_list)
        self.assertEqual("render: 100%" in shown, is_terminal)

    def test_the_log_counts_what_is_cut_and_what_is_dropped(self):
        """A row of 20 tokens has no room for the first trained ones."""
        self.write([{"messages": [user("a" * n), assistant("bbb")]} for n in range(40)])
        with self.assertLogs("absl", "INFO") as logs:
            self.make(sequence_length=20)
        lines = [line for line in logs.output if "are cut to 20 tokens" in line]
        found = np.array([re.findall(r"\b\d+\b", line) for line in lines], int)
        numbers, num_cut, _, num_dropped = found.sum(0)
        # [gMASK] <sop> <|user|> a..a <|assistant|> </think> bbb <|endoftext|>: n + 9,
        # and n + 6 with the first b.
        self.assertEqual((numbers, num_cut, num_dropped), (40, 3, 24))

    def test_warns_where_the_prompt_asks_for_thoughts_that_are_not_there(self):
        with self.assertLogs(level="WARNING") as logs:
            self.make(enable_thinking=True)
        self.assertIn("data.enable_thinking=True", logs.output[0])
        thoughtful = assistant("a", reasoning_content="b")
        extra = [{"messages": [user(f"{i}"), thoughtful]} for i in range(9)]
        self.write(self.records + extra)
        with self.assertNoLogs(level="WARNING"):
            self.make(enable_thinking=True)

    def test_a_bpe_with_special_tokens_is_trained(self):
        pipeline = self.make(tokenizer="bpe_chat", bpe_vocab_size=340)
        self.assertLen(
            pipeline.tokenizer.special_ids, len(tokenizer_lib.SPECIAL_TOKENS)
        )
        self.assertLess(len(pipeline.tokenizer.encode(" What")), 4)
        self.assertIsNotNone(pipeline.template)

    @parameterized.parameters(
        ("{", "a.jsonl:3: this is not JSON"),
        ("[]", "a.jsonl:3: .*messages.* is missing; got list"),
        ('{"text": "a"}', r"messages\".* is missing; got \['text'\]"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [1]}', r"messages\[0\]: a message must be an object"),
        ('{"messages": [{"content": "a"}]}', r"messages\[0\]: role.*got None"),
        ('{"messages": [{"role": "bot"}]}', r"a.jsonl:3: messages\[0\].*got 'bot'"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "must be a string, or a"),
        (
            json.dumps({"messages": [user([{"type": "image_url"}])]}),
            "got a part {'type': 'image_url'}",
        ),
        (
            json.dumps({"messages": [assistant("a", thinking="b")]}),
            r"messages\[0\]: the key 'thinking' is not read.*'reasoning_content'",
        ),
        ('{"conversations": [{"from": "me", "value": "a"}]}', r"\[0\]: from must be"),
        ('{"conversations": [{"from": "human"}]}', r"conversations\[0\] must be"),
        ('{"conversations": [{"from": "human", "value": "a"}]}', "role 'assistant'"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "role 'assistant'"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON in Uni"),
        (
            json.dumps({"messages": [assistant("", tool_calls=[CALL])]}),
            r"tool 'add' is called but is not among the tools \(none\)",
        ),
        (
            json.dumps({"messages": [assistant("", tool_calls=["add"])]}),
            "a tool call must be",
        ),
        (
            json.dumps({"messages": [assistant("a", is_masked=1)]}),
            "is_masked must be true or false, got 1",
        ),
        ('{"messages": [{"role": "user"}], "tools": [{}]}', "function with a name"),
        ('{"messages": [{"role": "user"}], "tools": 3}', "tools must be a list"),
    )
    def test_bad_lines(self, line, error):
        first = json.dumps(make_conversation(0))
        self.file.write_text(f"{first}\n\n{line}\n{first}\n", encoding="utf-8")
        with self.assertRaisesRegex(config.InputError, error):
            self.make()

    def test_other_forms_are_the_same_conversation(self):
        turns = [user("What?"), assistant("So."), user("Why?"), assistant("Because.")]
        senders = {"user": "human", "assistant": "gpt"}
        parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "at?"}]
        shared = [{"from": senders[t["role"]], "value": t["content"]} for t in turns]
        system = {"role": "system", "content": "Be brief."}
        template = templates.Template(tokenizer_lib.named("byte_chat"))
        lines = [
            {"messages": [system, *turns]},
            {"messages": [system, user(parts), *turns[1:]]},
            {"conversations": shared, "system": "Be brief."},
            {"conversations": [{"from": "system", "value": "Be brief."}, *shared]},
        ]
        self.write(lines)
        found = conversations.read_conversations(str(self.file))
        rendered = [template.render(c.messages, c.tools, end=True) for c in found]
        self.assertLen(rendered, 4)
        self.assertLen({(tuple(r.tokens), tuple(r.mask)) for r in rendered}, 1)
        self.assertLen({conversation.text for conversation in found}, 1)

    def test_keys_that_are_not_read_are_named_once(self):
        self.write(
            {"messages": [user("a"), assistant("b", mood="good", refusal=None)]}
            for _ in range(3)
        )
        with self.assertLogs(level="WARNING") as logs:
            conversations.read_conversations(str(self.file))
        self.assertLen(logs.output, 1)
        self.assertRegex(logs.output[0], r"a\.jsonl:1: .* not read: mood\.")

    def test_bad_sources_and_settings(self):
        with self.assertRaisesRegex(config.InputError, "no task 'fly'"):
            self.make(source="tasks:fly")
        for source in ("nowhere", "python", str(self.file.parent / "no.jsonl")):
            with self.assertRaisesRegex(config.InputError, "holds no conversations"):
                self.make(source=source)
        with self.assertRaisesRegex(config.InputError, "lacks: .*<think>"):
            self.make(tokenizer="byte")
        self.write(self.records[:1] * 5)  # one document, so all on one side
        with self.assertRaisesRegex(config.InputError, "nothing for the .* side"):
            self.make()
        with self.assertRaisesRegex(config.InputError, r"0\.\.4: .* got 5"):
            conversations.pick(str(self.file), 5)

    @parameterized.parameters(*problems.names())
    def test_demonstrations_of_tasks_are_conversations(self, name):
        found = conversations.read_conversations(f"tasks:{name}")
        self.assertBetween(len(found), 10, 4096)
        self.assertLen({c.name for c in found}, len(found))
        asked = {c.messages[0]["content"] for c in found}
        for index in range(50):
            held_out = problems.problem(name, "held_out", 0, index)
            self.assertNotIn(held_out.messages[0]["content"], asked)
        for conversation in found[:50]:
            # A tool may be called even if the prompt does not describe it.
            tools = conversation.tools or (problems.CALC_TOOL,)
            messages.check(conversation.messages, tools)

    def test_demonstrations_of_a_mixture_keep_its_shares(self):
        parts = {"reverse:2-4": 2, "gcd:1": 1, "calculator_untold:2": 1}
        name = "+".join(f"{weight}*{part}" for part, weight in parts.items())
        found = conversations.read_conversations(f"tasks:{name}")
        self.assertLen(found, 4096)
        shown = [conversation.messages for conversation in found]
        kinds = {"reverse:2-4": "reverse ", "gcd:1": "gcd "}
        for part, word in kinds.items():
            asked = [m for m in shown if m[0]["content"].startswith(word)]
            self.assertLen(asked, parts[part] * 1024)  # though gcd:1 has few
            taskset = environments.make(part)
            self.assertEqual(
                asked[0],
                taskset.demonstration(taskset.task("train", 0, 0)),
            )
        calls = [m for m in shown if "*" in m[0]["content"]]
        self.assertLen(calls, 1024)
        self.assertLen(calls[0], 4)  # question, call, result, answer

    def test_a_conversation_may_have_one_token_more_than_a_row(self):
        """Its last token is only a target."""
        turns = [user("ab"), assistant("cd")]
        template = templates.make_template(
            self.data, tokenizer_lib.named(self.data.tokenizer)
        )
        whole = template.render(turns, (), end=True)
        size = len(whole.tokens)
        given = conversations.Conversation(turns)
        for length, want in ((size, size), (size - 1, size), (size - 2, size - 2)):
            tokens, mask, is_cut = conversations.render(given, template, length)
            self.assertEqual(tokens.tolist(), whole.tokens[:want])
            self.assertEqual(mask.tolist(), whole.mask[:want])
            self.assertEqual(is_cut, want < size)
        first = whole.mask.index(True)
        self.assertIsNone(conversations.render(given, template, first - 1))

    def test_an_own_task_shows_4096_training_problems_of_seed_0(self):
        found = conversations.read_conversations(f"tasks:{__name__}:Endless")
        texts = [c.messages[0]["content"] for c in found]
        self.assertEqual(texts, [f"train 0 {i}" for i in range(4096)])

    def test_a_folder_is_its_files(self):
        (self.file.parent / "b.jsonl").write_text(json.dumps(make_conversation(99)))
        (self.file.parent / "c.txt").write_text("no conversation")
        found = conversations.read_conversations(str(self.file.parent))
        self.assertLen(found, 41)
        for index in (0, 40):
            got = conversations.pick(str(self.file.parent), index)
            self.assertEqual(got, found[index])

    def test_equal_ones_have_one_name_in_any_order_of_their_keys(self):
        turn = assistant("a", tool_calls=[{"name": "é", "arguments": {"k": "ü"}}])
        given = conversations.Conversation([turn], [{"name": "é", "type": "ß"}])
        again = conversations.Conversation(
            [dict(reversed(turn.items()))], [{"type": "ß", "name": "é"}]
        )
        self.assertEqual(given.name, again.name)
        # A BPE trains on letters, not on their escapes.
        self.assertEqual(
            given.text.split("\n"),
            ['{"name": "é", "type": "ß"}', "a", "é", '{"k": "ü"}'],
        )


class ViewTest(parameterized.TestCase):
    def test_trained_and_special_tokens_are_told_apart(self):
        tokenizer = tokenizer_lib.named("byte_chat")
        template = templates.Template(tokenizer)
        said = [user("é\n\x1b[m"), assistant("b", reasoning_content="a")]
        rendered = template.render(said, end=True)
        plain = view.view(rendered, tokenizer, in_color=False, with_ids=False)
        self.assertEqual(
            plain,
            "  [gMASK]<sop><|user|>é\\n\\x1b[m<|assistant|><think>\n"
            "+ a</think>b<|endoftext|>",
        )
        color = view.view(rendered, tokenizer, in_color=True, with_ids=False)
        self.assertIn("é\n\\x1b[m\x1b[0m", color)  # data sends no escape codes
        self.assertIn("\x1b[32ma\x1b[0m\x1b[32m\x1b[1;4m</think>\x1b[0m", color)
        path = self.create_tempfile("a.jsonl", json.dumps({"messages": said}))
        command = [
            sys.executable,
            "-m",
            "glm5_jax.chat",
            f"--messages={path.full_path}",
        ]
        printed = subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        self.assertEqual(printed.stdout.decode(), plain + "\n")
        ids = view.view(rendered, tokenizer, in_color=False, with_ids=True)
        self.assertIn("<|user|>·263 ", ids)
        self.assertIn("+ a·97 ", ids)


if __name__ == "__main__":
    environment.main()
