"""The garbage collector of a pod that is up."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from perdure.runtime.cli.pods import USUAL_YOUNG, YOUNG, calm_collector


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.mark.parametrize("usual", USUAL_YOUNG)
def test_young_generation_is_larger_once_a_pod_is_up(usual: int) -> None:
    gc.set_threshold(usual, 10, 10)
    calm_collector()
    assert gc.get_threshold()[0] == YOUNG
    assert gc.get_freeze_count() > 0


@pytest.mark.parametrize("chosen", [0, 50_000])
def test_an_application_keeps_the_thresholds_it_has_chosen(chosen: int) -> None:
    gc.set_threshold(chosen, 7, 3)
    calm_collector()
    assert gc.get_threshold()[0] == chosen
