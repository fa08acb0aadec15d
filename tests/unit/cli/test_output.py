"""The words of numbers and instants, and the one line of an error."""

import json

import pytest

from perdure.runtime.cli.output import instant, plain, print_json, say_error, short, span
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
