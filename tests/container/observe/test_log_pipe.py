"""Lines of a log that nothing reads, and what becomes of them once something does."""

import os

import pytest

from container.observe.logs import LinePipe

FULL = 65_536  # bytes that a pipe holds


@pytest.fixture
def pipe():
    """Both ends."""
    ends = os.pipe()
    yield ends
    for end in ends:
        if end is not None:
            os.close(end)


def told(count):
    """The line about lines that were dropped."""
    return b"dropped %d\n" % count


def lines_of(reader, last):
    """What comes, up to the line that is the last one."""
    seen = b""
    while not seen.endswith(last):
        seen += os.read(reader, FULL)
    return seen.split(b"\n")[:-1]


def test_a_line_is_there_once_it_is_written(pipe):
    """No thread has to come first."""
    reader, writer = pipe
    LinePipe(writer, told).write(b"a\n")

    assert os.read(reader, 10) == b"a\n"


def test_lines_of_a_full_pipe_are_kept(pipe):
    """Each write comes back; whatever reads in the end has all of them, whole and in order."""
    reader, writer = pipe
    lines = LinePipe(writer, told)
    written = [b"%06d%s" % (number, b"x" * (number % 9000)) for number in range(0, 30_000, 300)]
    for line in written:
        lines.write(line + b"\n")

    assert lines_of(reader, written[-1] + b"\n") == written
    lines.flush()
    lines.write(b"at once\n")
    assert os.read(reader, 10) == b"at once\n"
    assert lines.dropped == 0


def test_lines_beyond_the_bound_are_dropped_and_told(pipe):
    """In the place where they would have been, by their number."""
    reader, writer = pipe
    lines = LinePipe(writer, told, most_bytes=1000)
    os.set_blocking(writer, False)
    os.write(writer, b"y" * (FULL - 1) + b"\n")
    os.set_blocking(writer, True)
    for number in range(20):
        lines.write(b"%099d\n" % number)
    dropped = lines.dropped

    assert 9 <= dropped <= 10  # the thread may have taken one already
    _, *seen = lines_of(reader, b"dropped %d\n" % dropped)
    assert seen == [*(b"%099d" % number for number in range(20 - dropped)), b"dropped %d" % dropped]
    lines.flush()
    lines.write(b"again\n")
    assert os.read(reader, 10) == b"again\n"


def test_a_pipe_that_nothing_will_read_is_an_error():
    """As it is for any other writer."""
    reader, writer = os.pipe()
    lines = LinePipe(writer, told)
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        lines.write(b"a\n")
    os.close(writer)


def test_a_fork_leaves_the_child_no_lines(pipe):
    """They are the parent's to write."""
    reader, writer = pipe
    lines = LinePipe(writer, told)
    line = b"z" * FULL + b"\n"
    for _ in range(2):
        lines.write(line)
    child = os.fork()
    if not child:
        lines.flush()
        os._exit(1 if "0 bytes kept" in repr(lines) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert lines_of(reader, b"\n" + line) == [line[:-1]] * 2
