"""The committed record of what tests cost: dear ones say which fact they alone state."""

from tests.durations import portable, read_costly


def test_costly_tests_name_the_fact_they_alone_state(request):
    costly = set(read_costly())
    unmarked = [item.nodeid for item in request.session.items if portable(item.nodeid) in costly and not has_fact(item)]
    assert not unmarked


def has_fact(item):
    mark = item.get_closest_marker("costly")
    return mark is not None and isinstance(mark.args[0], str)
