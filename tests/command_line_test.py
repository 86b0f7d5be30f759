"""The command line and its configs: accepted values, messages and help."""

import contextlib
import dataclasses
import errno
import io
import os
import pathlib
import subprocess
import sys
import textwrap
from unittest import mock

from absl.testing import absltest, parameterized

from glm5_jax import __main__, command_line, config
from glm5_jax.config import explanations, failures, fields, files
from tests import environment

ROOT = pathlib.Path(__file__).parent.parent
SMALL = config.TrainConfig(
    num_steps=7,
    model=config.ModelConfig(hidden_size=64, index_topk=16, eos_token_id=(1, 2)),
    optim=config.OptimConfig(muon_split=False),
)


def _resolve(*overrides: tuple[str, str]) -> config.TrainConfig:
    return command_line.resolve(command_line.to_config_dict(SMALL), overrides)


class ResolveTest(parameterized.TestCase):
    def _errors(self, *overrides: tuple[str, str]) -> list[str]:
        with self.assertRaises(config.InputError) as caught:
            _resolve(*overrides)
        return str(caught.exception).splitlines()

    def test_dataclass_to_config_dict_and_back(self):
        self.assertEqual(_resolve(), SMALL)

    def test_config_dict_is_locked_and_takes_values_for_none(self):
        tree = command_line.to_config_dict(SMALL)
        with self.assertRaisesRegex(AttributeError, "hidden_size"):
            tree.model.hidden_sise = 3
        tree.init_from = "runs/a"
        self.assertEqual(command_line.resolve(tree).init_from, "runs/a")

    def test_json_and_back(self):
        tree = command_line.to_json_dict(SMALL)
        self.assertEqual(tree["model"]["eos_token_id"], [1, 2])
        self.assertEqual(command_line.resolve(tree), SMALL)

    def test_missing_fields_take_their_defaults(self):
        tree = {"model": {"index_topk": 16}}
        self.assertEqual(
            command_line.resolve(tree),
            config.TrainConfig(model=config.ModelConfig(index_topk=16)),
        )

    @parameterized.named_parameters(
        ("integer", "num_steps", "12", 12),
        ("negative", "mesh.data", "-1", -1),
        ("number", "optim.learning_rate", "1e-3", 1e-3),
        ("integer_as_number", "optim.weight_decay", "0", 0.0),
        ("bool", "model.norm_topk_prob", "false", False),
        ("choice", "model.attention", "dense", "dense"),
        ("text_that_looks_like_a_number", "init_from", "12", "12"),
        ("none", "init_from", "None", None),
        ("tuple", "model.eos_token_id", "(3,4)", (3, 4)),
        ("bare_tuple", "model.eos_token_id", "5,", (5,)),
        ("text_with_equals_sign", "sample_prompt", "a=b", "a=b"),
    )
    def test_override(self, path, text, expected):
        value = _resolve((path, text))
        for name in path.split("."):
            value = getattr(value, name)
        self.assertEqual(value, expected)
        self.assertIs(type(value), type(expected))

    def test_last_override_wins(self):
        self.assertEqual(_resolve(("seed", "1"), ("seed", "2")).seed, 2)

    @parameterized.named_parameters(
        ("float_for_integer", "num_steps", "1e3", "must be an integer, got '1e3'."),
        ("text_for_integer", "num_steps", "many", "must be an integer, got 'many'."),
        ("bool_for_integer", "seed", "True", "must be an integer, got 'True'."),
        ("integer_for_bool", "model.norm_topk_prob", "1", "must be true or false"),
        ("text_for_number", "optim.adam_b1", "big", "must be a number, got 'big'."),
        ("infinity", "optim.clip_norm", "1e999", "must be a number, got '1e999'."),
        ("choice", "model.attention", "spars", "Did you mean sparse?"),
        ("all_choices", "model.dtype", "int8", "one of float32, bfloat16, got 'int8'."),
        ("floats_for_tuple", "model.eos_token_id", "1,2.5", "integers such as (1, 2)"),
        ("unfinished", "model.eos_token_id", "(1,", "integers such as (1, 2)"),
        ("texts", "data.mixture", "a", "texts such as ('a', 'b')"),
        ("rows", "data.mixture_weights", "(1, 2)", "rows such as ((1, 2), (3, 4))"),
        ("digits", "num_steps", "9" * 5000, f"an integer, got '{'9' * 59}..."),
        ("digits_of_a_number", "optim.clip_norm", "9" * 400, "must be a number"),
        ("signs", "seed", "-" * 100_000, "must be an integer"),
        ("brackets", "model.eos_token_id", "(" * 9_000, "integers such as"),
        ("large_seed", "seed", str(2**32), "nor larger than 2147483647"),
        ("large_size", "model.hidden_size", str(2**62), "at most 16777216"),
        ("layers", "model.num_hidden_layers", "1000000", "at most 4096"),
        ("experts", "model.n_routed_experts", "10000000", "at most 65536"),
        ("no_source", "data.source", "", "name a folder"),
        ("rate", "optim.adam_learning_rate_scale", "-1", "must be > 0"),
        ("epsilon", "optim.adam_eps", "-1", "must be > 0"),
        ("rms", "optim.muon_update_rms", "-1", "must be > 0"),
        ("range", "model.initializer_range", "-1", "is negative"),
        ("no_text", "sample_prompt", "\udcff", "must be text, got '\\udcff'"),
        ("typo", "model.hiden_size", "8", "Did you mean model.hidden_size?"),
        ("no_section", "hidden_size", "8", "Did you mean model.hidden_size?"),
        ("other_section", "model.adam_b1", "0", "Did you mean optim.adam_b1?"),
        ("initials", "optim.lr", "1", "Did you mean optim.learning_rate?"),
        ("nothing_near", "zzz", "8", "--help lists them."),
        # Nothing keeps which tokens top_p left out, so the trainer could not.
        ("top_p", "rl.top_p", "0.9", "is no field"),
        ("wiped_section", "optim", "{}", "is a section, not a value"),
        ("below_a_field", "seed.x", "1", "Did you mean seed?"),
        ("broken_rule", "model.qk_rope_head_dim", "63", "must be even"),
    )
    def test_one_error(self, path, text, message):
        (line,) = self._errors((path, text))
        self.assertStartsWith(line, path + " ")
        self.assertIn(message, line)

    @parameterized.parameters(
        ("data.batch_size", 10**9), ("data.sequence_length", 2**31)
    )
    def test_sizes_beyond_reason(self, path, size):
        lines = self._errors((path, str(size)))
        self.assertStartsWith(lines[0], f"{path} must be at most 16777216, got {size}")

    def test_large_numbers_of_a_file(self):
        tree = command_line.to_json_dict(SMALL)
        tree["optim"]["learning_rate"] = 10**400
        tree["seed"] = 10**5000
        with self.assertRaises(config.InputError) as caught:
            command_line.resolve(tree)
        self.assertIn("optim.learning_rate must be a number", str(caught.exception))
        self.assertLess(len(str(caught.exception)), 400)

    def test_all_errors_at_once(self):
        lines = self._errors(
            ("num_stepz", "3"),
            ("model.hidden_size", "0"),
            ("model.kv_lora_rank", "x"),
            ("optim.weight_decay", "-1"),
            ("eval_batches", "0"),
        )
        starts = [line.partition(" ")[0] for line in lines]
        self.assertCountEqual(
            starts,
            [
                "num_stepz",
                "model.kv_lora_rank",
                "model.hidden_size",
                "optim.weight_decay",
                "eval_batches",
            ],
        )

    def test_a_failed_section_raises_no_doubts_about_others(self):
        # model falls back to its default, whose index_topk is too large for the data.
        (line,) = self._errors(("model.index_topk", "0"))
        self.assertStartsWith(line, "model.index_topk must be at least 1")

    def test_rules_between_sections_are_checked(self):
        (line,) = self._errors(("data.sequence_length", "16"))
        self.assertStartsWith(line, "model.index_topk must be smaller")

    def test_wrong_values_of_a_file(self):
        tree = command_line.to_json_dict(SMALL)
        tree["optim"] = 3
        tree["model"]["hidden_size"] = 1.0
        tree["model"]["rope"] = {"theta": 1e4}
        with self.assertRaises(config.InputError) as caught:
            command_line.resolve(tree)
        message = str(caught.exception)
        self.assertIn("optim is a section", message)
        self.assertIn("model.hidden_size must be an integer, got 1.0.", message)
        self.assertIn("model.rope.theta is no field", message)

    def test_another_class(self):
        changed = command_line.resolve({}, [("fsdp", "4")], config.MeshConfig)
        self.assertEqual(changed, config.MeshConfig(fsdp=4))


