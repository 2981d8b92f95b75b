"""Sends notices to people elsewhere: by a POST of JSON to a URL, and by a command.

The run does not wait for notices. Each outlet has a thread and a short queue of its own; a notice
for a full queue replaces the oldest. An outlet that begins to fail causes a single warning, and no
further warning before it has worked again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from deadpool_megatron.events import Event, Kind, date
from deadpool_megatron.failures import FailureKind, describe_kind
from deadpool_megatron.observe.narration import count, describe_wait, printable
from deadpool_megatron.preflight.health import run_in_shell

MAX_WAITING = 64
_POST_SECONDS = 10.0
_COMMAND_SECONDS = 60.0
# The variables of the command, which has the JSON on its standard input.
KIND_VARIABLE, TEXT_VARIABLE = "DEADPOOL_EVENT_KIND", "DEADPOOL_EVENT_TEXT"
# No notices for planned changes, and for a new coordinator.
_QUIET_KINDS = (FailureKind.PLANNED, FailureKind.COORDINATOR)


class Outlet:
    """A receiver of notices. ``deliver`` may block, and raises OSError with a text for people."""

    def __init__(
        self, name: str, deliver: Callable[[Mapping[str, Any]], None], warn: Callable[[str], None]
    ) -> None:
        """Start the thread. ``warn`` takes a line for people, in any thread."""
        self._name, self._deliver, self._warn = name, deliver, warn
        self._changed = threading.Condition()
        self._waiting: deque[Mapping[str, Any]] = deque(maxlen=MAX_WAITING)
        threading.Thread(target=self._work, name="notices", daemon=True).start()

    def put(self, notice: Mapping[str, Any]) -> None:
        """Queue a notice. Does not block."""
        with self._changed:
            self._waiting.append(notice)
            self._changed.notify_all()

    def flush(self, until: float) -> None:
        """Wait for the delivery of queued notices, at most until ``until`` (monotonic seconds)."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        """Deliver the queued notices, in the thread of the outlet."""
        is_failing = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                notice, reason = self._waiting[0], ""
            try:
                self._deliver(notice)
            except OSError as error:
                reason = str(error)
            except Exception as error:
                # No error may end the thread, as the end of the run would wait for its queue.
                # Report only the type: the text may have the URL, which may be a secret.
                reason = type(error).__name__
            if reason and not is_failing:
                self._warn(f"{self._name} did not receive '{notice['text']}': {reason}")
            is_failing = bool(reason)
            with self._changed:
                if self._waiting[0] is notice:  # otherwise newer notices have replaced it
                    self._waiting.popleft()
                self._changed.notify_all()


class Notices:
    """Sends notices of a run's events to a URL and to a command; an empty text means none."""

    def __init__(self, run_id: str, url: str, command: str, warn: Callable[[str], None]) -> None:
        self._run_id, self._outlets = run_id, list[Outlet]()
        if url:
            self._outlets.append(Outlet("--deadpool-notify", partial(post, url), warn))
        if command:
            self._outlets.append(
                Outlet("--deadpool-on-event", partial(_run_command, command), warn)
            )

    def note(self, event: Event) -> None:
        """Send a notice of an event, if the event has a notice. Does not block."""
        text = ""
        with contextlib.suppress(LookupError, TypeError, ValueError):  # a damaged event
            text = printable(notice_text(event)) if self._outlets else ""
        notice: dict[str, Any] = {"text": f"{self._run_id}: {text}", "run": self._run_id}
        notice |= {"at": date(event.wall_seconds), "event": event.to_dict()}
        for outlet in self._outlets if text else ():
            outlet.put(notice)

    def flush(self, until: float) -> None:
        """Let the outlets deliver queued notices, at most until ``until`` (monotonic seconds)."""
        for outlet in self._outlets:
            outlet.flush(until)


def notice_text(event: Event) -> str:
    """Return the text of a notice of an event; empty for no notice."""
    data = event.data
    match event.kind:
        case Kind.EPOCH_CLOSED if data.get("kind") not in _QUIET_KINDS:
            kind = str(data.get("kind"))
            return f"{describe_kind(kind)}: {data.get('cause')} (deadpool explain {kind})"
        case Kind.RECOVERED if data.get("kind") not in _QUIET_KINDS:
            again = f"{count(int(data['steps_recomputed']), 'iteration')} computed again"
            return f"recovered in {float(data['seconds']):.1f} s, {again} ({data.get('cause')})"
        case Kind.NODE_QUARANTINED:
            return str(data.get("cause"))
        case Kind.WAITING_FOR_SPARE:
            return f"waits for a node (deadpool agent --attach): {describe_wait(event)}"
        case Kind.RUN_ENDED:
            reason = f": {data['reason']}" if data.get("reason") else ""
            return f"ended with status {data.get('exit_status')}{reason}"
        case _:
            return ""


def post(url: str, notice: Mapping[str, Any]) -> None:
    """POST a notice to a URL, or to the URL in the file ``@FILE``. Raises OSError; its text does
    not contain the URL, which may be a secret."""
    kind, reason = {"Content-Type": "application/json"}, ""
    if url.startswith("@"):
        url = Path(url[1:]).read_text().strip()
    try:
        request = urllib.request.Request(url, json.dumps(notice).encode(), kind)
        with urllib.request.urlopen(request, timeout=_POST_SECONDS):
            return
    except urllib.error.HTTPError as error:
        reason = f"the server answered {error.code}"
    except TimeoutError:
        reason = f"no answer within {_POST_SECONDS:g} s"
    except urllib.error.URLError as error:
        reason = str(error.reason)
    except (ValueError, http.client.HTTPException) as error:
        reason = type(error).__name__
    raise OSError(reason)


def _run_command(command: str, notice: Mapping[str, Any]) -> None:
    """Run the command with a notice as its input. Raises OSError if it fails or takes too long."""
    facts = {KIND_VARIABLE: str(notice["event"]["kind"]), TEXT_VARIABLE: str(notice["text"])}
    body = json.dumps(notice).encode()
    end = run_in_shell(command, _COMMAND_SECONDS, body, {**os.environ, **facts})
    if end.status is None:
        raise OSError(f"it did not end within {_COMMAND_SECONDS:g} s")
    if end.status != 0:
        raise OSError(f"it ended with status {end.status}: {end.last_line or 'without a word'}")
