"""Pools on a device, and payloads in its memory that UCX reads and writes: no byte on the host."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

from support.connectors.zmq_addresses import free_port
from support.faults.leak_checks import zmq_started as zmq_started

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm-omni")
if importlib.util.find_spec("ucxx") is None:
    pytest.skip("ucxx is not installed: make test-vllm-omni", allow_module_level=True)

from vllm.v1.kv_cache_layout import KVCacheLayout

from omni_kvlink._native import host
from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm import device as pool_device
from omni_kvlink.integrations.vllm.settings import VllmSettings
from omni_kvlink.testing.rig import until
from support.vllm.devices import EVERY, check_loaded, is_counted
from support.vllm.devices import device as device
from support.vllm.devices import library as library
from support.vllm.devices import worker as worker
from support.vllm.halves import link_of, saver_of
from support.vllm.pools import SENT, PoolWorker, bytes_like, load, save

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.integrations.vllm.step import StepMetadata

pytestmark = [
    pytest.mark.skipif(bool(host.missing()), reason=host.missing() or ""),
    pytest.mark.usefixtures("zmq_started"),
    pytest.mark.timeout(300),
]
OPTIONS = {"copier": "pinned", "device": "auto", "quota": 16 << 20}


def workers(
    worker: Callable[..., PoolWorker], tls: str, *how: Any, **options: Any
) -> tuple[PoolWorker, PoolWorker, StepMetadata]:
    """A producer and a consumer over UCX, and the step that loads."""
    url = f"ucx://127.0.0.1:{free_port()}?trusted_network=1&ucx_tls={tls}"
    options = {**OPTIONS, **options}
    producer = worker("producer", *how, url=url, serve=options)
    consumer = worker("consumer", *how, peers=[url], connect=options)
    return producer, consumer, load(url=url)


@pytest.fixture(autouse=True)
def named(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.memory.type == "cpu":
        monkeypatch.setattr(pool_device, "name_of", lambda pool: "cuda:0")


@EVERY
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLNHC])
@pytest.mark.parametrize("kind", ["bfloat16", "int8 per token", "latent"])
def test_each_byte(
    worker: Callable[..., PoolWorker], device: Any, layout: KVCacheLayout, kind: str
) -> None:
    producer, consumer, step = workers(worker, "tcp,cuda_copy", layout, kind)
    consumer.forward(step)
    producer.forward(save(), bytes_like(producer, 7), SENT)
    consumer.run_until_loaded()
    check_loaded(consumer, bytes_like(consumer, 7))
    assert link_of(saver_of(producer.worker)).stats()["device_path"] == "ucx"
    for each in (producer, consumer):
        until(lambda each=each: is_counted(each), "it was counted")  # type: ignore[misc]
        assert each.counts["device_bytes"] > 0
        assert (each.counts["pinned_bytes"], each.counts["pageable_bytes"]) == (0, 0)


@EVERY
def test_without_a_cuda_transport_it_goes_by_the_host(
    worker: Callable[..., PoolWorker], device: Any
) -> None:
    producer, consumer, step = workers(worker, "tcp")
    consumer.forward(step)
    producer.forward(save(), bytes_like(producer, 7), SENT)
    consumer.run_until_loaded()
    check_loaded(consumer, bytes_like(consumer, 7))
    stats = link_of(saver_of(producer.worker)).stats()
    assert stats["device_path"] == "host"
    assert "UCX has only tcp" in stats["device_path_reason"]
    for each in (producer, consumer):
        until(lambda each=each: is_counted(each), "it was counted")  # type: ignore[misc]
        assert each.counts["pinned_bytes"] > 0
        assert each.counts["device_bytes"] == 0


@pytest.mark.parametrize("device", ["fake"], indirect=True)
def test_a_device_needs_a_quota(device: Any) -> None:
    extra = {"url": "shm://p", "serve": {"device": "auto"}}
    with pytest.raises(SchemaError, match=r"serve\.device needs serve\.quota"):
        VllmSettings.of(extra, produces=True, consumes=False)


@pytest.mark.parametrize("device", ["fake"], indirect=True)
def test_pools_in_host_memory_have_no_device(device: Any) -> None:
    assert pool_device.link_options({"device": "auto", "quota": 1}, []) == {
        "device": "",
        "quota": 1,
    }
    assert pool_device.link_options({"device": "cuda:3"}, []) == {"device": "cuda:3"}
