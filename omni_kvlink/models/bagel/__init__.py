"""The reference BAGEL: prompts of texts and images in, images and texts out, plain PyTorch.

It reads published BAGEL checkpoints (`BagelPipeline.from_pretrained`) and writes tiny ones with
random weights (`make_tiny_checkpoint`). Its KV cache is what crosses between two stages:
`prefill` makes a `BagelContexts`, `render` needs nothing else but the parameters and the noise.
"""

from .cache import BagelContext as BagelContext
from .cache import BagelContexts as BagelContexts
from .cache import LayerCache as LayerCache
from .cache import NaiveCache as NaiveCache
from .config import AutoencoderConfig as AutoencoderConfig
from .config import BagelConfig as BagelConfig
from .config import LanguageConfig as LanguageConfig
from .config import VisionConfig as VisionConfig
from .images import ImageLike as ImageLike
from .in_place import InPlaceCache as InPlaceCache
from .pipeline import BagelPipeline as BagelPipeline
from .pipeline import Prompt as Prompt
from .sampling import DenoiseParams as DenoiseParams
from .tiny import make_tiny_checkpoint as make_tiny_checkpoint
from .weights import CheckpointError as CheckpointError
