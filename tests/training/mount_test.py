"""A run's folder in a bucket, mounted as docs/storage.md says: S3 by s3fs and FUSE.

The bucket is moto's, the mount is real. A host that dies takes its mount with it; the
next one mounts anew and sees what the bucket holds.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import urllib.request

import pytest

from glm5_jax.checkpoint import rollback
from tests import environment
from tests.processes import launch
from tests.training import kill_test

ROOT = pathlib.Path(__file__).parents[2]
BUCKET = "bucket"


def missing():
    """Names the tool that this machine lacks for a bucket and a mount, or None."""
    for module in ("moto", "flask", "boto3"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install 'moto[s3,server]'"
    if shutil.which("s3fs") is None:
        return "s3fs is not installed (Debian: apt install s3fs)"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened"
    return None


def mount_command():
    """The command of docs/storage.md."""
    text = (ROOT / "docs" / "storage.md").read_text()
    (command,) = re.findall(r"^s3fs (?:.*\\\n)*.*$", text, re.MULTILINE)
    return command.replace("\\\n", " ")


def wait_for(what, is_alive):
    deadline = time.monotonic() + 120
    while not what():
        assert is_alive(), "the process has ended"
        assert time.monotonic() < deadline
        time.sleep(0.5)  # the bucket's server does one thing at a time


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
class MountTest(kill_test.LivesTest):
    num_steps = 20

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.port = launch.free_port()
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-p", str(cls.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        cls.addClassCleanup(server.wait)
        cls.addClassCleanup(server.kill)
        cls.url = f"http://127.0.0.1:{cls.port}"

        def answers():
            try:
                urllib.request.urlopen(cls.url, timeout=1).close()
                return True
            except urllib.error.HTTPError:
                return True
            except OSError:
                return False

        wait_for(answers, lambda: server.poll() is None)
        import boto3

        cls.store = boto3.client(
            "s3",
            endpoint_url=cls.url,
            region_name="us-east-1",
            aws_access_key_id="x",
            aws_secret_access_key="y",
        )
        cls.store.create_bucket(Bucket=BUCKET)

    def mount(self, name):
        """Mounts the bucket; returns folder and process."""
        folder = self.root / name
        folder.mkdir()
        command = mount_command().replace("BUCKET", BUCKET)
        command = command.replace("/mnt/bucket", str(folder))
        command = command.replace("https://s3.us-east-1.amazonaws.com", self.url)
        keys = {"AWSACCESSKEYID": "x", "AWSSECRETACCESSKEY": "y"}
        process = subprocess.Popen(
            [*command.split(), "-f"],
            env=os.environ | keys | {"NO_PROXY": "127.0.0.1"},
            stderr=subprocess.DEVNULL,
        )
        self.addCleanup(subprocess.run, ["umount", "-l", folder], check=False)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        wait_for(folder.is_mount, lambda: process.poll() is None)
        return folder, process

    def objects(self, pattern):
        """The keys in the bucket that match a pattern."""
        pages = self.store.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return [key for key in keys if re.fullmatch(pattern, key)]

    def sealed(self):
        """The steps of which the bucket holds a manifest."""
        keys = self.objects(r"run/checkpoints/\d+/manifest.json")
        return sorted(int(key.split("/")[2]) for key in keys)

    def test_a_host_dies_a_bit_flips_in_the_bucket_and_the_run_is_rolled_back(self):
        self.finish(self.root / "local")
        folder, mount = self.mount("first")
        child = self.start(folder / "run")
        wait_for(lambda: max(self.sealed(), default=0) >= 4, child.is_alive)
        child.kill()
        mount.kill()
        child.join()
        mount.wait()
        folder, _ = self.mount("second")
        newest = self.sealed()[-1]
        (key,) = self.objects(rf"run/checkpoints/{newest}/params/d/[0-9a-f]+")
        body = bytearray(self.store.get_object(Bucket=BUCKET, Key=key)["Body"].read())
        body[len(body) // 2] ^= 1
        self.store.put_object(Bucket=BUCKET, Key=key, Body=bytes(body))
        self.finish(folder / "run")
        there = os.listdir(folder / "run" / "checkpoints")
        self.assertIn(f"{newest}.damaged", there)
        self.assert_same_end(self.root / "local", folder / "run")
        before, last = sorted(int(name) for name in there if name.isdecimal())[-2:]
        _, aside = rollback.by_hand(folder / "run", before, 0)
        self.assertEqual((aside, self.sealed()[-1]), ([last], before))
        self.finish(folder / "run")
        self.assertEqual(self.sealed()[-1], last)
        self.assert_same_end(self.root / "local", folder / "run")


if __name__ == "__main__":
    environment.main()
