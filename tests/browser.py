"""A real browser for tests: Debian's Chromium, driven over a pipe by its own protocol (DevTools), without a package."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 20.0
"""Seconds that anything may take."""


class BrowserError(AssertionError):
    """What the browser says went wrong."""


class Browser:
    """A running Chromium."""

    def __init__(self, process: "subprocess.Popen[bytes]", reading: int, writing: int) -> None:
        self._process, self._reading, self._writing = process, reading, writing
        self._buffer = b""
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}

    @contextmanager
    def page(self, **size: Any) -> Iterator["Page"]:
        """Open a tab of its own, without cookies or cache of others; for ``size`` see ``Page.resize``."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        self._listeners[session] = page.note
        try:
            page.begin()
            page.resize(**size)
            yield page
        finally:
            del self._listeners[session]
            self.call("Target.disposeBrowserContext", browserContextId=context)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Ask the browser to do something, and return its answer; raise ``BrowserError``."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writing, data) :]
        end = time.monotonic() + PATIENCE
        while number not in self._answers:
            if time.monotonic() > end:
                raise BrowserError(f"{method}: no answer within {PATIENCE} s")
            self.listen(0.05)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def listen(self, seconds: float) -> None:
        """Wait for what the browser tells, and take it in: answers are kept, events go to their page."""
        if not select.select([self._reading], [], [], seconds)[0]:
            return
        data = os.read(self._reading, 1 << 20)
        if not data:
            raise BrowserError(f"the browser has ended with {self._process.wait(5)}")
        *whole, self._buffer = (self._buffer + data).split(b"\0")
        for message in map(json.loads, whole):
            if "id" in message:
                self._answers[message["id"]] = message
            elif listener := self._listeners.get(message.get("sessionId", "")):
                listener(message["method"], message["params"])


class Page:
    """A tab, with what it asked for and what it complained of."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.requests: list[str] = []
        self.complaints: list[str] = []
        """Errors of scripts, of the network and of the content security policy, and warnings."""
        self._loaded = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask the browser to do something with this page."""
        return self._browser.call(method, self._session, **params)

    def begin(self) -> None:
        """Listen to what happens in the page."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def note(self, method: str, params: dict[str, Any]) -> None:
        """Take in an event."""
        if method == "Page.loadEventFired":
            self._loaded += 1
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([one.get("value") for one in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"a dialog: {params['message']}")

    def resize(self, width: int = 1280, height: int = 900, *, dark: bool = False, still: bool = False) -> None:
        """Set the window's size, the colours that the user prefers, and whether things shall not move."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if still else "no-preference",
        }
        self.call("Emulation.setEmulatedMedia", features=[{"name": n, "value": v} for n, v in features.items()])

    def before_scripts(self, script: str) -> None:
        """Run a script in each page before its own."""
        self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def open(self, url: str) -> None:
        """Go to an address, and return when all of it is there."""
        self.loading(lambda: self.call("Page.navigate", url=url))

    def loading(self, act: Callable[[], Any]) -> None:
        """Do what loads another page, and return when all of it is there."""
        before = self._loaded
        act()
        self._until(lambda: self._loaded > before, "the page did not load")

    def run(self, script: str) -> Any:
        """Return the value of an expression, awaited; raise ``BrowserError`` for what it throws."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise BrowserError(done["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        return done["result"].get("value")

    def wait(self, script: str) -> Any:
        """Return the value of an expression as soon as it is true of the page."""
        value: Any = None

        def true() -> bool:
            nonlocal value
            value = self.run(script)
            return bool(value)

        self._until(true, f"never came true: {script}")
        return value

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key, such as Tab or Enter."""
        codes = {"Tab": 9, "Enter": 13, "Space": 32}
        text = {"Enter": "\r", "Space": " "}.get(key)
        common = {"key": " " if key == "Space" else key, "code": key, "windowsVirtualKeyCode": codes[key]}
        common["modifiers"] = 8 if shift else 0
        self.call(
            "Input.dispatchKeyEvent",
            type="keyDown" if text else "rawKeyDown",
            **common,
            **({"text": text} if text else {}),
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write what is seen to a PNG file: of the whole page, or of the window."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(shot["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000), "scale": 1}}

    def _until(self, true: Callable[[], bool], complaint: str) -> None:
        end = time.monotonic() + PATIENCE
        while not true():
            if time.monotonic() > end:
                raise BrowserError(f"{complaint}; {self.complaints}")
            self._browser.listen(0.05)


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Run Chromium with a new profile; skip the test where there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium is installed: make browser-tools")
    to_browser, from_browser = os.pipe(), os.pipe()
    command = [
        path,
        "--headless=new",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
        "--no-sandbox",  # which root, as in containers, cannot have; all that is opened here is the project's own
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        "--lang=en",
    ]
    with open(profile / "log", "wb") as log:
        process = subprocess.Popen(
            _with_pipes(command, to_browser[0], from_browser[1]),
            pass_fds=(to_browser[0], from_browser[1]),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Browser(process, from_browser[0], to_browser[1])
    finally:
        os.close(to_browser[1])  # the browser ends when nobody can talk to it any more
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
        os.close(from_browser[0])


def _with_pipes(command: list[str], reading: int, writing: int) -> list[str]:
    """Return a command that finds its pipes where Chromium looks for them, as files 3 and 4."""
    # Both are moved out of the way first, as one may have the number that the other is to get.
    script = f'exec 8<&{reading} 9>&{writing}; exec 3<&8 4>&9 8<&- 9>&-; exec "$@"'
    return ["/bin/bash", "-c", script, "browser", *command]
