"""A headless browser, driven over a pipe by the DevTools protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.common.wait import wait_for

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
#: options that keep it off the network
_ALONE = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)
# Elements that are cut off or overflow, except those that scroll.
_OVERFLOW = """[...document.querySelectorAll("body, body *")].filter((element) => {
    const style = getComputedStyle(element), box = element.getBoundingClientRect();
    const isCut = element.scrollWidth > element.clientWidth + 1 && style.display !== "inline";
    return box.width && !element.closest("svg") && (isCut || box.right > innerWidth + 1);
}).map((e) => `${e.tagName} #${e.id} .${e.className}: ${e.textContent.slice(0, 60)}`)"""


class Browser:
    """A browser with one tab. ``profile``: a folder for its files."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        (read, self._to), (self._from, write) = os.pipe(), os.pipe()
        # It reads from descriptor 3 and writes to 4.
        redirect = f'exec 3<&{read} 4>&{write}; exec "$@"'
        self._child = subprocess.Popen(
            ["bash", "-c", redirect, "-", CHROMIUM, *_ALONE, f"--user-data-dir={profile}"],
            pass_fds=(read, write),
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._number, self._rest, self._session = 0, b"", {}
        tab = self._do("Target.createTarget", url="about:blank")["targetId"]
        attached = self._do("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.wait()
        os.close(self._to)
        os.close(self._from)

    def resize(self, width: int) -> None:
        """Set the width of the screen in pixels."""
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
        self._do("Emulation.setDeviceMetricsOverride", **size)

    def open(self, address: str) -> None:
        self._do("Page.navigate", url=address)
        loaded = f"document.readyState === 'complete' && location.href === {json.dumps(address)}"
        wait_for("the page", lambda: self.value(loaded))

    def value(self, program: str) -> Any:
        """Return the value of an expression in the page."""
        found = self._do("Runtime.evaluate", expression=program, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self) -> str:
        return str(self.value("document.body.innerText"))

    def overflow(self) -> Any:
        return self.value(_OVERFLOW)

    def point(self, x: float, y: float) -> None:
        self._do("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _do(self, method: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        request = {"id": self._number, "method": method, "params": values, **self._session}
        os.write(self._to, json.dumps(request).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                piece = os.read(self._from, 1 << 20)
                assert piece, "the browser has ended"
                self._rest += piece
            message, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(message)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]  # type: ignore[no-any-return]
