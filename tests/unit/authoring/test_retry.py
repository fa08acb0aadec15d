"""When a failed step is tried again."""

import asyncio
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.runtime.authoring.durations import LONGEST
from perdure.runtime.authoring.errors import (
    DefinitionError,
    InvalidDuration,
    NonRetryableError,
    RecordedError,
    SignalTimeoutError,
    StepResultError,
    StepTimeoutError,
)
from perdure.runtime.authoring.retry import Retry, next_delay, retry_after


class ProviderDown(Exception):
    pass


class RegionDown(ProviderDown):
    pass


class Throttled(Exception):
    def __init__(self, **hints: object) -> None:
        self.__dict__.update(hints)


def delay(policy: Retry | None, error: BaseException, attempt: int = 1, **more: float):
    known = {"elapsed": 0.0, "fraction": 0.5, **more}
    return next_delay(policy, attempt=attempt, error=error, **known)


policies = st.builds(
    Retry,
    max_attempts=st.integers(1, 2000),
    strategy=st.sampled_from(["exponential", "fixed", "linear"]),
    base_delay=st.floats(0, 1000),
    max_delay=st.none() | st.floats(0, 10_000),
    factor=st.floats(1, 50),
    jitter=st.booleans(),
    max_elapsed=st.none() | st.floats(0, 100_000),
)
fractions = st.floats(0, 1, exclude_max=True)


@pytest.mark.req("ST1")
@given(policies, st.integers(1, 3000), st.floats(0, 1e6), fractions)
def test_a_delay_keeps_every_limit_of_its_policy(policy, attempt, elapsed, fraction):
    found = next_delay(
        policy, attempt=attempt, elapsed=elapsed, error=ProviderDown(), fraction=fraction
    )
    if found is None:
        budget = policy.budget_seconds
        assert attempt >= policy.max_attempts or elapsed + policy.max_seconds > budget
        return
    assert attempt < policy.max_attempts
    assert 0 <= found <= policy.max_seconds
    assert elapsed + found <= policy.budget_seconds


@pytest.mark.req("ST1")
@given(policies, st.integers(1, 100), fractions)
def test_jitter_takes_a_part_of_the_plain_delay(policy, attempt, fraction):
    steady = Retry(
        max_attempts=200,
        strategy=policy.strategy,
        base_delay=policy.base_delay,
        max_delay=policy.max_delay,
        factor=policy.factor,
        jitter=False,
    )
    random = Retry(
        max_attempts=200,
        strategy=policy.strategy,
        base_delay=policy.base_delay,
        max_delay=policy.max_delay,
        factor=policy.factor,
    )
    whole = delay(steady, ProviderDown(), attempt)
    assert delay(random, ProviderDown(), attempt, fraction=fraction) == whole * fraction
    following = delay(steady, ProviderDown(), attempt + 1)
    assert following >= whole
    if policy.strategy == "fixed":
        assert following == whole


@pytest.mark.req("ST1")
def test_the_strategies_grow_as_they_say():
    def delays(**options):
        policy = Retry(max_attempts=9, base_delay=0.5, jitter=False, **options)
        return [delay(policy, ProviderDown(), attempt) for attempt in (1, 2, 3, 4)]

    assert delays() == [0.5, 1.0, 2.0, 4.0]
    assert delays(factor=3) == [0.5, 1.5, 4.5, 13.5]
    assert delays(strategy="linear") == [0.5, 1.0, 1.5, 2.0]
    assert delays(strategy="fixed") == [0.5] * 4
    assert delays(max_delay="1.2s") == [0.5, 1.0, 1.2, 1.2]


@pytest.mark.req("ST1")
def test_no_policy_is_one_attempt_and_the_default_policy_three():
    assert delay(None, ProviderDown()) is None
    assert delay(Retry(), ProviderDown(), 2) is not None
    assert delay(Retry(), ProviderDown(), 3) is None


@pytest.mark.req("ST1")
def test_the_budget_counts_all_attempts_and_the_coming_wait():
    policy = Retry(max_attempts=None, base_delay=10, strategy="fixed", jitter=False, max_elapsed=60)
    assert delay(policy, ProviderDown(), 40, elapsed=50.0) == 10
    assert delay(policy, ProviderDown(), 2, elapsed=50.1) is None


@pytest.mark.req("ST1")
@pytest.mark.parametrize(
    ("retryable", "yes", "no"),
    [
        (ProviderDown, [ProviderDown(), RegionDown()], [ValueError()]),
        ((ProviderDown, "TimeoutError"), [RegionDown(), TimeoutError()], [ValueError()]),
        ("ProviderDown", [ProviderDown(), RegionDown()], [ValueError()]),
        (f"{__name__}.ProviderDown", [ProviderDown()], [ValueError()]),
        ("ProviderDown", [RecordedError("ProviderDown", "away")], [RecordedError("Other", "")]),
        (lambda error: "busy" in str(error), [ValueError("busy")], [ValueError("wrong")]),
        (
            [OSError, lambda error: error.args == (1,)],
            [ConnectionError(), KeyError(1)],
            [KeyError(2)],
        ),
    ],
)
def test_only_retryable_errors_are_tried_again(retryable, yes, no):
    policy = Retry(retryable=retryable)
    assert all(delay(policy, error) is not None for error in yes)
    assert all(delay(policy, error) is None for error in no)


@pytest.mark.req("ST1")
def test_a_predicate_that_raises_says_so_and_counts_as_no():
    error = ProviderDown("away")
    assert delay(Retry(retryable=lambda error: vars(error)["status"] >= 500), error) is None
    assert "KeyError" in error.__notes__[0]


class Final(NonRetryableError):
    pass


