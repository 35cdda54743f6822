"""`KVLink`: a KV cache in at one end, out at the other; whole, layer by layer, or in place."""

from omni_kvlink.link.allocation import Allocation as Allocation
from omni_kvlink.link.kvlink import FOREVER as FOREVER
from omni_kvlink.link.kvlink import KVLink as KVLink
from omni_kvlink.link.put_stream import PutStream as PutStream
from omni_kvlink.link.received import Payload as Payload
from omni_kvlink.link.received import Received as Received
from omni_kvlink.link.received import Verify as Verify
from omni_kvlink.link.received import check_verify as check_verify
from omni_kvlink.link.received_stream import ReceivedLayer as ReceivedLayer
from omni_kvlink.link.received_stream import ReceivedStream as ReceivedStream

KVConsumer = KVProducer = KVLink
