"""The words of numbers and instants, and the one line of an error."""

import json

import pytest

from perdure.runtime.cli.output import (
    instant,
    plain,
    print_json,
    print_table,
    say_error,
    short,
    span,
)
from perdure.runtime.cli.workflows import _detail
from perdure.storage.model import RunEvent, RunStatus


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, ""),
        (0.04, "0.0 s"),
        (59.9, "59.9 s"),
        (61, "1 min 1 s"),
        (7_380, "2 h 3 min"),
        (5 * 86_400 + 3_700, "5 d 1 h"),
    ],
)
def test_spans(seconds, words):
    assert span(seconds) == words


def test_instants_are_utc_to_the_millisecond():
    assert instant(0.1234) == "1970-01-01T00:00:00.123Z"
    assert instant(None) == ""


def test_short_texts_stay_on_one_line():
    assert short("a\nb   c") == "a b c"
    assert short("x" * 100, 10) == "x" * 9 + "…"
    assert short(None) == ""


def test_json_of_values(capsys):
    value = {"status": RunStatus.FAILED, "events": (RunEvent("timer-set", 1.5, "ä"),)}
    print_json(value)
    expected = {"status": "failed", "events": [{"type": "timer-set", "at": 1.5, "detail": "ä"}]}
    assert json.loads(capsys.readouterr().out) == expected == plain(value)


def test_an_error_is_one_line_without_password_or_markup(capsys):
    say_error("cannot reach\npostgresql://u:secret@h/d [bold]x[/]" + " word" * 100)
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.count("\n") == 1
    assert out.err.startswith("error: cannot reach postgresql://u:***@h/d [bold]x[/] word")


def test_a_narrow_screen_folds_the_last_column_only(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    run, words = "f388045064956ecaf5681110f83a37ec", "no answer from [the] provider"
    print_table(("run", "seq", "what"), [(run, 12, words), (None, 3, None)], title="\njournal")
    out = capsys.readouterr().out
    assert f"{run}  12   no answer from [the]\n" in out
    assert " provider\n" in out
    assert [line for line in out.splitlines() if line.endswith(" ")] == []


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (RunEvent("run-started", 1.0), None),
        (RunEvent("signal-received", 1.0, "0/signal:go#0"), "0/signal:go#0"),
        (
            RunEvent("signal-awaited", 1.0, '{"key": "0/signal:go#0", "due": 1.5, "name": "go"}'),
            "0/signal:go#0 until 1970-01-01T00:00:01.500Z",
        ),
        (
            RunEvent("timer-set", 1.0, '{"key": "0/timer#1", "due": 1.5, "name": "courier"}'),
            "0/timer#1 (courier) until 1970-01-01T00:00:01.500Z",
        ),
        (
            RunEvent("signal-awaited", 1.0, '{"key": "0/signal:go#0", "due": null, "name": "go"}'),
            "0/signal:go#0",
        ),
    ],
)
def test_the_timeline_says_until_when(event, words):
    assert _detail(event) == words
