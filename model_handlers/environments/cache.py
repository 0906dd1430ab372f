"""Environments on disk, by what models ask for. Runs on load threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.environments.environment import Environment, check_interpreter

if TYPE_CHECKING:
    from model_handlers.environments.wanted import Wanted


def find(wanted: Wanted, model: str) -> Environment:
    """The environment that a model asks for.

    Raises:
        MmeError: INVALID_MODEL when there is none.
    """
    environment = Environment(wanted.path)
    check_interpreter(environment, f"model '{model}': its environment {wanted.path}")
    return environment
