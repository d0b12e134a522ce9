"""Alerts by HTTP POST to a chat: from a background thread, so that no server can slow or stop training."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import queue
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.sinks.base import Event
from mfu_monitor.sinks.run_identity import short_alert

__all__ = ["WEBHOOK_URL_VARIABLE", "WebhookSink", "checked_url"]

WEBHOOK_URL_VARIABLE = "MFU_MONITOR_WEBHOOK_URL"
"""Environment variable with the address, where none is given as an argument."""

_LOGGER = logging.getLogger("mfu_monitor")
_LONGEST_PAUSE_S = 30.0
"""Between two tries, whatever the server asks for: an alert an hour late helps nobody."""


class _Secret:
    """An address that no repr, traceback with locals, log or exception shows: who knows it can post to the channel."""

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "<hidden>"


class WebhookSink:
    """Posts events as ``{"text": ...}``: the form that Slack's incoming webhooks and their likes take.

    ``emit`` only puts the message into a bounded queue; a daemon thread sends it, with a timeout and some retries. What
    cannot be sent is dropped; the first failure is logged once (logger ``mfu_monitor``), and never with the address.

    Args:
        url: address to post to; None takes the environment variable ``MFU_MONITOR_WEBHOOK_URL``.
        kinds: kinds of events that are posted.
        run_name: put in front of each message, to distinguish runs in one channel.
        timeout_s: seconds that connecting, and each wait for the server, may take.
        retries: tries after the first one, at a server that is down, busy (429) or failing (5xx).
        backoff_s: pause before the first retry; doubled each time.
        queue_size: messages that may wait; more are dropped.

    Raises:
        ConfigurationError: no address, or one that is not http(s); the message does not show it.

    Example:
        >>> sink = WebhookSink(run_name="gpt-7b")  # export MFU_MONITOR_WEBHOOK_URL=https://hooks.slack.com/...
    """

    _queue: queue.Queue[bytes | None]
    _closing: threading.Event
    _thread: threading.Thread | None
    _reported: bool

    def __init__(
        self,
        url: str | None = None,
        *,
        kinds: Sequence[str] = ("alert",),
        run_name: str = "",
        timeout_s: float = 5.0,
        retries: int = 3,
        backoff_s: float = 1.0,
        queue_size: int = 64,
    ) -> None:
        self._url = _Secret(checked_url(url if url is not None else os.environ.get(WEBHOOK_URL_VARIABLE)))
        self.kinds = tuple(kinds)
        self.run_name = run_name
        self.timeout_s = _positive("timeout_s", timeout_s)
        self.backoff_s = _positive("backoff_s", backoff_s)
        self.retries = retries
        self.queue_size = int(_positive("queue_size", queue_size))
        self._reset()

    def __repr__(self) -> str:
        return f"WebhookSink(url=<hidden>, kinds={self.kinds}, run_name={self.run_name!r})"

    def emit(self, event: Event) -> None:
        """Queue one event, if its kind is wanted. Never waits."""
        if event.kind not in self.kinds:
            return
        self._start()
        try:
            self._queue.put_nowait(_body(event, self.run_name))
        except queue.Full:
            self._report(f"more than {self.queue_size} messages were waiting, and the newest was dropped")

    def close(self, timeout_s: float = 5.0) -> None:
        """Give the queue up to ``timeout_s`` seconds to empty; what is left then is dropped."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closing.set()
        with contextlib.suppress(queue.Full):  # a full queue wakes the thread by itself
            self._queue.put_nowait(None)
        thread.join(timeout_s)

    def __getstate__(self) -> dict[str, Any]:
        """Threads and queues do not travel to a spawned process; it makes its own."""
        return {name: value for name, value in self.__dict__.items() if name not in _OWN_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _reset(self) -> None:
        self._queue = queue.Queue(self.queue_size)
        self._closing = threading.Event()
        self._thread = None
        self._reported = False

    def _start(self) -> None:
        """A thread with a queue of its own: one that still drains after ``close`` is not disturbed."""
        if self._thread is None or not self._thread.is_alive():
            self._queue = queue.Queue(self.queue_size)
            self._closing = threading.Event()
            arguments = (self._queue, self._closing)
            self._thread = threading.Thread(
                target=self._send_all, args=arguments, name="mfu-monitor-webhook", daemon=True
            )
            self._thread.start()

    def _send_all(self, bodies: queue.Queue[bytes | None], closing: threading.Event) -> None:
        while not (closing.is_set() and bodies.empty()):
            body = bodies.get()
            failure = self._send(body, closing) if body is not None else None
            if failure is not None:
                self._report(failure)

    def _send(self, body: bytes, closing: threading.Event) -> str | None:
        """Try to post; what went wrong in the end, or None."""
        failure = None
        for attempt in range(self.retries + 1):
            failure, retry_after_s = _post(self._url, body, self.timeout_s)
            if failure is None or retry_after_s is None or attempt == self.retries:
                return failure
            pause_s = max(self.backoff_s * 2**attempt, retry_after_s)
            if closing.wait(min(pause_s, _LONGEST_PAUSE_S)):
                time.sleep(min(self.backoff_s, 0.2))  # training is over: the last tries follow each other quickly
        return failure

    def _report(self, failure: str) -> None:
        if not self._reported:
            self._reported = True
            _LOGGER.warning(
                "An alert could not be posted to the webhook: %s. Training is not affected; alerts go on to the other "
                "sinks, and later ones are still tried, without another warning. Check the address (url= or %s) and "
                "whether this machine may reach it.",
                failure,
                WEBHOOK_URL_VARIABLE,
            )


_OWN_PROCESS = ("_queue", "_closing", "_thread", "_reported")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET of another address: a failure here, with its status."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _post(url: _Secret, body: bytes, timeout_s: float) -> tuple[str | None, float | None]:
    """One try. Returns what failed (None: nothing) and the seconds to wait before another (None: it would not help)."""
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "mfu-monitor"}
    try:
        request = urllib.request.Request(url.reveal(), data=body, headers=headers, method="POST")
        with _OPENER.open(request, timeout=timeout_s):
            return None, None
    except urllib.error.HTTPError as error:
        passing = error.code == 429 or error.code >= 500
        return f"the server answered {error.code}", _retry_after_s(error) if passing else None
    except TimeoutError:
        return f"no answer within {timeout_s:g} s", 0.0
    except urllib.error.URLError as error:
        return f"no connection ({_reason(error.reason)})", 0.0
    except (OSError, http.client.HTTPException) as error:
        return f"the connection broke ({type(error).__name__})", 0.0
    except Exception as error:  # noqa: BLE001  # whatever it is, the thread must live, and its text may hold the address
        return f"an unexpected {type(error).__name__}", None


