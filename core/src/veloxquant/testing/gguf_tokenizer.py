"""The tokenizer files of an mlx-lm model folder, made from the vocabulary inside a GGUF file.

The vocabulary is a byte-level BPE of the kind llama.cpp calls "smollm": every digit is a piece of its own, everything
else is split by the GPT-2 pattern, control tokens are never split.
"""

from typing import Any

CONTROL_TOKEN = 3


def tokenizer_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """The contents of tokenizer.json.

    Args:
        metadata (dict): The key-value section of the GGUF file, as plain Python values.

    Returns:
        dict: A byte-level BPE model in the format of the tokenizers library.

    Raises:
        ValueError: If the file holds another kind of vocabulary.
    """
    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"The GGUF vocabulary must be of kind gpt2/smollm, but is {kind[0]}/{kind[1]}.")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, metadata["tokenizer.ggml.token_type"]),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The contents of tokenizer_config.json, with the chat template.

    Args:
        metadata (dict): The key-value section of the GGUF file, as plain Python values.

    Returns:
        dict: The settings that transformers reads beside tokenizer.json.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    return {
        # The generic class keeps tokenizer.json as it is; the GPT-2 class would put its own splitting in its place.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _added_tokens(tokens: list[str], kinds: list[int]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [
        {"id": index, "content": token, **flags}
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == CONTROL_TOKEN
    ]
