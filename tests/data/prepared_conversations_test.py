"""Prepared conversations against the same ones read into memory."""

import dataclasses
import itertools
import json
import pathlib

import numpy as np
from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.data.chat import conversations
from glm5_jax.data.preparation import prepare, prepared
from glm5_jax.data.rows import sft
from glm5_jax.data.sources import documents as documents_lib
from tests import environment, runs
from tests.data import conversations_test, corpora

LENGTH = 700
NUM_FILES, NUM_LINES = 3, 20


def write(folder):
    folder.mkdir()
    for i in range(NUM_FILES):
        numbers = range(i * NUM_LINES, (i + 1) * NUM_LINES)
        records = map(conversations_test.make_conversation, numbers)
        lines = "".join(json.dumps(record) + "\n\n" for record in records)
        (folder / f"{i}.jsonl").write_text(lines)
    return folder


def packed(batches):
    """Returns the ids and trained positions of every document in the rows."""
    for batch in batches:
        for row in range(len(batch["tokens"])):
            segments = batch["segment_ids"][row]
            for segment in range(1, segments.max() + 1):
                where = segments == segment
                ids = *batch["tokens"][row][where], batch["targets"][row][where][-1]
                mask = batch["loss_mask"][row][where]
                yield tuple(map(int, ids)), tuple(map(int, np.flatnonzero(mask)))