class LoadConfigFileTest(parameterized.TestCase):
    def _file(self, text: str) -> str:
        path = self.create_tempdir().create_file("tiny.py").full_path
        pathlib.Path(path).write_text(textwrap.dedent(text))
        return path

    def test_variant_reaches_get_config(self):
        path = self._file("""
            import ml_collections
            def get_config(variant: str = "plain"):
                return ml_collections.ConfigDict({"sample_prompt": variant})
        """)
        for spec, expected in ((path, "plain"), (path + ":big", "big")):
            loaded = files.load(spec)
            self.assertEqual(loaded.sample_prompt, expected)

    @parameterized.named_parameters(
        ("no_get_config", "x = 1", "", "define get_config"),
        ("not_a_config", "def get_config(): return {}", "", "got dict"),
        ("syntax", "def get_config(:", "", "SyntaxError"),
        (
            "exception",
            "def get_config():\n    return 1 / 0",
            "",
            r"ZeroDivisionError: division by zero \(line 2\)",
        ),
        (
            "variant",
            "VARIANTS = {'small': 1, '': 0}\ndef get_config(variant=''): pass",
            ":smal",
            "no variant 'smal'. Did you mean small\\? Variants: small.",
        ),
        (
            "rule",
            "from glm5_jax import config\n"
            "def get_config(): return config.MeshConfig(fsdp=0, tensor=0)",
            "",
            "tiny.py: fsdp must.*\n.*tiny.py: tensor must",
        ),
    )
    def test_error(self, text, variant, message):
        path = self._file(text)
        with self.assertRaisesRegex(config.InputError, message):
            files.load(path + variant)

    def test_a_missing_file_lists_the_others(self):
        path = self._file("")
        with self.assertRaises(config.InputError) as caught:
            files.load(path.replace("tiny", "tinny"))
        self.assertIn(f"Did you mean {path}?", str(caught.exception))
        self.assertIn("holds tiny.py.", str(caught.exception))

    def test_a_missing_folder(self):
        with self.assertRaisesRegex(config.InputError, "nowhere/ holds no config"):
            files.load("nowhere/x.py")

    def test_those_of_the_package_are_found_from_anywhere(self):
        with contextlib.chdir(self.create_tempdir().full_path):
            for spec in ("configs/quickstart.py", "quickstart.py", "quickstart"):
                self.assertEqual(files.load(spec).stage, "pretrain")
            with self.assertRaisesRegex(config.InputError, "mean .*/quickstart.py"):
                files.load("configs/quickstar.py")

    def test_a_file_here_goes_before_one_of_the_package(self):
        with contextlib.chdir(pathlib.Path(self._file("")).parent):
            pathlib.Path("quickstart.py").write_text("")
            with self.assertRaisesRegex(config.InputError, "has no get_config"):
                files.load("quickstart.py")


