"""Source files are read by any number of threads."""

from __future__ import annotations

import gc
import threading
import warnings

from model_handlers.registry import syntax_tree
from tests.waiting import PATIENCE


def test_two_threads_read_two_files(tmp_path):
    """A thread that begins in the middle of another one's tree, where Python lets it run, changes nothing of it."""
    long, short = tmp_path / "long.py", tmp_path / "short.py"
    long.write_text("x = [" + ", ".join(f"f({number}, a.b[{number}])" for number in range(2000)) + "]\n")
    short.write_text("x = 1\n")
    read = []
    other = threading.Thread(target=lambda: read.append(syntax_tree(short)))

    def let_the_other_run(*_):
        if threading.current_thread() is threading.main_thread() and other.ident is None:
            other.start()
            other.join(0.1)  # it ends now, or when we have our tree

    gc.callbacks.append(let_the_other_run)
    try:
        tree = syntax_tree(long)
    finally:
        gc.callbacks.remove(let_the_other_run)
    assert other.ident is not None
    other.join(PATIENCE)
    assert len(tree.body[0].value.elts) == 2000
    assert len(read) == 1


def test_nobody_is_warned_of_what_a_file_says(tmp_path):
    """Tests make errors of warnings; this one has none."""
    file = tmp_path / "model.py"
    file.write_text("x = '\\d'\ny = 1 is 1\n")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert len(syntax_tree(file).body) == 2
    assert warned == []
