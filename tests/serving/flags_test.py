"""The flags of serve and route arrive where they are used."""

import runpy
import sys
from unittest import mock

from absl.testing import absltest, flagsaver

from glm5_jax import config
from glm5_jax.http_server import listening
from glm5_jax.inference import engine, service
from glm5_jax.model import transformer
from glm5_jax.serving import app, command, fetching
from glm5_jax.serving.router import local
from glm5_jax.weights import quantized_loading
from tests import environment, forked
from tests.model import tiny

SECONDS = 120
MACHINE = mock.create_autospec(engine.Engine, instance=True)
URLS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
FIELDS = {
    "model_name": ("name", "mine", "mine"),
    "min_prefill_tokens": ("min_prefill_tokens", "77", 77),
    "prefill_servers": ("prefill_servers", ",".join(URLS), URLS),
    "warm_up": ("warm_up", "true", True),
    "num_slots": ("num_slots", "3", 3),
    "num_pages": ("num_pages", "40", 40),
    "host_pages": ("host_pages", "50", 50),
    "num_drafts": ("num_drafts", "2", 2),
    "acceptance": ("acceptance", "rejection", "rejection"),
    "capacity": ("capacity", "99", 99),
    "max_concurrency": ("max_concurrency", "5", 5),
    "drain_seconds": ("drain_seconds", "6", 6),
    "seed": ("seed", "8", 8),
    "quantize": ("quantize", "w4a8", "w4a8"),
    "weights_url": ("weights_url", "http://a:1", "http://a:1"),
    "template": ("template", "glm5.2", "glm5.2"),
}


def told(name, function, *flags):
    """Returns the arguments with which a command calls a function."""
    receiver, sender = forked.PROCESSES.Pipe(duplex=False)
    task = name, function, flags, sender
    child = forked.PROCESSES.Process(target=_run, args=task)
    child.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(SECONDS) else None
    except EOFError:
        return None
    finally:
        child.join()


def _run(name, function, flags, sender):
    sys.argv = [name, *flags]
    with mock.patch(function, lambda *args: sender.send(args)):
        runpy.run_module(f"glm5_jax.{name}", run_name="__main__", alter_sys=True)


class FlagsTest(absltest.TestCase):
    def test_of_serve(self):
        flags = [f"--{flag}={text}" for flag, (_, text, _) in FIELDS.items()]
        flags += ["--checkpoint=RUN", "--compile_cache=none"]
        found = told("serve", "glm5_jax.serving.command.serve", *flags)
        self.assertIsNotNone(found)
        checkpoint, overrides, options = found
        self.assertEqual((checkpoint, [*overrides]), ("RUN", []))
        for field, _, value in FIELDS.values():
            self.assertEqual(getattr(options, field), value, field)
            self.assertNotEqual(getattr(command.Options(), field), value, field)

    def test_of_route(self):
        flags = [f"--replicas={URLS[0]}", f"--prefill_replicas={URLS[1]}"]
        flags += ["--load_factor=1.5", "--spare=7", "--max_wait=3", "--port=0"]
        found = told("route", "glm5_jax.serving.router.command.route", *flags)
        self.assertIsNotNone(found)
        replicas, settings = found
        self.assertEqual((replicas, settings.prefill_urls), (URLS[:1], URLS[1:]))
        bound = settings.options.bound
        self.assertEqual((bound.factor, bound.spare), (1.5, 7))
        self.assertEqual(settings.options.max_wait, 3)

    def test_servers_that_read_prompts_are_started_beside_those_that_answer(self):
        with (
            flagsaver.flagsaver(num_prefill_replicas=2),
            mock.patch.object(local, "Servers") as made,
            mock.patch.object(local.command, "route"),
        ):
            made.return_value.failure = None
            local.serve(3, 8)
            _, environs, cores, _, num_prefill = made.call_args.args
            self.assertEqual((len(environs), len(cores), num_prefill), (5, 5, 2))
            with self.assertRaisesRegex(config.InputError, "=2 needs --num_replicas"):
                local.serve(0, 8)


class OptionsTest(absltest.TestCase):
    def test_a_weight_store_elsewhere_is_beside_a_folder(self):
        for given, words in (
            ({"weights_url": "http://a:1"}, "needs --weights_root"),
            ({"weights_url": "a:1", "weights_root": "."}, "http://HOST:PORT"),
        ):
            with self.assertRaisesRegex(config.InputError, words):
                command._far_store(command.Options(**given))

    def test_all_is_compiled_before_the_server_runs(self):
        for warm_up, wanted in ((True, ["warm_up", "run"]), (False, ["run"])):
            calls = mock.Mock()
            with (
                mock.patch.object(command, "loaded") as loaded,
                mock.patch.object(listening, "make_server", return_value=calls),
                mock.patch.object(app, "make"),
            ):
                model = loaded.return_value.__enter__.return_value
                model.service.call = lambda call, it=calls: call(it)
                command.serve("RUN", (), command.Options(port=0, warm_up=warm_up))
            names = [name for name, *_ in calls.method_calls]
            self.assertEqual(names, wanted)

    def test_of_the_engine(self):
        model = tiny.model(num_nextn_predict_layers=1)
        read = model, transformer.abstract_params(model), None
        options = command.Options(num_drafts=2, acceptance="rejection", capacity=32)
        with (
            mock.patch.object(quantized_loading, "load_model", return_value=read),
            mock.patch.object(command.loading, "context_length", return_value=32),
            mock.patch.object(engine, "Engine", return_value=MACHINE) as made,
        ):
            command._engine("RUN", (), options)
        limits = made.call_args.kwargs["limits"]
        self.assertEqual((limits.num_drafts, limits.acceptance), (2, "rejection"))
        self.assertEqual(made.call_args.kwargs["seed"], 0)

    def test_of_other_servers_for_long_prompts(self):
        options = command.Options(
            prefill_servers=URLS, min_prefill_tokens=77, host_pages=4
        )
        driver = mock.create_autospec(service.Service, instance=True)
        found = mock.create_autospec(fetching.Fetcher, instance=True)
        with mock.patch.object(fetching, "Fetcher", return_value=found) as made:
            command._fetcher(driver, "mine", options)
        *_, settings = made.call_args.args
        self.assertEqual((settings.urls, settings.least_tokens), (URLS, 77))


if __name__ == "__main__":
    environment.main()