class CommandsTest(absltest.TestCase):
    """`python -m glm5_jax COMMAND`, and the installed command glm5_jax."""

    def run_with(self, *arguments):
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.object(sys, "argv", ["glm5_jax", *arguments]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                __main__.main()
                code = 0
            except SystemExit as end:
                code = end.code
        return code, out.getvalue(), err.getvalue()

    def test_lists_every_command(self):
        code, out, _ = self.run_with()
        self.assertEqual(code, 0)
        folder = pathlib.Path(__main__.__file__).parent
        files = [*folder.glob("*.py"), *folder.glob("*/__main__.py")]
        entry_points = {
            p.parent.name if p.stem == "__main__" else p.stem
            for p in files
            if p.parent / p.name != folder / "__main__.py"
            and "command_line.run(main" in p.read_text()
        }
        self.assertEqual(set(__main__.COMMANDS), entry_points)
        for name in __main__.COMMANDS:
            self.assertRegex(out, rf"(?m)^  {name} +[A-Z].*\.$")

    def test_an_unknown_one_is_named(self):
        code, _, err = self.run_with("trian")
        self.assertEqual(code, 2)
        self.assertIn("Did you mean train?", err)


class CommandLineTest(absltest.TestCase):
    def test_splits_config_from_other_flags(self):
        argv = (
            "--config=a.py:b --workdir w --config.x.y=a=b --config.z -1 --configure=1"
        )
        arguments, rest = command_line.parse_command_line(["train", *argv.split()])
        self.assertEqual(arguments.config, "a.py:b")
        self.assertEqual(arguments.overrides, (("x.y", "a=b"), ("z", "-1")))
        self.assertEqual(rest, ["train", "--workdir", "w", "--configure=1"])

    def test_wrong_use(self):
        cases = (
            (["--config"], "--config needs a value"),
            (["--config.seed", "--dry_run"], "--config.seed needs a value"),
            (["--config=a.py", "--config=b.py"], "given twice: a.py and b.py"),
        )
        for argv, message in cases:
            with self.assertRaisesRegex(config.InputError, message):
                command_line.parse_command_line(["train", *argv])

    def test_train_config(self):
        path = self.create_tempfile("c.py").full_path
        pathlib.Path(path).write_text(
            "from glm5_jax import command_line, config\n"
            "def get_config(variant: str = ''):\n"
            "    model = config.ModelConfig(index_topk=16)\n"
            "    return command_line.to_config_dict(config.TrainConfig(model=model))\n"
        )
        arguments = command_line.Arguments(config=path, overrides=(("seed", "3"),))
        expected = config.TrainConfig(seed=3, model=config.ModelConfig(index_topk=16))
        self.assertEqual(arguments.train_config(), expected)
        self.assertEqual(dataclasses.replace(arguments, config="a/b.py:c").name, "b")
        with self.assertRaisesRegex(config.InputError, "--config is missing"):
            dataclasses.replace(arguments, config=None).train_config()


class AddressTest(parameterized.TestCase):
    @parameterized.parameters(
        ("train", "--workdir=az://bucket/run", "--config=configs/quickstart.py"),
        ("convert", "--target=az://bucket/model", "--source=."),
        ("prepare", "--target=az://bucket/rows", "--source=."),
    )
    def test_a_path_that_is_no_folder_is_not_written_to(self, name, folder, other):
        done = subprocess.run(
            [sys.executable, "-m", f"glm5_jax.{name}", folder, other],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        self.assertEqual(done.returncode, 2, done.stderr)
        given = folder if name != "convert" else folder.removeprefix("--target=")
        self.assertIn(f"error: {given} is no path of a file system", done.stderr)


ERRORS = {
    "disk": OSError(errno.ENOSPC, "No space left on device", "a/b"),
    "path": OSError(errno.EACCES, "Permission denied", "a/b"),
    "no_path": OSError("the checkpoint cannot be written"),
    "memory": MemoryError(),
    "arithmetic": FloatingPointError("step 3 is\nnot finite"),
    "value": ValueError("embedded null byte"),
    "large": OverflowError("int too large to convert to float"),
    "deep": RecursionError("maximum recursion depth exceeded"),
    "pages": ValueError("x" * 10**6),
}
CODES = {"disk": 1, "no_path": 1, "memory": 1, "arithmetic": 1}  # others: 2


class FailuresTest(parameterized.TestCase):
    @parameterized.parameters(*ERRORS)
    def test_one_line_and_the_right_code(self, name):
        code, message = failures.describe(ERRORS[name])
        self.assertEqual(code, CODES.get(name, 2))
        self.assertEqual(message.count("\n"), 0)
        self.assertBetween(len(message), 10, 700)

    @parameterized.parameters(KeyError("x"), TypeError("x"), AssertionError())
    def test_a_bug_keeps_its_traceback(self, error):
        self.assertIsNone(failures.describe(error))

    def test_says_where_it_was(self):
        try:
            fields._typed("\udcff", str)
        except ValueError as error:
            _, message = failures.describe(error)
            with mock.patch.dict(os.environ, {failures.TRACEBACK: "1"}):
                self.assertIsNone(failures.describe(error))
        self.assertRegex(message, r"glm5_jax/config/fields.py:\d+; GLM5_JAX_TRACEBACK")


ENTRY_POINT = '''"""Trains a line."""
import sys
from absl import flags
from glm5_jax import command_line, config

only_model = "--only_model" in sys.argv
SIZE = flags.DEFINE_integer("size", 3, "How long the line is.")

def main(arguments):
    if arguments.config == "damaged":
        raise config.DamagedError("checkpoints/5: other content")
    if arguments.config == "full":
        raise OSError(28, "No space left on device", "a/b")
    if arguments.config == "interrupted":
        raise KeyboardInterrupt
    if arguments.config == "bad":
        raise config.InputError("first\\nsecond")
    print(SIZE.value, arguments.config, arguments.overrides)
    return SIZE.value

command_line.run(main, only_model=only_model)
'''


class ExplanationsTest(parameterized.TestCase):
    @parameterized.parameters(config.TrainConfig, config.PrepareConfig)
    def test_every_field_has_a_sentence(self, cls):
        texts = explanations.of(cls)
        self.assertEqual(list(texts), [path for path, *_ in fields.of(cls)])
        for path, text in texts.items():
            with self.subTest(path):
                self.assertRegex(text, '^[A-Z"0-9]')
                self.assertNotRegex(text, r"^Of |\.\.\.")
                self.assertGreaterEqual(len(text.split()), 3)


class RunTest(absltest.TestCase):
    def _run(self, *argv: str) -> tuple[int, str, str]:
        script = self.create_tempfile("line.py", ENTRY_POINT).full_path
        done = subprocess.run(
            [sys.executable, script, *argv],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def test_returns_the_value_of_main(self):
        code, out, _ = self._run("--config=a.py", "--size=0", "--config.b=1")
        self.assertEqual((code, out), (0, "0 a.py (('b', '1'),)\n"))
        code, _, _ = self._run("--size", "5")
        self.assertEqual(code, 5)

    def test_input_error_is_a_message_and_exit_code_2(self):
        code, out, err = self._run("--config=bad")
        self.assertEqual((code, out, err), (2, "", "error: first\nerror: second\n"))

    def test_damage_is_a_message_and_exit_code_1(self):
        code, out, err = self._run("--config=damaged")
        self.assertEqual((code, out), (1, ""))
        self.assertEqual(err, "error: checkpoints/5: other content\n")

    def test_a_full_disk_is_a_message_and_exit_code_1(self):
        code, _, err = self._run("--config=full")
        self.assertEqual(code, 1)
        self.assertEqual(err, "error: [Errno 28] No space left on device: 'a/b'\n")

    def test_ctrl_c_is_a_message_and_exit_code_130(self):
        code, _, err = self._run("--config=interrupted")
        self.assertEqual((code, err), (130, "error: interrupted.\n"))

    def test_unknown_flags(self):
        code, _, err = self._run("stray", "--siz=3", "--confg.seed=3")
        self.assertEqual(code, 2)
        self.assertIn("error: 'stray' belongs to no flag", err)
        self.assertIn("no flag --siz. Did you mean --size?", err)
        self.assertIn("no flag --confg.seed. Did you mean --config?", err)
        self.assertNotIn("Traceback", err)

    def test_wrong_value_of_a_flag(self):
        code, _, err = self._run("--size=big")
        self.assertEqual(code, 2)
        self.assertRegex(err, "^error: flag --size=big: .*'big'")
        self.assertNotIn("Traceback", err)

    def test_help(self):
        code, out, _ = self._run("--help")
        self.assertEqual(code, 0)
        for words in (
            "Trains a line.",
            "--size: How long the line is.",
            "--config=FILE.py[:variant]",
            "--config.model.hidden_size=6144  (an integer)",
            "--config.model.attention=sparse  (one of dense, sparse,",
            "--config.init_from=None  (text, or None)",
            "\n        Share of a weight, times the learning rate, that is subtracted",
        ):
            self.assertIn(words, out)
        code, out, _ = self._run("--help", "--only_model")
        self.assertIn("--config.model.X=VALUE", out)
        self.assertNotIn("learning_rate", out)


if __name__ == "__main__":
    environment.main()
