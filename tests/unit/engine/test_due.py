"""The heap of due times against a plain dictionary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perdure.runtime.engine.due import DueTimes

runs = st.sampled_from(["a", "b", "c", "d"])
times = st.floats(0, 10, allow_nan=False)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("note"), runs, times),
        st.tuples(st.just("forget"), runs, st.just(0.0)),
        st.tuples(st.just("pop"), st.just(""), times),
    ),
    max_size=60,
)


@given(operations)
def test_it_answers_like_a_dictionary(steps: list[tuple[str, str, float]]) -> None:
    due, model = DueTimes(), dict[str, float]()
    for what, run, at in steps:
        if what == "note":
            due.note(run, ord(run), at)
            model[run] = at
        elif what == "forget":
            due.forget(run)
            model.pop(run, None)
        else:
            gone = {r for r, t in model.items() if t <= at}
            assert due.pop_due(at) == {ord(r) for r in gone}
            for r in gone:
                del model[r]
        assert due.first() == (min(model.values()) if model else None)
        assert len(due) == len(model)
