"""A tab of a real browser, driven through pipes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")

# A browser that is driven through pipes wants them to be the descriptors 3 and 4.
_SHIM = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for want, end in zip((3, 4), ends):
    os.dup2(end, want)
os.execv(sys.argv[3], sys.argv[3:])
"""


@contextlib.contextmanager
def browsing(url: str, folder: Path) -> Iterator[Tab]:
    """Open an address in a browser; skip the test where there is no browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"there is none of {', '.join(BROWSERS)} on this machine")
    theirs, ours = os.pipe(), os.pipe()
    given = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}")
    command = [sys.executable, "-I", "-S", "-c", _SHIM, str(theirs[0]), str(ours[1]), browser, *given]
    with (
        (folder / "browser.log").open("wb") as log,
        subprocess.Popen(
            command, pass_fds=(theirs[0], ours[1]), stdout=log, stderr=log, start_new_session=True
        ) as process,
        os.fdopen(theirs[1], "wb", 0) as commands,
        os.fdopen(ours[0], "rb") as answers,
    ):
        os.close(theirs[0])
        os.close(ours[1])
        try:
            yield Tab(commands, _messages(answers), url)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # what is called a browser may be a script that starts one


class Tab:
    """A tab of a browser."""

    def __init__(self, commands: Any, messages: Iterator[dict[str, Any]], url: str) -> None:
        self._commands, self._messages, self._numbers = commands, messages, count(1)
        self._session: str | None = None
        target = self.call("Target.createTarget", url=url)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Runtime.enable")

    def call(self, method: str, **given: object) -> dict[str, Any]:
        """Call a method of the browser, and return what it answers."""
        number = next(self._numbers)
        sent = {"id": number, "method": method, "params": given}
        sent |= {"sessionId": self._session} if self._session else {}
        self._commands.write(json.dumps(sent).encode() + b"\0")
        answer = next(message for message in self._messages if message.get("id") == number)
        assert "error" not in answer, answer
        assert "exceptionDetails" not in answer["result"], answer
        found: dict[str, Any] = answer["result"]
        return found

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def logged(self) -> Iterator[dict[str, Any]]:
        """Yield what the page logs."""
        for message in self._messages:
            if message.get("method") == "Runtime.consoleAPICalled":
                yield json.loads(message["params"]["args"][0]["value"])


def _messages(answers: Any) -> Iterator[dict[str, Any]]:
    rest = b""
    while chunk := answers.read1(1 << 16):
        *whole, rest = (rest + chunk).split(b"\0")
        yield from map(json.loads, whole)
