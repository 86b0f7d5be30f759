"""Downloads a model by its name from a hub on this machine, over a socket."""

import contextlib
import hashlib
import http.server
import json
import os
import pathlib
import shutil
import socket
import threading
import typing
import urllib.parse
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.weights import hub, loading
from tests import environment

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "glm5"
NAME = "some-org/GLM-5.tiny"
SHA = "0123456789abcdef0123456789abcdef01234567"
TENSORS = ".safetensors"
NEXT = SHA[::-1]  # of the revision v2


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as huggingface.co does: a model's commit, its files, and their bytes."""

    files = {path.name: path.read_bytes() for path in GOLDEN.iterdir()} | {
        "modeling.py": b"raise SystemExit",
        "pytorch_model.bin": b"a pickle",
    }
    asked: typing.ClassVar[list] = []

    def do_HEAD(self):
        self.answer(has_body=False)

    def do_GET(self):
        self.answer(has_body=True)

    def answer(self, has_body):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if has_body:
            self.asked.append(path)
        of_model = f"/api/models/{NAME}"
        if path in (of_model, f"{of_model}/revision/main"):
            self.send(json.dumps({"id": NAME, "modelId": NAME, "sha": SHA}).encode())
        elif path == f"{of_model}/revision/v2":
            self.send(json.dumps({"id": NAME, "modelId": NAME, "sha": NEXT}).encode())
        elif path in (f"{of_model}/tree/{SHA}", f"{of_model}/tree/{NEXT}"):
            self.send(json.dumps([self.entry(name) for name in self.files]).encode())
        elif path.startswith((f"/{NAME}/resolve/{SHA}/", f"/{NAME}/resolve/{NEXT}/")):
            self.send(self.files[path.rpartition("/")[2]], has_body)
        else:
            self.send(b"{}", status=404, **{"X-Error-Code": "RepoNotFound"})

    def entry(self, name):
        content = self.files[name]
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": name, "size": len(content), "oid": oid}

    def send(self, body, has_body=True, status=200, **headers):
        self.send_response(status)
        etag = hashlib.sha1(body).hexdigest()
        sha = NEXT if NEXT in self.path else SHA
        named = {"ETag": f'"{etag}"', "X-Repo-Commit": sha, "Content-Length": len(body)}
        for name, value in (named | headers).items():
            self.send_header(name, str(value))
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


class HubTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        hub.folder.cache_clear()
        Hub.asked.clear()
        self.cache = self.create_tempdir().full_path
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.set_hub(server.server_address[1])

    def set_hub(self, port):
        where = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_CACHE": self.cache}
        self.enter_context(mock.patch.dict(os.environ, where))

    def test_a_name_is_the_model_of_its_files(self):
        _, params, _ = loading.load_model(NAME)
        _, wanted, _ = loading.load_model(GOLDEN)
        jax.tree.map(np.testing.assert_array_equal, params, wanted)
        downloaded = {path.rpartition("/")[2] for path in Hub.asked}
        self.assertIn("model.safetensors", downloaded)
        self.assertNoCommonElements(downloaded, {"modeling.py", "pytorch_model.bin"})
        with self.subTest("and is not downloaded again"):
            hub.folder.cache_clear()
            Hub.asked.clear()
            self.assertEqual(loading.find(NAME).folder.name, SHA)
            self.assertEmpty([path for path in Hub.asked if "resolve" in path])
        with self.subTest("also without a network"):
            hub.folder.cache_clear()
            self.set_hub(closed_port())
            with self.disk(free=0), self.assertNoLogs("absl", "INFO"):
                self.assertEqual(loading.find(NAME).folder.name, SHA)

    def test_a_revision_is_asked_for(self):
        self.assertEqual(loading.find(f"{NAME}@v2").folder.name, NEXT)

    def test_without_a_network_it_says_how_to_download(self):
        self.set_hub(closed_port())
        message = "hf download zai-org/GLM-5 --revision v1 --local-dir zai-org/GLM-5"
        with self.assertRaisesRegex(config_lib.InputError, message):
            loading.find("zai-org/GLM-5@v1")

    def test_a_model_that_the_hub_lacks(self):
        with self.assertRaisesRegex(config_lib.InputError, "no folder some-org/other"):
            loading.find("some-org/other")

    def disk(self, free):
        usage = mock.Mock(return_value=mock.Mock(free=free))
        return mock.patch.object(shutil, "disk_usage", usage)

    def test_a_disk_without_room(self):
        wanted = [n for n in Hub.files if pathlib.Path(n).suffix in (".json", TENSORS)]
        size = sum(len(Hub.files[name]) for name in wanted)
        with (
            self.disk(free=size - 1),
            self.assertRaisesRegex(config_lib.InputError, "set HF_HUB_CACHE"),
        ):
            loading.find(NAME)
        self.assertEmpty([path for path in Hub.asked if "resolve" in path])
        with self.disk(free=size):
            self.assertEqual(loading.find(NAME).folder.name, SHA)

    def test_a_path_below_a_folder_is_no_name(self):
        folder = self.create_tempdir().full_path
        with contextlib.chdir(folder):
            self.assertTrue(hub.is_name("runs/quickstart"))
            pathlib.Path("runs").mkdir()
            self.assertFalse(hub.is_name("runs/quickstart"))
            with self.assertRaisesRegex(config_lib.InputError, "There is no folder"):
                loading.find("runs/quickstart")
        for path in ("quickstart", "/runs/quickstart", "a/b/c", "../quickstart"):
            self.assertFalse(hub.is_name(path), path)
        self.assertEmpty(Hub.asked)


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


if __name__ == "__main__":
    environment.main()
