"""What a trainer asks of a server: new weights, log-probs of texts, chosen experts."""

import asyncio
import base64
import contextlib
import pathlib
import shutil
import tempfile
from concurrent import futures
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax.inference import engine, service
from glm5_jax.inference.limits import Limits
from glm5_jax.rl.weight_store import writer
from glm5_jax.serving import new_weights, served, token_ids, weight_updates
from glm5_jax.weights import huggingface_export
from tests import environment
from tests.inference import engine_test
from tests.model import tiny
from tests.serving import scripted, server_test

LOGPROB_ATOL = 1e-5  # float32 sums in another order


class ScoreTest(server_test.ClientTest):
    def score(self, **fields):
        return self.http.post("/score", json=fields)

    def test_logprobs_are_those_of_a_whole_forward_pass(self):
        rows = [[72, 101, 33, 9], [80], scripted.TOKENIZER.encode("abcd" * 7)]
        answer = self.score(token_ids=rows).json()
        self.assertEqual(answer["weight_version"], 0)
        self.assertEqual(answer["usage"]["prompt_tokens"], 33)
        padded = np.zeros((3, 28), np.int32)  # no token sees what comes after it
        for row, ids in zip(padded, rows, strict=True):
            row[: len(ids)] = ids
        logits = engine_test.full_logits(scripted.params(), scripted.MODEL, padded)
        wanted = np.asarray(jax.nn.log_softmax(logits))
        for row, want, found in zip(rows, wanted, answer["data"], strict=True):
            self.assertEqual(found["token_ids"], row)
            first, *logprobs = found["logprobs"]
            self.assertIsNone(first)
            want = want[np.arange(len(row) - 1), row[1:]]
            np.testing.assert_allclose(logprobs, want, atol=LOGPROB_ATOL)
        (text,) = self.score(texts="abcd").json()["data"]
        self.assertEqual(text["token_ids"], [*b"abcd"])

    @parameterized.parameters(
        ({}, "Give either texts or token_ids"),
        ({"texts": "a", "token_ids": [1]}, "Give either"),
        ({"texts": []}, "1 to 256 rows"),
        ({"token_ids": [[1], []]}, "at least one token"),
        ({"token_ids": [1, 9999]}, "Ids must lie in"),
        ({"token_ids": [1] * (scripted.CAPACITY + 1)}, "more than the 768"),
    )
    def test_wrong_rows(self, fields, message):
        answer = self.score(**fields)
        self.assertEqual(answer.status_code, 400)
        self.assertIn(message, answer.json()["error"]["message"])

    def test_a_server_without_flags_refuses(self):
        for path, body in (
            ("/start_weight_update", {}),
            ("/update_weights", {"update_info": {"path": "x"}}),
            ("/finish_weight_update", {}),
        ):
            answer = self.http.post(path, json=body)
            self.assertEqual(answer.status_code, 403)
            self.assertIn("--weights_root=FOLDER", answer.json()["error"]["message"])
        body = {"token_ids": [1], "return_routed_experts": True}
        answer = self.http.post("/inference/v1/generate", json=body)
        self.assertIn("--routed_experts", answer.json()["error"]["message"])


