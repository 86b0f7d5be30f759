"""A server whose model lies on 8 devices answers as one on a single device."""

import contextlib
import pathlib
import threading

import httpx
from absl.testing import parameterized

from glm5_jax.http_server import guard, listening
from glm5_jax.serving import app, command
from glm5_jax.weights import huggingface_export
from tests import environment
from tests.model import tiny

CONFIG = tiny.model(
    num_hidden_layers=1,
    first_k_dense_replace=0,
    kv_lora_rank=16,
    num_nextn_predict_layers=0,
    eos_token_id=(),
)
PROMPTS = [[5, 9, 2, 33, 7, 1, 60, 12], [4, 4, 8, 17, 2, 50, 3]]  # of one program


class MeshTest(parameterized.TestCase):
    def answers(self, folder, overrides):
        """Asks a server for greedy continuations in ids, over a socket."""
        options = command.Options(num_slots=8, capacity=32)
        with (
            command.loaded(str(folder), overrides, options) as model,
            contextlib.closing(listening.bind("127.0.0.1", 0)) as listener,
        ):
            listener.listen()  # clients that come before the thread wait
            server = listening.make_server(app.make(model, guard.Limits()), 5)
            thread = threading.Thread(target=server.run, args=([listener],))
            thread.start()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            settings = {"temperature": 0, "max_tokens": 6, "prompt_logprobs": 2}
            answers = []
            try:
                for prompt in PROMPTS:
                    body = {"token_ids": prompt, "sampling_params": settings}
                    reply = httpx.post(
                        f"{url}/inference/v1/generate", json=body, timeout=120
                    )
                    answer = reply.raise_for_status().json()
                    places = answer["prompt_logprobs"][1:]
                    answers.append(answer["choices"][0] | {"places": places})
            finally:
                server.should_exit = True
                thread.join()
        return answers

    def test_equal_ids_and_scores(self):
        folder = pathlib.Path(self.create_tempdir().full_path) / "model"
        huggingface_export.save_params(tiny.params(CONFIG), CONFIG, folder)
        alone = self.answers(folder, [])
        shared = self.answers(folder, [("mesh.fsdp", "8")])
        for one, other in zip(alone, shared, strict=True):
            self.assertEqual(one["token_ids"], other["token_ids"])
            self.assertLen(one["token_ids"], 6)
            for place, same in zip(one["places"], other["places"], strict=True):
                self.assertEqual(list(place), list(same))
                for id, found in place.items():
                    self.assertEqual(found["rank"], same[id]["rank"])
                    self.assertAlmostEqual(found["logprob"], same[id]["logprob"], 4)


if __name__ == "__main__":
    environment.main()
