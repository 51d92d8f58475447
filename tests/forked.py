"""Programs of ours that start at once: a process that has imported everything forks one for each call.

A start of Python with all that the command line needs takes most of a second, and tests start hundreds. What a program
sees is what it would see as a process of its own: arguments, environment, folder, standard files, an exit code. Tests
that send signals to a process, or look at it from outside, start a real one.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, NoReturn

import tailrace

PRELOADED = ("tests.views.folds.rig", "rich.markdown", "rich.table", "typer.rich_utils")
"""Modules that programs import besides the package."""
TIMEOUT_S = 60.0

_origin: list[socket.socket] = []
_lock = threading.Lock()


def run(
    module: str, *arguments: str, given: str = "", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module`` to its end; ``given`` is its standard input."""
    with ExitStack() as stack:
        files = [stack.enter_context(open(os.memfd_create(name), "w+b")) for name in ("in", "out", "err")]  # noqa: PTH123
        files[0].write(given.encode())
        files[0].seek(0)
        for file in files[1:]:  # as lines of a pipe they follow each other, whoever of a family writes them
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
        code = begin(module, arguments, [file.fileno() for file in files], env).wait()
        out, err = (os.pread(file.fileno(), 1 << 30, 0).decode() for file in files[1:])
    return subprocess.CompletedProcess(arguments, code, out, err)


class Forked:
    """A program that runs."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        [self.pid] = struct.unpack("i", os.read(pipe, 4))

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for its end; return its exit code, negative if a signal ended it."""
        late = threading.Timer(timeout_s, os.kill, (self.pid, signal.SIGKILL))
        late.start()
        try:
            [status] = struct.unpack("i", os.read(self._pipe, 4))
        finally:
            late.cancel()
            os.close(self._pipe)
        return os.waitstatus_to_exitcode(status)


def begin(module: str, arguments: Sequence[str], files: Sequence[int], env: Mapping[str, str] | None = None) -> Forked:
    """Start ``python -m module`` with these standard files."""
    ours, theirs = os.pipe()
    what = {"module": module, "arguments": arguments, "env": dict(os.environ if env is None else env)}
    body = json.dumps({**what, "folder": str(Path.cwd())}).encode()
    with _lock:
        if not _origin:
            _origin.append(_start())
        socket.send_fds(_origin[0], [struct.pack("i", len(body))], [*files, theirs])
        _origin[0].sendall(body)
    os.close(theirs)
    return Forked(ours)


def _start() -> socket.socket:
    ours, theirs = socket.socketpair()
    # A session of its own: a Ctrl-C in the terminal is for whoever runs the tests. It ends when the socket is closed.
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    subprocess.Popen(
        (sys.executable, "-m", __name__, str(theirs.fileno())),
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": path},
    )
    theirs.close()
    atexit.register(ours.close)
    return ours


def _serve(connection: socket.socket) -> None:
    ours = (module.name for module in walk_packages(tailrace.__path__, "tailrace."))
    for name in (*PRELOADED, *ours):
        if not name.startswith(("tailrace.__main__", "tailrace.testing")):
            import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        head, files, _, _ = socket.recv_fds(connection, 4, 4)
        if not head:
            return
        [left] = struct.unpack("i", head)
        body = b""
        while len(body) < left:
            body += connection.recv(left - len(body))
        if os.fork() == 0:
            connection.close()
            _watch(json.loads(body), files)
        for file in files:
            os.close(file)


def _watch(asked: dict[str, Any], files: list[int]) -> NoReturn:
    """Be the parent of a program; tell its pid, and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(files[3])
        for number, file in enumerate(files[:3]):
            os.dup2(file, number)
            os.close(file)
        _be(asked)
    for file in files[:3]:
        os.close(file)
    os.write(files[3], struct.pack("i", pid))
    _, status = os.waitpid(pid, 0)
    os.write(files[3], struct.pack("i", status))
    os._exit(0)


def _be(asked: dict[str, Any]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(asked["env"])
    time.tzset()
    os.chdir(asked["folder"])
    sys.argv = [asked["module"], *asked["arguments"]]
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1 if os.isatty(1) else -1)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
    code = 1
    try:
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
