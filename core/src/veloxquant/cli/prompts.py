"""From what the user gave to the tokens of a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from veloxquant.errors import VeloxQuantError

__all__ = ["SAMPLE_QUESTION", "read_prompt", "sample_prompt", "to_tokens"]

SAMPLE_QUESTION = "Summarize the text above in one sentence."
SAMPLE_TOKENS = 900


def read_prompt(text: str | None, file: str | None, sample_tokens: int | None) -> str | None:
    """Read the prompt that was given.

    Args:
        text: The prompt itself.
        file: Where it stands; ``-`` for standard input.
        sample_tokens: Length of the sample text to use in place of a prompt.

    Returns:
        The prompt, or None when neither text nor file was given.

    Raises:
        VeloxQuantError: More than one was given, the file cannot be read, or the prompt is empty.
    """
    if text is not None and file is not None:
        raise VeloxQuantError("give --prompt or --prompt-file, not both")
    if text is None and file is None:
        return None
    if sample_tokens is not None:
        raise VeloxQuantError("--sample-tokens is for the built-in prompt; leave it out with --prompt or --prompt-file")
    prompt = _read(file) if file is not None else text
    assert prompt is not None
    if not prompt.strip():
        empty = "the prompt is empty; write a text after --prompt"
        raise VeloxQuantError(empty if file is None else f"{_name(file)} is empty; write a text into it")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # bytes of the command line that Python could not decode
        raise VeloxQuantError("the prompt is not valid UTF-8 text") from None
    return prompt


def _name(file: str) -> str:
    return "standard input" if file == "-" else f"the prompt file '{file}'"


def _read(file: str) -> str:
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise VeloxQuantError(f"{_name(file)} cannot be read: {reason}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise VeloxQuantError(f"{_name(file)} is not UTF-8 text (byte {error.start}); convert it first") from error


def sample_prompt(tokenizer: Any, tokens: int | None) -> str:
    """A long prompt for those who bring none: a stretch of the sample text, then a request.

    Args:
        tokenizer: The model's tokenizer.
        tokens: Tokens of text.

    Raises:
        VeloxQuantError: The sample text is shorter.
    """
    from veloxquant.testing.sample import sample_tokens

    text = tokenizer.decode(sample_tokens(tokenizer, tokens or SAMPLE_TOKENS))
    return f"{text}\n\n{SAMPLE_QUESTION}"


def to_tokens(tokenizer: Any, prompt: str, *, chat: bool) -> list[int]:
    """Encode a prompt, as a user's message where the model knows chats.

    Args:
        tokenizer: The model's tokenizer.
        prompt: The text.
        chat: Use the tokenizer's chat template if it has one.

    Returns:
        Token ids, at least one.

    Raises:
        VeloxQuantError: The chat template fails, or nothing is left of the prompt.
    """
    if chat and tokenizer.has_chat_template:
        message = {"role": "user", "content": prompt}
        try:
            tokens = tokenizer.apply_chat_template([message], add_generation_prompt=True)
        except Exception as error:  # templates are programs that come with the model
            raise VeloxQuantError(f"the model's chat template failed ({error}); try --no-chat") from error
    else:
        tokens = tokenizer.encode(prompt)
    if not tokens:
        raise VeloxQuantError("the prompt has no tokens in this model's vocabulary")
    return [int(token) for token in tokens]