class UpdateTest(server_test.ClientTest):
    """Weights in a Hugging Face folder replace those of a running server."""

    @classmethod
    def setUpClass(cls):
        cls.root = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.served_fields = {"weights_root": cls.root / "allowed"}
        (cls.root / "allowed").mkdir()
        super().setUpClass()
        # The other model's only text is "zyzy...".
        with mock.patch.object(scripted, "SCRIPT", ("azyz",)):
            other = jax.tree.map(jnp.asarray, scripted.params())
        for place in ("allowed/new", "outside"):
            huggingface_export.save_params(other, scripted.MODEL, cls.root / place)
        store = writer.Writer(cls.root / "allowed" / "store")
        kept = store.publish(other, 9)
        cls.version = f"store/{kept.name.folder}"
        damaged = cls.root / "allowed" / "damaged"
        shutil.copytree(cls.root / "allowed" / "new", damaged)
        (file,) = damaged.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-100])

    def post(self, path, **body):
        answer = self.http.post(path, json=body)
        return answer.status_code, answer.json()

    def message(self, answer):
        return answer[1]["error"]["message"]

    def update(self, path):
        return self.post("/update_weights", update_info={"path": path})

    def test_an_update_from_pause_to_resume(self):
        self.assertEqual(self.complete("a").choices[0].text, "bcd")
        self.assertEqual(self.post("/finish_weight_update")[0], 409)
        self.assertEqual(self.update("new")[0], 409)
        self.assertEqual(self.post("/start_weight_update")[0], 200)
        for path, status, text in (
            ("../outside", 403, "must lie below"),
            (str(self.root / "outside"), 403, "must lie below"),
            ("missing", 400, "missing"),
            ("new/config.json/x", 400, "config.json"),
            ("damaged", 400, "damaged"),
        ):
            answer = self.update(path)
            self.assertEqual(answer[0], status, path)
            self.assertIn(text, self.message(answer))
        (self.root / "allowed" / "link").symlink_to(self.root / "outside")
        self.assertEqual(self.update("link")[0], 403)
        self.assertEqual(self.post("/finish_weight_update")[0], 409)  # nothing was read
        self.assertEqual(self.complete("a").choices[0].text, "bcd")

        self.assertEqual(self.post("/pause", mode="keep")[0], 200)
        self.assertEqual(self.update("new"), (200, {"status": "read"}))
        with futures.ThreadPoolExecutor() as pool:
            waiting = pool.submit(self.complete, "a", max_tokens=4)
            server_test.wait_until(lambda: self.service.stats().waiting == 1)
            for wrong in (-1, "x", 2**31):
                answer = self.post("/finish_weight_update", weight_version=wrong)
                self.assertIn("weight_version must be", self.message(answer))
            answer = self.post("/finish_weight_update", weight_version="7")
            self.assertEqual(answer[1]["weight_version"], 7)
            self.assertEqual(self.post("/resume")[0], 200)
            self.assertEqual(waiting.result().choices[0].text, "zyzy")
        (model,) = self.http.get("/v1/models").json()["data"]
        self.assertEqual(model["weight_version"], 7)

        self.post("/start_weight_update")
        self.update("new")
        answer = self.post("/finish_weight_update", weight_version=3)
        self.assertIn("version must increase", self.message(answer))
        answer = self.post("/finish_weight_update")  # it may be sent again
        self.assertEqual(answer[1]["weight_version"], 8)
        self.post("/start_weight_update")
        self.assertEqual(self.update(self.version)[0], 200)
        self.assertEqual(self.post("/finish_weight_update", weight_version=9)[0], 200)
        body = {"token_ids": [97], "sampling_params": {"max_tokens": 2, "logprobs": 1}}
        answer = self.http.post("/inference/v1/generate", json=body).json()
        (choice,) = answer["choices"]
        self.assertEqual(choice["weight_versions"], [9, 9])
        self.assertEqual(bytes(choice["token_ids"]), b"zy")

        self.require_a_late_version_is_waited_for()
        (manifest,) = (self.root / "allowed" / "store").glob("*/manifest.json")
        manifest.write_text("{")
        self.post("/start_weight_update")
        self.assertEqual(self.update(self.version)[0], 400)

    def test_requests_that_are_pinned_to_a_version(self):
        """All of their tokens are of that version, or there is no answer but 409."""
        version = self.service.stats().version
        other = version + 1
        said = [{"role": "user", "content": "Hi"}]
        for path, body in (
            ("/v1/chat/completions", {"messages": said, "stream": True}),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/messages", {"messages": said, "max_tokens": 2}),
            ("/v1/responses", {"input": "Hi"}),
        ):
            answer = self.post(path, **body, weight_version=other)
            self.assertEqual(answer[0], 409, path)
            words = (
                f"of version {version}, but the request wants weight_version={other}"
            )
            self.assertIn(words, self.message(answer))

        path, sampling = "/inference/v1/generate", {"max_tokens": 2}
        body = {"token_ids": [97], "sampling_params": sampling}
        for wanted, status in ((other, 409), (version, 200)):
            sampling["weight_version"] = wanted
            self.assertEqual(self.post(path, **body)[0], status)
        self.service.pause().result()
        with futures.ThreadPoolExecutor() as pool:
            asked = pool.submit(self.post, path, **body)
            server_test.wait_until(lambda: self.service.stats().waiting == 1)
            params = jax.tree.map(jnp.asarray, scripted.params())
            self.service.publish(params, other).result()
            self.service.resume().result()
            answer = asked.result()
        self.assertEqual(answer[0], 409)
        self.assertIn(f"Weights of version {other} came", self.message(answer))

    def require_a_late_version_is_waited_for(self):
        """As where NFS shows another host's folder a minute after it is there."""
        folder = self.root / "allowed" / self.version
        hidden = folder.rename(folder.with_name("hidden"))
        self.post("/start_weight_update")
        with mock.patch.object(new_weights, "_VISIBLE_SECONDS", 0.0):
            answer = self.update(self.version)
        self.assertEqual(answer[0], 400)
        self.assertIn("has not been in sight for 0 s", self.message(answer))
        show = mock.Mock(side_effect=lambda seconds: hidden.rename(folder))
        clock = mock.Mock(monotonic=mock.Mock(return_value=0.0), sleep=show)
        with mock.patch.object(new_weights, "time", clock):
            self.assertEqual(self.update(self.version), (200, {"status": "read"}))
        self.assertEqual(self.post("/finish_weight_update")[0], 200)


