"""Links: `KVLink` opens a `KVProducer` or a `KVConsumer`; streams and allocations."""

from omni_kvlink.connectors.protocol.get_table import MAX_TIMEOUT as MAX_TIMEOUT
from omni_kvlink.connectors.protocol.get_table import check_timeout as check_timeout
from omni_kvlink.connectors.protocol.process_check import check_process as check_process
from omni_kvlink.link.allocation import Allocation as Allocation
from omni_kvlink.link.append_stream import AppendStream as AppendStream
from omni_kvlink.link.chunk_stream import ChunkStream as ChunkStream
from omni_kvlink.link.consumer import GetAttempts as GetAttempts
from omni_kvlink.link.consumer import KVConsumer as KVConsumer
from omni_kvlink.link.consumer import Received as Received
from omni_kvlink.link.consumer import ReceivedChunk as ReceivedChunk
from omni_kvlink.link.consumer import ReceivedLayer as ReceivedLayer
from omni_kvlink.link.consumer import ReceivedStream as ReceivedStream
from omni_kvlink.link.consumer import Verify as Verify
from omni_kvlink.link.consumer import begin_chunks as begin_chunks
from omni_kvlink.link.consumer import begin_get as begin_get
from omni_kvlink.link.consumer import can_retry as can_retry
from omni_kvlink.link.consumer import check_verify as check_verify
from omni_kvlink.link.consumer import open_chunks as open_chunks
from omni_kvlink.link.consumer import open_delivery as open_delivery
from omni_kvlink.link.consumer import open_stream as open_stream
from omni_kvlink.link.consumer import verify_first as verify_first
from omni_kvlink.link.kvlink import KVLink as KVLink
from omni_kvlink.link.kvlink import LinkOptions as LinkOptions
from omni_kvlink.link.producer import KVProducer as KVProducer
from omni_kvlink.link.put_stream import PutStream as PutStream
from omni_kvlink.payload.bundle import Payload as Payload
