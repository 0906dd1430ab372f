"""What the tests notice: one operator or constant of the product is changed, and one of them has to fail.

    python -m benchmarks.mutants --record                 once for a tree: runs all tests, some 20 minutes
    python -m benchmarks.mutants [--seed 1] [--count 30] [--skip 0] [--only FILE ...] [--save FILE] [--tree CHECKOUT]

Lines are chosen by their text and their function, not by their place: another tree with the same line has the same
change. Each is made in a copy of the tree, with a virtual environment that finds the copy only. The tests run that
executed the line, the fastest first, and after them the files of tests/contract whose servers did, until one fails. A
line that no process was seen to execute is left to all of tests/contract. What fails has to pass without the change.

A row for each change says where it is, what became of what, and which test caught it; the last line is the share of the
caught. A run that takes several times what its tests took is caught, too. `--save` adds the rows to a file, and
`--skip` goes on behind the first of the chosen lines: the work can be done in parts.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import copy
import ctypes
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
from coverage import CoverageData

if TYPE_CHECKING:
    from collections.abc import Iterable

_STOREYS = ("container", "serve", "model_handlers")
_RECORD = Path("build/coverage")
_LAST = "tests/contract"
_TESTS = 300  # for a change, before tests/contract
_SECONDS = 100.0  # that they took in the recording
_LAST_SECONDS = 300.0
_TIMES, _MORE = 3, 60.0  # a run may take so many times what it took in the recording, and some seconds
_PR_SET_CHILD_SUBREAPER = 36
_COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One place of one file, and what stands there instead."""

    path: str
    line: int
    statement: int  # the line where its statement begins
    span: tuple[int, int]  # in bytes
    before: str
    after: str
    name: str  # of what is assigned outside of functions; ""

    def __str__(self) -> str:
        return f"`{self.before}` → `{self.after}`"

    def of(self, source: bytes) -> bytes:
        """The file with the change."""
        start, end = self.span
        return source[:start] + self.after.encode() + source[end:]


@dataclass
class Outcome:
    """What became of one change."""

    place: str
    change: str
    result: str  # caught, survived, or not executed
    by: str = ""
    tests: int = 0
    seconds: float = 0.0


