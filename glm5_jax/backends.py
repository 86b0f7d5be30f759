"""Keeps jax from starting libtpu where there is no TPU. Imports no jax.

libtpu comes with the extras for tests and for compiling ahead of time. On a machine
without a TPU it takes a second to fail, and says so in lines that read like an error.
"""

import importlib.metadata
import importlib.util
import os
import pathlib

_DEVICES, _PCI = pathlib.Path("/dev"), pathlib.Path("/sys/bus/pci/devices")
_GOOGLE, _NETWORK_CARD = "0x1ae0", "0x0042"  # PCI ids; other cards may be TPUs


def skip_absent() -> None:
    """Sets JAX_PLATFORMS=cpu where libtpu is the only plugin, and has no TPU.

    What the user has set stays. In doubt nothing is set.
    """
    is_settled = any(name.startswith("TPU_") for name in os.environ)
    if is_settled or "JAX_PLATFORMS" in os.environ:
        return
    if importlib.util.find_spec("libtpu") is None or has_plugins():
        return
    if not may_have_tpu():
        os.environ["JAX_PLATFORMS"] = "cpu"


def has_plugins() -> bool:
    """Returns whether jax would find a plugin for another accelerator."""
    if importlib.util.find_spec("jax_plugins") is not None:
        return True
    return bool(importlib.metadata.entry_points(group="jax_plugins"))


def may_have_tpu(devices: pathlib.Path = _DEVICES, pci: pathlib.Path = _PCI) -> bool:
    """Returns whether a TPU is in this machine, or nobody can tell.

    Args:
      devices: folder of the devices that programs open.
      pci: folder with a folder for each card.
    """
    if any(devices.glob("accel*")) or (devices / "vfio").exists() or not pci.is_dir():
        return True
    try:
        cards = [
            tuple((card / name).read_text().strip() for name in ("vendor", "device"))
            for card in pci.iterdir()
        ]
    except OSError:
        return True
    return any(
        vendor == _GOOGLE and device != _NETWORK_CARD for vendor, device in cards
    )
