"""A headless Chromium, driven through Chrome's DevTools protocol on a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

from patience import patient

EXECUTABLE = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--window-size=1200,800",
    "--remote-debugging-pipe",
)
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, " ": 32}


class Chromium:
    """One page. Close it like a file."""

    def __init__(self, folder: Path) -> None:
        """`folder`: for its profile; a fresh one."""
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, EXECUTABLE, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.urls: list[str] = []  # of every request
        self.errors: list[str] = []  # of the page's script, and of its policy
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(info["targetId"] for info in targets if info["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                return reply.get("result", {})

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + patient(30)
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("Chromium does not answer")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        event = json.loads(message)
        params = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["source"] == "security":
                self.errors.append(params["entry"]["text"])
        return event

    def js(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 10) -> Any:
        """Until an expression is true."""
        deadline = time.monotonic() + patient(seconds)
        while time.monotonic() < deadline:
            value = self.js(f"(({expression}) || '')")
            if value != "":
                return value
            time.sleep(0.03)
        raise AssertionError(f"never true: {expression}; the page says {self.js('document.body.innerText')!r}")

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key of the keyboard."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key], "modifiers": 8 if shift else 0}
        text = {"Enter": "\r", " ": " "}.get(key)
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def write(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)

    def point(self, selector: str, *, click: bool = False) -> None:
        """Move the mouse to an element, and click it."""
        box = self.js(f"JSON.stringify(document.querySelector({json.dumps(selector)}).getClientRects()[0])")
        rect = json.loads(box)
        at = {"x": rect["x"] + rect["width"] / 2, "y": rect["y"] + rect["height"] / 2}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def screenshot(self, path: Path) -> None:
        """What is seen, as a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
