"""Training from prepared folders: order, sharing among processes, refusals."""

import dataclasses
import gzip
import itertools
import json
import pathlib
import shutil

import grain
import numpy as np
from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.data.preparation import index as index_lib
from glm5_jax.data.preparation import prepared, shards
from glm5_jax.data.rows import pipeline as pipeline_lib
from tests import environment, runs
from tests.data import corpora

BATCH = 8
WEIGHTS = ((0.75, 0.25), (0.1, 0.9))
BORDER = 5  # step


class PreparedTest(runs.FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folders = {}
        for seed, name in enumerate(("web", "code")):
            source = corpora.write_jsonl(cls.root / f"{name}_corpus", 2, 30, seed)
            cls.folders[name] = corpora.make_prepared(source, cls.root / name)
        cls.data = config.DataConfig(
            source=str(cls.folders["web"]), sequence_length=32, batch_size=BATCH
        )

    def make(self, seed=0, **changes):
        return prepared.make_pipeline(dataclasses.replace(self.data, **changes), seed)

    def mix(self, seed=0, **changes):
        given = {
            "mixture": tuple(map(str, self.folders.values())),
            "mixture_weights": WEIGHTS,
            "mixture_steps": (BORDER,),
        }
        return self.make(seed, **given | changes)

    def assert_equal_batches(self, first, second):
        self.assertEqual(first.keys(), second.keys())
        for key, value in first.items():
            np.testing.assert_array_equal(value, second[key], err_msg=key)

    @parameterized.product(num_processes=[1, 2, 4], start=[0, 3, 7], mixed=[0, 1])
    def test_processes_and_restarts_do_not_change_a_step(
        self, num_processes, start, mixed
    ):
        """Joins the rows of several processes; compares with one process."""
        make = self.mix if mixed else self.make
        parts = []
        for number in range(num_processes):
            part = make()
            part.restrict_to({BATCH: range(number, BATCH, num_processes)})
            parts.append(itertools.islice(part.train_iterator(start), 3))
        whole = make()
        for step, shares in enumerate(zip(*parts, strict=True), start=start):
            want = whole.train_batch(step)
            got = {key: np.empty_like(value) for key, value in want.items()}
            for number, share in enumerate(shares):
                for key, value in share.items():
                    got[key][number::num_processes] = value
            self.assert_equal_batches(got, want)

    @parameterized.parameters("a.txt", "a.txt.gz", "")
    def test_a_single_text_gives_the_batches_of_a_run_without_preparation(self, name):
        """Prepares a file, or a folder with one file; its end is held out."""
        folder = pathlib.Path(self.create_tempdir().full_path)
        text = "".join(f"line {i} of the text\n" for i in range(300)).encode()
        packed = gzip.compress(text) if name.endswith(".gz") else text
        (folder / (name or "a.txt")).write_bytes(packed)
        source = str(folder / name)
        target = corpora.make_prepared(source, folder.parent / f"p_{folder.name}")
        rest = {"tokenizer": "byte", "held_out_percent": 20}
        data = dataclasses.replace(self.data, source=source, **rest)
        memory = pipeline_lib.make_pipeline(data, 0)
        ready = self.make(source=str(target))
        for step in (0, 40):
            self.assert_equal_batches(ready.train_batch(step), memory.train_batch(step))
        held_out = [list(pipe.eval_batches(99)) for pipe in (ready, memory)]
        num_bytes = sum(batch["num_bytes"].sum() for batch in held_out[0])
        self.assertAlmostEqual(num_bytes / len(text), 0.2, delta=0.01)
        total = [sum(b["num_bytes"].sum() for b in side) for side in held_out]
        self.assertEqual(total[0], total[1])

    def test_no_bit_of_an_index_can_change_a_batch(self):
        whole = (self.folders["web"] / "index.json").read_bytes()
        want = index_lib.read(self.folders["web"])
        folder = pathlib.Path(self.create_tempdir().full_path)
        rng = np.random.default_rng(0)
        for i in rng.choice(len(whole), 300):
            content = bytearray(whole)
            content[i] ^= 1 << rng.integers(8)
            (folder / "index.json").write_bytes(content)
            try:
                self.assertEqual(index_lib.read(folder), want)  # a blank
            except config.InputError as error:
                self.assertIn("prepare of the folder again", str(error))

    def test_another_number_of_rows_is_another_fingerprint(self):
        index = index_lib.read(self.folders["web"])
        fewer = dataclasses.replace(index.train[0], rows=index.train[0].rows - 1)
        other = dataclasses.replace(index, train=(fewer, *index.train[1:]))
        self.assertNotEqual(index.fingerprint["rows"], other.fingerprint["rows"])
        for name in ("corpus", "tokenizer", "rows"):
            self.assertRegex(index.fingerprint[name], "^[0-9a-f]{16}$")

    def test_folders_and_mixtures_are_prepared_and_documents_are_not(self):
        source = str(self.root / "web_corpus")
        for changes, want in (
            ({}, True),
            ({"source": source}, False),
            ({"source": source, "mixture": (str(self.folders["web"]),)}, True),
        ):
            data = dataclasses.replace(self.data, **changes)
            self.assertEqual(prepared.is_prepared(data), want)

    def test_sources_have_the_shortest_names_that_differ(self):
        for given, names in (
            (("/a/x", "/b/y"), ["x", "y"]),
            (("/a/x", "/b/x"), ["a/x", "b/x"]),
            (("/a/b c/x", "/d/b c/x"), ["a/b_c/x", "d/b_c/x"]),
            (("/x", "/a/x"), ["//x", "a/x"]),
        ):
            data = config.DataConfig(mixture=given)
            self.assertEqual(list(prepared.sources(data)), names)

    def test_an_index_may_be_written_in_another_order(self):
        """A program that formats JSON anew may sort its keys."""
        folder = pathlib.Path(self.create_tempdir().full_path)
        text = (self.folders["web"] / index_lib.NAME).read_text()
        ordered = json.dumps(dict(reversed(json.loads(text).items())))
        (folder / index_lib.NAME).write_text(ordered)
        self.assertEqual(index_lib.read(folder), index_lib.read(self.folders["web"]))

    @parameterized.parameters("../web/train-00000.array_record", "/etc/passwd", "")
    def test_an_index_names_no_file_of_another_folder(self, name):
        index = index_lib.read(self.folders["web"])
        shard = dataclasses.replace(index.train[0], name=name)
        folder = pathlib.Path(self.create_tempdir().full_path)
        dataclasses.replace(index, train=(shard,)).write(folder)
        with self.assertRaisesRegex(config.InputError, "no name of a shard"):
            index_lib.read(folder)

    def test_shards_that_were_exchanged_are_not_read(self):
        folder = pathlib.Path(self.create_tempdir().full_path) / "copy"
        shutil.copytree(self.folders["web"], folder)
        index = index_lib.read(folder)
        first, second = (folder / shard.name for shard in index.train[:2])
        size = max(first.stat().st_size, second.stat().st_size)
        for path in (first, second):  # and of the same size
            path.write_bytes(path.read_bytes().ljust(size, b"\0"))
        same = [
            dataclasses.replace(
                shard, size=size, rows=1, ends=shards.ends(folder / shard.name)
            )
            for shard in index.train[:2]
        ]
        dataclasses.replace(index, train=tuple(same)).write(folder)
        self.make(source=str(folder))
        first.rename(folder / "aside")
        second.rename(first)
        (folder / "aside").rename(second)
        with self.assertRaisesRegex(config.InputError, "under this name.*--check"):
            self.make(source=str(folder))

    def test_one_epoch_has_every_row_once(self):
        pipe = self.make()
        (name,) = pipe.epochs(1)
        size = round(BATCH / pipe.epochs(1)[name])
        steps = -(-size // BATCH)
        rows = [
            b"".join(batch[key][row].tobytes() for key in sorted(batch))
            for batch in map(pipe.train_batch, range(steps))
            for row in range(BATCH)
        ][:size]
        self.assertLen(set(rows), size)

    def test_the_same_text_as_in_memory(self):
        """Splits a corpus into the same two sides as training from memory."""
        source = str(self.root / "web_corpus")
        data = dataclasses.replace(
            self.data, source=source, tokenizer="byte", held_out_percent=20
        )
        data = dataclasses.replace(data, cache_dir=self.create_tempdir().full_path)
        memory, disk = pipeline_lib.make_pipeline(data, 0), self.make()
        totals = []
        for each in (memory, disk):
            batches = list(each.eval_batches(10**6))
            targets = np.concatenate(
                [b["targets"][b["loss_mask"] > 0] for b in batches]
            )
            totals.append(
                (np.sort(targets), sum(b["num_bytes"].sum() for b in batches))
            )
        np.testing.assert_array_equal(totals[0][0], totals[1][0])
        self.assertEqual(totals[0][1], totals[1][1])
        self.assertEqual(memory.tokenizer.digest, disk.tokenizer.digest)

    def test_weights_hold_in_every_stage(self):
        pipe = self.mix()
        sizes = {
            name: BATCH / self.make(source=str(folder)).epochs(1)[name]
            for name, folder in self.folders.items()
        }
        for first, last, weights in ((0, BORDER, WEIGHTS[0]), (BORDER, 15, WEIGHTS[1])):
            num_rows = (last - first) * BATCH
            before, after = pipe.epochs(first), pipe.epochs(last)
            for name, weight in zip(self.folders, weights, strict=True):
                used = (after[name] - before[name]) * sizes[name]
                self.assertAlmostEqual(used, num_rows * weight, delta=1)

    def test_held_out_rows_are_in_the_order_of_seed_0(self):
        """Another order would change the figures of runs that have begun."""
        folder = self.folders["web"]
        rows = shards.ShardRows(
            folder, index_lib.read(folder).held_out, eos_id=256, sequence_length=32
        )
        order = grain.MapDataset.source(range(len(rows))).shuffle(seed=0)
        batches = list(self.make().eval_batches(99))
        got = np.concatenate([batch["tokens"] for batch in batches])
        want = [rows[order[i]]["tokens"] for i in range(len(rows))]
        np.testing.assert_array_equal(got[: len(want)], want)
        self.assertFalse(batches[-1]["loss_mask"].ravel()[32 * len(rows) :].any())
        self.assertLen(batches, -(-len(rows) // BATCH))

    def test_held_out_batches_are_the_same_for_every_seed_and_by_source(self):
        one, two = self.mix(seed=1), self.mix(seed=2)
        self.assertEqual(one.held_out_names, ("web", "code"))
        alone = self.make(source=str(self.folders["code"]))
        for name in one.held_out_names:
            pairs = zip(
                one.eval_batches(2, name), two.eval_batches(2, name), strict=True
            )
            for first, second in pairs:
                self.assert_equal_batches(first, second)
        for first, second in zip(
            one.eval_batches(9, "code"), alone.eval_batches(9), strict=True
        ):
            self.assert_equal_batches(first, second)

    def test_fingerprint_names_the_difference(self):
        base = self.mix()
        self.assertEqual(self.mix().fingerprint, base.fingerprint)
        # A new version invalidates every run; raise it only for a new order.
        self.assertIn("order_version=1", base.fingerprint.split())
        alone = self.make().fingerprint.split()
        self.assertContainsSubset(["source.version=1", "mixture=[[0,[1.0]]]"], alone)
        source = self.root / "web_corpus"
        other = corpora.make_prepared(
            source, pathlib.Path(self.create_tempdir().full_path) / "web", seed=1
        )
        changed = (str(other), str(self.folders["code"]))
        for keys, pipe in (
            ({"seed"}, self.mix(seed=1)),
            ({"batch_size", "mixture"}, self.mix(batch_size=4)),
            ({"mixture"}, self.mix(mixture_steps=(BORDER + 1,))),
            ({"mixture[0].seed", "mixture[0].rows"}, self.mix(mixture=changed)),
        ):
            words = set(base.fingerprint.split()) ^ set(pipe.fingerprint.split())
            self.assertEqual({word.partition("=")[0] for word in words}, keys)

    def test_a_folder_that_does_not_fit_is_refused(self):
        with self.assertRaisesRegex(config.InputError, "must be 32, .* got 64"):
            self.make(sequence_length=64)
        with self.assertRaisesRegex(
            config.InputError, "another tokenizer than data.tokenizer='byte_chat'"
        ):
            self.make(tokenizer="byte_chat")
        self.make(tokenizer="byte")
        web = str(self.folders["web"])
        with self.assertRaisesRegex(config.InputError, "names a folder twice"):
            self.make(mixture=(web, web))
        other = corpora.make_prepared(
            self.root / "web_corpus",
            pathlib.Path(self.create_tempdir().full_path) / "other",
            tokenizer="byte_chat",
        )
        with self.assertRaisesRegex(config.InputError, "another tokenizer"):
            self.make(mixture=(web, str(other)))
        with self.assertRaisesRegex(config.InputError, "no prepared rows"):
            self.make(mixture=(web, str(self.root / "web_corpus")))

    def test_a_damaged_shard_is_refused_at_once(self):
        folder = pathlib.Path(self.create_tempdir().full_path) / "web"
        shutil.copytree(self.folders["web"], folder)
        (folder / "train-00001.array_record").unlink()
        with self.assertRaisesRegex(config.InputError, "00001.array_record is missing"):
            self.make(source=str(folder))

    @parameterized.named_parameters(
        ("count", {"mixture_weights": ((1.0,),)}, "must be 1 times 2 numbers"),
        (
            "stages",
            {"mixture_steps": (5,), "mixture_weights": ((1.0, 1.0),)},
            "2 times",
        ),
        ("negative", {"mixture_weights": ((1.0, -1.0),)}, "must not be negative"),
        ("zero", {"mixture_weights": ((0.0, 0.0),)}, "nor all 0"),
        (
            "order",
            {"mixture_steps": (5, 5), "mixture_weights": ((1.0, 1.0),) * 3},
            "ascending",
        ),
    )
    def test_weights_that_are_refused(self, changes, message):
        with self.assertRaisesRegex(config.InputError, message):
            config.DataConfig(mixture=("a", "b"), **changes)


if __name__ == "__main__":
    environment.main()
