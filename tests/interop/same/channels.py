"""Scripts for topics, channels and consumers: copies, sharing, pausing, emptying, deleting, ephemeral names."""

from interop.same.stage import (
    END,
    GONE,
    Script,
    Stage,
    Step,
    batch,
    channel,
    client,
    differs,
    disappears,
    ended,
    exists,
    figures,
    identify,
    leave,
    post,
    pub,
    same,
    settles,
    sized,
)

SUB = b"SUB T c\n"
HELD = SUB + b"RDY 1\n" + pub(b"x")
"""Commands that put one message in flight. The script then waits for three frames."""
OTHER = client("b")
FIRST = client("")
NOTHING = {"depth": 0, "in_flight_count": 0, "deferred_count": 0}

EPHEMERAL = b"SUB T c#ephemeral\n"


def whether_all_came(total: int) -> Step:
    """Read frames up to the reply to CLS. Record whether `total` messages arrived, instead of the messages."""

    def step(stage: Stage) -> None:
        while "CLOSE_WAIT" not in stage.client.answers:
            stage.do(1)
        stage.client.messages = ["all came" if len(stage.client.messages) == total else "not all came"]

    return step


SCRIPTS: dict[str, Script] = {
    # -- copies
    "the first channel gets what waits in the topic": same(
        pub(b"1", b"2"), 2, SUB + b"RDY 2\n", 3, b"FIN {0}\nFIN {1}\n" + END, settles(**NOTHING)
    ),
    "later channels get what is published later": same(
        pub(b"1") + SUB + b"RDY 5\n",
        3,
        OTHER,
        b"SUB T d\nRDY 5\n",
        1,
        FIRST,
        pub(b"2"),
        2,
        b"FIN {0}\nFIN {1}\n" + END,
        OTHER,
        1,
        b"FIN {1}\n" + END,
        settles(message_count=2),
        settles("d", message_count=1),
    ),
    "channels finish for themselves": same(
        HELD,
        3,
        post("/channel/create?topic=T&channel=d"),
        pub(b"y"),
        1,
        b"FIN {0}\n",
        1,
        b"FIN {1}\n" + END,
        settles(**NOTHING),
        settles("d", depth=1, message_count=1),
    ),
    "consumers of a channel share": same(
        SUB + b"RDY 1\n",
        1,
        OTHER,
        SUB + b"RDY 1\nMPUB T\n" + batch(b"x", b"x"),
        3,
        FIRST,
        1,
        settles(in_flight_count=2, client_count=2),
        END,
        OTHER,
        END,
    ),
    # -- ownership of messages in flight
    "FIN by another client": same(
        HELD,
        3,
        OTHER,
        SUB + b"FIN {0}\nREQ {0} 0\nTOUCH {0}\n" + END,
        ended,
        FIRST,
        b"FIN {0}\n" + END,
        settles(**NOTHING),
    ),
    "FIN by a client of another channel": same(
        HELD,
        3,
        OTHER,
        b"SUB T d\nFIN {0}\nREQ {0} 0\nTOUCH {0}\n" + END,
        ended,
        FIRST,
        b"FIN {0}\n" + END,
        settles(**NOTHING),
    ),
    "REQ gives a message to another client": same(
        HELD,
        3,
        OTHER,
        SUB + b"RDY 1\n",
        1,
        FIRST,
        b"RDY 0\nREQ {0} 0\n",
        OTHER,
        1,
        FIRST,
        b"FIN {0}\n" + END,
        ended,
        OTHER,
        b"FIN {0}\n" + END,
    ),
    # -- closed connections
    "a consumer leaves with nothing in flight": same(
        HELD, 3, b"FIN {0}\n", leave, settles(client_count=0, **NOTHING)
    ),
    "a consumer leaves with a message in flight": differs(
        "connection-lost",
        HELD,
        3,
        leave,
        settles(client_count=0),
        figures("depth", "in_flight_count"),
        here=[
            "OK",
            "OK",
            "{0} attempts 1: x",
            "c settles at {'client_count': 0}",
            "c has {'depth': 1, 'in_flight_count': 0}",
        ],
    ),
    "an error, with a message in flight": differs(
        "error-requeues",
        HELD,
        3,
        b"NOPE\n",
        ended,
        settles(client_count=0),
        figures("depth", "in_flight_count"),
        here=[
            "OK",
            "OK",
            "error E_INVALID invalid command NOPE",
            "(end)",
            "{0} attempts 1: x",
            "c settles at {'client_count': 0}",
            "c has {'depth': 1, 'in_flight_count': 0}",
        ],
    ),
    # -- pause
    "a paused channel sends nothing": same(
        SUB + b"RDY 2\n", 1, channel("pause"), pub(b"x"), 1, settles(depth=1, paused=True), b"CLS\n" + END
    ),
    "a paused channel takes answers": same(
        HELD, 3, channel("pause"), b"TOUCH {0}\nFIN {0}\n" + END, settles(paused=True, **NOTHING)
    ),
    "a paused channel keeps what is requeued": same(
        HELD, 3, channel("pause"), b"REQ {0} 0\nNOP\nNOP\nCLS\n", 1, settles(depth=1), END
    ),
    "an unpaused channel goes on": same(
        SUB + b"RDY 2\n",
        1,
        channel("pause"),
        pub(b"x"),
        1,
        settles(depth=1),
        channel("unpause"),
        1,
        b"FIN {0}\n" + END,
    ),
    "pausing twice": same(
        SUB,
        1,
        channel("pause"),
        channel("pause"),
        channel("unpause"),
        channel("unpause"),
        b"RDY 1\n" + pub(b"x"),
        2,
        END,
    ),
    "SUB to a paused channel": same(
        post("/topic/create?topic=T"),
        channel("create"),
        channel("pause"),
        SUB + HELD[len(SUB) :],
        2,
        settles(depth=1),
        END,
    ),
    "a paused topic keeps its messages": same(
        SUB + b"RDY 2\n",
        1,
        post("/topic/pause?topic=T"),
        pub(b"x"),
        1,
        settles("", depth=1, paused=True),
        figures("depth", "message_count"),
        b"CLS\n" + END,
    ),
    "an unpaused topic goes on": same(
        SUB + b"RDY 2\n",
        1,
        post("/topic/pause?topic=T"),
        pub(b"x", b"y"),
        2,
        post("/topic/unpause?topic=T"),
        2,
        b"FIN {0}\nFIN {1}\n" + END,
    ),
    "a paused topic lets its channels go on": same(
        HELD, 3, post("/topic/pause?topic=T"), b"REQ {0} 0\n", 1, b"FIN {0}\n" + END
    ),
    "a new channel of a paused topic": same(
        pub(b"x"),
        1,
        post("/topic/pause?topic=T"),
        SUB + b"RDY 1\n",
        1,
        settles("", depth=1),
        figures("depth"),
        post("/topic/unpause?topic=T"),
        1,
        END,
    ),
    # -- empty
    "an emptied channel": same(
        SUB,
        1,
        pub(b"1", b"2"),
        2,
        settles(depth=2),
        channel("empty"),
        settles(message_count=2, **NOTHING),
        END,
    ),
    "an emptied channel forgets what is in flight": same(
        HELD, 3, channel("empty"), b"FIN {0}\nREQ {0} 0\nTOUCH {0}\n" + END, settles(**NOTHING)
    ),
    "an emptied channel forgets what is deferred": same(
        HELD,
        3,
        b"REQ {0} 3600000\nDPUB T 3600000\n" + sized(b"y"),
        1,
        settles(deferred_count=2),
        channel("empty"),
        settles(**NOTHING),
        END,
    ),
    "an emptied channel sends what comes next": same(
        HELD, 3, channel("empty"), pub(b"y"), 2, b"FIN {1}\n" + END, settles(**NOTHING)
    ),
    "an emptied topic": same(
        pub(b"1", b"2"),
        2,
        post("/topic/empty?topic=T"),
        settles("", depth=0, message_count=2),
        SUB + b"RDY 1\n" + END,
    ),
    "an emptied topic leaves its channels alone": same(
        SUB,
        1,
        pub(b"1"),
        1,
        settles(depth=1),
        post("/topic/empty?topic=T"),
        b"RDY 1\n",
        1,
        b"FIN {0}\n" + END,
    ),
    # -- delete
    "a deleted channel ends its consumers": same(
        SUB, 1, OTHER, SUB, 1, channel("delete"), ended, FIRST, ended, exists("c"), exists("")
    ),
    "a deleted channel with messages in flight": same(
        HELD, 3, channel("delete"), ended, exists("c"), exists("")
    ),
    "a deleted channel, and SUB to it": same(
        HELD, 3, channel("delete"), ended, OTHER, SUB + b"RDY 1\n" + pub(b"y"), 3, b"FIN {0}\nFIN {1}\n" + END
    ),
    "a deleted topic ends its consumers": same(
        SUB, 1, OTHER, b"SUB T d\n", 1, post("/topic/delete?topic=T"), ended, FIRST, ended, exists("")
    ),
    "a deleted topic leaves its publishers": same(
        pub(b"1"),
        1,
        post("/topic/delete?topic=T"),
        exists(""),
        pub(b"2") + END,
        settles("", depth=1, message_count=1),
    ),
    # -- ephemeral
    "an ephemeral channel goes with its last client": same(
        EPHEMERAL,
        1,
        OTHER,
        EPHEMERAL,
        1,
        leave,
        settles("c#ephemeral", client_count=1),
        FIRST,
        leave,
        disappears("c#ephemeral"),
        exists(""),
    ),
    "an ephemeral channel has messages": same(
        EPHEMERAL + b"RDY 1\n" + pub(b"x"),
        3,
        b"REQ {0} 0\n",
        1,
        b"FIN {0}\n" + END,
        disappears("c#ephemeral"),
    ),
    "an ephemeral topic waits for its first channel": same(
        pub(b"x", topic=b"T#ephemeral"),
        1,
        leave,
        client("b"),
        b"SUB T#ephemeral c\nRDY 1\n",
        2,
        b"FIN {0}\n" + END,
    ),
    "FIN of nothing in an ephemeral channel": same(EPHEMERAL + b"FIN " + GONE + b"\n" + END),
    # -- sampling
    "a sample of 99 percent": differs(
        "sample-rate",
        *(identify(sample_rate=99) + SUB + b"RDY 2500\nMPUB T\n" + batch(*[b"x"] * 1000), 3),
        *(settles(depth=0, message_count=1000), b"CLS\n", whether_all_came(1000), END),
        here=[
            *["OK"] * 3,
            "CLOSE_WAIT",
            "error E_INVALID invalid command NOPE",
            "not all came",
            "c settles at {'depth': 0, 'message_count': 1000}",
        ],
    ),
    # -- counters
    "figures of a subscribed client": same(
        SUB + b"RDY 2\nMPUB T\n" + batch(b"1", b"2", b"3"),
        4,
        b"FIN {0}\n",
        1,
        b"REQ {1} 3600000\n",
        settles(
            depth=0,
            in_flight_count=1,
            deferred_count=1,
            message_count=3,
            requeue_count=1,
            timeout_count=0,
            client_count=1,
        ),
        b"CLS\n" + END,
    ),
}
