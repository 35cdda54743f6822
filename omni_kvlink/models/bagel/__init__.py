"""The reference BAGEL: prompts of texts and images in, images and texts out, plain PyTorch.

It reads published BAGEL checkpoints (`BagelPipeline.from_pretrained`) and writes tiny ones with
random weights (`make_tiny_checkpoint`). Two stages exchange its KV cache: `prefill` returns a
`BagelContexts`, from which `render` makes the image, given the parameters and the noise.
"""

from omni_kvlink.models.bagel.cache import BagelContext as BagelContext
from omni_kvlink.models.bagel.cache import BagelContexts as BagelContexts
from omni_kvlink.models.bagel.cache import LayerCache as LayerCache
from omni_kvlink.models.bagel.cache import NaiveCache as NaiveCache
from omni_kvlink.models.bagel.checkpoint import CheckpointReport as CheckpointReport
from omni_kvlink.models.bagel.checkpoint import check_checkpoint as check_checkpoint
from omni_kvlink.models.bagel.config import AutoencoderConfig as AutoencoderConfig
from omni_kvlink.models.bagel.config import BagelConfig as BagelConfig
from omni_kvlink.models.bagel.config import LanguageConfig as LanguageConfig
from omni_kvlink.models.bagel.config import VisionConfig as VisionConfig
from omni_kvlink.models.bagel.header import CheckpointError as CheckpointError
from omni_kvlink.models.bagel.hidden_states import HiddenStates as HiddenStates
from omni_kvlink.models.bagel.image_maker import decode_preview as decode_preview
from omni_kvlink.models.bagel.images import ImageLike as ImageLike
from omni_kvlink.models.bagel.in_place import InPlaceCache as InPlaceCache
from omni_kvlink.models.bagel.pipeline import BagelPipeline as BagelPipeline
from omni_kvlink.models.bagel.prompts import Prompt as Prompt
from omni_kvlink.models.bagel.prompts import TokenIds as TokenIds
from omni_kvlink.models.bagel.sampling import DenoiseParams as DenoiseParams
from omni_kvlink.models.bagel.text_output import TextOutput as TextOutput
from omni_kvlink.models.bagel.tiling import Tiling as Tiling
from omni_kvlink.models.bagel.tiny import make_tiny_checkpoint as make_tiny_checkpoint
from omni_kvlink.models.bagel.tokenizer import TokenizerMissingError as TokenizerMissingError
