"""Scripts for the times of heartbeats, timeouts and deferred messages. The channel c of each script already exists."""

from collections.abc import Mapping

from interop.same.stage import (
    END,
    PATIENCE_S,
    Script,
    Step,
    channel,
    client,
    comes,
    deflate_on,
    differs,
    ended,
    heartbeats,
    identify,
    negotiate,
    pub,
    reply,
    same,
    settles,
    sized,
    takes,
    wait,
)

FLAGS = ["--max-msg-timeout=2500ms", "--queue-scan-selection-count=100"]
"""The second flag makes nsqd process all its channels in every scan."""

SUB = b"SUB T c\n"
BEATING = identify(heartbeat_interval=1000)
HELD = identify(msg_timeout=1000) + SUB + b"RDY 1\n" + pub(b"x")
"""Commands that put one message in flight for a second. The script then waits for four frames."""
NOTHING: Mapping[str, object] = {"depth": 0, "in_flight_count": 0, "deferred_count": 0}


def answering(answer: bytes) -> tuple[Step, ...]:
    """Return steps that answer each of four heartbeats."""
    return tuple(step for count in range(1, 5) for step in (heartbeats(count), answer))


SCRIPTS: dict[str, Script] = {
    # -- heartbeats
    "heartbeats of a client that does nothing": same(
        BEATING, comes(1.9, 3.8, heartbeats(1), b"NOP\n", heartbeats(2)), END
    ),
    "heartbeats of a publisher": same(
        BEATING + pub(b"x"), comes(1.9, 3.8, heartbeats(1), pub(b"y"), heartbeats(2)), END
    ),
    "heartbeats of a consumer": same(
        BEATING + SUB + b"RDY 5\n", comes(1.9, 3.8, heartbeats(1), b"NOP\n", heartbeats(2)), END
    ),
    "heartbeats after CLS": same(
        BEATING + SUB + b"CLS\n", comes(1.9, 3.8, heartbeats(1), b"NOP\n", heartbeats(2)), END
    ),
    "a silent client is closed": same(BEATING, comes(1.9, 3.8, ended)),
    "a silent publisher is closed": same(BEATING + pub(b"x"), comes(1.9, 3.8, ended)),
    "a silent consumer is closed": same(
        BEATING + SUB + b"RDY 1\n", comes(1.9, 3.8, ended), settles(client_count=0)
    ),
    "a silent consumer that gets messages is closed": same(
        BEATING + SUB + b"RDY 5\n", 2, client("b"), pub(b"1"), 1, END, client(""), comes(1.9, 3.8, ended)
    ),
    "NOP keeps a connection": same(BEATING, *answering(b"NOP\n"), END),
    "PUB keeps a connection": same(BEATING, *answering(pub(b"x")), END),
    "FIN keeps a connection": same(BEATING + SUB, *answering(b"FIN 0123456789abcdef\n"), END),
    "an empty parameter keeps a connection": same(BEATING + SUB, *answering(b"RDY \n"), END),
    "half a line": differs(
        "slow-command",
        *(BEATING, 1, heartbeats(1), b"NO", takes(0.5, 1.6, ended)),
        here=["OK", "(1 heartbeats)", "(end)", "(after 2 s)"],
    ),
    "half a body": differs(
        "slow-command",
        *(BEATING + b"PUB T\n" + sized(b"half")[:-3], 1, heartbeats(1), b"a", takes(0.5, 1.6, ended)),
        here=["OK", "(1 heartbeats)", "(end)", "(after 2 s)"],
    ),
    "no heartbeats": same(identify(heartbeat_interval=-1), 1, wait(2.5), END),
    # -- buffers: the next heartbeat flushes them
    "a message in the buffer, and no timer": same(
        negotiate(heartbeat_interval=1000, output_buffer_timeout=-1) + SUB + b"RDY 5\n",
        *(2, client("b"), pub(b"x"), 1, END, client(""), comes(0.9, 5, 1), b"FIN {0}\n" + END),
    ),
    "messages that fill the buffer, and no timer": same(
        negotiate(heartbeat_interval=30_000, output_buffer_timeout=-1, output_buffer_size=64)
        + SUB
        + b"RDY 9\n",
        *(
            2,
            client("b"),
            pub(b"x" * 100, b"y" * 100),
            2,
            END,
            client(""),
            takes(0, PATIENCE_S, 1),
            b"FIN {0}\n" + END,
        ),
    ),
    "as many messages as were asked for, and no timer": same(
        negotiate(heartbeat_interval=30_000, output_buffer_timeout=-1) + SUB + b"RDY 2\n",
        *(
            2,
            client("b"),
            pub(b"x", b"y"),
            2,
            END,
            client(""),
            takes(0, PATIENCE_S, 2),
            b"FIN {0}\nFIN {1}\n" + END,
        ),
    ),
    "a message, unbuffered": same(
        negotiate(heartbeat_interval=5000, output_buffer_size=-1) + SUB + b"RDY 5\n",
        *(2, client("b"), pub(b"x"), 1, END, client(""), takes(0, 4, 1), b"FIN {0}\n" + END),
    ),
    "a message, unbuffered, in deflate": differs(
        "deflate-unbuffered",
        *(negotiate(heartbeat_interval=1000, output_buffer_size=-1, deflate=True), 1, deflate_on, 1),
        *(SUB + b"RDY 5\n", 1, client("b"), pub(b"x"), 1, END, client(""), takes(0.5, 1.6, 1), END),
        here=[
            reply(deflate=True, max_msg_timeout=2500, output_buffer_size=1, output_buffer_timeout=0),
            *["OK"] * 2,
            "(after 0 s)",
            "error E_INVALID invalid command NOPE",
            "{0} attempts 1: x",
            "b: OK",
            "b: error E_INVALID invalid command NOPE",
        ],
    ),
    "messages in the buffer of a client that wants no more": differs(
        "buffered",
        negotiate(output_buffer_timeout=30_000) + SUB + b"RDY 5\n",
        *(2, client("b"), pub(b"x"), 1, pub(b"y"), 1, END, wait(0.2), client(""), b"RDY 0\n", 1, END),
        here=[
            reply(max_msg_timeout=2500, output_buffer_timeout=30_000),
            "OK",
            "error E_INVALID invalid command NOPE",
            "{0} attempts 1: x",
            "b: OK",
            "b: OK",
            "b: error E_INVALID invalid command NOPE",
        ],
    ),
    # -- timeouts
    "a message that times out comes again": same(
        HELD,
        4,
        comes(0.9, 3.8, 1),
        b"FIN {0}\nFIN {0}\n" + END,
        settles(timeout_count=1, requeue_count=0, **NOTHING),
    ),
    "and again": same(HELD, 4, comes(1.9, 4.8, 2), b"FIN {0}\n" + END, settles(timeout_count=2)),
    "FIN after the timeout": same(
        HELD,
        4,
        b"RDY 0\n",
        settles(depth=1, in_flight_count=0, timeout_count=1),
        b"TOUCH {0}\nREQ {0} 0\nFIN {0}\n" + END,
    ),
    "a message that times out goes to another client": same(
        HELD,
        4,
        b"RDY 0\n",
        client("b"),
        SUB + b"RDY 1\n",
        1,
        comes(0.9, 3.8, 1, since=""),
        client(""),
        b"FIN {0}\n" + END,
        ended,
        client("b"),
        b"FIN {0}\n" + END,
        settles(timeout_count=1, **NOTHING),
    ),
    "a timeout, and another message that waits": differs(
        "redelivery-first",
        *(HELD, 4, pub(b"y"), 1, comes(0.9, 3.8, 1), b"CLS\n" + END),
        here=[
            *["OK"] * 4,
            "(in time)",
            "CLOSE_WAIT",
            "error E_INVALID invalid command NOPE",
            "{0} attempts 1: x",
            "{0} attempts 2: x",
        ],
    ),
    "TOUCH gives more time": same(
        HELD, 4, takes(1.4, 2.6, wait(0.6), b"TOUCH {0}\n", 1), b"FIN {0}\n" + END, settles(timeout_count=1)
    ),
    "TOUCH gives more time, up to the maximum": same(
        identify(msg_timeout=2000) + SUB + b"RDY 1\n" + pub(b"x"),
        4,
        takes(2.2, 3.2, wait(1), b"TOUCH {0}\n", wait(0.8), b"TOUCH {0}\n", 1),
        b"FIN {0}\n" + END,
    ),
    "a message times out in a paused channel": same(
        HELD,
        4,
        channel("pause"),
        settles(depth=1, timeout_count=1),
        channel("unpause"),
        1,
        b"FIN {0}\n" + END,
    ),
    "a message times out after CLS": same(
        HELD, 4, b"CLS\n", 1, settles(depth=1, timeout_count=1), b"FIN {0}\n" + END
    ),
    # -- deferring
    "REQ with a delay": same(
        SUB + b"RDY 1\n" + pub(b"x"),
        3,
        takes(0.6, 3, b"REQ {0} 700\n", settles(deferred_count=1), 1),
        b"FIN {0}\n" + END,
        settles(timeout_count=0, requeue_count=1, **NOTHING),
    ),
    "DPUB": same(
        SUB + b"RDY 5\nDPUB T 700\n" + sized(b"later") + pub(b"now"),
        4,
        comes(0.6, 3, 1),
        b"FIN {0}\nFIN {1}\n" + END,
    ),
    "DPUBs by their times": same(
        SUB + b"RDY 5\n" + b"".join(b"DPUB T %d\n" % (300 * n) + sized(b"%d" % n) for n in (3, 1, 4, 2)),
        9,
        b"FIN {0}\nFIN {1}\nFIN {2}\nFIN {3}\n" + END,
        settles(**NOTHING),
    ),
    "DPUB in a paused channel": same(
        SUB + b"RDY 5\n",
        1,
        channel("pause"),
        b"DPUB T 300\n" + sized(b"x"),
        1,
        settles(depth=1, deferred_count=0),
        channel("unpause"),
        1,
        END,
    ),
    "DPUB that nobody waits for": same(
        b"DPUB T 2000\n" + sized(b"x"),
        1,
        settles(deferred_count=1, depth=0),
        settles(deferred_count=0, depth=1),
        END,
    ),
    "DPUB before there is a channel": differs(
        "defer-from-publish",
        b"DPUB T.late 600\n" + sized(b"first") + b"DPUB T.late 0\n" + sized(b"now"),
        2,
        wait(0.8),
        b"SUB T.late c\nRDY 1\n",
        2,
        b"CLS\n" + END,
        here=[
            "OK",
            "OK",
            "OK",
            "CLOSE_WAIT",
            "error E_INVALID invalid command NOPE",
            "{0} attempts 1: first",
        ],
    ),
}
