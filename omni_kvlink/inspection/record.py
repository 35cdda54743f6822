"""`Record`: one payload of a recording, a line of its index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE_NAME = "{:06d}.safetensors"
_FileName = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{6,12}\.safetensors\Z")]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One payload that crossed a link.

    Attributes:
        file: its file in the directory of the recording.
        key: its request id.
        call: "get" if it was received, "put" if it was sent.
        time: seconds from the start of the recording to the end of the call.
        seconds: of the call; of a get those that it waited, too.
        nbytes: of the payload, header and tensors.
        sha256: of the file, as `sha256sum` prints it.
        wrong: number of its digests that do not match its bytes.
    """

    file: _FileName
    key: str
    call: Literal["get", "put"]
    time: _Seconds
    seconds: _Seconds
    nbytes: int
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    wrong: int = 0

    def digest_line(self) -> str:
        """Its line in a list of digests, which `diff` compares: SHA-256 of the payload, and key."""
        return f"{self.sha256}  {self.key.encode('unicode_escape').decode()}"

    def line(self) -> bytes:
        """Its line in the index."""
        return msgspec.json.encode(self) + b"\n"


_DECODER = msgspec.json.Decoder(Record)


def read_index(text: bytes) -> Iterator[Record]:
    """Yield the records of an index; its last line counts if it is complete.

    ValueError for a line that is none.
    """
    *lines, _ = text.split(b"\n")
    for line in lines:
        yield _DECODER.decode(line)
