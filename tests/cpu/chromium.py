"""A headless Chromium for tests, driven by its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

BINARY = shutil.which("chromium") or shutil.which("google-chrome")


class Page:
    """One page of a browser of its own; `folder` is the browser's home."""

    def __init__(self, folder: Path, *, width: int = 1280, height: int = 800) -> None:
        assert BINARY is not None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        flags = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        flags += ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--disable-background-networking", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, BINARY, *flags],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder)},
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._data = b""
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for part in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{part}.enable")
        self.resize(width, height)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """A window of this size; narrow ones are a phone's."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read(60.0)
            if found.get("id") == self._number:
                assert "error" not in found, (method, found)
                return found["result"]
            self.events.append(found)

    def evaluate(self, code: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, code: str, *, timeout_s: float = 60.0) -> Any:
        """Wait until an expression is true, and give it."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            value = self.evaluate(code)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"not within {timeout_s} s: {code}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if (key, kind) == ("Enter", "keyDown") else {}
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **text,
            )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def of(self, method: str) -> list[dict[str, Any]]:
        """What the events of one kind carried."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def problems(self) -> list[str]:
        """Exceptions, and what the console says that is an error."""
        found = [str(event["exceptionDetails"]) for event in self.of("Runtime.exceptionThrown")]
        entries = [event["entry"] for event in self.of("Log.entryAdded")]
        return found + [str(entry) for entry in entries if entry["level"] == "error"]

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        while b"\0" not in self._data:
            ready, _, _ = select.select([self._in], [], [], timeout_s)
            assert ready, "the browser does not answer"
            part = os.read(self._in, 65536)
            assert part, "the browser has ended"
            self._data += part
        message, _, self._data = self._data.partition(b"\0")
        return json.loads(message)
