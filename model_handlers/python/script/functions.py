"""The functions that a script defines, and how each is called: with or without a context, as it was written.

Which of them go together is checked once, when the model loads.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

    from model_handlers.python.script.context import Context

# What each is given; a context may follow.
_ARGUMENTS = {
    "pre_model_fn": ("model_dir",),
    "model_fn": ("model_dir",),
    "model_warmup_fn": ("model_dir", "model"),
    "input_fn": ("request_body", "content_type"),
    "predict_fn": ("data", "model"),
    "output_fn": ("prediction", "accept"),
    "transform_fn": ("model", "request_body", "content_type", "accept"),
}
_REPLACED = ("input_fn", "predict_fn", "output_fn")  # by transform_fn
_WRITERS = ("transform_fn", "output_fn")
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class ScriptFunctions:
    """The functions of one script.

    Args:
        module: the script.
        path: its file, for messages.
        model: the model's name, for messages.
        context: what functions get that take one more argument than they must.

    Raises:
        MmeError: INVALID_MODEL when two do not go together, or one takes what it is not given.
    """

    def __init__(self, module: ModuleType, path: Path, model: str, context: Context) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, arguments in _ARGUMENTS.items():
            function = getattr(module, name, None)
            if function is not None:
                where = f"model '{model}': {name} in {path}"
                self._functions[name] = _bound(function, where, f"{name}({', '.join(arguments)})", context)
        self._writers = [getattr(module, name, None) for name in _WRITERS]
        if "transform_fn" in self and any(name in self for name in _REPLACED):
            raise invalid_model(
                "Cannot use transform_fn implementation in conjunction with input_fn, predict_fn, and/or output_fn "
                f"implementation: model '{model}' has both in {path}"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    @property
    def streams(self) -> bool:
        """Whether the function that writes answers is a generator: its pieces are sent as they come."""
        return any(inspect.isgeneratorfunction(function) for function in self._writers)

    def get(self, name: str) -> Callable[..., Any] | None:
        """One of them, to be called without its context; None where the script does not define it."""
        return self._functions.get(name)


def _bound(function: Any, where: str, form: str, context: Context) -> Callable[..., Any]:
    """The function, to be called as its `form` says."""
    if not callable(function):
        raise invalid_model(f"{where} is no function but a {type(function).__name__}")
    try:
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    except (TypeError, ValueError) as error:  # a callable of native code may have none
        raise invalid_model(f"{where} does not tell what it takes: {error}") from error
    given, takes = form.count(",") + 1, sum(kind in _BY_POSITION for kind in kinds)
    if takes == given + 1:
        return lambda *arguments: function(*arguments, context)
    if takes != given and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise invalid_model(
            f"{where} takes {takes} arguments but {given} were given: write {form}, and a context behind if need be"
        )
    bound: Callable[..., Any] = function
    return bound
