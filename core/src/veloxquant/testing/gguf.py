"""Turn a Llama model in a GGUF file into an ordinary mlx-lm model folder.

MLX reads the blocks of a Q4_1 file as its own affine groups of 32 (the embeddings, Q8_0, as 8 bits). What is left to do
is to give the arrays mlx-lm's names, to undo llama.cpp's order of the query and key rows, and to write the config and
tokenizer files.
"""

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx

from veloxquant.testing.gguf_tokenizer import tokenizer_config
from veloxquant.testing.gguf_tokenizer import tokenizer_json

FORMAT = 1
MARKER = "veloxquant.json"
GROUP_SIZE = 32

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def is_converted(folder: Path, sha256: str) -> bool:
    """Whether a folder was written by this format from the GGUF file with this digest.

    Args:
        folder (Path): The model folder, which need not exist.
        sha256 (str): Digest of the GGUF file in hexadecimal.

    Returns:
        bool: True if the folder is complete and need not be written again.
    """
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(marker == _marker(sha256))


def convert_gguf(source: Path, folder: Path, sha256: str) -> None:
    """Write the model folder for a GGUF file in one step, safe against other processes that do the same.

    Args:
        source (Path): The GGUF file.
        folder (Path): The folder to make; one of another format is replaced.
        sha256 (str): Digest of ``source`` in hexadecimal, recorded in the folder.

    Raises:
        ValueError: If the file holds a model or vocabulary that this module does not know.
        OSError: If the folder cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as workspace:
        built = Path(workspace) / "built"
        built.mkdir()
        _write_model(source, built)
        _write_json(built / MARKER, _marker(sha256))
        _publish(built, folder, sha256)


def _marker(sha256: str) -> dict[str, Any]:
    return {"format": FORMAT, "sha256": sha256}


def _publish(built: Path, folder: Path, sha256: str) -> None:
    for attempt in range(3):
        try:
            built.rename(folder)
        except OSError:
            # Another process may have been faster, and its folder is as good as this one.
            if is_converted(folder, sha256):
                return
            if attempt == 2:
                raise
            # A folder cannot be renamed onto another one: put the outdated one among the temporary files.
            with suppress(FileNotFoundError):
                folder.rename(built.parent / f"outdated{attempt}")
        else:
            return


def _write_model(source: Path, folder: Path) -> None:
    loaded = mx.load(str(source), format="gguf", return_metadata=True)
    if not isinstance(loaded, tuple):
        raise ValueError(f"{source} has no metadata.")
    arrays, raw_metadata = loaded
    metadata = {key: _plain(value) for key, value in raw_metadata.items()}
    if metadata.get("general.architecture") != "llama":
        raise ValueError(f"The GGUF model must be a llama, but is {metadata.get('general.architecture')}.")
    weights = _model_weights(arrays, metadata["llama.attention.head_count"], metadata["llama.attention.head_count_kv"])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    _write_json(folder / "config.json", _model_config(metadata, tied="lm_head.weight" not in weights))
    _write_json(folder / "generation_config.json", _special_ids(metadata))
    _write_json(folder / "tokenizer.json", tokenizer_json(metadata))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, mx.array) else value


def _model_weights(arrays: dict[str, mx.array], heads: int, kv_heads: int) -> dict[str, mx.array]:
    weights = {}
    for name, array in arrays.items():
        if ".attn_q." in name:
            array = _half_split_rows(array, heads)
        elif ".attn_k." in name:
            array = _half_split_rows(array, kv_heads)
        # The group scales are float16 in the file. In float32 they are the same numbers and the products are faster.
        weights[_mlx_name(name)] = array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
    return weights


def _half_split_rows(array: mx.array, heads: int) -> mx.array:
    """Order the rows of each head as the first and the second half of the rotary pairs.

    llama.cpp stores the two rows of a pair side by side, mlx-lm's rotation expects them half a head apart.

    Args:
        array (array): Weights, scales or biases of shape ``[heads * head_dim, columns]``.
        heads (int): The number of heads.

    Returns:
        array: The same rows in mlx-lm's order, same shape.
    """
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _mlx_name(name: str) -> str:
    path, _, kind = name.rpartition(".")
    try:
        if path.startswith("blk."):
            _, layer, part = path.split(".")
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
        return f"{_TOP_NAMES[path]}.{kind}"
    except (KeyError, ValueError):
        raise ValueError(f"The GGUF file holds the array {name}, which a llama model does not have.") from None


def _model_config(metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.embedding_length"] // heads,
        "max_position_embeddings": metadata["llama.context_length"],
        # The file stores the number in single precision; 1e-05 is meant.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": metadata["llama.rope.freq_base"],
        "vocab_size": metadata["llama.vocab_size"],
        "tie_word_embeddings": tied,
        **_special_ids(metadata),
        "quantization": {
            "group_size": GROUP_SIZE,
            "bits": 4,
            "model.embed_tokens": {"group_size": GROUP_SIZE, "bits": 8},
        },
    }


def _special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
