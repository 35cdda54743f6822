"""Payload files: what is in them, which of their bytes are wrong, where two of them differ."""

from omni_kvlink.inspection.chunk_fault import ChunkFault as ChunkFault
from omni_kvlink.inspection.chunk_fault import faults_of as faults_of
from omni_kvlink.inspection.payload_file import PayloadFile as PayloadFile
