"""Payload files: their content, wrong bytes, differences; recordings of what crosses a link."""

from omni_kvlink.inspection.chunk_fault import ChunkFault as ChunkFault
from omni_kvlink.inspection.chunk_fault import faults_of as faults_of
from omni_kvlink.inspection.comparison import Comparison as Comparison
from omni_kvlink.inspection.payload_file import PayloadFile as PayloadFile
from omni_kvlink.inspection.recorder import Recorder as Recorder
from omni_kvlink.inspection.recording import Recording as Recording
from omni_kvlink.inspection.recording import read_recording as read_recording
from omni_kvlink.inspection.replay import Replay as Replay
