"""`check_checkpoint`: whether a directory has all that BAGEL needs, read from headers alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from omni_kvlink.errors import MissingFileError
from omni_kvlink.models.bagel.header import complaints, read_header, unread
from omni_kvlink.models.bagel.loading import AUTOENCODER_FILE, MODEL_FILE, load_config
from omni_kvlink.models.bagel.model import BagelModel
from omni_kvlink.models.bagel.tokenizer import SpecialTokens
from omni_kvlink.models.bagel.vae import Autoencoder

if TYPE_CHECKING:
    from torch import nn

_FILES = (
    *("config.json", "llm_config.json", "vit_config.json", "tokenizer.json"),
    *(MODEL_FILE, AUTOENCODER_FILE),
)
_FETCH = "fetch it: hf download ByteDance-Seed/BAGEL-7B-MoT --local-dir DIRECTORY"


@dataclass
class CheckpointReport:
    """The findings of `check_checkpoint`; lines that begin with their file's name.

    Attributes:
        errors: tensors that are missing, or have another shape or dtype: it cannot be loaded.
        unread: tensors that nothing reads.
        tensors: how many tensors the two files have.
        nbytes: the bytes of those that are read, in the files.
    """

    errors: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    tensors: int = 0
    nbytes: int = 0


def check_checkpoint(directory: str | Path) -> CheckpointReport:
    """Compare the files of a checkpoint with its configuration; no tensor is read.

    Takes seconds, and a few MB of memory, for a checkpoint of any size. Needs no safetensors.

    Raises:
        MissingFileError: there is no such directory, or files are missing; it names all of them.
        SchemaError: a configuration file, or the tokenizer's, does not fit.
        CheckpointError: a weights file is no complete safetensors file.
    """
    root, report = Path(directory), CheckpointReport()
    _check_files(root)
    SpecialTokens.load(root)
    config = load_config(root)
    with torch.device("meta"):
        networks = {
            MODEL_FILE: BagelModel(config, "all"),
            AUTOENCODER_FILE: Autoencoder(config.ae, encoder=True, decoder=True),
        }
    for name, network in networks.items():
        _add(report, root / name, network)
    return report


def _check_files(root: Path) -> None:
    if not root.is_dir():
        reason = "is no directory" if root.exists() else "does not exist"
        raise MissingFileError(f"{root} {reason}: give the directory of a checkpoint, or {_FETCH}")
    missing = [name for name in _FILES if not (root / name).is_file()]
    if missing:
        raise MissingFileError(f"{root} lacks {', '.join(missing)}: {_FETCH}")


def _add(report: CheckpointReport, path: Path, network: nn.Module) -> None:
    tensors = read_header(path)
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    report.errors += [f"{path.name}: {text}" for text in complaints(tensors, expected)]
    report.unread += [f"{path.name}: {name}" for name in unread(tensors, expected.keys())]
    report.tensors += len(tensors)
    ranges = (tensors[name].data_offsets for name in expected.keys() & tensors.keys())
    report.nbytes += sum(stop - start for start, stop in ranges)
