"""The server of ``bsam report --watch``: what it answers, to whom, and when it reads the runs again."""

import json
import os
import socket
import struct
import threading
from http.client import HTTPConnection
from pathlib import Path

import pytest

from bsam.common.errors import BsamRuntimeError
from bsam.lab.cli import page_server
from bsam.lab.cli.page_server import PageServer, WatchedPage, version_of


class Rendered:
    """Render the metrics of a run as they are; note every version."""

    def __init__(self, metrics):
        self.metrics, self.versions = metrics, []

    def __call__(self, version):
        self.versions.append(version)
        return f"<p>{version}: {self.metrics.read_text()} é</p>".encode()


@pytest.fixture
def metrics(tmp_path):
    file = tmp_path / "runs/one/metrics.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text('{"epoch": 1}\n')
    return file


@pytest.fixture
def render(metrics):
    return Rendered(metrics)


@pytest.fixture
def clock(monkeypatch):
    """The seconds that the server sees: they pass when a test says so."""
    now = [0.0]
    monkeypatch.setattr(page_server.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def server(tmp_path, render, clock):
    with PageServer(WatchedPage([tmp_path / "runs"], render, seconds=5), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path="/", method="GET", host=None, **headers):
    """Return the answer to a request, and its body."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    host = f"127.0.0.1:{server.server_port}" if host is None else host
    for name, value in {"Host": host, **headers}.items():
        if value:
            connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def test_the_page_and_its_version(server, render):
    answer, body = ask(server)
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert int(answer.headers["Content-Length"]) == len(body.encode())
    assert answer.headers["Cache-Control"] == "no-store"
    version, answer = json.loads(ask(server, "/version")[1])["version"], ask(server, "/version")[0]
    assert answer.headers["Content-Type"].startswith("application/json")
    assert body == f'<p>{version}: {{"epoch": 1}}\n é</p>'
    assert server.url == f"http://127.0.0.1:{server.server_port}/"
    assert ask(server, host=f"localhost:{server.server_port}")[0].status == 200


def test_head_has_the_headers_of_get(server):
    (got, page), (head, body) = ask(server), ask(server, method="HEAD")
    assert (head.status, body) == (200, "")
    assert head.headers["Content-Length"] == got.headers["Content-Length"] == str(len(page.encode()))


def test_only_this_machine_is_served(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "localhost", "evil.example:{port}", "", "[::1]:{port}"])
@pytest.mark.parametrize("path", ["/", "/version"])
def test_another_host_gets_nothing(server, render, host, path):
    answer, body = ask(server, path, host=host.format(port=server.server_port))
    assert answer.status == 403
    assert body == f"The page is served at {server.url} only."
    assert render.versions == []


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_other_methods_are_not_allowed(server, render, method):
    answer, _ = ask(server, method=method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"
    assert render.versions == []


@pytest.mark.parametrize(
    "path",
    ["/../etc/passwd", "//etc/passwd", "/%2e%2e/etc/passwd", "/runs/one/metrics.jsonl", "/one/metrics.jsonl", "/?a",
     "/version/", "/index.html", "http://127.0.0.1/", "..", "*"],
)  # fmt: skip
def test_no_url_is_a_path(server, path):
    answer, body = ask(server, path)
    assert answer.status == 404
    assert body == f"There is only one page: {server.url}"


def test_a_changed_run_appears_after_some_seconds(server, metrics, render, clock):
    version = json.loads(ask(server, "/version")[1])["version"]
    assert '{"epoch": 1}\n é' in ask(server)[1]
    with metrics.open("a") as file:
        file.write('{"epoch": 2}\n')
    clock[0] += 4.9
    assert 'epoch": 2' not in ask(server)[1]
    assert json.loads(ask(server, "/version")[1])["version"] == version
    clock[0] += 0.2
    changed = json.loads(ask(server, "/version")[1])["version"]
    assert changed != version
    assert f'<p>{changed}: {{"epoch": 1}}\n{{"epoch": 2}}' in ask(server)[1]
    assert render.versions == [version, changed]


def test_an_unchanged_run_is_rendered_once(server, render, clock):
    pages = set()
    for _ in range(3):
        pages.add(ask(server)[1])
        clock[0] += 10
    assert len(render.versions) == len(pages) == 1


def test_requests_at_the_same_time_render_once(server, render):
    threads = [threading.Thread(target=ask, args=[server]) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(render.versions) == 1


def test_runs_that_cannot_be_read_are_an_error_and_the_server_goes_on(server, metrics, clock):
    content = metrics.read_text()
    metrics.unlink()
    answer, body = ask(server)
    assert answer.status == 500
    assert body.startswith("The runs cannot be read: ")
    assert body.count("\n") == 0
    assert answer.headers["Refresh"] == "5", "the browser tries again"
    metrics.write_text(content)
    clock[0] += 10
    answer, _ = ask(server)
    assert (answer.status, answer.headers["Refresh"]) == (200, None)


@pytest.mark.parametrize("ending", [socket.SHUT_RDWR, None], ids=["shut", "reset"])
def test_a_browser_that_leaves_is_no_error(server, render, ending, capfd):
    """Even if it leaves while the page is rendered."""
    asked, left = threading.Event(), threading.Event()
    once = server.page._render

    def wait(version):
        asked.set()
        left.wait(10)
        return once(version) * 1_000_000

    server.page._render = wait
    server.daemon_threads = False  # so that closing waits for them
    with socket.create_connection(("127.0.0.1", server.server_port)) as browser:
        browser.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
        asked.wait(10)
        if ending is None:
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            browser.shutdown(ending)
    left.set()
    assert ask(server, "/version")[0].status == 200
    server.shutdown()
    server.server_close()
    assert capfd.readouterr().err == ""


def test_the_version_follows_from_the_files_that_a_report_reads(tmp_path, metrics):
    folder = tmp_path / "runs"
    versions = [version_of([folder])]
    for name in ("checkpoint.pt", "metrics.jsonl.draft", "log.txt", "report.html"):
        (metrics.parent / name).write_text("new")
        assert version_of([folder]) == versions[0]
    for name in ("config.json", "two.csv", "model.safetensors", "deep/predictions.npz"):
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("new")
        versions.append(version_of([folder]))
    os.utime(metrics, ns=(1, 1))
    versions += [version_of([folder]), version_of([folder / "two.csv"]), version_of([folder, folder / "two.csv"])]
    assert len(set(versions)) == len(versions)
    assert version_of([Path(tmp_path / "runs")]) == versions[5]


def test_a_port_that_is_taken(render, metrics):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BsamRuntimeError, match=rf"port {port} cannot be used \(.*\): choose another one"):
            PageServer(WatchedPage([metrics], render, 5), port)
