"""Finding and loading the model that the user named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from veloxquant.errors import VeloxQuantError

__all__ = ["SAMPLE", "check_model", "load_model"]

SAMPLE = "sample"

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# By name: the classes are of a library that mlx-lm uses and veloxquant does not. Subclasses come first.
_HUB_ERRORS = {
    "GatedRepoError": "access to the repository is gated; accept its terms on the hub and log in first",
    "RepositoryNotFoundError": "there is no such folder here and no such public repository",
    "RevisionNotFoundError": "the repository has no such revision",
    "HFValidationError": "this is no valid repository name",
    "LocalEntryNotFoundError": "there is no such folder here, no downloaded copy, and the hub cannot be reached",
    "OfflineModeIsEnabled": "there is no such folder here, no downloaded copy, and the hub is switched off",
    "ConnectError": "there is no such folder here, and the hub cannot be reached",
    "ConnectionError": "there is no such folder here, and the hub cannot be reached",
}


def check_model(name: str) -> None:
    """Refuse what cannot be a model, before anything is loaded.

    Args:
        name: ``sample``, a folder, or ``org/name`` of a repository of the Hugging Face hub.

    Raises:
        VeloxQuantError: It is none of them.
    """
    if name == SAMPLE:
        return
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise VeloxQuantError(f"the model folder '{name}' has no config.json; name a folder that mlx-lm can load")
    elif name and folder.exists():
        raise VeloxQuantError(f"the model '{name}' is a file; name the folder that holds it")
    elif not _REPOSITORY.fullmatch(name):
        raise VeloxQuantError(f"there is no model folder '{name}'; name a folder, org/name on the hub, or '{SAMPLE}'")


def load_model(name: str) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        name: As for ``check_model``.

    Returns:
        The model and mlx-lm's tokenizer wrapper.

    Raises:
        VeloxQuantError: It cannot be had, or its files cannot be used.
    """
    if name == SAMPLE:
        from veloxquant.testing.sample import load_sample_model

        return load_sample_model()
    import mlx_lm

    folder = Path(name).expanduser()
    try:
        model, tokenizer = mlx_lm.load(str(folder) if folder.is_dir() else name)[:2]
    except Exception as error:  # whatever is wrong with the user's files
        raise VeloxQuantError(f"the model '{name}' cannot be loaded: {_reason(error)}") from error
    return model, tokenizer


def _reason(error: Exception) -> str:
    names = [cls.__name__ for cls in type(error).__mro__]
    for name, reason in _HUB_ERRORS.items():
        if name in names:
            return reason
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
