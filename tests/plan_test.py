"""The plan command as a user runs it."""

import pathlib

from absl.testing import parameterized

from tests import environment, forked

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = "--config=configs/glm5_pretrain.py"
AGENTIC = "--config=configs/glm5_rl_agentic.py"


def run(*arguments):
    return forked.run("plan", *arguments)


class PlanTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("no_topology", (), "e.g. --topology=v5p:8x8x8"),
        ("no_slice", ("--topology=v5p:512x1x1",), "near it: v5p:4x8x8, v5p:8x8x8"),
        (
            "what_it_varies",
            (
                "--topology=v5p:8x8x8",
                "--config.mesh.fsdp=8",
                "--config.model.expert_chunks=2",
            ),
            "leave out --config.mesh.fsdp, --config.model.expert_chunks (slices",
        ),
        ("no_node", ("--topology=h200:4",), "h200:8 is one, h200:64x8 are 64"),
        (
            "compiled_gpus",
            ("--topology=h200:8", "--verify=1"),
            "v5e, v5p, v6e, tpu7x alone, as reports read",
        ),
        ("unknown_chip", ("--topology=v9:2x2",), "chip of v5e, v5p, v6e, tpu7x"),
        (
            "rows",
            ("--topology=v5p:8x8x8", "--batch_size=7", "--sequence_length=5000"),
            "data.batch_size to 8",
        ),
        ("length", ("--topology=v5p:2x2x1", "--sequence_length=x"), "sequence_length"),
    )
    def test_wrong_input_ends_with_2_and_one_message(self, arguments, message):
        result = run(CONFIG, *arguments)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn(message, result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        self.assertEmpty(result.stdout)

    @parameterized.named_parameters(
        (
            "not_of_a_stage_that_plays",
            CONFIG,
            ("--tasks=coding", "--engine=v5p:4x4x4"),
            "--tasks, --engine: a run of stage 'pretrain' plays no episodes",
        ),
        ("tasks", AGENTIC, ("--tasks=cooking",), "kinds of reasoning, coding, search"),
        ("size", AGENTIC, ("--turns=many",), "--turns must be MEDIAN"),
        (
            "parts",
            AGENTIC,
            ("--config.rl.environment=a+b", "--config.rl.concurrency=(0, 8)"),
            "bounds 2 parts, and --tasks=coding names 1 kinds",
        ),
        ("rows", AGENTIC, ("--batch_size=64",), "--config.rl.rows_per_step"),
        ("verify", AGENTIC, ("--verify=1",), "whose splits are simulated"),
        (
            "two_engines",
            AGENTIC,
            ("--engine=v5p:4x4x4", "--engine_report=x.json"),
            "leave one out",
        ),
        ("no_report", AGENTIC, ("--engine_report=x.json",), "--program=decode"),
        ("engine", AGENTIC, ("--engine=v6e:4x4",), "must be a slice of v5p"),
        (
            "no_split",
            AGENTIC,
            ("--engine=v5p:4x4x8",),
            "128 devices: there is no split into engines of 128",
        ),
    )
    def test_a_plan_of_rl_refuses_wrong_input(self, config, arguments, message):
        result = run(config, "--topology=v5p:4x4x8", *arguments)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn(message, result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        self.assertEmpty(result.stdout)

    def test_a_run_that_fits_nowhere_is_shown_and_refused(self):
        result = run(CONFIG, "--topology=v5p:2x2x2", "--batch_size=8", "--top=3")
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("of which 0 fit", result.stdout)
        self.assertEqual(result.stdout.count("none  "), 3)
        self.assertIn("fits no mesh of v5p:2x2x2", result.stderr)


if __name__ == "__main__":
    environment.main()
