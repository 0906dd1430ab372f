"""What is said at the start of a store or a repository without models: as a rule another folder was meant. Blocks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from container.settings import Mode
from serve.sources.layout import is_model, list_models
from serve.sources.store import ARCHIVE_SUFFIX

if TYPE_CHECKING:
    from container.settings import Settings


def bare_source(settings: Settings) -> str:
    """Which store or repository has nothing to serve, and what to do, by what a folder holds instead."""
    if settings.mode is Mode.STORE:
        lacks = f"there is no archive (*.tar.gz) in the store {settings.model_store}"
        folder = None if settings.model_store.startswith("s3://") else Path(settings.model_store)
        if folder is not None and (is_model(folder) or list_models(folder)):
            return f"{lacks}: it holds models that are not packed; --model-repository serves a folder of those"
        return f"{lacks}: check its name, or put archives there"
    lacks = f"there is no model in the repository {', '.join(map(str, settings.repositories))}"
    folders = [each for each in settings.repositories if isinstance(each, Path)]
    if any(is_model(folder) for folder in folders):
        return f"{lacks}, which is a model's own directory: name the folder above it"
    if any(next(folder.glob(f"*{ARCHIVE_SUFFIX}"), None) for folder in folders):
        return f"{lacks}, which holds archives: --model-store serves those"
    return f"{lacks}: check its name, or put directories of models there"
