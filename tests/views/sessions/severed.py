"""A wire to the store that breaks at the worst moment: a call has been carried out, and its answer is lost."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable


class Severed:
    """A proxy of a server on this machine.

    Args:
        port: Of the server.
        loses: Gets the name of each of our functions that is called; returns True to lose its answer.
    """

    def __init__(self, port: int, loses: Callable[[str], bool]) -> None:
        self._port, self._loses = port, loses
        self.lost: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        doomed = ""
        with client, socket.create_connection(("127.0.0.1", self._port)) as server:
            while True:
                for readable in select.select([client, server], [], [])[0]:
                    try:
                        data = readable.recv(1 << 20)
                    except OSError:
                        return
                    if not data:
                        return
                    if readable is server:
                        if doomed:
                            self.lost.append(doomed)
                            return
                        client.sendall(data)
                        continue
                    for name in ("claim", "put_session", "append"):
                        if b"tailrace_%s_" % name.encode() in data and self._loses(name):
                            doomed = name
                    server.sendall(data)
