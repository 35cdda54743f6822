"""Nested data arrive as from vLLM-Omni's own serializer, with large tensors sent as tensors."""

from __future__ import annotations

import itertools
import tempfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm_omni", reason="make test-vllm-omni installs it")

from omni_kvlink import IntegrityError, SchemaError
from omni_kvlink.integrations.vllm_omni import nested as module
from omni_kvlink.integrations.vllm_omni import register
from omni_kvlink.integrations.vllm_omni.connector import VllmOmniConnector
from omni_kvlink.integrations.vllm_omni.stage_edges import StageEdge
from omni_kvlink.testing.rig import until
from support.vllm_omni.stage import NAME

pytest.importorskip("hypothesis")
from hypothesis import given
from PIL import Image

from support.link.ends import end_of
from support.vllm_omni.nested_values import Record, difference, nested

if TYPE_CHECKING:
    from collections.abc import Iterator

# Reaches into _finished_load_reqs, _links, _serializer: vLLM-Omni's adapter has no public name for
# what has come, and the connector none for what is sent beside a payload's bytes.

EDGE = ("0", "1")
_numbers = itertools.count()
Ends = tuple[VllmOmniConnector, VllmOmniConnector]


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    with (
        tempfile.TemporaryDirectory(prefix="kvl-") as sockets,
        connector(sockets, "nested") as sender,
        connector(sockets, "nested") as reader,
    ):
        yield sender, reader


def connector(sockets: str, name: str) -> VllmOmniConnector:
    """A connector that waits an hour for a payload: a call that does not get it hangs its test."""
    options = {"directory": sockets, "quota": 256 << 20}
    return VllmOmniConnector({"kvlink": {"name": name, "options": options, "poll": 3600.0}})


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_NBYTES", 1)


def through(ends: Ends, data: Any) -> Any:
    sender, reader = ends
    key = f"r{next(_numbers)}_0_0"
    _, nbytes, _ = sender.put(*EDGE, key, data)
    found = reader.get(*EDGE, key)
    assert found is not None
    assert found[1] == nbytes
    return found[0]


def expected(data: Any) -> Any:
    return VllmOmniConnector.deserialize_obj(VllmOmniConnector.serialize_obj(data))


@pytest.mark.parametrize("min_nbytes", [1, 24])
@given(data=nested)
def test_any_data_arrive_as_from_their_serializer(min_nbytes: int, ends: Ends, data: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_NBYTES", min_nbytes)
        try:
            theirs = expected(data)
        except Exception as error:  # what it cannot carry is an error here, too
            with pytest.raises((type(error), SchemaError)):
                through(ends, data)
            return
        assert difference(through(ends, data), theirs) == ""


def hidden_states() -> dict[str, Any]:
    states = torch.randn(64, 2048).to(torch.bfloat16)
    layers = {0: states[:, ::2], 24: states.T, 3: torch.nn.Parameter(states.float())}
    return {"hidden_states": {"output": states, "layers": layers}, "meta": {"left": 3}}


def test_large_tensors_are_sent_by_reference_and_arrive_as_the_receivers_own(ends: Ends) -> None:
    data = hidden_states()
    states, layers = (data["hidden_states"][name] for name in ("output", "layers"))
    packed, tensors, _ = module.take_out(data, ends[0]._serializer)
    assert [tensor.data_ptr() for tensor in tensors] == [
        *(states.data_ptr(), states.data_ptr(), states.data_ptr(), layers[3].data_ptr())
    ]
    assert len(packed) < 1000
    got = through(ends, data)
    assert difference(got, expected(data)) == ""
    until(lambda: ends[0].health()["unread"] == 0, "the link's memory is free again")
    got["hidden_states"]["output"].zero_()  # which shares nothing with the others
    assert torch.equal(got["hidden_states"]["layers"][24], states.T)


def test_small_tensors_stay_in_the_bytes(ends: Ends) -> None:
    data = {"codes": {"audio": torch.arange(512)}, "meta": {"finished": torch.tensor(True)}}
    packed, tensors, _ = module.take_out(data, ends[0]._serializer)
    assert (packed, tensors) == (VllmOmniConnector.serialize_obj(data), [])
    assert difference(through(ends, data), expected(data)) == ""


def test_more_tensors_than_a_header_holds(
    ends: Ends, all_are_large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [torch.full((3,), i) for i in range(module.MAX_TAKEN + 5)]
    assert difference(through(ends, data), expected(data)) == ""
    monkeypatch.setattr(module, "MAX_TAKEN", 1)
    assert len(module.take_out(data, ends[0]._serializer)[1]) == 1
    assert difference(through(ends, data), expected(data)) == ""


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize(
    "data",
    [
        torch.arange(6).reshape(2, 3),
        torch.arange(50, dtype=torch.uint8),
        np.arange(4.0),
        Image.new("RGB", (3, 2), "red"),
        torch.ones(3)[::2].requires_grad_(),
        Record("r", {"t": torch.ones(2)}),
        np.ma.masked_array([1, 2], [False, True]),
    ],
    ids=lambda data: type(data).__name__,
)
def test_a_value_without_a_structure(data: Any, ends: Ends) -> None:
    assert difference(through(ends, data), expected(data)) == ""


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.usefixtures("all_are_large")
def test_a_quantized_tensor(ends: Ends) -> None:
    """Their serializer keeps its bytes and its dtype, not its scale."""
    got = through(ends, [torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.quint8)])[0]
    theirs = expected([torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.quint8)])[0]
    assert got.dtype == theirs.dtype == torch.quint8
    assert bytes(got.view(torch.uint8).tolist()) == bytes(theirs.view(torch.uint8).tolist())


