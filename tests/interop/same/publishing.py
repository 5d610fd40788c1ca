"""Scripts for PUB, DPUB and MPUB: parameters, names, sizes."""

from struct import pack

from interop.same.stage import END, Script, batch, differs, ended, exists, pub, same, settles, sized

SUB = b"SUB T c\n"
BIGGEST = 1048576

NAMES = {
    "a letter": b"t",
    "every kind of character": b"Az09._-",
    "dots": b"..",
    "64 characters": b"t" * 64,
    "65 characters": b"t" * 65,
    "64 characters, ephemeral": b"t" * 54 + b"#ephemeral",
    "65 characters, ephemeral": b"t" * 55 + b"#ephemeral",
    "nothing but #ephemeral": b"#ephemeral",
    "#ephemeral twice": b"t#ephemeral#ephemeral",
    "#ephemera": b"t#ephemera",
    "a slash": b"a/b",
    "a colon": b"a:b",
    "not ASCII": "é".encode(),
    "not UTF-8": b"\xff",
    "quotes": b'a"b\\',
    "a control character": b"a\x01\x7f\t",
    "a null": b"a\0",
    "a line separator": "a\u2028b\u200b\ufeff".encode(),
    "beyond 16 bits": "\U0001f600\U000e0001".encode(),
    "a surrogate": b"\xed\xa0\x80",
}