def _reason(reason: object) -> str:
    """A system error's own words; any other text could contain the address."""
    if isinstance(reason, TimeoutError):
        return "timed out"
    return (reason.strerror if isinstance(reason, OSError) else None) or type(reason).__name__


def _retry_after_s(error: urllib.error.HTTPError) -> float:
    value = error.headers.get("Retry-After", "") if error.headers else ""
    return float(value) if value.isascii() and value.isdigit() else 0.0


def _body(event: Event, run_name: str) -> bytes:
    if event.payload.get("message"):
        return json.dumps({"text": _escaped(short_alert(event.payload))}).encode()
    title = " ".join(part for part in (run_name, event.title) if part)
    text = f"*{title}*\n{event.text}" if title else event.text
    return json.dumps({"text": _escaped(text)}).encode()


def _escaped(text: str) -> str:
    """Slack reads ``<...>`` as a link and ``&`` as an entity: https://docs.slack.dev/messaging/formatting-message-text."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def checked_url(url: str | None) -> str:
    """The address, if it can be one.

    Raises:
        ConfigurationError: no address, or one that is not http(s) with a host; the message does not show it.
    """
    url = (url or "").strip()  # secrets that are kept in files end in a line break
    if not url:
        raise ConfigurationError(
            "The webhook has no address. Give url=, or set the environment variable "
            f"{WEBHOOK_URL_VARIABLE}, for example to https://hooks.slack.com/services/...; or leave the webhook out."
        )
    try:
        parts = urllib.parse.urlsplit(url)
        allowed = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        allowed = False
    if not allowed:
        raise ConfigurationError(
            "The webhook's address (not shown: it is a secret) is not an http or https URL with a host. "
            "Expected a form like https://hooks.slack.com/services/..."
        ) from None
    return url


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigurationError(f"{name}={value!r} was given; a number above 0 is expected, for example {name}=5.")
    return value
