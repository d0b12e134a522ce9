"""The webhook, against a real HTTP server on this machine."""

from __future__ import annotations

import json
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.sinks.base import Event
from mfu_monitor.sinks.notify import CallableSink, LoggingSink
from mfu_monitor.sinks.webhook import WEBHOOK_URL_VARIABLE, WebhookSink

SECRET = "T000/B000/verysecrettoken"


class Server:
    """A chat server whose answers a test scripts; keeps what it was sent."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.statuses: list[int] = []
        self.answers = threading.Event()
        """While it is not set, requests are taken and not answered."""
        self.answers.set()
        self.headers: dict[str, str] = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.requests.append((self.path, dict(self.headers), json.loads(body)))
                server.answers.wait()
                self.send_response(server.statuses.pop(0) if server.statuses else 200)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def do_GET(self) -> None:
                server.requests.append((self.path, dict(self.headers), "GET"))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                """Silence."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/{SECRET}"

    def close(self) -> None:
        self.answers.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def alert(text: str = "MFU fell", step: int = 7) -> Event:
    return Event(kind="alert", step=step, title="drop", text=text, payload={"kind": "drop"})


def sink_to(url: str, **options: Any) -> WebhookSink:
    return WebhookSink(url, **{"timeout_s": 60.0, "retries": 1, "backoff_s": 0.01} | options)


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.01)


def test_an_alert_arrives_as_slack_json(server: Server) -> None:
    sink = sink_to(server.url, run_name="gpt-7b")
    sink.emit(alert("MFU 45% -> 36% & falling"))
    sink.close(timeout_s=60.0)
    [(path, headers, body)] = server.requests
    assert path == f"/{SECRET}"
    assert headers["Content-Type"].startswith("application/json")
    # Slack reads <, > and & as markup: they travel as entities.
    assert body == {"text": "*gpt-7b drop*\nMFU 45% -&gt; 36% &amp; falling"}


def test_only_the_wanted_kinds_are_posted(server: Server) -> None:
    sink = sink_to(server.url, kinds=("alert", "diagnosis"))
    for kind in ("reading", "alert", "record", "diagnosis"):
        sink.emit(Event(kind=kind, step=1, text=kind))
    sink.close(timeout_s=60.0)
    assert [body["text"] for _, _, body in server.requests] == ["alert", "diagnosis"]


def test_the_address_comes_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WEBHOOK_URL_VARIABLE, server.url)
    sink = WebhookSink()
    sink.emit(alert())
    sink.close(timeout_s=60.0)
    assert len(server.requests) == 1


def test_a_line_break_at_the_end_of_the_address_is_none_of_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WEBHOOK_URL_VARIABLE, server.url + "\n")
    sink = WebhookSink()
    sink.emit(alert())
    sink.close(timeout_s=60.0)
    assert [path for path, _, _ in server.requests] == ["/" + SECRET]


def test_no_address_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WEBHOOK_URL_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=f"url=, or set the environment variable {WEBHOOK_URL_VARIABLE}"):
        WebhookSink()


@pytest.mark.parametrize("url", [f"ftp://host/{SECRET}", f"hooks.slack.com/{SECRET}", f"http://h:x/{SECRET}", SECRET])
def test_a_wrong_address_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigurationError, match="not an http or https URL") as caught:
        WebhookSink(url)
    assert "secret" not in str(caught.value).replace("it is a secret", "")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(("name", "value"), [("timeout_s", 0), ("backoff_s", -1.0), ("queue_size", True)])
def test_a_wrong_option_is_refused_with_an_example(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}={value!r} was given; a number above 0"):
        WebhookSink("http://h/", **{name: value})


def emit_many(sink: WebhookSink, count: int = 50) -> None:
    for step in range(count):
        sink.emit(alert(step=step))


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "mfu_monitor"]


def test_a_server_that_is_down_costs_nothing_and_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    gone = Server()
    url = gone.url
    gone.close()
    sink = sink_to(url)
    emit_many(sink)
    wait_for(lambda: sink._queue.empty())
    sink.close(timeout_s=60.0)
    [message] = failures(caplog)
    assert "no connection (Connection refused)" in message
    assert "Training is not affected" in message
    assert "secret" not in message


def test_a_slow_server_costs_nothing_and_is_reported_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.answers.clear()
    sink = sink_to(server.url, timeout_s=0.1, retries=0)
    emit_many(sink, 3)  # returns though nothing was answered
    wait_for(lambda: len(server.requests) == 3)
    sink.close(timeout_s=60.0)
    [message] = failures(caplog)
    assert "no answer within 0.1 s" in message or "timed out" in message


