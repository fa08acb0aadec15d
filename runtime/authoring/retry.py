"""When a failed step is tried again: a policy and one pure function."""

from __future__ import annotations

import math
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeAlias

from perdure.runtime.authoring.durations import LONGEST, Duration, to_seconds
from perdure.runtime.authoring.errors import DefinitionError, NonRetryableError, RecordedError

Predicate: TypeAlias = Callable[[Any], bool]
Retryable: TypeAlias = type[BaseException] | str | Predicate
Strategy: TypeAlias = Literal["exponential", "fixed", "linear"]

_STRATEGIES = ("exponential", "fixed", "linear")


@dataclass(frozen=True)
class Retry:
    """A step's retry policy. Without one, a step has a single attempt.

    max_attempts: in total, the first included; None: no limit but max_elapsed.
    strategy: "exponential" (base_delay · factor^n), "linear" (base_delay · n) or "fixed" (base_delay).
    base_delay, max_delay: durations (default 1 s and 60 s); max_delay None: no ceiling.
    jitter: full jitter, a random part of the computed delay, so that many retries do not come at once.
    max_elapsed: a budget over all attempts and waits, counted from the start of the first; a retry that would
        begin after it is not made. It survives a change of process, as the attempt count does.
    retryable: exception types, names ("ProviderDown", "billing.ProviderDown") and predicates, one or several; only
        what one of them accepts is tried again. None: every error. Never tried again, whatever it says:
        NonRetryableError, cancellation, SystemExit and KeyboardInterrupt, also inside an exception group. A group is
        accepted if all of its errors are, or it is itself.
    respect_retry_after: an error with ``retry_after`` (seconds) or ``retry_after_ms`` sets the delay itself,
        without jitter and ceiling; an error without it falls back to the strategy.
    Raises DefinitionError for values that make no sense.
    """

    max_attempts: int | None = 3
    strategy: Strategy = "exponential"
    base_delay: Duration = 1.0
    max_delay: Duration | None = 60.0
    factor: float = 2.0
    jitter: bool = True
    max_elapsed: Duration | None = None
    retryable: Retryable | Sequence[Retryable] | None = None
    respect_retry_after: bool = True
    base_seconds: float = field(init=False, repr=False, compare=False)
    max_seconds: float = field(init=False, repr=False, compare=False)
    budget_seconds: float = field(init=False, repr=False, compare=False)
    conditions: tuple[Retryable, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        attempts = self.max_attempts
        if attempts is not None and (type(attempts) is not int or attempts < 1):
            raise DefinitionError(
                f"Retry(max_attempts={attempts!r}): use 1 or more, the first attempt counts; or None"
            )
        if self.strategy not in _STRATEGIES:
            raise DefinitionError(
                f"Retry(strategy={self.strategy!r}): use one of {', '.join(_STRATEGIES)}"
            )
        if not 1 <= self.factor < math.inf:
            raise DefinitionError(f"Retry(factor={self.factor!r}): use a number from 1 on")
        if attempts is None and self.max_elapsed is None:
            raise DefinitionError("Retry(max_attempts=None) needs max_elapsed, or it never ends")
        self._keep("base_seconds", to_seconds(self.base_delay, "Retry(base_delay)"))
        self._keep("max_seconds", _or_longest(self.max_delay, "Retry(max_delay)"))
        self._keep("budget_seconds", _or_longest(self.max_elapsed, "Retry(max_elapsed)"))
        self._keep("conditions", _conditions(self.retryable))

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def error_types(self) -> tuple[type[BaseException], ...]:
        """The types among the conditions: naming one here declares it."""
        return tuple(kind for kind in self.conditions if isinstance(kind, type))


def next_delay(
    policy: Retry | None, *, attempt: int, elapsed: float, error: BaseException, fraction: float
) -> float | None:
    """Seconds to wait before the next attempt; None: give up. Pure, but for the policy's own predicates.

    attempt: attempts made so far, 1 after the first. elapsed: seconds since the first began.
    fraction: a random number in [0, 1), used for jitter. A predicate that raises counts as a no, with a note
    on ``error``.
    """
    if policy is None or not _may_retry(policy, error):
        return None
    if policy.max_attempts is not None and attempt >= policy.max_attempts:
        return None
    delay = retry_after(error) if policy.respect_retry_after else None
    if delay is None:
        delay = back_off(policy, attempt)
        if policy.jitter:
            delay *= fraction
    if elapsed + delay > policy.budget_seconds:
        return None
    return delay


def back_off(policy: Retry, attempt: int) -> float:
    """The strategy's delay after ``attempt`` attempts, before jitter."""
    delay = policy.base_seconds
    if not delay:
        return 0.0  # however large the factor has grown
    if policy.strategy == "linear":
        delay *= attempt
    elif policy.strategy == "exponential":
        try:
            delay *= policy.factor ** (attempt - 1)
        except OverflowError:
            delay = policy.max_seconds
    return min(delay, policy.max_seconds)


def retry_after(error: BaseException) -> float | None:
    """What the error asks for, in seconds: its ``retry_after`` or ``retry_after_ms``; None if neither is usable.

    Of a group that does not say, the most that one of its errors asks for."""
    seconds = _hint(error, "retry_after")
    if seconds is not None:
        return seconds
    millis = _hint(error, "retry_after_ms")
    if millis is not None:
        return millis / 1000
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return max((asked for e in inner if (asked := retry_after(e)) is not None), default=None)


def _hint(error: BaseException, attribute: str) -> float | None:
    """Providers send anything here; what is no usable number is no hint."""
    try:
        value = getattr(error, attribute, None)
        if isinstance(value, timedelta):
            value = value.total_seconds()
        if value is None or isinstance(value, bool):
            return None
        number = float(value)
    except BaseException:  # their code, which may raise anything
        return None
    return number if 0 <= number <= LONGEST else None


def _may_retry(policy: Retry, error: BaseException) -> bool:
    return not _is_final(error) and (not policy.conditions or _accepted(policy.conditions, error))


def _is_final(error: BaseException) -> bool:
    """A group is if one of its errors is: it would be final again."""
    if isinstance(error, (NonRetryableError, CancelledError)) or not isinstance(error, Exception):
        return True
    return isinstance(error, ExceptionGroup) and any(map(_is_final, error.exceptions))


def _accepted(conditions: Sequence[Retryable], error: BaseException) -> bool:
    """A group is if all of its errors are, or it is itself."""
    if isinstance(error, BaseExceptionGroup) and all(
        _accepted(conditions, inner) for inner in error.exceptions
    ):
        return True
    return any(_accepts(condition, error) for condition in conditions)


def _accepts(condition: Retryable, error: BaseException) -> bool:
    if isinstance(condition, type):
        return isinstance(error, condition)
    if isinstance(condition, str):
        return condition in _names(error)
    try:
        return bool(condition(error))
    except BaseException as fault:  # SystemExit too: it is user code
        error.add_note(f"not tried again: the retryable predicate {condition!r} raised {fault!r}")
        return False


def _names(error: BaseException) -> set[str]:
    names = {name for kind in type(error).__mro__ for name in _names_of(kind)}
    if isinstance(error, RecordedError):
        names |= {error.name, f"{error.module}.{error.name}"}
    return names


def _names_of(kind: type) -> tuple[str, str, str]:
    return kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"


def _or_longest(value: Duration | None, what: str) -> float:
    return LONGEST if value is None else to_seconds(value, what)


def _conditions(given: Retryable | Sequence[Retryable] | None) -> tuple[Retryable, ...]:
    if given is None:
        return ()
    several = given if isinstance(given, (list, tuple, set, frozenset)) else (given,)
    if not several:
        raise DefinitionError(
            "Retry(retryable=()) would never retry: leave it out, or leave out the policy"
        )
    for condition in several:
        fits = (
            issubclass(condition, BaseException)
            if isinstance(condition, type)
            else (isinstance(condition, str) and condition.strip()) or callable(condition)
        )
        if not fits:
            raise DefinitionError(
                f"Retry(retryable={condition!r}): use exception types, their names, or a function of the error"
            )
    return tuple(several)
