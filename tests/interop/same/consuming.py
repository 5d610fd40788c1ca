"""Scripts for SUB, RDY, FIN, REQ, TOUCH and CLS of one client."""

from interop.same.publishing import NAMES
from interop.same.stage import END, GONE, Script, batch, differs, ended, figures, pub, same, settles, sized

SUB = b"SUB T c\n"
HELD = SUB + b"RDY 1\n" + pub(b"x")
"""Commands that put one message in flight. The script then waits for three frames."""

SCRIPTS: dict[str, Script] = {
    f"SUB to a name with {what}": same(b"SUB T " + name + b"\n" + END) for what, name in NAMES.items()
} | {
    # -- SUB
    "SUB without channel": same(b"SUB T\n"),
    "SUB without anything": same(b"SUB\n"),
    "SUB twice": same(SUB + SUB),
    "SUB to two channels": same(SUB + b"SUB T d\n"),
    "SUB bad topic": same(b"SUB T| c\n"),
    "SUB bad topic and channel": same(b"SUB T| |\n"),
    "SUB empty topic": same(b"SUB  c\n"),
    "SUB empty channel": same(b"SUB T \n"),
    "SUB bad channel": same(b"SUB T c#ephemera\n"),
    "SUB ephemeral": same(b"SUB T#ephemeral c#ephemeral\n" + END),
    "SUB surplus": same(b"SUB T c d\n" + END),
    "SUB quoting": same(b'SUB a"b\\\t\x7f\xc3\xa9\xff c\n'),
    "SUB after PUB": same(pub(b"x") + SUB + b"RDY 1\n", 3, b"FIN {0}\n" + END),
    "SUB after CLS": same(SUB + b"CLS\n" + SUB),
    # -- CLS
    "CLS": same(SUB + b"CLS\nRDY 1\nNOP\n" + END),
    "CLS with a parameter": same(SUB + b"CLS now\n" + END),
    "CLS twice": same(SUB + b"CLS\nCLS\n"),
    "PUB after CLS": same(SUB + b"CLS\n" + pub(b"x") + END, settles(depth=1)),
    "FIN after CLS": same(HELD, 3, b"CLS\nFIN {0}\nFIN {0}\n" + END),
    "REQ after CLS": same(HELD, 3, b"CLS\nREQ {0} 0\nREQ {0} 0\n" + END),
    "TOUCH after CLS": same(HELD, 3, b"CLS\nTOUCH {0}\nFIN {0}\nTOUCH {0}\n" + END),
    "nothing is sent after CLS": same(HELD, 3, b"CLS\n", 1, pub(b"y") + b"FIN {0}\n" + END, settles(depth=1)),
    # -- RDY
    "RDY too high": same(SUB + b"RDY 2501\n"),
    "RDY highest": same(SUB + b"RDY 2500\n" + END),
    "RDY negative": same(SUB + b"RDY -1\n"),
    "RDY signed": same(SUB + b"RDY +1\n"),
    "RDY word": same(SUB + b"RDY x\n"),
    "RDY word in bytes": same(SUB + b"RDY \xff\n"),
    "RDY empty": same(SUB + b"RDY \n" + END),
    "RDY surplus": same(SUB + b"RDY 1 2\n" + END),
    "RDY without count is 1": same(b"MPUB T\n" + batch(b"1", b"2") + SUB + b"RDY\n", 3, b"CLS\n" + END),
    "RDY with zeroes": same(SUB + b"RDY 0000000000000000000000000000001\n" + END),
    "RDY zero is none": same(pub(b"1") + SUB + b"RDY 0\n" + END, settles(depth=1)),
    "RDY nonsense after CLS": same(SUB + b"CLS\nRDY 99999\nRDY x\n" + END),
    "RDY beyond 63 bits": differs(
        "big-decimals",
        SUB + b"RDY 9223372036854775808\n",
        here=["OK", "error E_INVALID RDY count 9223372036854775808 out of range 0-2500"],
    ),
    "RDY beyond 64 bits": differs(
        "big-decimals",
        SUB + b"RDY 18446744073709551617\n" + END,
        here=["OK", "error E_INVALID RDY count 18446744073709551616 out of range 0-2500"],
    ),
    "RDY is a ceiling": same(
        b"MPUB T\n" + batch(b"1", b"2", b"3") + SUB + b"RDY 2\n", 4, b"FIN {1}\n", 1, b"CLS\n" + END
    ),
    "RDY again does not add": same(
        b"MPUB T\n" + batch(b"1", b"2") + SUB + b"RDY 1\nRDY 1\n", 3, b"RDY 1\nCLS\n" + END
    ),
    "RDY lowered recalls nothing": same(
        b"MPUB T\n" + batch(b"1", b"2", b"3") + SUB + b"RDY 2\n",
        4,
        b"RDY 1\nFIN {0}\nNOP\nCLS\n",
        1,
        b"FIN {1}\n" + END,
    ),
    "RDY raised sends more": same(
        b"MPUB T\n" + batch(b"1", b"2", b"3") + SUB + b"RDY 1\n", 3, b"RDY 3\n", 2, END
    ),
    # -- FIN
    "FIN unknown": same(SUB + b"FIN " + GONE + b"\n" + END),
    "FIN twice": same(HELD, 3, b"FIN {0}\nFIN {0}\n" + END),
    "FIN id too short": same(SUB + b"FIN 0123\n"),
    "FIN id too long": same(SUB + b"FIN " + GONE + b"0\n"),
    "FIN without id": same(SUB + b"FIN\n"),
    "FIN empty id": same(SUB + b"FIN \n"),
    "FIN surplus": same(SUB + b"FIN " + GONE + b" more\n" + END),
    "FIN id of any bytes": same(SUB + b'FIN \x00\xff"\\\xc3\xa9abcdefghij\n' + END),
    "FIN id in upper case": same(SUB + b"FIN 0123456789ABCDEF\n" + END),
    # -- REQ
    "REQ unknown": same(SUB + b"REQ " + GONE + b" 0\n" + END),
    "REQ without time": same(SUB + b"REQ " + GONE + b"\n"),
    "REQ without anything": same(SUB + b"REQ\n"),
    "REQ bad id": same(SUB + b"REQ 1 0\n"),
    "REQ bad id and time": same(SUB + b"REQ 1 soon\n"),
    "REQ bad time": same(SUB + b"REQ " + GONE + b" soon\n"),
    "REQ negative time": same(SUB + b"REQ " + GONE + b" -1\n"),
    "REQ empty time": same(SUB + b"REQ " + GONE + b" \n" + END),
    "REQ at once": same(HELD, 3, b"REQ {0} 0\n", 1, b"FIN {0}\nFIN {0}\n" + END),
    "REQ again and again": same(
        HELD,
        3,
        b"REQ {0} 0\n",
        1,
        b"REQ {0} 0\n",
        1,
        b"REQ {0} 0\n",
        1,
        b"FIN {0}\n" + END,
        settles(requeue_count=3),
    ),
    "REQ, and another message that waits": differs(
        "redelivery-first",
        *(HELD, 3, pub(b"y"), 1, settles(depth=1), b"REQ {0} 0\n", 1, b"CLS\n" + END),
        here=[
            *["OK"] * 3,
            "CLOSE_WAIT",
            "error E_INVALID invalid command NOPE",
            "{0} attempts 1: x",
            "{0} attempts 2: x",
            "c settles at {'depth': 1}",
        ],
    ),
    "REQ twice": same(HELD, 3, b"RDY 0\nREQ {0} 0\nREQ {0} 0\n" + END, settles(depth=1, requeue_count=1)),
    "REQ deferred": same(
        HELD, 3, b"REQ {0} 3600000\nREQ {0} 0\nFIN {0}\nTOUCH {0}\n" + END, settles(depth=0, deferred_count=1)
    ),
    "REQ above the maximum": same(HELD, 3, b"REQ {0} 99999999\nFIN {0}\n" + END, settles(deferred_count=1)),
    "REQ beyond 64 bits": differs(
        "big-decimals",
        HELD,
        3,
        b"RDY 0\nREQ {0} 18446744073709551616\n" + END,
        ended,
        figures("depth", "deferred_count"),
        here=[
            "OK",
            "OK",
            "error E_INVALID invalid command NOPE",
            "(end)",
            "{0} attempts 1: x",
            "c has {'depth': 0, 'deferred_count': 1}",
        ],
    ),
    # -- TOUCH
    "TOUCH": same(HELD, 3, b"TOUCH {0}\nTOUCH {0}\nFIN {0}\nTOUCH {0}\n" + END),
    "TOUCH unknown": same(SUB + b"TOUCH " + GONE + b"\n" + END),
    "TOUCH without id": same(SUB + b"TOUCH\n"),
    "TOUCH bad id": same(SUB + b"TOUCH 1\n"),
    "TOUCH surplus": same(SUB + b"TOUCH " + GONE + b" 5\n" + END),
    # -- publishing and consuming on one connection
    "PUB in state subscribed": same(HELD, 3, b"FIN {0}\n" + END),
    "bodies as they were sent": same(
        SUB + b"RDY 5\nMPUB T\n" + batch(b"\0", b"\n", b"FIN " + GONE + b"\n", b"x" * 60000, b"\xff" * 100),
        7,
        b"FIN {0}\nFIN {1}\nFIN {2}\nFIN {3}\nFIN {4}\n" + END,
        settles(depth=0, in_flight_count=0),
    ),
    "MPUB and DPUB in state subscribed": same(
        SUB + b"RDY 2\nMPUB T\n" + batch(b"1") + b"DPUB T 3600000\n" + sized(b"2"), 4, b"FIN {0}\n" + END
    ),
}