class PreparedConversationsTest(runs.FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.source = write(cls.root / "corpus")
        cls.data = config.DataConfig(
            source=str(cls.source),
            tokenizer="byte_chat",
            sequence_length=LENGTH,
            batch_size=2,
            held_out_percent=20,
            cache_dir=str(cls.root / "cache"),
            enable_thinking=False,
        )
        cls.whole = cls.prepare(cls.root / "whole")

    @classmethod
    def prepare(cls, target, num_workers=1, **changes):
        defaults = {
            "kind": "conversations",
            "tokenizer": "byte_chat",
            "packing": "best_fit",
            "sequence_length": LENGTH,
            "enable_thinking": False,
            "shard_mib": 1.0,
        }
        changes = {"source": cls.source, **changes}
        settings = corpora.settings(**defaults | changes)
        cls.written = prepare.prepare(settings, target, num_workers)
        return target

    def target(self):
        return pathlib.Path(self.create_tempdir().full_path) / "target"

    def open(self, folder, **changes):
        changes = {"source": str(folder), **changes}
        data = dataclasses.replace(self.data, **changes)
        return prepared.make_pipeline(data, 3, "conversations")

    def online(self, **changes):
        return sft.make_pipeline(dataclasses.replace(self.data, **changes), 3)

    def epoch(self, pipe):
        """Returns more batches than one epoch has."""
        (epochs,) = pipe.epochs(1).values()
        return itertools.islice(pipe.train_iterator(), round(1 / epochs) + 1)

    def assert_same_documents(self, first, second):
        self.assertEqual(
            set(packed(self.epoch(first))), set(packed(self.epoch(second)))
        )
        sides = [list(packed(each.eval_batches(99))) for each in (first, second)]
        self.assertCountEqual(*sides)
        self.assertNotEmpty(sides[0])

    def test_a_part_has_the_batches_of_the_same_conversations_in_memory(self):
        """Compares two epochs bit for bit, masks and order included."""
        here, online = self.open(self.whole), self.online()
        ((_, epochs),) = here.epochs(1).items()
        for step in range(round(2 / epochs)):
            ours, theirs = here.train_batch(step), online.train_batch(step)
            self.assertEqual(ours.keys(), theirs.keys())
            for key, value in theirs.items():
                np.testing.assert_array_equal(ours[key], value, err_msg=key)
        self.assert_same_documents(here, online)
        self.assertEqual(here.template.stop_ids, online.template.stop_ids)
        self.assertFalse(here.template.enable_thinking)

    def test_many_parts_have_the_same_documents_and_masks(self):
        folder = self.prepare(self.target(), 2, shard_mib=corpora.SHARD_MIB)
        self.assertGreater(self.written["train"]["shards"], 5)
        self.assertEqual(self.written["documents"], NUM_FILES * NUM_LINES)
        self.assert_same_documents(self.open(folder), self.online())

    def test_long_ones_are_cut_and_empty_ones_dropped_alike(self):
        records = list(map(conversations_test.make_conversation, range(30)))
        for i in range(40):
            answer = conversations_test.assistant("yes " * i)
            records.append({"messages": [conversations_test.user(f"{i}?"), answer]})
        path = self.root / "lengths.jsonl"
        path.write_text("\n".join(map(json.dumps, records)))
        # All 30 have at least 438 tokens; the first 410 are not trained.
        for length, cut, dropped in ((450, 3, 0), (400, 0, 30), (100, 10, 30)):
            changes = {"source": str(path), "sequence_length": length}
            folder = self.prepare(self.target(), **changes)
            self.assertGreaterEqual(self.written["cut"], cut)
            self.assertEqual(self.written["dropped"], dropped)
            here = self.open(folder, sequence_length=length)
            self.assert_same_documents(here, self.online(**changes))

    def test_templates_decide_on_masks(self):
        changes = {"chat_template": "glm5.2", "enable_thinking": True}
        here = self.open(self.prepare(self.target(), **changes), **changes)
        self.assert_same_documents(here, self.online(**changes))

    def test_a_bpe_is_that_of_the_same_conversations_in_memory(self):
        changes = {"tokenizer": "bpe_chat", "bpe_vocab_size": 330}
        here = self.open(self.prepare(self.target(), **changes), **changes)
        online = self.online(**changes)
        self.assertEqual(here.tokenizer.digest, online.tokenizer.digest)
        self.assert_same_documents(here, online)

    def test_a_file_alone(self):
        source = self.source / "0.jsonl"
        folder = self.prepare(self.target(), source=str(source))
        self.assertEqual(self.written["documents"], NUM_LINES)
        self.assert_same_documents(self.open(folder), self.online(source=str(source)))

    def test_buckets_are_by_length(self):
        folder = self.prepare(self.target(), buckets=(450,))
        lengths = {
            name: [len(ids) - 1 for ids, _ in packed(self.epoch(self.open(path)))]
            for name, path in (
                ("short", folder / "up_to_450"),
                ("long", folder / "longer"),
            )
        }
        self.assertBetween(max(lengths["short"]), 1, 450)
        self.assertBetween(min(lengths["long"]), 451, LENGTH)

    def test_a_bad_line_is_named_and_mended(self):
        source = write(self.root / "mended")
        path = source / "1.jsonl"
        good = path.read_text()
        path.write_text(good.replace('"user"', '"bot"', 1))
        folder, mib = self.target(), corpora.SHARD_MIB
        message = r"1.jsonl:1: messages\[0\]: role must be .*'bot'"
        with self.assertRaisesRegex(config.InputError, message):
            self.prepare(folder, source=str(source), shard_mib=mib)
        self.assertNotEmpty(list(folder.glob("parts/*.json")))
        path.write_text(good)
        self.prepare(folder, source=str(source), shard_mib=mib)
        new = self.prepare(self.target(), source=str(source), shard_mib=mib)
        self.assertEqual(corpora.contents(folder), corpora.contents(new))

    def test_missing_thoughts_are_warned_of(self):
        with self.assertLogs(level="WARNING") as logs:
            self.prepare(self.target(), enable_thinking=True)
        self.assertIn("No turn has a thought", logs.output[0])
        with self.assertNoLogs(level="WARNING"):
            self.prepare(self.target())

    @parameterized.parameters(False, True)
    def test_a_thought_of_the_training_side_suffices(self, is_held_out):
        records = [conversations_test.make_conversation(i) for i in range(20)]
        thought = conversations_test.assistant("a", reasoning_content="b")
        turns = next(
            turns
            for i in itertools.count()
            if documents_lib.is_held_out(
                conversations.Conversation(
                    turns := [conversations_test.user(f"{i}"), thought]
                ).name,
                20,
            )
            == is_held_out
        )
        path = self.root / f"thoughts_{is_held_out}.jsonl"
        lines = map(json.dumps, [*records, {"messages": turns}])
        path.write_text("\n".join(lines))
        expected = self.assertLogs if is_held_out else self.assertNoLogs
        with expected(level="WARNING"):
            self.prepare(self.target(), source=str(path), enable_thinking=True)

    def test_stages_learn_from_their_kind_alone(self):
        data = dataclasses.replace(self.data, source=str(self.whole))
        message = "--kind=conversations, which only stage sft can use"
        with self.assertRaisesRegex(config.InputError, message):
            prepared.make_pipeline(data, 0)
        texts = corpora.write_jsonl(self.root / "texts")
        folder = corpora.make_prepared(
            texts, self.target(), tokenizer="byte_chat", sequence_length=LENGTH
        )
        message = "--kind=text, which only stages pretrain, dsa_warmup, "
        with self.assertRaisesRegex(config.InputError, message):
            self.open(folder)
        with self.assertRaisesRegex(config.InputError, message):
            self.open(folder, mixture=(str(self.whole), str(folder)))

    @parameterized.parameters(
        ("chat_template", "glm5.1"),
        ("enable_thinking", True),
        ("clear_thinking", False),
        ("sequence_length", 64),
    )
    def test_a_run_names_the_settings_of_its_preparation(self, name, value):
        message = rf"data.{name} must be .* got {value}; .*--{name}={value}"
        with self.assertRaisesRegex(config.InputError, message):
            self.open(self.whole, **{name: value})

    @parameterized.parameters(
        ({"packing": "truncate"}, "packing must be 'best_fit' with kind"),
        ({"fim_rate": 0.5}, "fim_rate must be 0 with kind"),
        ({"field": "body"}, "field is of texts"),
        ({"tokenizer": "byte"}, "lacks: .*Use tokenizer='byte_chat'"),
        ({"tokenizer": "bpe"}, "lacks: .*Use tokenizer='byte_chat'"),
        ({"source": "python"}, "holds no conversations: 'python'"),
        ({"source": "tasks:calculator"}, "'tasks:NAME', which is not prepared"),
    )
    def test_a_folder_that_does_not_fit_leaves_nothing(self, changes, message):
        target = self.target()
        with self.assertRaisesRegex(config.InputError, message):
            self.prepare(target, **changes)
        self.assertFalse(target.exists())

    def test_no_text_is_no_matter(self):
        said = [conversations_test.user(""), conversations_test.assistant("")]
        lines = [json.dumps({"messages": said})] * 3
        more = [json.dumps(conversations_test.make_conversation(i)) for i in range(20)]
        path = self.root / "empty.jsonl"
        path.write_text("\n".join(lines + more))
        self.assertLen(conversations.read_conversations(str(path)), 23)
        folder = self.prepare(self.target(), source=str(path))
        self.assert_same_documents(self.open(folder), self.online(source=str(path)))


if __name__ == "__main__":
    environment.main()
