"""`AsyncKVLink`: a `KVLink` for asyncio; what waits holds no thread."""

from .get_stream import AsyncReceivedStream as AsyncReceivedStream
from .link import AsyncKVLink as AsyncKVLink
from .put_stream import AsyncPutStream as AsyncPutStream
