"""The aot command as a user runs it: what is wrong is told before anything compiles."""

import json
import pathlib
import shlex

from absl.testing import parameterized

from tests import environment, forked

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = "--config=configs/glm5_pretrain.py"


def run(*arguments):
    return forked.run("aot", *arguments)


class AotTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("no_topology", (CONFIG,), "--topology is missing; give the chips of a slice"),
        (
            "no_slice",
            (CONFIG, "--topology=v5p:8x8x0"),
            "near it: v5p:2x4x4, v5p:4x4x4, v5p:4x4x8",
        ),
        ("unknown_chip", (CONFIG, "--topology=v9:2x2"), "chip of v5e, v5p, v6e, tpu7x"),
        (
            "unknown_field",
            (CONFIG, "--topology=v5p:2x2x1", "--config.mesh.fdsp=8"),
            "Did you mean mesh.fsdp?",
        ),
    )
    def test_wrong_input_ends_with_2_and_one_message(self, arguments, message):
        result = run(*arguments)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn(message, result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        self.assertEmpty(result.stdout)

    def test_arrays_are_listed_without_a_compiler(self):
        result = run(CONFIG, "--topology=v5p:8x8x8", "--arrays")
        self.assertEqual(result.returncode, 0, result.stderr)
        rows = {line.split()[0]: line for line in result.stdout.splitlines() if line}
        name = "params.layers_1.block_0.mlp.experts.gate_proj"
        self.assertIn("[75, 256, 6144, 2048]", rows[name])
        self.assertRegex(rows[name], r"\b1800 +1$")  # MiB of a device, copies

    def test_a_listing_holds_the_command_that_makes_it_again(self):
        stem = pathlib.Path(self.create_tempdir().full_path) / "listing"
        axes = ("--config.mesh.fsdp=4", "--config.mesh.expert=2")
        given = (*axes, "--config.data.batch_size=8", "--topology=v5p:2x2x2")
        result = run(CONFIG, *given, "--depth=4", "--arrays", f"--out={stem}")
        self.assertEqual(result.returncode, 0, result.stderr)
        content = stem.with_suffix(".json").read_text()
        command = json.loads(content)["command"]
        self.assertIn(f"```\n{command}\n```", stem.with_suffix(".md").read_text())
        python, _, module, *arguments = shlex.split(command)
        self.assertEqual((python, module), ("python", "glm5_jax.aot"))
        stem.with_suffix(".json").unlink()
        self.assertEqual(run(*arguments).returncode, 0)
        self.assertEqual(stem.with_suffix(".json").read_text(), content)


if __name__ == "__main__":
    environment.main()
