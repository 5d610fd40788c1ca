"""The sizes and the ages of operations."""

import random

from trio_nsq.replication.lag import OperationAges
from trio_nsq.replication.operations import Kind
from trio_nsq.replication.stream import OperationStream


def test_the_size_of_the_operations_after_a_number() -> None:
    chance = random.Random(1)
    stream = OperationStream(20_000)
    sizes: list[int] = []
    for number in range(1, 300):
        before = stream.bytes_after(0) if stream.has_after(0) else None
        stream.append(Kind.WRITE, b"a", number, data=[bytes(chance.randrange(500))])
        _, pieces = stream.after(number - 1, 1)
        sizes.append(sum(map(len, pieces)))
        assert before is None or not stream.has_after(0) or stream.bytes_after(0) == before + sizes[-1]
        for after in range(number + 1):
            if stream.has_after(after):
                assert stream.bytes_after(after) == sum(sizes[after:])
            else:
                assert stream.bytes_after(after) == stream.kept_bytes
    assert not stream.has_after(0)
    assert stream.kept_bytes <= 20_000


def test_some_operations_at_a_time() -> None:
    stream = OperationStream(1 << 30)
    sizes = []
    for number in range(1, 20):
        stream.append(Kind.WRITE, b"a", number, data=[bytes(100)])
        sizes.append(sum(map(len, stream.after(number - 1, 1)[1])))
    assert len(set(sizes)) == 1
    for after in range(19):
        for most in (1, sizes[0], sizes[0] + 1, 3 * sizes[0], 1 << 20):
            last, pieces = stream.after(after, most)
            count = min(19 - after, -(-most // sizes[0]))
            assert (last, sum(map(len, pieces))) == (after + count, count * sizes[0])
    assert stream.after(19, 1) == (19, [])


def test_the_age_of_what_is_lacked() -> None:
    ages = OperationAges()
    assert ages.age_s(5.0, 0) == 0.0
    ages.sample(10.0, 3)
    ages.sample(11.0, 3)
    ages.sample(12.0, 7)
    assert [ages.age_s(13.0, number) for number in (0, 2, 3, 6, 7, 9)] == [3.0, 3.0, 1.0, 1.0, 0.0, 0.0]


def test_ages_are_never_too_high_after_many_samples() -> None:
    ages = OperationAges()
    for number in range(20_000):
        ages.sample(float(number), number)
    for number in (0, 10_000, 19_000):
        assert 0 < ages.age_s(20_000.0, number) <= 20_000 - number - 1
    assert ages.age_s(20_000.0, 19_998) == 1.0