def test_close_does_not_wait_longer_than_it_says(server: Server) -> None:
    server.answers.clear()
    sink = sink_to(server.url)
    sink.emit(alert())
    wait_for(lambda: len(server.requests) == 1)
    sink.close(timeout_s=0.2)  # returns though the server never answers
    assert not server.answers.is_set()


def test_500_is_tried_again_and_then_arrives(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.statuses = [500, 503]
    sink = sink_to(server.url, retries=3)
    sink.emit(alert())
    wait_for(lambda: len(server.requests) == 3)
    sink.close(timeout_s=60.0)
    assert failures(caplog) == []


def test_500_for_good_is_reported_once_and_later_alerts_still_go(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.statuses = [500] * 4
    sink = sink_to(server.url, retries=1)
    sink.emit(alert("first"))
    sink.emit(alert("second"))
    wait_for(lambda: len(server.requests) == 4)
    sink.emit(alert("third"))
    sink.close(timeout_s=60.0)
    assert [body["text"][-5:] for _, _, body in server.requests] == ["first", "first", "econd", "econd", "third"]
    [message] = failures(caplog)
    assert "the server answered 500" in message


@pytest.mark.parametrize("pause", ["\xb2", "-1", "soon", "9" * 400])
def test_whatever_pause_the_server_asks_for_later_alerts_still_go(server: Server, pause: str) -> None:
    server.statuses, server.headers = [503], {"Retry-After": pause}
    sink = sink_to(server.url, retries=0)
    sink.emit(alert("first"))
    sink.emit(alert("second"))
    sink.close(timeout_s=60.0)
    assert [request[2]["text"] for request in server.requests] == ["*drop*\nfirst", "*drop*\nsecond"]


def test_a_refusal_is_not_tried_again(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.statuses = [404]
    sink = sink_to(server.url, retries=5)
    sink.emit(alert())
    sink.close(timeout_s=60.0)
    assert len(server.requests) == 1
    assert "the server answered 404" in failures(caplog)[0]


def test_a_redirect_is_not_followed(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.statuses = [302]
    server.headers = {"Location": "/elsewhere"}
    sink = sink_to(server.url)
    sink.emit(alert())
    sink.close(timeout_s=60.0)
    assert [path for path, _, _ in server.requests] == [f"/{SECRET}"]
    assert "the server answered 302" in failures(caplog)[0]


def test_a_full_queue_drops_and_never_blocks(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.answers.clear()
    sink = sink_to(server.url, queue_size=2)
    emit_many(sink, 20)  # returns though nothing was answered
    server.answers.set()
    sink.close(timeout_s=60.0)
    assert 1 <= len(server.requests) <= 4
    [message] = failures(caplog)
    assert "more than 2 messages were waiting" in message


def test_nothing_shows_the_address(server: Server) -> None:
    sink = sink_to(server.url)
    assert "secret" not in repr(sink)
    assert "secret" not in repr(vars(sink))


def test_the_sink_travels_to_another_process_and_works_there(server: Server) -> None:
    sink = sink_to(server.url)
    sink.emit(alert("here"))
    copy = pickle.loads(pickle.dumps(sink))
    copy.emit(alert("there"))
    copy.close(timeout_s=60.0)
    sink.close(timeout_s=60.0)
    assert sorted(body["text"][-5:] for _, _, body in server.requests) == ["\nhere", "there"]


def test_a_closed_sink_starts_again(server: Server) -> None:
    def senders() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "mfu-monitor-webhook"}

    before, sink = senders(), sink_to(server.url)
    for _ in range(2):
        sink.emit(alert())
        sink.close(timeout_s=60.0)
    assert len(server.requests) == 2
    assert senders() <= before


def test_losses_are_logged_as_warnings_and_recoveries_as_information(caplog: pytest.LogCaptureFixture) -> None:
    sink = LoggingSink()
    with caplog.at_level(logging.INFO, logger="mfu_monitor"):
        for kind in ("drop", "recovery", "change"):
            sink.emit(Event(kind="alert", step=1, text=f"100% {kind}", payload={"kind": kind}))
        sink.emit(Event(kind="reading", step=1, text="no"))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "100% drop"),
        ("INFO", "100% recovery"),
        ("INFO", "100% change"),
    ]


def test_a_function_is_called_with_alerts_only() -> None:
    seen: list[Event] = []
    sink = CallableSink(seen.append)
    sink.emit(Event(kind="reading", step=1))
    sink.emit(alert())
    sink.close()
    assert [event.kind for event in seen] == ["alert"]


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot be called"):
        CallableSink("print")  # type: ignore[arg-type]
