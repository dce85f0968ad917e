"""Serve the page of a report on this machine, and render it again after the runs have changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ...common.errors import BsamError, BsamRuntimeError

HOST = "127.0.0.1"
SECONDS = 5.0  # between two looks at the files
READ = {".json", ".jsonl", ".csv", ".npz", ".safetensors"}  # the files that change a report; checkpoints do not


class WatchedPage:
    """The page of runs that may still be training.

    Args:
        paths: the files and folders that are watched.
        render: returns the page, given its version; the page reloads itself when the server has another version.
        seconds: look at the files at most this often.
    """

    def __init__(self, paths: Sequence[Path], render: Callable[[str], bytes], seconds: float) -> None:
        self._paths = paths
        self._render = render
        self._seconds = seconds
        self._lock = threading.Lock()  # a browser may ask again while the page is rendered
        self._version, self._looked = "", -float("inf")
        self._rendered, self._html = "", b""

    def version(self) -> str:
        """Return a digest that changes with the runs."""
        with self._lock:
            return self._look()

    def html(self) -> bytes:
        """Return the page, rendered again if the runs have changed."""
        with self._lock:
            version = self._look()
            if version != self._rendered:
                self._html = self._render(version)
                self._rendered, self._looked = version, time.monotonic()
            return self._html

    def _look(self) -> str:
        if time.monotonic() - self._looked >= self._seconds:
            self._version, self._looked = version_of(self._paths), time.monotonic()
        return self._version


def version_of(paths: Iterable[Path]) -> str:
    """Return a digest of the names, sizes and times of the files that a report reads."""
    digest = hashlib.sha256()
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in READ and file.is_file():
                status = file.stat()
                digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


class PageServer(ThreadingHTTPServer):
    """Serve a page at ``/`` and its version at ``/version``, to this machine only.

    No file is reachable through a URL, and a request must name this server in its Host header: otherwise, a web site
    whose name resolves to 127.0.0.1 could read the page.

    Args:
        page: the page.
        port: the port; 0 takes a free one.
    """

    def __init__(self, page: WatchedPage, port: int) -> None:
        self.page = page
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise BsamRuntimeError(
                f"port {port} cannot be used ({error.strerror}): choose another one with --port"
            ) from error
        self.url = f"http://{HOST}:{self.server_port}/"
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        """Answer a request."""
        if self.headers.get("Host") not in self.server.hosts:
            self._answer(HTTPStatus.FORBIDDEN, f"The page is served at {self.server.url} only.")
        elif self.path == "/":
            self._answer_with(self.server.page.html, "text/html")
        elif self.path == "/version":
            self._answer_with(lambda: json.dumps({"version": self.server.page.version()}), "application/json")
        else:
            self._answer(HTTPStatus.NOT_FOUND, f"There is only one page: {self.server.url}")

    do_HEAD = do_GET  # noqa: N815 (the name that http.server calls; _answer leaves out the body)

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):  # the function for any other method
            return lambda: self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "Only GET and HEAD are allowed.")
        raise AttributeError(name)

    def _answer_with(self, content: Callable[[], str | bytes], kind: str) -> None:
        try:
            answer = content()
        except (BsamError, OSError) as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"The runs cannot be read: {error}")
        else:
            self._answer(HTTPStatus.OK, answer, kind)

    def _answer(self, status: HTTPStatus, content: str | bytes, kind: str = "text/plain") -> None:
        body = content.encode(errors="replace") if isinstance(content, str) else content
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            self.send_header("Refresh", f"{SECONDS:g}")  # the browser tries again
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        with contextlib.suppress(ConnectionError):  # the browser may have left
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
