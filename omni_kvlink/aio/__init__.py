"""`AsyncKVLink`: a `KVLink` for asyncio; what waits holds no thread."""

from omni_kvlink.aio.link import AsyncKVLink as AsyncKVLink
from omni_kvlink.aio.put_stream import AsyncPutStream as AsyncPutStream
from omni_kvlink.aio.received_stream import AsyncReceivedStream as AsyncReceivedStream
