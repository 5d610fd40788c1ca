"""Scripts for brokers with small limits: values at and beyond each limit."""

from struct import pack

from interop.same.stage import (
    END,
    Script,
    batch,
    client,
    deflate_on,
    differs,
    ended,
    identify,
    leave,
    negotiate,
    post,
    pub,
    same,
    settles,
    sized,
    takes,
)

FLAGS = [
    "--max-msg-size=10",
    "--max-body-size=204",
    "--max-rdy-count=5",
    "--max-req-timeout=2s",
    "--max-msg-timeout=2s",
    "--msg-timeout=1500ms",
    "--max-heartbeat-interval=2s",
    "--max-output-buffer-size=128",
    "--max-output-buffer-timeout=1s",
    "--min-output-buffer-timeout=100ms",
    "--output-buffer-timeout=200ms",
    "--max-channel-consumers=2",
    "--max-deflate-level=3",
    "--snappy=false",
    "--mem-queue-size=2",
]
OURS_ONLY = ["--max-defer=2s"]

SUB = b"SUB T c\n"

SCRIPTS: dict[str, Script] = {
    # -- IDENTIFY
    "the reply": same(negotiate() + END),
    "all at their lower ends": same(
        negotiate(heartbeat_interval=1000, output_buffer_size=64, output_buffer_timeout=100, msg_timeout=1000)
        + END
    ),
    "all at their upper ends": same(
        negotiate(
            heartbeat_interval=2000, output_buffer_size=128, output_buffer_timeout=1000, msg_timeout=2000
        )
        + END
    ),
    "heartbeat too long": same(identify(heartbeat_interval=2001)),
    "buffer too large": same(identify(output_buffer_size=129)),
    "buffer timeout too short": same(identify(output_buffer_timeout=99)),
    "buffer timeout too long": same(identify(output_buffer_timeout=1001)),
    "msg timeout too long": same(identify(msg_timeout=2001)),
    "snappy where there is none": same(negotiate(snappy=True) + END),
    "deflate, for there is no snappy": same(negotiate(snappy=True, deflate=True), 1, deflate_on, 1, END),
    "deflate level, above the highest": same(negotiate(deflate=True, deflate_level=4), 1, deflate_on, 1, END),
    "deflate level, below the highest": same(negotiate(deflate=True, deflate_level=2), 1, deflate_on, 1, END),
    "IDENTIFY of 204 bytes": same(b"IDENTIFY\n" + sized(b"{}".ljust(204)) + END),
    "IDENTIFY of 205 bytes": same(b"IDENTIFY\n" + sized(b"{}".ljust(205))),
    "AUTH of 204 bytes": same(b"AUTH\n" + sized(b"x" * 204)),
    "AUTH of 205 bytes": same(b"AUTH\n" + sized(b"x" * 205)),
    # -- publishing
    "PUB of 10 bytes": same(pub(b"x" * 10) + END),
    "PUB of 11 bytes": same(pub(b"x" * 11)),
    "DPUB of 10 bytes": same(b"DPUB T 0\n" + sized(b"x" * 10) + END),
    "DPUB of 11 bytes": same(b"DPUB T 0\n" + sized(b"x" * 11)),
    "DPUB as late as can be": same(b"DPUB T 2000\n" + sized(b"x") + END),
    "DPUB too late": same(b"DPUB T 2001\n" + sized(b"x")),
    "MPUB of 40 messages": same(b"MPUB T\n" + batch(*[b"x"] * 40) + END, settles("", message_count=40)),
    "MPUB of 41 messages": same(b"MPUB T\n" + pack(">ii", 204, 41)),
    "MPUB with a message of 10 bytes": same(b"MPUB T\n" + batch(b"x" * 10) + END),
    "MPUB with a message of 11 bytes": same(b"MPUB T\n" + batch(b"x", b"x" * 11)),
    "MPUB of 204 bytes": same(b"MPUB T\n" + batch(*[b"x" * 10] * 12, b"y" * 7, b"y" * 7, b"y" * 6) + END),
    "MPUB of 205 bytes": same(b"MPUB T\n" + batch(*[b"x" * 10] * 12, b"y" * 7, b"y" * 7, b"y" * 7)),
    "HTTP /pub of 10 bytes": same(post("/pub?topic=T", b"x" * 10)),
    "HTTP /pub of 11 bytes": same(post("/pub?topic=T", b"x" * 11)),
    "HTTP /pub as late as can be": same(post("/pub?topic=T&defer=2000", b"x")),
    "HTTP /pub too late": same(post("/pub?topic=T&defer=2001", b"x")),
    "HTTP /mpub of 204 bytes": same(post("/mpub?topic=T", b"xxxxxxx\n" * 25 + b"yyyy")),
    "HTTP /mpub of 205 bytes": same(post("/mpub?topic=T", b"xxxxxxx\n" * 25 + b"yyyyy")),
    "HTTP /mpub with a message of 10 bytes": same(post("/mpub?topic=T", b"x\n" + b"x" * 10)),
    "HTTP /mpub with a message of 11 bytes": same(post("/mpub?topic=T", b"x\n" + b"x" * 11 + b"\n")),
    "HTTP /mpub of 40 messages in binary": same(post("/mpub?topic=T&binary=true", batch(*[b"x"] * 40)[4:])),
    "HTTP /mpub of 41 messages in binary": same(
        post("/mpub?topic=T&binary=true", pack(">i", 41) + bytes(190))
    ),
    # -- consuming
    "RDY highest": same(SUB + b"RDY 5\n" + END),
    "RDY too high": same(SUB + b"RDY 6\n"),
    "REQ as late as can be": same(
        SUB + b"RDY 1\n" + pub(b"x"), 3, b"RDY 0\nREQ {0} 2000\n" + END, settles(deferred_count=1)
    ),
    "REQ too late is cut": same(
        SUB + b"RDY 1\n" + pub(b"x"), 3, b"REQ {0} 3600000\n", takes(1.5, 8, 1), b"FIN {0}\n" + END
    ),
    "two consumers": same(SUB, 1, client("b"), SUB, 1, END, client(""), END),
    "three consumers": same(
        *(SUB, 1, client("b"), SUB, 1, client("d"), SUB, ended, client(""), END, client("b"), END)
    ),
    "three consumers of two channels": same(
        SUB, 1, client("b"), SUB, 1, client("d"), b"SUB T d\n", 1, END, client("b"), END, client(""), END
    ),
    "three consumers, one after the other": same(
        SUB, 1, client("b"), SUB, 1, leave, settles(client_count=1), client("d"), SUB + END, client(""), END
    ),
    # -- ephemeral
    "a slow ephemeral channel": differs(
        "ephemeral-channel",
        *(b"SUB T c#ephemeral\n" + pub(b"1", b"2", b"3", b"4", b"5"), 6),
        settles("c#ephemeral", message_count=5),
        *(b"RDY 5\n", 2, b"CLS\n" + END),
        here=[
            *["OK"] * 6,
            "CLOSE_WAIT",
            "error E_INVALID invalid command NOPE",
            *(f"{{{n}}} attempts 1: {n + 1}" for n in range(5)),
            "c#ephemeral settles at {'message_count': 5}",
        ],
    ),
    "a full ephemeral topic": differs(
        "ephemeral-topic",
        *(step for n in range(5) for step in (pub(b"%d" % n, topic=b"T#ephemeral"), 1)),
        *(b"SUB T#ephemeral c\nRDY 5\n", 3, b"CLS\n" + END),
        here=[
            *["OK"] * 6,
            "CLOSE_WAIT",
            "error E_INVALID invalid command NOPE",
            "{0} attempts 1: 3",
            "{1} attempts 1: 4",
        ],
    ),
}
