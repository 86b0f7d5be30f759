"""The view of a run: what it says of the metrics, and when it ends."""

import json

from glm5_jax import config as config_lib
from glm5_jax.training.reporting import watch
from tests import environment, runs


def record(step, reward, **changes):
    return {
        "step": step,
        "perf/step_seconds": 4.0,
        "perf/rollout_seconds": 1.0,
        "actors/engines_idle_share": 0.125,
        "rollout/episodes": 8.0,
        "rollout/label/ok": 7.0,
        "rollout/label/timeout": 1.0,
        "rollout/label/env_error": 0.0,
        "rollout/reward": reward,
        "rollout/staleness_max": 2,
        "rl/trained_tokens": 100.0,
        "rl/tokens/stale_1": 30.0,
        "rl/tokens/stale_2": 12.0,
        "groups/begun": 9,
        "groups/running": 4,
        "groups/done": 5,
        "groups/restarted": 0,
    } | changes


class WatchTest(runs.FolderTest):
    def test_the_last_step_and_the_curves_before_it(self):
        tags = {"rollout/reward/gcd": 0.75, "rollout/reward/sort": 0.25}
        records = [
            record(1, 0.0, **{"eval/success": 0.5}),
            record(2, None, **{"rollout/reward/gcd": 0.5}),
            record(3, 1.0, **tags),
        ]
        self.assertEqual(
            watch.view(records, "async", 20),
            [
                "async · step 3 of 20 · 4 s a step",
                "episodes    8 in this step: 7 ok, 1 timeout",
                "reward      1  ▁█  0 to 1",
                "  gcd       0.75  ▁█  0.5 to 0.75",
                "  sort      0.25  ",
                "staleness   at most 2 versions, 42% of the tokens are stale",
                "idle        trainer 25%, engines 12%",
                "groups      9 begun = 5 done + 4 running",
                "held-out    50% solved at step 1  ",
            ],
        )

    def test_a_ledger_that_does_not_close_is_seen(self):
        lines = watch.view([record(1, 0.5, **{"groups/begun": 10})], "x", 2)
        self.assertIn("groups      10 begun ≠ (LOST) 5 done + 4 running", lines)

    def test_a_run_of_stage_rl_has_no_groups(self):
        plain = {k: v for k, v in record(1, 0.5).items() if "groups/" not in k}
        self.assertNotIn("groups", "\n".join(watch.view([plain], "x", 2)))

    def test_it_follows_a_run_to_its_end(self):
        folder, said = self.root / "run", []
        folder.mkdir()
        with self.assertRaisesRegex(config_lib.InputError, "--run must be"):
            watch.follow(folder, said.append, is_terminal=True)
        (folder / "config.json").write_text(json.dumps({"num_steps": 2}))
        watch.follow(folder, said.append, is_terminal=False)
        self.assertEqual(said, ["run: no step is logged yet"])

        def say(text):
            """Lets the run do its next step once the last one was seen."""
            said.append(text)
            if len(said) == 4:
                (folder / "summary.json").touch()
            step = len(said) - 1
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record(step, 0.5)) + "\n")

        watch.follow(folder, say, is_terminal=True, poll_seconds=0.01)
        self.assertLen(said, 5)
        self.assertIn("step 3 of 2", said[-1])
        self.assertTrue(said[-1].startswith("\x1b[H"))


if __name__ == "__main__":
    environment.main()
