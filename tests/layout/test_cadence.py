"""Which generations are protected, and what follows for slots and for failures."""

from hypothesis import given, strategies as st

from deadpool_megatron.layout.records import Generation, is_due, next_due, successors


@given(st.integers(0, 10_000), st.integers(1, 50))
def test_next_due_iteration_is_the_first_from_there_on(iteration, every):
    found = next_due(iteration, every)
    assert found >= iteration
    assert is_due(found, every)
    assert not any(is_due(between, every) for between in range(iteration, found))


@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(0, 40), st.integers(0, 40), st.integers(0, 9)
)
def test_successors_never_count_more_than_were_written(before, every, restored, more, back):
    """Lineage 1 with one cadence up to what was restored, lineage 2 with another one from there."""
    restored_at = Generation(1, next_due(restored, before))
    line = [Generation(1, k) for k in range(restored_at.iteration + 1) if is_due(k, before)]
    end = restored_at.iteration + more
    new = [Generation(2, k) for k in range(restored_at.iteration + 1, end + 1) if is_due(k, every)]
    held = line[max(0, len(line) - 1 - back)]
    newest = (line + new)[-1]
    counted = successors(held, restored_at, newest, every)
    assert counted <= sum(held < other for other in line + new)
    if held == restored_at:
        assert counted == len(new)
