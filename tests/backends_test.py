"""libtpu is left alone only where it is sure that there is no TPU."""

import os
import pathlib
from unittest import mock

from absl.testing import parameterized

from glm5_jax import backends
from tests import environment


class TpuTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = pathlib.Path(self.create_tempdir().full_path)
        self.devices, self.pci = folder / "dev", folder / "pci"
        self.devices.mkdir()

    def add_card(self, vendor, device):
        card = self.pci / str(len(list(self.pci.iterdir())))
        card.mkdir()
        (card / "vendor").write_text(f"{vendor}\n")
        (card / "device").write_text(f"{device}\n")

    @parameterized.parameters(
        ("0x8086", "0x1237", False),
        ("0x1ae0", "0x0042", False),  # the network card of a virtual machine
        ("0x1ae0", "0x0063", True),
        ("0x1ae0", "0xffff", True),  # of the next generation
    )
    def test_a_card_of_google_may_be_one(self, vendor, device, expected):
        self.pci.mkdir()
        self.add_card("0x1af4", "0x1000")
        self.add_card(vendor, device)
        found = backends.may_have_tpu(self.devices, self.pci)
        self.assertEqual(found, expected)

    def test_in_doubt_there_is_one(self):
        self.assertTrue(backends.may_have_tpu(self.devices, self.pci))
        self.pci.mkdir()
        self.assertFalse(backends.may_have_tpu(self.devices, self.pci))
        (self.devices / "accel0").touch()
        self.assertTrue(backends.may_have_tpu(self.devices, self.pci))
        (self.devices / "accel0").rename(self.devices / "vfio")
        self.assertTrue(backends.may_have_tpu(self.devices, self.pci))


class SkipTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("no TPU", {}, False, False, "cpu"),
        ("a TPU", {}, False, True, None),
        ("a GPU's plugin", {}, True, False, None),
        ("the user's choice", {"JAX_PLATFORMS": ""}, False, False, ""),
        ("a TPU's environment", {"TPU_NAME": "local"}, False, False, None),
    )
    def test_platforms(self, environ, has_plugins, has_tpu, expected):
        with (
            mock.patch.dict(os.environ, environ, clear=True),
            mock.patch.object(backends, "has_plugins", return_value=has_plugins),
            mock.patch.object(backends, "may_have_tpu", return_value=has_tpu),
            mock.patch.object(backends.importlib.util, "find_spec"),
        ):
            backends.skip_absent()
            self.assertEqual(os.environ.get("JAX_PLATFORMS"), expected)


if __name__ == "__main__":
    environment.main()
