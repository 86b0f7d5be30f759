"""The search for layers that become windows, against all patterns of whole models."""

import dataclasses
import itertools
import json
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.data.sources import documents
from glm5_jax.evals import calibration, record, sliding_layers
from glm5_jax.inference import scoring
from glm5_jax.weights import index_share
from tests import environment, runs
from tests.evals import subjects
from tests.model import tiny

# Dense feed-forward layers compile fastest.
CONFIG = tiny.model(
    num_hidden_layers=3,
    first_k_dense_replace=3,
    num_nextn_predict_layers=0,
    attention="dense",
    vocab_size=40,
    variants=config_lib.AttentionVariants(sliding_window=3),
)
ROWS = scoring.rows_of_tokens(np.random.default_rng(0).integers(0, 40, (2, 12)), CONFIG)
ATOL = 1e-5  # nats, in float32
WINDOWS = 2


def nats(params, pattern):
    """Loss of the whole model with the pattern's layers."""
    types = sliding_layers.layer_types(CONFIG, pattern)
    config = dataclasses.replace(CONFIG, layer_types=types)
    params = index_share.regrouped(
        params, CONFIG, config, lambda x, i: np.asarray(x[i]), np.stack
    )
    params = jax.tree.map(jnp.asarray, params)
    return scoring.summarize(ROWS, scoring.score(params, config, ROWS))["nll"]


class SearchTest(runs.FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.params = tiny.params(CONFIG)
        cls.path = cls.root / "search.json"
        cls.stack = sliding_layers._stack(  # compiled once for all searches
            cls.params, CONFIG, ROWS, depth.layer_kinds(CONFIG)
        )
        cls.enterClassContext(
            mock.patch.object(sliding_layers, "_stack", return_value=cls.stack)
        )
        cls.steps = cls.search(path=cls.path, layers_per_step=1)

    @classmethod
    def search(cls, config=CONFIG, rows=ROWS, num_windows=WINDOWS, **settings):
        return sliding_layers.search(cls.params, config, rows, num_windows, **settings)

    def test_a_beam_that_holds_every_pattern_finds_the_best(self):
        patterns = {"".join(p) for p in itertools.permutations("FSS")}
        wanted = {pattern: nats(self.params, pattern) for pattern in patterns}
        last = self.steps[-1]
        self.assertLen(last.beam, len(patterns))
        self.assertEqual([s.pattern.count("S") for s in self.steps], [0, 1, 2])
        for pattern, value in last.beam:
            self.assertAlmostEqual(value, wanted[pattern], delta=ATOL)
        self.assertEqual(last.pattern, min(wanted, key=wanted.get))
        self.assertEqual(last.nats, last.beam[0][1])

    def test_a_step_turns_two_layers_and_the_last_one_those_that_are_left(self):
        steps = self.search(num_windows=3)
        self.assertEqual([s.pattern.count("S") for s in steps], [0, 2, 3])
        self.assertEqual(steps[1].beam, self.steps[-1].beam)

    def test_a_beam_of_one_follows_the_best_layer(self):
        steps = self.search(beam=1, layers_per_step=1)
        pattern = "FFF"
        for step in steps[1:]:
            places = [i for i, letter in enumerate(pattern) if letter == "F"]
            options = [f"{pattern[:i]}S{pattern[i + 1 :]}" for i in places]
            found = self.stack.losses(options)
            pattern = min(options, key=found.get)
            self.assertEqual(step.beam, ((pattern, found[pattern]),))

    def test_a_search_resumes_after_its_last_step(self):
        tree = json.loads(self.path.read_text())
        self.assertLen(tree["rounds"], 3)
        path = self.root / "resumed.json"
        path.write_text(json.dumps(tree | {"rounds": tree["rounds"][:2]}))
        with mock.patch.object(
            self.stack, "losses", side_effect=self.stack.losses
        ) as ran:
            self.assertEqual(self.search(path=path, layers_per_step=1), self.steps)
        ran.assert_called_once()
        self.assertEqual(path.read_text(), self.path.read_text())

    def test_what_cannot_be_searched_is_refused(self):
        types = ("latent_sliding", "latent", "gated_delta")
        two = dataclasses.replace(CONFIG, layer_types=types)
        shared = dataclasses.replace(
            CONFIG, attention="sparse", index_topk_pattern="FSF"
        )
        wide = config_lib.AttentionVariants(sliding_window=12)
        wide = dataclasses.replace(CONFIG, variants=wide)
        self.stack.losses = mock.Mock(side_effect=AssertionError("it computed"))
        self.addCleanup(self.stack.__dict__.pop, "losses")
        for changes, message in (
            ({"num_windows": 5}, "must be 1 to 3, .*; got 5"),
            ({"config": two}, "must be 1 to 1, .*; got 2"),
            ({"config": wide}, "longer than .*sliding_window=12, got 12 tokens"),
            ({"config": shared}, "whose index others share cannot"),
            ({"beam": 0}, "at least 1 pattern, got 0"),
            ({"layers_per_step": 0}, "at least 1 layer, got 0"),
            ({"path": self.path, "beam": 2}, "search of another model or text"),
        ):
            with self.assertRaisesRegex(config_lib.InputError, message):
                self.search(**changes)


class CalibrationTest(runs.FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        for i in range(40):
            (cls.root / f"{i}.txt").write_text(f"{i:02}. ")
        corpus = record.Corpus(source=str(cls.root), percent=20)
        subject = subjects.subject(num_hidden_layers=1)
        cls.subject = dataclasses.replace(subject, corpus=corpus)

    def test_the_answers_of_tasks_alone_count(self):
        rows = calibration.rows_of_tasks(self.subject, "needle", 160, 3)
        self.assertEqual(rows["tokens"].shape, (3, 160))
        for row in range(3):
            counts = rows["loss_mask"][row] > 0
            answer = subjects.BYTES.decode(rows["targets"][row][counts])
            self.assertRegex(answer, r"^ \d{4}$")
            text = subjects.BYTES.decode(rows["tokens"][row])
            self.assertEqual(text.count(answer), 2)  # in the needle, and at the end
        with self.assertRaisesRegex(config_lib.InputError, "has no answers"):
            calibration.rows_of_tasks(self.subject, "mtp", 160, 3)

    def test_no_document_is_held_out(self):
        rows = calibration.rows_of_corpus(self.subject, 12, 4)
        self.assertEqual(rows["tokens"].shape, (4, 12))
        names = re.findall(r"\d\d", subjects.BYTES.decode(rows["tokens"].ravel()))
        self.assertLen({*names}, 12)
        for name in names:
            self.assertFalse(documents.is_held_out(f"{int(name)}.txt", 20))


if __name__ == "__main__":
    environment.main()