class _Finder(ast.NodeVisitor):
    """All changes of one file, with the function each is in."""

    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[tuple[str, Change]] = []
        self._path = path
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._scopes: list[str] = []
        self._in_function = 0
        self._statement: ast.stmt | None = None
        self.visit(ast.parse(source))

    def visit(self, node: ast.AST) -> None:
        outer = self._statement
        if isinstance(node, ast.stmt):
            self._statement = node
        super().visit(node)
        self._statement = outer

    def _add(self, node: ast.expr | ast.stmt, instead: ast.AST) -> None:
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        before, after = (" ".join(self._source[start:end].decode().split()), ast.unparse(instead))
        if isinstance(instead, (ast.Compare, ast.BoolOp, ast.BinOp)):
            after = f"({after})"
        name = ""
        if not self._in_function and isinstance(self._statement, (ast.Assign, ast.AnnAssign)):
            target = self._statement.targets[0] if isinstance(self._statement, ast.Assign) else self._statement.target
            name = target.id if isinstance(target, ast.Name) else ""
        change = Change(self._path, node.lineno, (self._statement or node).lineno, (start, end), before, after, name)
        self.found.append((".".join(self._scopes), change))

    def _scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._scopes.append(node.name)
        inside = 0
        if not isinstance(node, ast.ClassDef):
            inside = 1
            for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                self.visit(default)
        self._in_function += inside
        for statement in node.body:
            self.visit(statement)
        self._in_function -= inside
        self._scopes.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _scope  # noqa: N815 - annotations are not visited

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Python 3.11 does not know where what is in it stands."""

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._condition(node)

    def _condition(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if isinstance(node.test, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
            self._add(node.test, ast.UnaryOp(ast.Not(), node.test))
        self.generic_visit(node)

    visit_While = visit_IfExp = _condition  # noqa: N815

    def visit_Return(self, node: ast.Return) -> None:
        if node.value and not isinstance(node.value, ast.Constant):
            self._add(node.value, ast.Constant(None))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for index, operator in enumerate(node.ops):
            changed = copy.deepcopy(node)
            changed.ops[index] = _COMPARED[type(operator)]()
            self._add(node, changed)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._add(node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = isinstance(node.left, (ast.Constant, ast.JoinedStr)) and not isinstance(
            getattr(node.left, "value", ""), (int, float)
        )
        if type(node.op) in _COMPUTED and not text:  # words put together are no arithmetic
            self._add(node, ast.BinOp(node.left, _COMPUTED[type(node.op)](), node.right))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in _COMPUTED:
            self._add(node, ast.AugAssign(node.target, _COMPUTED[type(node.op)](), node.value))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add(node, node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, ast.Constant(not node.value))
        elif isinstance(node.value, (int, float)):
            self._add(node, ast.Constant(node.value + 1))


def choose(tree: Path, seed: int, only: list[str]) -> list[Change]:
    """One change for each line that has any, in the order of the seed."""
    changes: dict[str, tuple[str, Change]] = {}
    for storey in _STOREYS:
        for file in sorted((tree / storey).rglob("*.py")):
            path = str(file.relative_to(tree))
            if path.endswith("_pb2.py") or (only and path not in only):
                continue
            source = file.read_bytes()
            lines = source.decode().splitlines()
            of_line: dict[tuple[str, str], list[int]] = {}
            for scope, change in _Finder(path, source).found:
                text = lines[change.line - 1].strip()
                same = of_line.setdefault((scope, text), [])
                if change.line not in same:
                    same.append(change.line)
                line = _rank(seed, scope, text, same.index(change.line))
                rank = _rank(seed, str(change))
                if (key := f"{line} {path}") not in changes or rank < changes[key][0]:
                    changes[key] = rank, change
    return [changes[key][1] for key in sorted(changes)]


def _rank(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


class Copy:
    """A copy of a tree, with a virtual environment that finds the product there. A context manager.

    Args:
        tree: what is copied: the files that git knows.
        recorded: the folder for what each process executes; None to record nothing.
    """

    def __init__(self, tree: Path, recorded: Path | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        self.tree = self._folder / "tree"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # removed, and git was not told
                shutil.copy2(tree / name, self.tree / name)
        self._bin = self._folder / "venv" / "bin"
        venv.create(self._bin.parent, symlinks=True)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(self._bin.parent)}))
        for package in Path(sysconfig.get_path("purelib")).iterdir():
            if package.suffix != ".pth" and not package.name.startswith("__editable__"):
                (packages / package.name).symlink_to(package)
        (packages / "tree.pth").write_text(f"{self.tree}\n")
        for script in Path(sys.executable).parent.iterdir():
            if not (self._bin / script.name).exists() and (text := script.read_bytes()).startswith(b"#!"):
                _, _, rest = text.partition(b"\n")
                (self._bin / script.name).write_bytes(f"#!{self._bin}/python\n".encode() + rest)
                (self._bin / script.name).chmod(0o755)
        if recorded:
            shutil.copy2(Path(__file__).with_name("contexts.py"), self.tree / "benchmarks")
            begins = f"from benchmarks import contexts; contexts.start({str(recorded)!r}, {str(self.tree)!r})"
            (packages / "zz_contexts.pth").write_text(f"import sys; exec({begins!r})\n")
        self._clock = time.time()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, path: str, source: bytes) -> None:
        """Replace one file, so that Python compiles it again."""
        (self.tree / path).write_bytes(source)
        self._clock += 10
        os.utime(self.tree / path, (self._clock, self._clock))

    def pytest(self, *arguments: str, timeout: float | None = None) -> tuple[int | None, str]:
        """Run tests until one fails; the exit code, None after the timeout, and what was printed."""
        command = [str(self._bin / "python"), "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *arguments]
        without = {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"}
        environ = {name: value for name, value in os.environ.items() if name not in without}
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(command, cwd=self.tree, env=environ, stdout=output, stderr=output)
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end_children()
            output.seek(0)
            return code, output.read()


def _end_children() -> None:
    """All that was begun, servers in sessions of their own too: what loses its parent becomes our child."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, 5)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


