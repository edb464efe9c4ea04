"""Events come out whole, however the network cuts them."""

import pytest

from eagle_kit.bench.load.sse import SseParser

STREAM = (
    ': comment\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:two\ndata: lines\n\ndata: "\u2028\x0b\x85"\n\ndata: '
).encode()
EVENTS = [b'{"a": 1}', b"two\nlines", '"\u2028\x0b\x85"'.encode()]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_how_bytes_arrive(size):
    parser = SseParser()
    found = [event for i in range(0, len(STREAM), size) for event in parser.feed(STREAM[i : i + size])]
    assert found == EVENTS


def test_several_events_of_one_read_are_several_events():
    assert SseParser().feed(b"data: 1\n\ndata: 2\n\ndata: 3\n") == [b"1", b"2"]