SCRIPTS: dict[str, Script] = (
    {
        f"{verb} to a name with {what}": same(f"{verb} ".encode() + name + rest)
        for what, name in NAMES.items()
        for verb, rest in (("PUB", b"\n" + sized(b"x") + END), ("DPUB", b" 0\n" + sized(b"x") + END))
    }
    | {
        # -- PUB
        "PUB": same(pub(b"x") + END, settles("", message_count=1, message_bytes=1, depth=1)),
        "PUB of every byte": same(SUB + b"RDY 1\n" + pub(bytes(range(256))), 3, b"FIN {0}\n" + END),
        "PUB without topic": same(b"PUB\n"),
        "PUB to an empty name": same(b"PUB \n"),
        "PUB empty message": same(b"PUB T\n" + sized(b"")),
        "PUB negative size": same(b"PUB T\n\xff\xff\xff\xff"),
        "PUB most negative size": same(b"PUB T\n\x80\0\0\0"),
        "PUB biggest": same(pub(bytes(BIGGEST)) + END),
        "PUB too big": same(b"PUB T\n" + pack(">i", BIGGEST + 1)),
        "PUB as big as can be said": same(b"PUB T\n\x7f\xff\xff\xff"),
        "PUB bad name before its size": same(b"PUB bad|name\n\xff\xff\xff\xff"),
        "PUB many": same(pub(*(b"%d" % n for n in range(500))) + END),
        "PUB to two topics": same(pub(b"1") + pub(b"2", topic=b"T.other") + pub(b"3") + END),
        # -- DPUB
        "DPUB at once": same(SUB + b"RDY 1\nDPUB T 0\n" + sized(b"x"), 3, b"FIN {0}\n" + END),
        "DPUB latest": same(b"DPUB T 3600000\n" + sized(b"x") + END),
        "DPUB too late": differs(
            "max-defer",
            b"DPUB T 3600001\n" + sized(b"x") + END,
            here=["OK", "error E_INVALID invalid command NOPE"],
        ),
        "DPUB too late for either": differs(
            "max-defer",
            b"DPUB T 31536000001\n",
            here=["error E_INVALID DPUB timeout 31536000001 out of range 0-31536000000"],
        ),
        "DPUB negative": same(b"DPUB T -1\n"),
        "DPUB signed": same(b"DPUB T +1\n"),
        "DPUB fraction": same(b"DPUB T 1.5\n"),
        "DPUB word": same(b"DPUB T soon\n"),
        "DPUB hexadecimal": same(b"DPUB T 0x10\n"),
        "DPUB other digits": same("DPUB T \u0661\n".encode()),
        "DPUB leading zeroes": same(b"DPUB T " + b"0" * 100 + b"3600000\n" + sized(b"x") + END),
        "DPUB empty time": same(b"DPUB T \n" + sized(b"x") + END),
        "DPUB without time": same(b"DPUB T\n"),
        "DPUB without anything": same(b"DPUB\n"),
        "DPUB surplus": same(b"DPUB T 0 0\n" + sized(b"x") + END),
        "DPUB bad topic and time": same(b"DPUB bad|name soon\n"),
        "DPUB bad time and size": same(b"DPUB T soon\n\xff\xff\xff\xff"),
        "DPUB empty message": same(b"DPUB T 1\n" + sized(b"")),
        "DPUB negative size": same(b"DPUB T 1\n\xff\xff\xff\xff"),
        "DPUB biggest": same(b"DPUB T 1\n" + sized(bytes(BIGGEST)) + END),
        "DPUB too big": same(b"DPUB T 1\n" + pack(">i", BIGGEST + 1)),
        "DPUB beyond nsqd's nanoseconds": differs(
            "big-decimals",
            b"DPUB T 18446744073710\n" + sized(b"x") + END,
            here=["error E_INVALID DPUB timeout 18446744073710 out of range 0-31536000000"],
        ),
        "DPUB beyond 64 bits": differs(
            "big-decimals",
            b"DPUB T 18446744073709551617\n" + sized(b"x") + END,
            here=["error E_INVALID DPUB timeout 18446744073709551616 out of range 0-31536000000"],
        ),
        # -- HPUB
        "HPUB": differs(
            "message-headers",
            SUB + b"RDY 1\nHPUB T\n" + batch(b"\0\4a:1\nx"),
            3,
            b"FIN {0}\n" + END,
            here=["OK", "OK", "error E_INVALID invalid command NOPE", "{0} attempts 1: x"],
        ),
        # -- MPUB
        "MPUB": same(
            SUB + b"RDY 3\nMPUB T\n" + batch(b"1", b"22", b"333"), 5, b"FIN {2}\nFIN {0}\nFIN {1}\n" + END
        ),
        "MPUB of many": same(b"MPUB T\n" + batch(*[b"x"] * 5000) + END),
        "MPUB without topic": same(b"MPUB\n"),
        "MPUB to a bad name": differs(
            "mpub-name",
            b"MPUB bad|name\n" + batch(b"x"),
            here=['error E_BAD_TOPIC MPUB topic name "bad|name" is not valid'],
        ),
        "MPUB no messages": same(b"MPUB T\n" + batch()),
        "MPUB negative count": same(b"MPUB T\n" + sized(pack(">i", -1))),
        "MPUB count too high": same(b"MPUB T\n" + pack(">ii", 5242880, 1048576)),
        "MPUB empty message": same(b"MPUB T\n" + batch(b"1", b"", b"3")),
        "MPUB biggest message": same(b"MPUB T\n" + batch(b"1", bytes(BIGGEST)) + END),
        "MPUB message too big": same(b"MPUB T\n" + pack(">iii", 2000000, 1, BIGGEST + 1)),
        "MPUB negative message size": same(b"MPUB T\n" + pack(">iii", 100, 1, -5)),
        "MPUB biggest body": same(
            b"MPUB T\n" + batch(*[bytes(BIGGEST - 4)] * 4, bytes(BIGGEST - 8)) + END,
            settles("", message_count=5, message_bytes=5 * BIGGEST - 24),
        ),
        "MPUB body too big": same(b"MPUB T\n" + pack(">i", 5242881)),
        "MPUB empty body": same(b"MPUB T\n" + pack(">i", 0)),
        "MPUB negative body": same(b"MPUB T\n" + pack(">i", -1)),
        "MPUB body longer than its messages": same(b"MPUB T\n" + pack(">iii", 100, 1, 1) + b"x" + END),
        "MPUB body shorter than its messages": same(b"MPUB T\n" + pack(">iii", 8, 1, 1) + b"x" + END),
        "MPUB with the size of the bodies alone": same(  # segmentio/nsq-go
            b"MPUB T\n" + pack(">i", 6) + batch(b"a", b"bc", b"def")[4:] + END
        ),
        "MPUB of messages that are too big together": differs(
            "mpub-size",
            b"MPUB T\n" + pack(">i", 100) + batch(*[bytes(BIGGEST)] * 6)[4:] + END,
            here=[f"error E_BAD_BODY MPUB body too big {6 * BIGGEST} > {5 * BIGGEST}"],
        ),
        "MPUB refused, and its topic": differs(
            "refused-no-topic",
            b"MPUB T\n" + batch(),
            ended,
            exists(""),
            here=["error E_BAD_BODY MPUB invalid message count 0", "(end)", "topic does not exist"],
        ),
        "PUB refused, and its topic": same(b"PUB T\n" + sized(b""), ended, exists("")),
    }
)
