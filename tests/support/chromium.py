"""A small client of the DevTools protocol: opens pages in a headless Chromium and returns what happened in them."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)
# The browser reads commands from descriptor 3 and writes answers to descriptor 4.
LAUNCH = "from sys import argv; import os; [os.dup2(int(argv[n]), n + 2) for n in (1, 2)]; os.execv(argv[3], argv[3:])"
FIRST_FREE = 10
SECONDS = 300
"""How long an answer may take; a machine under load is slow, and a browser that hangs must not hang the tests."""


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Visit:
    """What one visit of a page showed: the value of the script, every request, and every complaint."""

    value: Any = None
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Browser:
    """A running browser with one tab."""

    def __init__(self, commands: int, answers: int) -> None:
        self.commands, self.answers = commands, answers
        self.received = b""
        self.number = 0
        self.events: list[dict[str, Any]] = []
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    session: str | None = None

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that arrive before it are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.received:
            ready, _, _ = select([self.answers], [], [], SECONDS)
            assert ready, f"Chromium did not answer for {SECONDS} s"
            found = os.read(self.answers, 1 << 16)
            assert found, "Chromium ended"
            self.received += found
        message, _, self.received = self.received.partition(b"\0")
        return json.loads(message)

    def wait_for_load(self, loader: str) -> None:
        while not any(is_load(event, loader) for event in self.events):
            self.events.append(self.receive())

    def visit(self, address: str, width: int, script: str) -> Visit:
        """Open a page in a window of this width and run a script in it."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.wait_for_load(self.call("Page.navigate", url=address)["loaderId"])
        visit = Visit(self.evaluate(script))
        for event in self.events:
            self.note(event.get("method"), event.get("params", {}), visit)
        return visit

    def evaluate(self, script: str) -> Any:
        """Run a script in the page and return its value, which a promise may give."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, a letter or a named one such as "Enter"."""
        text = key if len(key) == 1 else {"Enter": "\r"}.get(key, "")
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def prefer(self, scheme: str) -> None:
        """Let pages think that the user prefers the colour scheme "light" or "dark"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, width: int, height: int, scale: float = 1) -> bytes:
        """Return the page in a window of this size as a PNG."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def note(self, method: str | None, params: dict[str, Any], visit: Visit) -> None:
        if method == "Network.requestWillBeSent":
            visit.requests.append(params["request"]["url"])
        elif method == "Network.loadingFailed":
            visit.problems.append(f"a request failed: {params['errorText']}")
        elif method == "Network.responseReceived" and params["response"]["status"] >= 400:
            visit.problems.append(f"{params['response']['status']} for {params['response']['url']}")
        elif method == "Runtime.exceptionThrown":
            visit.problems.append(f"exception: {params['exceptionDetails']['text']}")
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            visit.problems.append(f"console: {params['args']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            visit.problems.append(f"log: {params['entry']['text']}")


def is_load(event: dict[str, Any], loader: str) -> bool:
    """Return whether an event says that everything of one navigation is loaded."""
    params = event.get("params", {})
    return event["method"] == "Page.lifecycleEvent" and params["name"] == "load" and params["loaderId"] == loader


@contextmanager
def open_browser(program: str, profile: Path) -> Iterator[Browser]:
    """Start the browser with an empty profile; it ends with the block."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    passed = [fcntl.fcntl(end, fcntl.F_DUPFD, FIRST_FREE) for end in (theirs_in, theirs_out)]
    command = [sys.executable, "-c", LAUNCH, *map(str, passed), program, *FLAGS, f"--user-data-dir={profile}"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, pass_fds=passed, stdin=quiet, stdout=quiet, stderr=quiet)
    for end in (theirs_in, theirs_out, *passed):
        os.close(end)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        process.terminate()
        process.wait()
        os.close(ours_out)
        os.close(ours_in)
