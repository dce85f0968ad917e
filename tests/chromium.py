"""Drive Debian's Chromium over the DevTools protocol, through a pipe."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-sandbox",  # containers run as root
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--use-angle=swiftshader",  # WebGL without a GPU
    "--enable-unsafe-swiftshader",
)
PATIENCE = 60  # seconds for an answer; the first drawing by software is slow


class Browser:
    """A headless browser with one page.

    Args:
        profile: an empty folder.
    """

    def __init__(self, profile: Path) -> None:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        assert program is not None, "chromium is not installed: apt-get install chromium"
        read_end, self._out = os.pipe()
        self._in, write_end = os.pipe()
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(  # the browser reads from descriptor 3 and writes to descriptor 4
            ["bash", "-c", f'exec "$@" 3<&{read_end} 4>&{write_end}', "bash", *command],
            pass_fds=(read_end, write_end),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        self._numbers, self._rest = itertools.count(1), b""
        self._answers: dict[int, dict[str, Any]] = {}
        self.messages: list[str] = []  #: errors in the console
        self.requests: list[str] = []  #: addresses
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self.call("Browser.close")
        self._process.wait(30)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": arguments}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while number not in self._answers:
            self._receive(end)
        answer = self._answers.pop(number)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _receive(self, end: float) -> None:
        ready, _, _ = select.select([self._in], [], [], max(end - time.monotonic(), 0))
        assert ready, "the browser does not answer"
        content = os.read(self._in, 1 << 20)
        assert content, "the browser has ended"
        *messages, self._rest = (self._rest + content).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._event(message["method"], message["params"])

    def _event(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] == "error":
            self.messages.append(json.dumps([part.get("value") for part in event["args"]]))
        elif method == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.messages.append(event["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])

    def open(self, url: str, width: int = 1024, theme: str = "light") -> None:
        """Load a page in a window of this width."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.messages.clear()
        self.requests.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """Return the value of JavaScript; a promise is awaited."""
        options = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = PATIENCE) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)

    def press_enter(self) -> None:
        """Press Enter."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def drag(self, element: str, x: int, y: int) -> None:
        """Drag with the mouse from the middle of an element, given as JavaScript, by some pixels."""
        box = f"(box => [box.x + box.width / 2, box.y + box.height / 2])({element}.getBoundingClientRect())"
        left, top = self.value(box)
        button = {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=left, y=top)
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=left, y=top, **button)
        for part in (0.25, 0.5, 0.75, 1.0):
            place = {"x": left + part * x, "y": top + part * y}
            self.call("Input.dispatchMouseEvent", type="mouseMoved", buttons=1, button="left", **place)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=left + x, y=top + y, **button)

    def screenshot(self, path: Path) -> None:
        """Save a picture of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
