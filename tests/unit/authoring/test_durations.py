"""Lengths of time and instants as people write them."""

import contextlib
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.runtime.authoring.durations import LONGEST, to_seconds, to_unix
from perdure.runtime.authoring.errors import InvalidDuration

pytestmark = pytest.mark.req("SL1")


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (0, 0.0),
        (30, 30.0),
        (0.25, 0.25),
        (timedelta(days=7), 604_800.0),
        ("7 days", 604_800.0),
        ("1h 30m", 5400.0),
        ("1h30m", 5400.0),
        ("30m 1h", 5400.0),
        ("1 hour, 30 minutes", 5400.0),
        ("250ms", 0.25),
        ("500 millis", 0.5),
        ("15 us", 0.000015),
        ("15µs", 0.000015),
        ("1.5 s", 1.5),
        ("2 WEEKS", 1_209_600.0),
        ("  1 day  ", 86_400.0),
        ("1 d 2 h 3 min 4 sec 5 msec", 93_784.005),
        ("0.1s", 0.1),
    ],
)
def test_durations_read_as_people_write_them(written, seconds):
    assert to_seconds(written) == seconds


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("", "is empty"),
        ("30", "has no unit"),
        ("soon", "no length of time I can read"),
        ("1 fortnight", "no length of time I can read"),
        ("1h and 30m", "no length of time I can read"),
        ("1h,,30m", "no length of time I can read"),
        ("1 . 5 s", "no length of time I can read"),
        ("1e3 s", "no length of time I can read"),
        ("1h 2h", "names one unit twice"),
        ("1h 1 hour", "names one unit twice"),
        ("2 months", "months or years"),
        ("1y", "months or years"),
        ("-5s", "is negative"),
        (-0.001, "is negative"),
        (timedelta(seconds=-1), "is negative"),
        (float("nan"), "not a number"),
        (float("inf"), "longer than 1,000 years"),
        (10**400, "longer than 1,000 years"),
        ("400000 days", "longer than 1,000 years"),
        (True, "bool"),
        (None, "NoneType"),
        (Decimal(5), "Decimal"),
        (datetime(2030, 1, 1, tzinfo=UTC), "datetime"),
    ],
)
def test_bad_durations_are_refused_with_examples(written, words):
    with pytest.raises(InvalidDuration, match=words) as caught:
        to_seconds(written, "sleep")
    assert "sleep" in str(caught.value)
    assert isinstance(caught.value, ValueError)


@given(st.floats(min_value=0, max_value=1e9))
def test_numbers_and_timedeltas_of_one_length_agree_to_the_microsecond(seconds):
    assert to_seconds(timedelta(seconds=seconds)) == pytest.approx(to_seconds(seconds), abs=1.5e-6)
    assert to_seconds(seconds) == round(seconds * 1e6) / 1e6


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(InvalidDuration):
        assert 0 <= to_seconds(text) <= LONGEST


def test_instants_need_a_time_zone():
    noon = datetime(2030, 1, 31, 12, tzinfo=UTC)
    elsewhere = datetime(2030, 1, 31, 14, tzinfo=timezone(timedelta(hours=2)))
    assert to_unix(noon) == to_unix(elsewhere) == 1_896_091_200.0
    with pytest.raises(InvalidDuration, match=r"no time zone.*tzinfo=UTC"):
        to_unix(datetime(2030, 1, 31, 12))  # noqa: DTZ001
    wrong: tuple[Any, ...] = (1_896_091_200.0, "2030-01-31", noon.date())
    for other in wrong:
        with pytest.raises(InvalidDuration, match="not a datetime"):
            to_unix(other)
