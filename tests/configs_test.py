"""Every file in configs/ resolves in every variant, and configs check themselves."""

import dataclasses
import pathlib
import runpy
from typing import Literal

from absl.testing import parameterized

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib
from glm5_jax.config import checks
from tests import environment

CONFIGS = sorted((pathlib.Path(__file__).parent.parent / "configs").glob("*.py"))


@dataclasses.dataclass
class Section:
    name: Literal["a", "b"] = "a"
    size: int = 1


class ConfigsTest(parameterized.TestCase):
    @parameterized.named_parameters((path.stem, path) for path in CONFIGS)
    def test_resolves(self, path):
        variants = runpy.run_path(str(path)).get("VARIANTS", ())
        for variant in ("", *variants):
            spec = f"{path}:{variant}" if variant else str(path)
            config = command_line.Arguments(config=spec).train_config()
            self.assertIsInstance(config, config_lib.TrainConfig)

    @parameterized.parameters(
        ("calculator", "rl"),
        ("calculator", "async"),
        ("reverse", "rl"),
        ("reverse", "async"),
        ("mixture", "async"),
    )
    def test_sft_ends_where_rl_may_start(self, task, stage):
        """SFT plays what RL's gate plays, and ends well below the gate's bound."""
        sft, rl = (
            command_line.Arguments(
                config=str(CONFIGS[0].with_name(f"small_{name}_{task}.py"))
            ).train_config()
            for name in ("sft", stage)
        )
        for name in ("environment", "max_new_tokens", "max_turns", "temperature"):
            self.assertEqual(getattr(sft.rl, name), getattr(rl.rl, name), name)
        most = rl.rl.max_start_success
        self.assertEqual(most, config_lib.RLConfig.max_start_success)
        self.assertLessEqual(sft.stop_at, most - 0.049)

    @parameterized.parameters(
        (
            {"checkpoints_keep_every": 150},
            "multiple of checkpoint_every, .* 150 and 100",
        ),
        (
            {"checkpoints_keep_every": 5, "checkpoint_every": 0},
            "only those steps are saved",
        ),
        ({"checkpoints_keep_best": 1, "eval_every": 30}, "multiple of eval_every"),
        ({"checkpoints_keep_best": 1, "eval_every": 0}, "got 100 and 0"),
        ({"checkpoints_keep_best": -1}, "must not be negative"),
        ({"host_copy_every": 5, "checkpoint_every": 0}, "needs checkpoint_every"),
    )
    def test_kept_checkpoints_must_be_saved_and_evaluated(self, fields, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            config_lib.TrainConfig(**fields)

    def test_saved_and_evaluated_checkpoints_can_be_kept(self):
        config = config_lib.TrainConfig(
            model=presets.GLM5_1M, checkpoints_keep_every=300, checkpoints_keep_best=2
        )
        kept = config.checkpoints_keep_every, config.checkpoints_keep_best
        self.assertEqual(kept, (300, 2))

    def test_a_value_that_does_not_exist_is_refused(self):
        # The package's own sections are type-checked under tests before their rules.
        rules = [*checks.choices(Section()), *checks.choices(Section("c"))]
        self.assertEqual([holds for holds, _ in rules], [True, False])
        with self.assertRaisesRegex(config_lib.InputError, "name must be one of a, b"):
            checks.require(*rules)


if __name__ == "__main__":
    environment.main()
