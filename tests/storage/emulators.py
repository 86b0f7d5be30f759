"""Emulators of S3 (moto) and of Cloud Storage, each a process, and clean buckets."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time
import urllib.error
import urllib.request
from unittest import mock

import fsspec

from tests.processes import launch

SECONDS = 60  # until an emulator answers, on a machine under load
SCHEMES = ("gs", "s3")
# Its server has one thread, which the first connection keeps: another process waits. It
# reads an object's bytes as mail, in which a line break at the end does not count.
GOOGLE = """
import json
from http import server as http_server

http_server.HTTPServer = http_server.ThreadingHTTPServer
from gcp_storage_emulator import __main__, server

read_data, raw = server._read_data, server._read_raw_data

def exact(handler, query):
    kind = handler.headers.get("Content-Type") or ""
    if not kind.startswith("multipart/related"):
        return read_data(handler, query)
    boundary = kind.partition("boundary=")[2].strip('"').encode()
    body = server._decode_raw_data(raw(handler), handler)
    _, first, rest = body.split(b"--" + boundary + b"\\n", 2)
    meta, (head, content) = first.partition(b"\\n\\n")[2], rest.split(b"\\n\\n", 1)
    end = content.rindex(b"\\n--" + boundary)
    kind = head.decode().partition("Content-Type: ")[2]
    return {"meta": json.loads(meta), "content": content[:end], "content-type": kind}

server._read_data = exact
__main__.main()
"""
COMMANDS = {
    "gs": ["-c", GOOGLE, "start", "--host=127.0.0.1", "--in-memory", "--port"],
    "s3": ["-m", "moto.server", "-H", "127.0.0.1", "-p"],
}
# gcsfs and s3fs read these as Google's and AWS's own tools do; no code knows of them.
VARIABLES = {
    "gs": {
        "STORAGE_EMULATOR_HOST": "http://127.0.0.1:{port}",
        "FSSPEC_GCS_TOKEN": "anon",
    },
    "s3": {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_DEFAULT_REGION": "us-east-1",
    },
}


@contextlib.contextmanager
def serving(scheme, home):
    """Runs an emulator with a bucket `bucket`; yields what programs must find set.

    The variables are set in this process too. Copies are kept in `home`.
    """
    port = str(launch.free_port())
    command = [sys.executable, *COMMANDS[scheme], port]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environ = {k: v.format(port=port) for k, v in VARIABLES[scheme].items()}
    environ |= {"GLM5_JAX_BUCKETS": str(home), "NO_PROXY": "127.0.0.1"}
    # As storage/bucket.py sets it: gcsfs reads it at its import, which may be for S3.
    environ |= {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    with subprocess.Popen(command, **quiet) as server:
        try:
            _wait_for(f"http://127.0.0.1:{port}", server)
            with mock.patch.dict(os.environ, environ):
                configure(environ)
                system(scheme).mkdir("bucket")
                yield environ
        finally:
            server.kill()
            fsspec.config.conf.pop("gcs", None)


def configure(environ):
    """Reads the variables that fsspec reads at its import only."""
    fsspec.config.set_conf_env(fsspec.config.conf, envdict=environ)
    for name in ("gs", "s3"):
        fsspec.get_filesystem_class(name).clear_instance_cache()


def system(scheme):
    """Returns fsspec's view, by which tests look at a bucket and damage it."""
    return fsspec.url_to_fs(f"{scheme}://bucket")[0]


def objects(scheme, folder):
    """Returns the names of the objects below a folder of the bucket."""
    root, found = f"bucket/{folder}", system(scheme)
    found.invalidate_cache()
    return sorted(path.removeprefix(f"{root}/") for path in found.find(root))


def _wait_for(url, server):
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, "the emulator has ended"
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the emulator does not answer")


def write(folder, **contents):
    """Writes small files below a folder; __ in a name stands for /."""
    for name, text in contents.items():
        path = pathlib.Path(folder, *name.split("__"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
