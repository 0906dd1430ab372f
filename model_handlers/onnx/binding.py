"""Executions with inputs and outputs bound: each tensor is copied once, to where the session wants it and back.

A session on a GPU takes a plain execution's inputs as they are needed, one by one. Bound, they are on their way before
the first operator begins; outputs come back into memory of their own, and those that nobody asked for not at all.

Called by instance threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from model_handlers.tensor import Array


def run_bound(session: Any, inputs: Mapping[str, Array], outputs: Sequence[str], options: Any) -> list[Array]:
    """Execute once; outputs are on the host."""
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    for name in outputs:
        binding.bind_output(name)
    session.run_with_iobinding(binding, options)
    found: list[Array] = binding.copy_outputs_to_cpu()
    return found