@pytest.mark.req("ST2")
@pytest.mark.parametrize(
    "error",
    [
        NonRetryableError("no"),
        Final("no"),
        asyncio.CancelledError(),
        KeyboardInterrupt(),
        SystemExit(1),
        GeneratorExit(),
        SignalTimeoutError("approval", 3.0),
        StepResultError("charge", []),
    ],
)
def test_what_is_final_is_never_tried_again(error):
    always = Retry(retryable=(BaseException, lambda error: True))
    assert delay(always, error) is None


@pytest.mark.req("ST3")
def test_a_timed_out_attempt_is_transient():
    assert delay(Retry(), StepTimeoutError("charge", 3.0)) is not None
    assert delay(Retry(retryable=TimeoutError), StepTimeoutError("charge", 3.0)) is not None


@pytest.mark.req("ST1")
@pytest.mark.parametrize(
    ("hints", "seconds"),
    [
        ({"retry_after": 7}, 7.0),
        ({"retry_after": 0.5}, 0.5),
        ({"retry_after": "120"}, 120.0),
        ({"retry_after": timedelta(minutes=2)}, 120.0),
        ({"retry_after_ms": 1500}, 1.5),
        ({"retry_after": None, "retry_after_ms": 20}, 0.02),
        ({"retry_after": 3, "retry_after_ms": 9999}, 3.0),
        ({"retry_after": 0}, 0.0),
        ({"retry_after": "Wed, 21 Oct 2015 07:28:00 GMT"}, None),
        ({"retry_after": -1}, None),
        ({"retry_after": float("nan")}, None),
        ({"retry_after": True}, None),
        ({"retry_after": 1e300}, None),
        ({"retry_after": []}, None),
        ({}, None),
    ],
)
def test_what_the_provider_asks_for_is_read_where_it_is_usable(hints, seconds):
    assert retry_after(Throttled(**hints)) == seconds


@pytest.mark.req("ST1")
def test_the_providers_delay_replaces_the_back_off_of_that_attempt():
    policy = Retry(max_attempts=5, base_delay=1, max_delay=2, jitter=False)
    assert delay(policy, Throttled(retry_after=60)) == 60
    assert delay(policy, Throttled(retry_after="soon")) == 1
    deaf = Retry(max_attempts=5, base_delay=1, jitter=False, respect_retry_after=False)
    assert delay(deaf, Throttled(retry_after=60)) == 1
    short = Retry(max_attempts=5, base_delay=1, jitter=False, max_elapsed=30)
    assert delay(short, Throttled(retry_after=60)) is None


def test_a_hint_whose_property_raises_is_no_hint():
    class Broken(Exception):
        @property
        def retry_after(self) -> float:
            raise RuntimeError("no")

    assert retry_after(Broken()) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_attempts": 0}, "use 1 or more"),
        ({"max_attempts": 2.5}, "use 1 or more"),
        ({"max_attempts": True}, "use 1 or more"),
        ({"max_attempts": None}, "needs max_elapsed"),
        ({"strategy": "cubic"}, "exponential, fixed, linear"),
        ({"factor": 0.5}, "from 1 on"),
        ({"factor": float("nan")}, "from 1 on"),
        ({"retryable": ()}, "would never retry"),
        ({"retryable": int}, "exception types"),
        ({"retryable": (ProviderDown, 5)}, "exception types"),
        ({"retryable": ""}, "exception types"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(options, words):
    with pytest.raises(DefinitionError, match=words):
        Retry(**options)


def test_a_bad_duration_in_a_policy_is_named():
    with pytest.raises(InvalidDuration, match=r"Retry\(base_delay\)"):
        Retry(base_delay="soon")
    assert Retry(max_delay=None).max_seconds == LONGEST


# ---- groups, which a step's own TaskGroup raises ----------------------------------------------


def group(*errors: BaseException) -> BaseException:
    return BaseExceptionGroup("tasks", list(errors))


@pytest.mark.req("ST2")
@pytest.mark.parametrize(
    "error",
    [
        group(NonRetryableError("no")),
        group(ProviderDown(), NonRetryableError("no")),
        group(ProviderDown(), group(ProviderDown(), NonRetryableError("no"))),
        group(ProviderDown(), asyncio.CancelledError()),
        group(SystemExit(1)),
    ],
)
@pytest.mark.parametrize("retryable", [None, Exception, BaseException, lambda error: True])
def test_a_group_with_a_final_error_is_final(error, retryable):
    assert delay(Retry(retryable=retryable), error) is None


@pytest.mark.parametrize(
    "retryable", [ProviderDown, "ProviderDown", lambda error: isinstance(error, ProviderDown)]
)
def test_a_group_is_tried_again_if_each_of_its_errors_is(retryable):
    policy = Retry(retryable=retryable)
    assert delay(policy, group(ProviderDown(), group(RegionDown()))) is not None
    assert delay(policy, group(ProviderDown(), KeyError())) is None
    assert delay(Retry(retryable=[retryable, KeyError]), group(ProviderDown(), KeyError()))
    assert delay(Retry(retryable=[retryable, ExceptionGroup]), group(ValueError())) is not None


def test_a_group_waits_as_long_as_the_most_patient_of_its_errors_asks():
    error = group(Throttled(retry_after=3), group(Throttled(retry_after_ms=7000)), KeyError())
    assert retry_after(error) == 7
    assert retry_after(group(KeyError())) is None
    assert delay(Retry(jitter=False), error) == 7


@pytest.mark.parametrize("strategy", ["exponential", "linear", "fixed"])
@pytest.mark.parametrize("attempt", [1, 2, 1024, 1025, 5000])
def test_no_delay_stays_no_delay(strategy, attempt):
    policy = Retry(base_delay=0, strategy=strategy, max_attempts=None, max_elapsed=3600)
    assert delay(policy, ProviderDown(), attempt) == 0
