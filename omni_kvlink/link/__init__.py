"""`KVLink`: a KV cache in at one end, out at the other; whole, layer by layer, or in place."""

from .allocation import Allocation as Allocation
from .get_stream import ReceivedLayer as ReceivedLayer
from .get_stream import ReceivedStream as ReceivedStream
from .kvlink import FOREVER as FOREVER
from .kvlink import KVLink as KVLink
from .put_stream import PutStream as PutStream
from .received import Payload as Payload
from .received import Received as Received
from .received import Verify as Verify
from .received import check_verify as check_verify