@pytest.mark.usefixtures("all_are_large")
def test_their_request_outputs(ends: Ends) -> None:
    """Their deserializer makes these objects of dicts; the tensors in them are the same."""
    from vllm.outputs import CompletionOutput, RequestOutput

    answer = CompletionOutput(0, "a", [1, 2], None, None, finish_reason="stop")
    answer.multimodal_output = {"audio": torch.randn(2, 3), "codes": [torch.arange(3)]}
    output = RequestOutput("r", "p", [3], None, [answer], True)
    output.multimodal_output = {"hidden": torch.randn(4).to(torch.bfloat16)}
    data = {"engine_inputs": [output], "x": torch.ones(2)}
    got = through(ends, data)
    assert isinstance(got["engine_inputs"][0], RequestOutput)
    assert difference(got, expected(data)) == ""


@pytest.mark.usefixtures("all_are_large")
def test_deep_nesting(ends: Ends) -> None:
    data: Any = {"t": torch.arange(3)}
    for _ in range(200):
        data = [data]
    assert difference(through(ends, data), expected(data)) == ""
    for _ in range(20_000):
        data = [data]
    with pytest.raises(SchemaError, match="cannot be serialized"):
        through(ends, data)


def test_what_their_serializer_refuses_is_a_schema_error(ends: Ends) -> None:
    for tensor in (torch.ones(1 << 16).to_sparse(), torch.ones(1 << 16, device="meta")):
        with pytest.raises(SchemaError, match="dict cannot be serialized"):
            through(ends, {"t": tensor})


def test_a_flipped_bit_of_a_tensor_is_not_handed_out(sockets: str) -> None:
    with connector(sockets, "flip") as sender, connector(sockets, "flip") as reader:
        data = {"t": torch.full((1 << 18,), 0x5A, dtype=torch.uint8)}
        sender.put(*EDGE, "r_0_0", data)
        link = sender._links.sender(StageEdge.of(*EDGE, "r_0_0"))
        memory = end_of(link).pool.mapping(0).region.view()
        memory[memory.tobytes().index(b"\x5a" * 4096)] ^= 1
        with pytest.raises(IntegrityError):
            reader.get(*EDGE, "r_0_0")


# ---- vLLM-Omni's own chunk adapter at both ends


def build_chunk(transfer_manager: Any, multimodal_output: Any, request: Any, **_: Any) -> Any:
    """As a model's: what of a step goes to the next stage, by the connector's own settings."""
    from vllm_omni.data_entry_keys import CodesStruct, OmniPayloadStruct

    frames = transfer_manager.connector.config["codec_chunk_frames"]
    hidden = multimodal_output["hidden"]
    return OmniPayloadStruct(hidden=hidden, codes=CodesStruct(audio=torch.arange(frames)))


def chunk_adapter(stage: int, section: dict[str, Any]) -> Any:
    from vllm_omni.distributed.omni_connectors.transfer_adapter import chunk_transfer_adapter

    extra = {"kvlink": section, "codec_chunk_frames": 25}
    model = SimpleNamespace(
        stage_connector_config={"name": NAME, "extra": extra},
        stage_id=stage,
        worker_type="generation",
        max_model_len=100,
        custom_process_next_stage_input_func=f"{__name__}.build_chunk",
    )
    scheduler = SimpleNamespace(max_num_seqs=4)
    config = SimpleNamespace(model_config=model, scheduler_config=scheduler)
    return chunk_transfer_adapter.OmniChunkTransferAdapter(config)


class ChunkRequest(SimpleNamespace):
    """The fields of a request that the adapter reads."""

    def is_finished(self) -> bool:
        return bool(self.finished)


def chunk_request(name: str, **more: Any) -> Any:
    return ChunkRequest(
        request_id=f"{name}-inner",
        external_req_id=name,
        num_computed_tokens=1,
        prompt_token_ids=[],
        resumable=False,
        finished=False,
        additional_information=None,
        **more,
    )


def test_their_chunk_adapter_sends_and_receives_a_stream_of_chunks(sockets: str) -> None:
    register()
    section = {"name": "chunks", "options": {"directory": sockets, "quota": 64 << 20}}
    sender, receiver = chunk_adapter(0, section), chunk_adapter(1, section)
    hidden = [torch.randn(200, 1024).to(torch.bfloat16) for _ in range(3)]
    sent, got = chunk_request("r"), chunk_request("r")
    try:
        for number, states in enumerate(hidden):
            sent.finished = number == len(hidden) - 1
            sender.save_async({"hidden": states}, sent)
            receiver.load_async(got)
            until(lambda: got.request_id in receiver._finished_load_reqs, "a chunk came")
            receiver._finished_load_reqs.clear()
            assert torch.equal(got.additional_information["hidden"], states)
            assert got.prompt_token_ids == list(range(25))
        assert receiver.is_done_receiving_chunks(got.request_id)
    finally:
        sender.shutdown(), receiver.shutdown()
        for thread in (sender.save_thread, sender.recv_thread, receiver.recv_thread):
            thread.join(60)