class ClearTest(parameterized.TestCase):
    @parameterized.parameters(False, True)
    def test_the_cache_is_cleared_with_the_new_weights(self, clears):
        """In one command of the engine, so that no token is drawn between the two."""
        done, num_commands = [], []

        def call(act):
            num_commands.append(1)
            engine = mock.Mock(clear_cache=lambda: done.append("clear"))
            result = futures.Future()
            result.set_result(act(engine))
            return result

        own = mock.Mock(call=call)
        model = mock.Mock(spec=served.Served, weights_root=pathlib.Path("/"))
        model.service = own
        coming = mock.Mock(publish=lambda engine, version: done.append(version))
        read = {"path": "weights"}

        async def run():
            updates = weight_updates.Updates(model)
            updates.start()
            await updates.update(weight_updates.UpdateBody(update_info=read))
            num_commands.clear()
            await updates.finish(
                weight_updates.FinishBody(weight_version=4, clear_cache=clears)
            )

        with mock.patch.object(new_weights, "begin", return_value=coming):
            asyncio.run(run())
        self.assertEqual(done, [4, "clear"] if clears else [4])
        self.assertLen(num_commands, 1)


class ExpertsTest(parameterized.TestCase):
    def test_experts_of_a_generation(self):
        """They are those that a forward pass over the whole text chooses."""
        config = engine_test.ONE_LAYER
        params = tiny.params(config)
        made = engine.Engine(
            params,
            config,
            num_slots=1,
            capacity=24,
            with_experts=True,
            limits=Limits(with_adjustments=True),
        )
        prompt = engine_test.make_prompts(9)[0]
        asked = {"token_ids": prompt, "return_routed_experts": True}
        asked["sampling_params"] = {"max_tokens": 6, "seed": 0}
        body = token_ids.GenerateBody.model_validate(asked)
        with contextlib.closing(service.Service(made)) as driver:
            model = served.Served(name="tiny", service=driver, routed_experts=True)
            answer = asyncio.run(token_ids.generate(model, body))
        (choice,) = answer["choices"]
        found = choice["routed_experts"]
        data = np.frombuffer(base64.b64decode(found["data"]), "<u2")
        data = data.reshape(found["shape"])
        row = np.array([[*prompt, *choice["token_ids"]]], np.int32)
        _, experts = jax.device_get(engine_test.with_choices(params, config, row))
        want = experts[:, 0, :-1].swapaxes(0, 1)
        np.testing.assert_array_equal(np.sort(data), np.sort(want))


if __name__ == "__main__":
    environment.main()
