"""Groups of processes, found by flags, environment and cluster."""

import contextlib
import dataclasses
import http.server
import threading
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.processes import group
from tests import environment

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[001-004]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
}
OPEN_MPI = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}
AUTOMATIC = group.Group()


@contextlib.contextmanager
def metadata_server(attributes):
    """Returns Compute Engine's metadata of a TPU VM with these attributes."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            value = attributes.get(self.path.rpartition("/")[2])
            is_asked_well = self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if value and is_asked_well else 404)
            self.end_headers()
            self.wfile.write((value or "").encode())

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}
        server.shutdown()


class FindTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("laptop", {}),
        ("login_node", {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"}),
        ("slurm_alone", SLURM | {"SLURM_NTASKS": "1"}),
        ("open_mpi_alone", OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}),
        ("one_of_one", {"JAX_NUM_PROCESSES": "1"}),
        ("pod_without_tpu", {"TPU_WORKER_HOSTNAMES": "a,b"}),
    )
    def test_alone(self, environ):
        self.assertIsNone(group.find(environ=environ))

    @parameterized.named_parameters(
        ("slurm", SLURM),
        ("open_mpi", OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "2"}),
    )
    def test_a_cluster_manager_is_found(self, environ):
        self.assertEqual(group.find(environ=environ), AUTOMATIC)
        ours = group.find("10.0.0.9:1234", environ=environ)
        self.assertEqual(ours, group.Group(coordinator="10.0.0.9:1234"))

    @parameterized.named_parameters(
        ("one_slice", {"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ("one_host", {"TPU_WORKER_HOSTNAMES": "a"}, False),
        ("new_name", {"TPU_PROCESS_ADDRESSES": "a,b"}, True),
        (
            "slices_of_one_host",
            {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"},
            True,
        ),
        ("cpu", {"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, False),
    )
    def test_tpu_of_gke(self, environ, is_pod):
        with mock.patch.object(group, "_has_tpu", return_value=True):
            found = group.find(environ=environ)
        self.assertEqual(found, AUTOMATIC if is_pod else None)

    @parameterized.named_parameters(
        ("pod", {"worker-network-endpoints": "10.0.0.1,10.0.0.2"}, True),
        ("one_host", {"worker-network-endpoints": "10.0.0.1"}, False),
        (
            "slices",
            {"tpu-env": "ZONE: 'a'\nMEGASCALE_NUM_SLICES: '2'\n"},
            True,
        ),
        ("nothing", {}, False),
    )
    def test_tpu_vm(self, attributes, is_pod):
        with (
            metadata_server(attributes) as environ,
            mock.patch.object(group, "_has_tpu", return_value=True),
        ):
            self.assertEqual(group.find(environ=environ), AUTOMATIC if is_pod else None)

    def test_flags_go_before_the_environment(self):
        environ = {
            "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1",
            "JAX_NUM_PROCESSES": "4",
            "JAX_PROCESS_ID": "3",
        }
        want = group.Group(coordinator="10.0.0.1:1", num_processes=4, process_id=3)
        self.assertEqual(group.find(environ=environ), want)
        want = group.Group(coordinator="h:2", num_processes=2, process_id=0)
        self.assertEqual(group.find("h:2", 2, 0, environ), want)

    @parameterized.named_parameters(
        ("missing", ("h:1", 2, None), r"missing: --process_id \(or JAX_PROCESS_ID\)"),
        ("no_port", ("h", 2, 0), "HOST:PORT"),
        ("large_port", ("h:70000", 2, 0), "1..65535"),
        ("number", ("h:1", 2, 2), "got 2 of 2"),
        ("negative", ("h:1", 2, -1), "got -1 of 2"),
    )
    def test_bad_numbers(self, given, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            group.find(*given, environ={})

    def test_words_for_numbers(self):
        with self.assertRaisesRegex(config_lib.InputError, "JAX_PROCESS_ID must be"):
            group.find(environ={"JAX_PROCESS_ID": "first"})


class SupportedTest(parameterized.TestCase):
    def test_other_commands_than_train_run_alone(self):
        group.require_alone({"JAX_NUM_PROCESSES": "1"})
        several = {
            "JAX_COORDINATOR_ADDRESS": "10.0.0.1:8476",
            "JAX_NUM_PROCESSES": "4",
            "JAX_PROCESS_ID": "1",
        }
        with self.assertRaisesRegex(config_lib.InputError, "on one host, without"):
            group.require_alone(several)

    def test_settings_for_one_process_are_refused_in_several(self):
        config = config_lib.TrainConfig(model=presets.GLM5_1M, sample_tokens=3)
        group.require_supported(config, None)
        with self.assertRaisesRegex(config_lib.InputError, "sample_tokens=0"):
            group.require_supported(config, AUTOMATIC)
        config = dataclasses.replace(
            config, stage="rl", rl=config_lib.RLConfig(max_new_tokens=9)
        )
        with self.assertRaisesRegex(config_lib.InputError, "'rl' runs in one"):
            group.require_supported(config, AUTOMATIC)

    def test_a_trainer_whose_episodes_servers_play_may_have_any_size(self):
        rl = config_lib.RLConfig(
            max_new_tokens=9, servers="http://a:1", weights_store="/tmp", slots=3
        )
        config = config_lib.TrainConfig(
            stage="async_rl",
            model=presets.GLM5_1M,
            rl=rl,
            sample_tokens=0,
            mesh=config_lib.MeshConfig(fsdp=2),  # an own engine would need rl.slots=4
        )
        group.require_supported(config, AUTOMATIC)


if __name__ == "__main__":
    environment.main()
