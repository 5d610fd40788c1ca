"""All code that computes offsets in message frames and FIN lines agrees with the bytes on the wire."""

from hypothesis import given
from hypothesis import strategies as st

from protocol.support import message_frame
from trio_nsq.broker.state.batch import Batch
from trio_nsq.broker.state.in_flight_batch import InFlightBatch
from trio_nsq.log import RecordBatch
from trio_nsq.protocol import bulk, pack_messages
from trio_nsq.protocol.commands import finish_line_ids, finish_run_bytes
from trio_nsq.protocol.frames import FrameReader, MessageRun, unpack_frames


@given(
    bodies=st.lists(st.binary(max_size=40), min_size=1, max_size=20),
    first_id=st.integers(0, 2**64 - 100),
    timestamp_ns=st.integers(0, 2**63 - 1),
)
def test_frames_and_fin_lines(bodies: list[bytes], first_id: int, timestamp_ns: int) -> None:
    ids = [b"%016x" % (first_id + number) for number in range(len(bodies))]
    frames = [
        message_frame(body, message_id=message_id, timestamp_ns=timestamp_ns)
        for body, message_id in zip(bodies, ids, strict=True)
    ]
    lines = [b"FIN %s\n" % message_id for message_id in ids]
    assert {len(line) for line in lines} == {bulk.FINISH_LINE_BYTES}
    assert [len(each) - bulk.MESSAGE_FRAME_BYTES for each in frames] == list(map(len, bodies))

    batch = Batch([RecordBatch(7, first_id, timestamp_ns, 0, pack_messages(bodies))])
    taken, sent = batch.take(0, len(bodies), 10**6)
    assert (taken, bytes(sent)) == (b"".join(lines), b"".join(frames))
    for number, (body, message_id) in enumerate(zip(bodies, ids, strict=True)):
        assert (batch.id(number), batch.body(number), batch.timestamp_ns(number)) == (
            message_id,
            body,
            timestamp_ns,
        )
        assert tuple(map(bytes, batch.take(number, 1, 0))) == (lines[number], frames[number])

    delivery = InFlightBatch(taken, 7, 1, 0, 0)
    assert [delivery.id_of(7 + number) for number in range(len(ids))] == ids
    assert all(map(delivery.holds, ids))
    assert finish_line_ids(taken) == delivery.split() == ids
    assert finish_run_bytes(taken) == len(taken)

    reader = FrameReader()
    reader.receive_data(b"".join(frames))
    expected = MessageRun(ids, bodies, [timestamp_ns] * len(ids), [1] * len(ids))
    assert reader.next_event() == expected
    for split in (bulk.split_frames, unpack_frames):
        run = MessageRun([], [], [], [])
        end = split(b"".join(frames), 0, 10**6, run.ids, run.bodies, run.timestamps_ns, run.attempts)
        assert (run, end) == (expected, sum(map(len, frames)))
