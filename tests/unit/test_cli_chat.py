"""`strata chat` against scripted servers: what it sends, prints, and survives."""

import io
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from shared.cli.chat import Chat
from shared.cli.main import main


class Script:
    """A server that plays one stream after another, and notes what it was asked."""

    def __init__(self, *streams: bytes, models: bytes = b'{"data": [{"id": "tiny"}]}') -> None:
        self.streams = list(streams)
        self.models = models
        self.asked: list[dict[str, Any]] = []
        self.url = ""


@contextmanager
def scripted(script: Script) -> Iterator[Script]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(script.models)

        def do_POST(self) -> None:
            script.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            stream = script.streams.pop(0)
            if stream.startswith(b"{"):
                self.send_response(400)
                self.send_header("Content-Length", str(len(stream)))
                self.end_headers()
                self.wfile.write(stream)
            else:
                self._say(stream)

        def _say(self, body: bytes) -> None:
            self.send_response(200)
            # More than comes where the stream is to be cut.
            length = len(body) + (100 if body.endswith(b"CUT") else 0)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body.removesuffix(b"CUT"))

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield script
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def stream(*texts: str, end: str = "data: [DONE]\n\n") -> bytes:
    deltas = [{"role": "assistant", "content": ""}, *({"content": text} for text in texts), {}]
    events = [json.dumps({"choices": [{"delta": delta}]}, ensure_ascii=False) for delta in deltas]
    return ("".join(f": a comment\n\ndata: {event}\n\n" for event in events) + end).encode()


def test_an_answer_that_repeats_itself_is_said_to_and_kept_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    choice = {"delta": {}, "finish_reason": "length", "stop_reason": "repetition_detected"}
    end = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    with scripted(Script(stream("----", end=end), stream("fine"))) as script:
        talk = chat(script)
        assert talk.say("one")
        assert talk.say("two")
        assert script.asked[1]["messages"][-2] == {"role": "assistant", "content": "----"}
    assert capsys.readouterr().out == "---- [ended: it repeats itself]\nfine\n"


def chat(script: Script) -> Chat:
    return Chat(script.url, [{"role": "system", "content": "s"}], {"temperature": 0.5})


def test_a_conversation_grows_by_question_and_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(Script(stream("Hé", "llo"), stream("again"))) as script:
        talk = chat(script)
        talk.say("hi")
        talk.say("and?")
    assert capsys.readouterr().out == "Héllo\nagain\n"
    assert script.asked[0] == {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}],
        "stream": True,
        "temperature": 0.5,
    }
    assert [message["content"] for message in script.asked[1]["messages"]] == ["s", "hi", "Héllo", "and?"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_wait_says_how_long_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until text comes, which nothing may overwrite then; the next answer has its own wait."""
    opening = stream(end="").replace(b"a comment", b"1 request ahead")
    with scripted(Script(opening + stream("Hé", "llo"), opening + stream("x", end="CUT"))) as script:
        talk = chat(script)
        monkeypatch.setattr("sys.stderr", Terminal())
        talk.say("hi")
        shown = ["1 request ahead\x1b[K", "a comment\x1b[K", "\x1b[K"]
        assert sys.stderr.getvalue().split("\r")[1:] == shown
        monkeypatch.setattr("sys.stderr", Terminal())
        talk.say("hi")
        assert sys.stderr.getvalue().split("\r")[1:-1] == shown[:-1]
    assert capsys.readouterr().out == "Héllo\nx\n"


def test_elsewhere_comments_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(Script(stream("x"))) as script:
        chat(script).say("hi")
    assert capsys.readouterr().err == ""


def test_undo_and_new(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(Script(*[stream("x")] * 4)) as script:
        talk = chat(script)
        talk.undo()
        talk.say("a")
        talk.say("b")
        talk.undo()
        talk.say("c")
        talk.begin_anew()
        talk.say("d")
    contents = [[message["content"] for message in asked["messages"]] for asked in script.asked]
    assert contents == [["s", "a"], ["s", "a", "x", "b"], ["s", "a", "x", "c"], ["s", "d"]]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b'{"error": {"message": "temperature: too hot"}}', "temperature: too hot"),
        (b'{"error": "flat"}', "the server answers 400"),
        (stream("He", end='data: {"error": {"message": "a worker is gone"}}\n\n'), "a worker is gone"),
        (stream("He", end="CUT"), "ended in the middle"),
        (stream("He", end=""), "ended in the middle"),
    ],
)
def test_an_answer_that_fails_is_not_part_of_the_conversation(
    capsys: pytest.CaptureFixture[str], answer: bytes, words: str
) -> None:
    with scripted(Script(answer, stream("fine"))) as script:
        talk = chat(script)
        talk.say("a")
        printed = capsys.readouterr()
        talk.say("b")
    assert printed.err.startswith("strata: ")
    assert words in printed.err
    assert printed.out in ("", "He\n")
    assert [message["content"] for message in script.asked[1]["messages"]] == ["s", "b"]


@pytest.mark.parametrize("models", [b"<html>", b"{}", b'{"data": []}', b"[]", b'{"data": [5]}'])
def test_another_kind_of_server_is_told_from_ours(capsys: pytest.CaptureFixture[str], models: bytes) -> None:
    with scripted(Script(models=models)) as script, pytest.raises(SystemExit) as ended:
        main(["chat", "--url", script.url])
    assert ended.value.code == 1
    assert "not as a server of models" in capsys.readouterr().err
