"""Links for asyncio: what waits holds no thread, and no copy stops the event loop."""

from omni_kvlink.aio.consumer import AsyncChunkStream as AsyncChunkStream
from omni_kvlink.aio.consumer import AsyncKVConsumer as AsyncKVConsumer
from omni_kvlink.aio.consumer import AsyncReceivedStream as AsyncReceivedStream
from omni_kvlink.aio.link import AsyncKVLink as AsyncKVLink
from omni_kvlink.aio.producer import AsyncAppendStream as AsyncAppendStream
from omni_kvlink.aio.producer import AsyncKVProducer as AsyncKVProducer
from omni_kvlink.aio.producer import AsyncPutStream as AsyncPutStream
