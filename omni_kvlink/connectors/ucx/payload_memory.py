"""The memory of one end of a UCX link: a device's if UCX reaches it, else the host's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink._native import cuda
from omni_kvlink._native.device_memory import DeviceMapping, number_of
from omni_kvlink.connectors.ucx.settings import UcxSettings
from omni_kvlink.connectors.ucx.worker import reaches_cuda
from omni_kvlink.errors import NativeError
from omni_kvlink.memory.mapping import Mapping

if TYPE_CHECKING:
    from omni_kvlink.connectors.base import Options
    from omni_kvlink.connectors.control.address import ControlAddress
    from omni_kvlink.memory.mapping import MakeArena


class PayloadMemory(NamedTuple):
    """The maker of arenas; `device` is "" for the host's memory, and `host_reason` says why."""

    make: MakeArena = Mapping.anonymous
    device: str = ""
    host_reason: str = ""

    @classmethod
    def of_link(cls, address: ControlAddress, options: Options) -> PayloadMemory:
        """Decide it, once: memory of the device for the whole quota is allocated here.

        Raises what `UcxSettings.of_link` does.
        """
        if not options.device:
            return cls()
        reason = _refusal(UcxSettings.of_link(address, options))
        if reason:
            return cls(host_reason=reason)
        number = number_of(options.device)
        assert number is not None, "Options has checked it"
        try:
            mapping = DeviceMapping(number, options.quota)
        except NativeError as error:
            text = f"{options.quota} bytes of {options.device}: {error}; set a lower quota="
            return cls(host_reason=text)
        made = [mapping]  # taken by the pool, which drops it when it is closed
        return cls(lambda nbytes, is_wanted: made.pop(), options.device)


def _refusal(settings: UcxSettings) -> str:
    """Why UCX reaches no device's memory, with the cure; "" if it does."""
    if "cuda" not in settings.transports:
        tls = settings.transports
        return f"UCX has only {tls}, ucx_tls='{tls},cuda_copy' reaches a GPU"
    reason = cuda.missing() or cuda.no_device()
    if reason:
        return reason
    if not reaches_cuda(settings):
        return "this UCX has no CUDA transports; install libucx for CUDA (ucx-cu12 or ucx-cu13)"
    return ""
