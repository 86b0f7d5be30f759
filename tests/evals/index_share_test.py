"""The search for indexers that can go, against forward passes of whole models."""

import json
from unittest import mock

import jax
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.evals import index_share
from glm5_jax.inference import scoring
from glm5_jax.weights import index_share as sharing
from tests import environment, runs
from tests.model import tiny

# Layers without experts compile faster.
CONFIG = tiny.model(
    num_hidden_layers=4,
    first_k_dense_replace=3,
    num_nextn_predict_layers=0,
    index_topk=3,
    vocab_size=40,
)
ROWS = scoring.rows_of_tokens(np.random.default_rng(0).integers(0, 40, (2, 12)), CONFIG)
ATOL = 1e-5  # nats, in float32


class SearchTest(runs.FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.params = tiny.params(CONFIG)
        cls.path = cls.root / "search.json"
        cls.rounds = cls.search(2, cls.path)

    @classmethod
    def search(cls, num_indexers, path=None, config=CONFIG, rows=ROWS):
        return index_share.search(cls.params, config, rows, num_indexers, path)

    def test_it_removes_one_indexer_a_round_the_least_missed(self):
        start, *rounds = self.rounds
        self.assertEqual(start.pattern, "FFFF")
        self.assertLen(rounds, 2)
        pattern = start.pattern
        for each in rounds:
            losses = dict(each.losses)
            own = [i for i, letter in enumerate(pattern) if letter == "F" and i]
            self.assertEqual(list(losses), own)
            self.assertEqual(each.nats, min(losses.values()))
            self.assertEqual(each.nats, losses[each.removed])
            pattern = pattern[: each.removed] + "S" + pattern[each.removed + 1 :]
            self.assertEqual(each.pattern, pattern)

    def test_the_last_loss_is_that_of_the_shared_model(self):
        last = self.rounds[-1]
        params, config = sharing.share(self.params, CONFIG, last.pattern)
        nll = scoring.summarize(ROWS, scoring.score(params, config, ROWS))["nll"]
        self.assertAlmostEqual(nll, last.nats, delta=ATOL)

    def test_a_search_resumes_after_its_last_round(self):
        tree = json.loads(self.path.read_text())
        self.assertLen(tree["rounds"], 3)
        path = self.root / "resumed.json"
        path.write_text(json.dumps(tree | {"rounds": tree["rounds"][:2]}))
        with mock.patch.object(
            index_share, "_next_round", return_value=self.rounds[2]
        ) as made:
            self.assertEqual(self.search(2, path), self.rounds)
        self.assertEqual(
            [call.args[1] for call in made.call_args_list], [self.rounds[1].pattern]
        )
        self.assertEqual(json.loads(path.read_text()), tree)

    def test_more_indexers_than_an_earlier_search_kept(self):
        stored = self.path.read_text()
        self.assertEqual(self.search(3, self.path), self.rounds[:2])
        self.assertEqual(self.path.read_text(), stored)

    def test_what_cannot_be_searched_is_refused(self):
        dense = tiny.model(num_hidden_layers=4, attention="dense", vocab_size=40)
        short = scoring.rows_of_tokens(np.ones((1, 3), int), CONFIG)
        for changes, message in (
            ({"config": dense}, "needs model.attention='sparse', got 'dense'"),
            ({"rows": short}, "longer than model.index_topk=3, got 3 tokens"),
            ({"num_indexers": 5}, "must be 1 to 4, .*; got 5"),
            (
                {"path": self.path, "rows": ROWS | {"tokens": ROWS["tokens"] // 2}},
                "another model or text",
            ),
        ):
            with self.assertRaisesRegex(config_lib.InputError, message):
                self.search(**{"num_indexers": 2, **changes})


class ShareTest(runs.FolderTest):
    def test_only_indexers_go_and_layers_stay_in_order(self):
        params = tiny.params(CONFIG)
        shared, config = sharing.share(params, CONFIG, "FSFS")
        one_of = lambda x, i: np.asarray(x[i])
        before = sharing.by_layer(params, CONFIG, one_of)
        after = sharing.by_layer(shared, config, one_of)
        for layer, letter in enumerate("FSFS"):
            kept = {
                k: v
                for k, v in before[layer].items()
                if letter == "F" or k != "indexer"
            }
            jax.tree.map(np.testing.assert_array_equal, after[layer], kept)
        self.assertEqual(shared["lm_head"] is params["lm_head"], True)

    def test_an_indexer_that_is_not_there_is_refused(self):
        params, config = sharing.share(tiny.params(CONFIG), CONFIG, "FSFS")
        with self.assertRaisesRegex(config_lib.InputError, r"F at layers \[1\], where"):
            sharing.share(params, config, "FFFS")


if __name__ == "__main__":
    environment.main()
