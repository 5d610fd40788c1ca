"""Scripts in two parts, before and after a clean restart."""

from typing import NamedTuple

from interop.same.stage import (
    END,
    Script,
    batch,
    channel,
    differs,
    ended,
    exists,
    figures,
    leave,
    post,
    pub,
    same,
    settles,
    sized,
)

SUB = b"SUB T c\n"
HELD = SUB + b"RDY 1\n" + pub(b"x")


class Parts(NamedTuple):
    before: Script
    after: Script


SCRIPTS: dict[str, Parts] = {
    "messages in a topic": Parts(
        same(pub(b"1", b"2") + END),
        same(settles("", depth=2), figures("message_count", of=""), SUB + b"RDY 1\n", 2, END),
    ),
    "messages in a channel": Parts(
        same(SUB, 1, pub(b"1", b"2", b"3"), 3, settles(depth=3), END),
        same(
            *(settles(depth=3, message_count=0), SUB + b"RDY 5\n", 4),
            *(b"FIN {0}\nFIN {1}\nFIN {2}\n" + END, settles(depth=0, in_flight_count=0)),
        ),
    ),
    "a message that was finished": Parts(
        same(HELD + pub(b"y"), 4, b"FIN {0}\n", 1, b"FIN {1}\n" + END, settles(depth=0, in_flight_count=0)),
        same(settles(depth=0), SUB + b"RDY 1\nCLS\n" + END),
    ),
    "a message in flight": Parts(
        same(HELD, 3, settles(in_flight_count=1)),
        same(settles(depth=1, in_flight_count=0), SUB + b"RDY 1\n", 2, b"FIN {0}\n" + END),
    ),
    "a message that was requeued": Parts(
        same(HELD, 3, b"REQ {0} 0\n", 1, b"RDY 0\nREQ {0} 0\n" + END, settles(depth=1, requeue_count=2)),
        same(settles(depth=1, requeue_count=0), SUB + b"RDY 1\n", 2, b"FIN {0}\n" + END),
    ),
    "a message that was published with a delay": Parts(
        same(SUB, 1, b"DPUB T 3600000\n" + sized(b"x"), 1, settles(deferred_count=1), END),
        differs(
            "defer-kept",
            *(settles("", depth=0), figures("depth", "deferred_count")),
            here=["topic settles at {'depth': 0}", "c has {'depth': 0, 'deferred_count': 1}"],
        ),
    ),
    "a message that was requeued with a delay": Parts(
        same(HELD, 3, b"REQ {0} 3600000\n" + END, settles(deferred_count=1)),
        differs(
            "defer-kept", figures("depth", "deferred_count"), here=["c has {'depth': 0, 'deferred_count': 1}"]
        ),
    ),
    "a paused channel": Parts(
        same(SUB, 1, channel("pause"), pub(b"x") + END, settles(depth=1)),
        same(settles(depth=1, paused=True), SUB + b"RDY 1\n", 1, channel("unpause"), 1, b"FIN {0}\n" + END),
    ),
    "a paused topic": Parts(
        same(SUB, 1, post("/topic/pause?topic=T"), pub(b"x") + END, settles("", depth=1)),
        same(
            settles("", depth=1, paused=True),
            figures("depth"),
            post("/topic/unpause?topic=T"),
            settles(depth=1),
        ),
    ),
    "a channel that was emptied": Parts(
        same(SUB, 1, pub(b"1", b"2"), 2, settles(depth=2), channel("empty"), END),
        same(settles(depth=0), SUB + b"RDY 1\n" + pub(b"3"), 3, END),
    ),
    "a channel that was deleted": Parts(
        same(SUB, 1, channel("delete"), ended), same(exists(""), exists("c"), SUB + b"RDY 1\nCLS\n" + END)
    ),
    "a topic that was deleted": Parts(
        same(pub(b"x"), 1, post("/topic/delete?topic=T"), END), same(exists(""))
    ),
    "an ephemeral channel": Parts(
        same(b"SUB T c#ephemeral\n" + pub(b"x"), 2, settles("c#ephemeral", depth=1)),
        same(exists(""), exists("c#ephemeral")),
    ),
    "an ephemeral topic": Parts(
        same(pub(b"x", topic=b"T#ephemeral"), 1, leave), same(b"SUB T#ephemeral c\nRDY 1\nCLS\n" + END)
    ),
    "a channel that was made and never used": Parts(
        same(post("/topic/create?topic=T"), channel("create")),
        same(exists("c"), pub(b"x"), 1, settles(depth=1), END),
    ),
    "many messages": Parts(
        same(SUB, 1, b"MPUB T\n" + batch(*[b"%d" % n for n in range(3000)]), 1, settles(depth=3000), END),
        same(settles(depth=3000, in_flight_count=0, deferred_count=0)),
    ),
}
