"""as_stored: an architecture with the projection to logits that a folder's files have; imports no torch."""

import logging
from dataclasses import replace
from pathlib import Path

from engine.loading.gguf_folder import gguf_of
from engine.loading.model_files import TensorEntry, indexed_files, stored_tensors
from engine.model_config import ModelArchitecture

logger = logging.getLogger(__name__)

_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MATRICES = (_HEAD, "lm_head.qweight", "lm_head.weight_packed")
"""Names of a projection's values, as numbers or quantized."""
_CHUNK_BYTES = 8 << 20


def as_stored(architecture: ModelArchitecture, folder: Path) -> ModelArchitecture:
    """The architecture without tied embeddings, if the files' projection to logits differs from their embeddings.

    transformers decides in the same way, whatever `tie_word_embeddings` says. A projection that equals the
    embeddings is a copy, which need not be loaded.
    """
    if not architecture.tie_word_embeddings or gguf_of(folder) is not None:
        return architecture
    if not all((folder / name).is_file() for name in indexed_files(folder)):
        return architecture
    tensors = stored_tensors(folder)
    if not any(name in tensors for name in _MATRICES):
        return architecture
    if _EMBEDDINGS in tensors and _HEAD in tensors and _are_equal(tensors[_EMBEDDINGS], tensors[_HEAD]):
        return architecture
    logger.info(
        "%s has its own projection to logits, although config.json has tie_word_embeddings: true", folder
    )
    return replace(architecture, tie_word_embeddings=False)


def _are_equal(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two tensors have the same bytes. Reads both tensors up to the first difference."""
    if (one.dtype, one.shape, one.num_bytes) != (other.dtype, other.shape, other.num_bytes):
        return False
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.offset)
        right.seek(other.offset)
        rest = one.num_bytes
        while rest > 0:
            size = min(rest, _CHUNK_BYTES)
            if left.read(size) != right.read(size):
                return False
            rest -= size
    return True
