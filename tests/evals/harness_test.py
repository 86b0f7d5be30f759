"""lm-eval's view of a model, on a local task that needs no download."""

import importlib.util
import json
import math
import unittest
from unittest import mock

import numpy as np
from absl.testing import absltest

from glm5_jax.evals import likelihood, record
from tests import environment, runs
from tests.evals import subjects

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
TASK = """task: local_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


def flat_subject():
    """A model whose tokens all have the same probability."""
    subject = subjects.subject(
        num_hidden_layers=1, first_k_dense_replace=1, num_nextn_predict_layers=0
    )
    params = {**subject.params, "lm_head": subject.params["lm_head"] * 0}
    return type(subject)(config=subject.config, params=params, tokenizer=subjects.BYTES)


class LikelihoodTest(absltest.TestCase):
    def test_it_is_of_the_continuation_alone(self):
        subject = flat_subject()
        pairs = [([1, 2, 3], [4, 5]), ([1], [0, 0, 0])]
        found = likelihood.of_pairs(subject, pairs, with_greedy=True)
        token = -math.log(subject.config.vocab_size)
        np.testing.assert_allclose(
            [x.value for x in found], [2 * token, 3 * token], 1e-6
        )
        self.assertEqual(
            [x.is_greedy for x in found], [False, True]
        )  # of ties the first


@unittest.skipUnless(HAS_HARNESS, "lm_eval is not installed: pip install .[lm_eval]")
class HarnessTest(runs.FolderTest):
    def requests(self, *arguments):
        from lm_eval.api import instance

        kind = "loglikelihood"
        return [
            instance.Instance(kind, {}, given, i) for i, given in enumerate(arguments)
        ]

    def test_texts_longer_than_the_model_are_cut_into_windows(self):
        from glm5_jax.evals import harness

        model, token = harness.Harness(flat_subject()), -math.log(260)
        [found] = model.loglikelihood_rolling(self.requests(("x" * 700,)))
        self.assertAlmostEqual(found, 700 * token, delta=1e-2)
        pairs = self.requests(("y" * 400 + " ", "ab"), ("", "abc"))
        found = model.loglikelihood(pairs)
        np.testing.assert_allclose([x[0] for x in found], [3 * token, 3 * token], 1e-5)

    def test_generation_ends_at_the_stop_text(self):
        from glm5_jax.evals import harness

        model = harness.Harness(flat_subject())
        settings = {"until": [subjects.BYTES.decode([0])], "max_gen_toks": 4}
        texts = model.generate_until(
            self.requests(("a", settings), ("b" * 300, {"max_gen_toks": 4}))
        )
        self.assertEqual(texts, ["", subjects.BYTES.decode([0] * 4)])

    def test_a_long_answer_does_not_cut_a_short_prompt(self):
        from glm5_jax.evals import answering, harness

        model, given = harness.Harness(flat_subject()), []

        def generated(subject, tasks, score):
            del subject, score
            given.extend(tasks)
            return ((i, record.Answer({}, "")) for i, _ in tasks)

        with mock.patch.object(answering, "generated", generated):
            model.generate_until(
                self.requests(("a" * 31, {}), ("b" * 400, {"max_gen_toks": 1024}))
            )
        limit = flat_subject().config.max_position_embeddings
        sizes = [(len(task.prompt), task.max_new_tokens) for _, task in given]
        self.assertEqual(sizes[0], (31, min(256, limit - 31)))
        self.assertEqual(sizes[1], (limit - limit // 4, limit // 4))

    def test_a_local_task_runs(self):
        import lm_eval
        from lm_eval import tasks

        from glm5_jax.evals import harness

        choices = [" three", " six"]
        lines = [
            {"question": "1 + 2 =", "choices": choices, "answer": 0},
            {"question": "1 + 2 + 3 =", "choices": choices, "answer": 1},
        ]
        path = self.root / "sums.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
        (self.root / "sums.yaml").write_text(TASK.format(path=path))
        manager = tasks.TaskManager(include_path=str(self.root), include_defaults=False)
        results = lm_eval.simple_evaluate(
            model=harness.Harness(flat_subject()),
            tasks=["local_sums"],
            task_manager=manager,
            bootstrap_iters=0,
        )
        # The shorter text is likelier where all tokens are alike.
        self.assertEqual(results["results"]["local_sums"]["acc,none"], 0.5)


if __name__ == "__main__":
    environment.main()