class Recording:
    """Which tests executed which lines of a tree, and how long each took."""

    def __init__(self, tree: Path, data: CoverageData, seconds: dict[str, float], sources: dict[str, str]) -> None:
        self._tree = tree
        self._data = data
        self._seconds = seconds
        self._sources = sources
        self._files: dict[str, float] = {}
        for test, took in seconds.items():
            file = test.partition("::")[0]
            self._files[file] = self._files.get(file, 0.0) + took

    @classmethod
    def read(cls, tree: Path) -> Recording:
        """What `record` has written."""
        facts = json.loads((tree / _RECORD / "tests.json").read_text())
        data = CoverageData(str(tree / _RECORD / "lines"))
        data.read()
        return cls(tree, data, **facts)

    def knows(self, path: str) -> bool:
        """Whether the file is still what was recorded."""
        return self._sources.get(path) == _digest(self._tree / path)

    def took(self, name: str) -> float:
        """A test, or a file of tests; 0 for what is neither."""
        return self._seconds.get(name) or self._files.get(name, 0.0)

    def tests_of(self, file: str) -> list[str]:
        """All tests of a file or a folder."""
        return [name for name in self._seconds if name.startswith((f"{file}::", f"{file}/"))]

    def executed_by(self, change: Change) -> set[str]:
        """The tests, and the files of tests whose processes, executed the line.

        A line that runs while its file is imported belongs to those that execute a line with the name that it assigns,
        or to those that execute any.
        """
        lines = {line: _named(contexts) for line, contexts in self._data.contexts_by_lineno(change.path).items()}
        if change.line not in lines and change.statement not in lines:
            return set()
        if found := lines.get(change.line) or lines.get(change.statement):
            return found
        texts = enumerate((self._tree / change.path).read_text().splitlines(), 1)
        users = [line for line, text in texts if change.name and re.search(rf"\b{change.name}\b", text)]
        return set().union(*(lines.get(line, ()) for line in users)) or set().union(*lines.values())


def _named(contexts: list[str]) -> set[str]:
    return {context.rpartition("|")[2] for context in contexts} - {""}


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def record(tree: Path) -> None:
    """Run all tests in a copy, and keep what they executed."""
    recorded = (tree / _RECORD).absolute()
    shutil.rmtree(recorded, ignore_errors=True)
    recorded.mkdir(parents=True)
    with Copy(tree, recorded) as copied:
        code, output = copied.pytest("-n", "2", "-p", "benchmarks.contexts")
        print(output[-3000:], f"\npytest ended with {code}")
        keep(recorded, copied.tree)


def keep(recorded: Path, tree: Path) -> None:
    """Make one file of those of all processes, with the paths and the contents of that tree."""
    kept = CoverageData(str(recorded / "lines"))
    for path in sorted(recorded.glob("lines.*")):
        with suppress(Exception):  # a process that was killed while it wrote
            one = CoverageData(str(path))
            one.read()
            kept.update(one, map_path=lambda name: os.path.relpath(name, tree))
        path.unlink()
    kept.write()
    seconds: dict[str, float] = {}
    for path in recorded.glob("times*"):
        for line in path.read_text().splitlines():
            test, _, _, took, *_ = json.loads(line)
            seconds[test] = seconds.get(test, 0.0) + took
    files = [file for storey in _STOREYS for file in (tree / storey).rglob("*.py")]
    sources = {str(file.relative_to(tree)): _digest(file) for file in files}
    (recorded / "tests.json").write_text(json.dumps({"seconds": seconds, "sources": sources}))


