"""Each mistake in the settings of the vLLM connectors: a sentence with the field and the cure.

The settings are read without vLLM; it makes the connector, and so reads them, when it starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import ConnectorError, KVLink, KVLinkError, SchemaError
from omni_kvlink.integrations.vllm.peers import Peers
from omni_kvlink.integrations.vllm.settings import EncoderSettings, VllmSettings
from omni_kvlink.integrations.vllm.tier.settings import TierSettings
from omni_kvlink.testing.rig import until
from support.connectors.keyless import is_let_in

if TYPE_CHECKING:
    from pathlib import Path

RIGHT: dict[str, Any] = {"url": "shm://p", "peers": ["shm://p"]}
FLAG = "wanted true or false, a boolean and not a text"
SECONDS = "wanted a number of seconds above 0"
SIZE = 'a whole number, or a text such as "8GB" or "16KiB"'

BOTH: list[tuple[dict[str, Any], str]] = [
    ({"url": 7000}, "url=7000: wanted a text such as 'shm://name'"),
    ({"url": None}, "url=None: wanted a text such as 'shm://name'"),
    ({"url": "shm:p"}, "url: 'shm:p' is not a link URL; one looks like shm://name; did you mean"),
    ({"url": "shn://p"}, "url='shn://p': no connector shn; did you mean shm? There are auto"),
    ({"url": "shm://p?qouta=5"}, "url: qouta: no such setting; did you mean quota? There are"),
    ({"url": "shm://p?insecure=no"}, "url: insecure='no': wanted true, false, 1 or 0"),
    ({"url": ""}, 'url is missing: what this producer serves, such as "shm://'),
    ({"peers": "shm://p"}, "peers='shm://p': wanted a list of any number of elements"),
    ({"peers": [7000]}, "peers: 7000 is neither a URL, such as shm://prefill-0, nor one with *"),
    ({"peers": ["p"]}, "peers: 'p' is neither a URL, such as shm://prefill-0, nor one with *"),
    ({"peers": ["shn://p"]}, "peers='shn://p': no connector shn; did you mean shm?"),
    ({"peers": ["shm://p?mode=seald"]}, "peers: mode='seald': wanted 'pooled' or 'sealed'; did"),
    ({"peers": []}, 'peers is missing: the producers to read from, ["shm://'),
    ({"model": 3}, "model=3: wanted a text"),
    ({"adapters": ["sql"]}, "adapters=['sql']: wanted a map from texts to a text that is not"),
    ({"adapters": {"sql": 3}}, "adapters.sql=3: wanted a text that is not empty such as 'sql-v3'"),
    ({"timeout": "30"}, f"timeout='30': {SECONDS}"),
    ({"timeout": None}, f"timeout=None: {SECONDS}"),
    ({"timeout": [30]}, f"timeout=[30]: {SECONDS}"),
    ({"timeout": True}, f"timeout=True: {SECONDS}"),
    ({"timeout": float("nan")}, f"timeout=nan: {SECONDS}"),
    ({"ttl": 0}, f"ttl=0: {SECONDS}"),
    ({"ttl": "60s"}, f"ttl='60s': {SECONDS}"),
    ({"serve": "x"}, "serve='x': wanted a map of quota, mode"),
    ({"serve": {"qouta": 1}}, "serve.qouta: no such setting; did you mean quota? There are quota"),
    ({"serve": {"quota": 0}}, f"serve.quota=0: wanted bytes from 1 to 2**63 - 1: {SIZE}"),
    ({"serve": {"insecure": "false"}}, f"serve.insecure='false': {FLAG}"),
    ({"serve": {"trusted_network": "false"}}, f"serve.trusted_network='false': {FLAG}"),
    ({"serve": {"digests": "false"}}, f"serve.digests='false': {FLAG}"),
    ({"serve": {"copier": "nativ"}}, "serve.copier='nativ': wanted 'auto' or 'pinned' or 'native'"),
    ({"serve": {"require": ["rmda"]}}, "serve.require[0]='rmda': wanted 'shm' or 'gpu' or 'rdma'"),
    ({"connect": {"require": "smh"}}, "connect.require[0]='smh': wanted 'shm' or 'gpu' or 'rdma'"),
    ({"connect": ["x"]}, "connect=['x']: wanted a map of quota, mode"),
    ({"connect": {"inline": "lots"}}, "connect.inline='lots': wanted bytes from 0 to 32768: a"),
    ({"connect": {"insecure": "false"}}, f"connect.insecure='false': {FLAG}"),
    ({"connect": {"digests": True}}, "connect.digests: no such setting; there are quota, mode"),
    ({"tiemout": 30}, "tiemout: no such setting; did you mean timeout? There are url, peers"),
]  # fmt: skip
CACHES: list[tuple[dict[str, Any], str]] = [
    *BOTH,
    ({"delay_free": "false"}, f"delay_free='false': {FLAG}"),
    ({"delay_free": None}, f"delay_free=None: {FLAG}"),
    ({"offer_decoded": "false"}, f"offer_decoded='false': {FLAG}"),
    ({"offer_decoded": 0}, f"offer_decoded=0: {FLAG}"),
    ({"peers_file": 5}, "peers_file=5: wanted a path, as text"),
    ({"peers_file": "/nowhere/p"}, "peers_file /nowhere/p cannot be read"),
    ({"compatible_with": [0.30]}, "compatible_with[0]=0.3: wanted a text that is not empty"),
    ({"compatible_with": "0.30.1"}, "compatible_with='0.30.1': wanted a list of any number of"),
    ({"load": "asnyc"}, "load='asnyc': wanted 'async' or 'sync'; did you mean async?"),
    ({"peer_tp": "2"}, "peer_tp='2': wanted a whole number from 0 on"),
    ({"peer_tp": 2.0}, "peer_tp=2.0: wanted a whole number from 0 on"),
    ({"drain": -1}, "drain=-1: wanted a number of seconds from 0 on"),
    ({"serve": {"device": "gpu"}}, "serve.device='gpu': wanted 'cuda:0', with this or another n"),
    ({"serve": {"device": "auto"}}, "serve.device needs serve.quota: bytes of the device's memory"),
]  # fmt: skip
ENCODERS: list[tuple[dict[str, Any], str]] = [
    *BOTH,
    ({"load_failure_policy": "recompute"}, "load_failure_policy='recompute': wanted 'encode' or"),
    ({"peers": ["shm://*"]}, "peers: shm://* names no producer; wanted URLs without *"),
]  # fmt: skip
TIERS: list[tuple[dict[str, Any], str]] = [
    ({"url": ""}, 'url is missing: what this engine serves, such as "shm://engine-0"'),
    ({"model": ""}, "model is missing: a name of the weights with their revision and quantiza"),
    ({"modle": "m"}, "modle: no such setting; did you mean model? There are url, stores"),
    ({"url": "shn://p"}, "url='shn://p': no connector shn; did you mean shm?"),
    ({"stores": "shm://s"}, "stores='shm://s': wanted a list of any number of elements"),
    ({"peers": ["p"]}, "peers[0]: 'p' is not a link URL; one looks like shm://name"),
    ({"model": 3}, "model=3: wanted a text"),
    ({"adapter": None}, "adapter=None: wanted a text"),
    ({"budget": 0}, f"budget=0: wanted bytes from 1 to 2**63 - 1: {SIZE}"),
    ({"timeout": 0}, f"timeout=0: {SECONDS}"),
    ({"drain": -1}, "drain=-1: wanted a number of seconds from 0 on"),
    ({"locality": "near"}, "locality='near': wanted '' or 'LOCAL' or 'REMOTE'"),
    ({"link": {"directry": "/x"}}, "link.directry: no such setting; did you mean directory?"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "sentence"), CACHES)
def test_a_mistake_of_the_kv_connector(extra: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SchemaError) as caught:
        VllmSettings.of({**RIGHT, **extra}, produces=True, consumes=True)
    assert str(caught.value).startswith(f"kv_connector_extra_config: {sentence}")


@pytest.mark.parametrize(("extra", "sentence"), ENCODERS)
def test_a_mistake_of_the_encoder_connector(extra: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SchemaError) as caught:
        EncoderSettings.of({**RIGHT, **extra}, produces=True, consumes=True)
    assert str(caught.value).startswith(f"ec_connector_extra_config: {sentence}")


@pytest.mark.parametrize(("extra", "sentence"), TIERS)
def test_a_mistake_of_the_tier(extra: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SchemaError) as caught:
        TierSettings.of({"url": "shm://a", "model": "m", **extra}, 0)
    assert str(caught.value).startswith(f"secondary_tiers: {sentence}")


def test_the_tiers_of_data_parallel_engines() -> None:
    """One entry is for all of them."""
    entry = {"url": "shm://e-{dp}", "peers": ["shm://e-0", "shm://e-1"], "model": "m"}
    entry["budget"] = "8GB"
    found = [TierSettings.of(entry, index) for index in (0, 1)]
    assert [each.url for each in found] == ["shm://e-0", "shm://e-1"]
    assert {each.budget for each in found} == {8 * 10**9}


@pytest.mark.parametrize("extra", [None, [], "url"])
def test_settings_that_are_no_map(extra: object) -> None:
    with pytest.raises(SchemaError, match=r"kv_connector_extra_config=.*: wanted a map of url"):
        VllmSettings.of(extra, produces=True, consumes=True)


def test_right_settings(tmp_path: Path) -> None:
    (tmp_path / "peers").write_text("shm://q\n")
    file, serve = str(tmp_path / "peers"), {"quota": "64GB", "prefault": "8GiB", "device": "auto"}
    given = {**RIGHT, "peers_file": file, "timeout": 5, "delay_free": False, "serve": serve}
    found = VllmSettings.of(given, produces=True, consumes=True)
    assert found.serve == {"quota": 64 * 10**9, "prefault": 8 << 30, "device": "auto"}
    assert (found.timeout, found.delay_free, found.peers) == (5.0, False, ("shm://p",))
    ahead = VllmSettings.of({**RIGHT, "serve": {"prefault": "8GB"}}, produces=True, consumes=True)
    assert ahead.serve == {"prefault": 8 * 10**9}  # the pools' size is the quota


@pytest.mark.parametrize("kind", [VllmSettings, EncoderSettings])
@pytest.mark.parametrize("flag", ["false", False, True])
def test_a_keyless_peer(kind: type[VllmSettings | EncoderSettings], flag: Any) -> None:
    """What a JSON configuration calls insecure="false" is refused; false demands keys."""
    url = "zmq+tcp://127.0.0.1:0"
    extra = {"url": url, "peers": [url], "serve": {"insecure": flag}}
    if flag == "false":
        with pytest.raises(KVLinkError, match=r"serve\.insecure='false'"):
            kind.of(extra, produces=True, consumes=True)
        return
    settings = kind.of(extra, produces=True, consumes=True)
    with KVLink.serve(settings.url, **settings.serve) as link:
        assert is_let_in(link.url) == flag


@pytest.mark.parametrize("kind", [VllmSettings, EncoderSettings])
@pytest.mark.filterwarnings("ignore:.*INSECURE:RuntimeWarning")
def test_a_required_path(kind: type[VllmSettings | EncoderSettings]) -> None:
    """Where only TCP is, neither side is given RDMA, and both say so; nothing is encrypted."""
    url, plain = "zmq+tcp://127.0.0.1:0", {"insecure": True}
    for path in ("rdma", "encrypted", "shm"):
        serve, connect = {"require": [path], **plain}, {"require": path, **plain}
        extra = {"url": url, "peers": [url], "serve": serve, "connect": connect}
        strict = kind.of(extra, produces=True, consumes=True)
        with pytest.raises(ConnectorError, match=f"require='{path}', and the path is zmq.tcp "):
            KVLink.serve(strict.url, **strict.serve)
        with KVLink.serve(url, insecure=True) as link:
            peers = Peers([link.url], strict.connect)
            with pytest.raises(ConnectorError, match=f"require='{path}', and the path is zmq.tcp "):
                peers.link(link.url, timeout=60)
            until(lambda link=link: link.stats()["refused"].get("path") == 1, "it is counted")  # type: ignore[misc]
            peers.close()


def test_an_engine_does_not_start(request: pytest.FixtureRequest) -> None:
    """VLLM makes the connector, which reads its settings; before the weights if it has graphs."""
    pytest.importorskip("vllm")
    engine = request.getfixturevalue("engine")
    from omni_kvlink.integrations.vllm import OmniKVLinkConnector

    extra = {"delay_free": "false"}
    with pytest.raises(
        SchemaError, match=f"^kv_connector_extra_config: delay_free='false': {FLAG}"
    ):
        OmniKVLinkConnector.requires_piecewise_for_cudagraph({**RIGHT, **extra})
    assert OmniKVLinkConnector.requires_piecewise_for_cudagraph(RIGHT)
    with pytest.raises(
        SchemaError, match=f"^kv_connector_extra_config: delay_free='false': {FLAG}"
    ):
        engine("producer", **extra)
    with pytest.raises(ConnectorError, match="require='rdma', and the path is shm"):
        engine("producer", serve={"require": "rdma"})
