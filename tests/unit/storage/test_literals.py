"""Arrays as PostgreSQL reads them."""

from __future__ import annotations

import pytest

from perdure.storage.postgres.literals import numbers, texts


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (["a"], '{"a"}'),
        (["a", "b,c"], '{"a","b,c"}'),
        (["a", None], '{"a",NULL}'),
        (['a"', "b"], '{"a\\"","b"}'),
        (['","', "b"], '{"\\",\\"","b"}'),
        (["a\\", "b"], '{"a\\\\","b"}'),
        (["", "NULL"], '{"","NULL"}'),
        ([None, None], "{}"),
        ([], "{}"),
    ],
)
def test_texts(values: list[str | None], text: str) -> None:
    assert texts(values) == text


def test_numbers() -> None:
    assert numbers([1, 2.5]) == "{1,2.5}"
    assert numbers([1, None, 3]) == "{1,NULL,3}"
    assert numbers([1, None], usual=1) == "{1,NULL}"
    assert numbers([1, 1], usual=1) == "{}"
    assert numbers([]) == "{}"