class Trial:
    """Changes, one after the other, in one copy."""

    def __init__(self, copied: Copy, recording: Recording) -> None:
        self._copy = copied
        self._recording = recording

    def of(self, change: Change) -> Outcome:
        """Make it, run those that may notice, and take it back."""
        outcome = Outcome(f"{change.path}:{change.line}", str(change), "survived")
        began = time.monotonic()
        source = (self._copy.tree / change.path).read_bytes()
        executed = self._recording.executed_by(change)
        if not executed:
            outcome.result = "not executed"
        for tests in (self._first(executed), self._last(executed)):
            outcome.tests += len(tests)
            if by := self._caught_by(tests, change, source):
                outcome.result, outcome.by = "caught", by
                break
        outcome.seconds = round(time.monotonic() - began)
        return outcome

    def _first(self, executed: set[str]) -> list[str]:
        """Tests of the process that ran the line, then those of files whose processes did; the fastest first."""
        others = {name for name in executed if not name.startswith(f"{_LAST}/")}
        files = [test for name in others if "::" not in name for test in self._recording.tests_of(name)]
        tests = [*self._fastest(name for name in others if "::" in name), *self._fastest(files)]
        return self._within(_SECONDS, list(dict.fromkeys(tests))[:_TESTS])

    def _last(self, executed: set[str]) -> list[str]:
        """Files of the contract, the fastest first: those whose servers ran the line, or all where no process did."""
        names = {name.partition("::")[0] for name in executed or self._recording.tests_of(_LAST)}
        return self._within(_LAST_SECONDS, self._fastest(name for name in names if name.startswith(f"{_LAST}/")))

    def _fastest(self, names: Iterable[str]) -> list[str]:
        return sorted((name for name in names if self._recording.took(name)), key=self._recording.took)

    def _within(self, seconds: float, names: list[str]) -> list[str]:
        """As many of them as take no longer, at least one."""
        until = list(itertools.accumulate(map(self._recording.took, names)))
        return names[: max(1, bisect.bisect(until, seconds))]

    def _caught_by(self, tests: list[str], change: Change, source: bytes) -> str:
        """The first that fails with the change, and not without it; "" for none."""
        while tests:
            limit = _TIMES * sum(map(self._recording.took, tests)) + _MORE
            self._copy.write(change.path, change.of(source))
            try:
                code, output = self._copy.pytest("-x", "--tb=no", *tests, timeout=limit)
            finally:
                self._copy.write(change.path, source)
            if code == 0:
                return ""
            if code is None:
                ends = self._copy.pytest("-x", "--tb=no", *tests, timeout=limit)[0] is not None
                return f"a run that did not end in {limit:.0f} s" if ends else ""
            failed = re.search(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - |$)", output, re.MULTILINE)
            if not failed:
                return "an error before the first test" if self._passes(tests[:1]) else ""
            if self._passes([failed[1]]):
                return failed[1]
            tests = [test for test in tests if test != failed[1]]  # it fails here in any case
            if "::" not in tests[0]:  # so do not begin its file again
                tests = [test for test in tests if test != failed[1].partition("::")[0]]
        return ""

    def _passes(self, tests: list[str]) -> bool:
        return self._copy.pytest("--tb=no", *tests, timeout=_TIMES * _LAST_SECONDS)[0] == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="run all tests once, and note what they execute")
    parser.add_argument("--tree", type=Path, default=Path(), help="another checkout; this one's packages serve it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30, help="how many lines are changed, one at a time")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of the first")
    parser.add_argument(
        "--only", action="append", default=[], metavar="FILE", help="lines of this file; may be repeated"
    )
    parser.add_argument("--save", type=Path, help="add the rows to this JSON file")
    options = parser.parse_args()
    tree = options.tree.absolute()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if options.record:
        record(tree)
        return 0
    try:
        recording = Recording.read(tree)
    except FileNotFoundError:
        sys.exit(f"nothing is recorded in {_RECORD}: begin with --record")
    changes = choose(tree, options.seed, options.only)[options.skip : options.skip + options.count]
    if gone := {change.path for change in changes if not recording.knows(change.path)}:
        sys.exit(f"recorded before these changed, so use --record again: {', '.join(sorted(gone))}")
    with Copy(tree) as copied:
        rows = [_row(Trial(copied, recording).of(change)) for change in changes]
    if options.save:
        before = json.loads(options.save.read_text()) if options.save.exists() else []
        options.save.write_text(json.dumps([*before, *map(asdict, rows)], indent=1) + "\n")
    caught = sum(row.result == "caught" for row in rows)
    print(f"\n{caught} of {len(rows)} are caught ({caught / max(1, len(rows)):.0%}); seed {options.seed}")
    return 0


def _row(outcome: Outcome) -> Outcome:
    change = outcome.change.replace("|", "\\|")
    print(f"| {outcome.place} | {change} | {outcome.result} | {outcome.by} | {outcome.seconds} s |", flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
