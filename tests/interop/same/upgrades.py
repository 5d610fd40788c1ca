"""Scripts for TLS, snappy and deflate."""

import ssl
import zlib
from collections.abc import Mapping
from random import Random
from struct import pack

from interop.same.lines import COMMANDS
from interop.same.stage import (
    END,
    Script,
    Step,
    batch,
    deflate_on,
    differs,
    ended,
    half_close,
    heartbeats,
    http_request,
    identify,
    negotiate,
    pub,
    raw,
    reply,
    same,
    sized,
    snappy_on,
    takes,
    tls,
    with_raw,
)

SUB = b"SUB T c\n"
TLS_1_0, TLS_1_1, TLS_1_2 = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2

RANDOM = Random(5).randbytes(200_000).translate(None, b"T{")  # without the placeholders of scripts
BODIES = [b"x", b"y" * 300_000, RANDOM, bytes(range(64)) * 4, b"\0" * 65536, b"z"]

UPGRADES: Mapping[str, tuple[Step, ...]] = {
    "snappy": (negotiate(snappy=True), 1, snappy_on, 1),
    "deflate": (negotiate(deflate=True), 1, deflate_on, 1),
    "TLS": (negotiate(tls_v1=True), 1, tls(), 1),
    "TLS 1.2": (negotiate(tls_v1=True), 1, tls(version=TLS_1_2), 1),
    "TLS and snappy": (negotiate(tls_v1=True, snappy=True), 1, tls(), 1, snappy_on, 1),
    "TLS and deflate": (negotiate(tls_v1=True, deflate=True), 1, tls(), 1, deflate_on, 1),
    "TLS 1.2 and deflate": (negotiate(tls_v1=True, deflate=True), 1, tls(version=TLS_1_2), 1, deflate_on, 1),
}
"""Steps that start each upgrade; all later data is sent upgraded."""

SNAPPY, DEFLATE, TLS = UPGRADES["snappy"], UPGRADES["deflate"], UPGRADES["TLS"]

STREAM_IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"
NOP_UNCOMPRESSED = b"\x01\x08\x00\x00" + pack("<I", 0x0) + b"NOP\n"  # with a wrong checksum


def stored(data: bytes, *, last: bool = False) -> bytes:
    """Return an uncompressed block of DEFLATE."""
    return bytes([last]) + pack("<HH", len(data), len(data) ^ 0xFFFF) + data


SCRIPTS: dict[str, Script] = (
    {
        f"{name}, and no more": same(*steps, b"NOP\n", half_close)
        for name, steps in UPGRADES.items()
        if "TLS" not in name
    }
    | {f"{name}, and errors": same(*steps, END) for name, steps in UPGRADES.items()}
    | {
        f"{name}, and messages": same(
            *steps,
            SUB + b"RDY 100\n",
            1,
            b"MPUB T\n" + batch(*BODIES) + pub(*BODIES),
            7 + 12,
            b"".join(b"FIN {%d}\n" % n for n in range(10)) + b"CLS\nFIN {0}\n" + END,
        )
        for name, steps in UPGRADES.items()
    }
    | {
        f"{name}, unbuffered": same(
            negotiate(output_buffer_size=-1, **fields), *steps[1:], SUB + b"RDY 2\n" + pub(b"1", b"2"), 5, END
        )
        for name, (steps, fields) in {
            "snappy": (SNAPPY, {"snappy": True}),
            "deflate": (DEFLATE, {"deflate": True}),
            "TLS": (TLS, {"tls_v1": True}),
            "TLS and deflate": (UPGRADES["TLS and deflate"], {"tls_v1": True, "deflate": True}),
        }.items()
    }
    | {
        f"{name}, the smallest buffer": same(
            negotiate(output_buffer_size=64, output_buffer_timeout=25, **fields),
            *steps[1:],
            SUB + b"RDY 50\n" + pub(*[b"x" * 50] * 20),
            41,
            END,
        )
        for name, (steps, fields) in {
            "snappy": (SNAPPY, {"snappy": True}),
            "deflate": (DEFLATE, {"deflate": True}),
            "TLS": (TLS, {"tls_v1": True}),
        }.items()
    }
    | {
        f"{name}, and heartbeats": same(
            negotiate(heartbeat_interval=1000, **fields), *steps[1:], heartbeats(1), END
        )
        for name, (steps, fields) in {
            "snappy": (SNAPPY, {"snappy": True}),
            "TLS and deflate": (UPGRADES["TLS and deflate"], {"tls_v1": True, "deflate": True}),
        }.items()
    }
    | {
        f"deflate level {level}": same(
            negotiate(deflate=True, deflate_level=level), 1, deflate_on, 1, pub(b"x" * 1000) + END
        )
        for level in (-5, -1, 0, 1, 5, 6, 7, 9, 100)
    }
    | {
        # -- requested and unrequested upgrades
        "all asked for, and no negotiation": same(
            identify(tls_v1=True, snappy=True, deflate=True) + pub(b"x") + END
        ),
        "TLS and both compressions": same(negotiate(tls_v1=True, snappy=True, deflate=True)),
        "TLS is not used": same(negotiate() + END),
        "snappy after an IDENTIFY without": same(negotiate(), 1, *SNAPPY, pub(b"x") + END),
        "an IDENTIFY more inside TLS": same(*TLS, negotiate(msg_timeout=5000) + pub(b"x") + END),
        "snappy inside TLS, later": differs(
            "upgrade-once",
            *(*TLS, negotiate(snappy=True), 1, pub(b"x") + END),
            here=[
                reply(tls_v1=True),
                "(TLSv1.3)",
                "OK",
                reply(),
                "OK",
                "error E_INVALID invalid command NOPE",
            ],
        ),
        "deflate inside TLS, later": differs(
            "upgrade-once",
            *(*TLS, negotiate(deflate=True), 1, pub(b"x") + END),
            here=[
                reply(tls_v1=True),
                "(TLSv1.3)",
                "OK",
                reply(),
                "OK",
                "error E_INVALID invalid command NOPE",
            ],
        ),
        "snappy twice": differs(
            "upgrade-once",
            *(*SNAPPY, negotiate(snappy=True), 1, pub(b"x") + END),
            here=[reply(snappy=True), "OK", reply(), "OK", "error E_INVALID invalid command NOPE"],
        ),
        "an IDENTIFY more in snappy": same(*SNAPPY, identify() + pub(b"x") + END),
        "an IDENTIFY more in deflate": same(*DEFLATE, identify() + pub(b"x") + END),
        # -- failing handshakes
        "no handshake, but bytes": differs(
            "tls-reason",
            *(negotiate(tls_v1=True), 1, raw(b"NOP\n" * 10), ended),
            here=[
                reply(tls_v1=True),
                "error E_IDENTIFY_FAILED IDENTIFY failed wrong version number",
                "(end)",
            ],
        ),
        "no handshake, but the end": same(negotiate(tls_v1=True), 1, half_close, ended),
        "no handshake for five seconds": differs(
            "tls-reason",
            *(negotiate(tls_v1=True), 1, takes(4.5, 6.5, ended)),
            here=[
                reply(tls_v1=True),
                "error E_IDENTIFY_FAILED IDENTIFY failed no TLS handshake within 5 s",
                "(end)",
                "(in time)",
            ],
        ),
        "TLS 1.0": differs(
            "tls-min-version",
            *(negotiate(tls_v1=True), 1, tls(version=TLS_1_0), END),
            here=[reply(tls_v1=True), "(no TLS: TLSV1_ALERT_PROTOCOL_VERSION)"],
        ),
        "TLS 1.1": differs(
            "tls-min-version",
            *(negotiate(tls_v1=True), 1, tls(version=TLS_1_1), END),
            here=[reply(tls_v1=True), "(no TLS: TLSV1_ALERT_PROTOCOL_VERSION)"],
        ),
        # -- malformed snappy
        "snappy: plain text": same(*SNAPPY, raw(b"NOP\n" * 10), ended),
        "snappy: no stream identifier": same(*SNAPPY, raw(b"\x01\x08\x00\x00\0\0\0\0NOP\n"), ended),
        "snappy: a wrong checksum": same(*SNAPPY, raw(STREAM_IDENTIFIER + NOP_UNCOMPRESSED), ended),
        "snappy: a chunk to be skipped": same(
            *SNAPPY, b"NOP\n", raw(b"\x80\x03\0\0abc" + b"\xfe\x03\0\0\0\0\0"), END
        ),
        "snappy: a chunk that must be known": same(*SNAPPY, b"NOP\n", raw(b"\x02\x03\0\0abc"), ended),
        "snappy: the stream identifier again": same(*SNAPPY, b"NOP\n", raw(STREAM_IDENTIFIER), END),
        "snappy: a wrong stream identifier": same(*SNAPPY, raw(b"\xff\x06\x00\x00SnApPy"), ended),
        "snappy: half a chunk": same(*SNAPPY, b"NOP\n", raw(b"\x00\x50\0\0abc"), half_close),
        "snappy: a huge chunk": same(*SNAPPY, b"NOP\n", raw(b"\x00\xff\xff\xff" + bytes(200_000)), ended),
        "snappy: one byte at a time": same(*SNAPPY, *(b"%c" % byte for byte in pub(b"xyz")), END),
        "snappy: commands, and plain text in the same piece": same(
            *SNAPPY, with_raw(pub(b"1", b"2"), b"CLS\n"), half_close, ended
        ),
        # -- malformed deflate
        "deflate: commands, and plain text in the same piece": same(
            *DEFLATE, with_raw(pub(b"1", b"2"), b"CLS\n"), half_close, ended
        ),
        "deflate: plain text": same(*DEFLATE, raw(b"NOP\n" * 10), ended),
        "deflate: a block of no type": same(*DEFLATE, raw(b"\x07\x07\x07\x07"), ended),
        "deflate: stored blocks": same(*DEFLATE, raw(stored(b"NOP\n") + stored(END) + stored(b"")), ended),
        "deflate: a stored block with wrong sizes": same(*DEFLATE, raw(b"\0\x04\0\x04\0NOP\n"), ended),
        "deflate: the last block": same(*DEFLATE, raw(stored(b"NOP\n", last=True)), ended),
        "deflate: more after the last block": same(
            *DEFLATE, raw(stored(pub(b"x", topic=b"a.topic"), last=True) + stored(END)), ended
        ),
        "deflate: with a zlib header": same(*DEFLATE, raw(zlib.compress(END)), ended),
        "deflate: half a block": same(*DEFLATE, b"NOP\n", raw(b"\0\x04\0"), half_close),
        "deflate: one byte at a time": same(*DEFLATE, *(b"%c" % byte for byte in pub(b"xyz")), END),
        "deflate: a great deal in a few bytes": same(*DEFLATE, pub(b"x" * 1_000_000) * 3 + END),
    }
)

TLS_REQUIRED: dict[str, Script] = {
    **{f"{verb} before TLS": same(command + END) for verb, command in COMMANDS.items() if verb != "IDENTIFY"},
    "IDENTIFY without TLS": same(negotiate() + pub(b"x")),
    "IDENTIFY without negotiation": same(identify(tls_v1=True) + pub(b"x")),
    "an IDENTIFY more, without TLS": same(negotiate() + negotiate() + b"NOP\n"),
    "a bad IDENTIFY": same(identify(msg_timeout=1)),
    "two compressions of which one is off": same(
        negotiate(tls_v1=True, snappy=True, deflate=True), 1, tls("client"), 1, snappy_on, 1, pub(b"x") + END
    ),
    "a certificate that is vouched for": same(
        negotiate(tls_v1=True), 1, tls("client"), 1, SUB + b"RDY 1\n" + pub(b"x"), 3, b"FIN {0}\n" + END
    ),
    "a certificate that is vouched for, TLS 1.2": same(
        negotiate(tls_v1=True), 1, tls("client", TLS_1_2), 1, END
    ),
    "no certificate, TLS 1.2": same(negotiate(tls_v1=True), 1, tls("", TLS_1_2)),
    "a stranger's certificate, TLS 1.2": same(negotiate(tls_v1=True), 1, tls("stranger", TLS_1_2)),
    "no certificate": same(negotiate(tls_v1=True), 1, tls(), ended),
    "a stranger's certificate": same(negotiate(tls_v1=True), 1, tls("stranger"), ended),
    "HTTP": same(
        http_request("GET", "/ping"),
        http_request("POST", "/pub?topic=T", b"x"),
        http_request("GET", "/nothing"),
    ),
}
"""Scripts for brokers with --tls-required=true, --tls-client-auth-policy=require-verify and --deflate=false."""

TLS_REQUIRED_OVER_TCP: dict[str, Script] = {
    "PUB before TLS": same(pub(b"x")),
    "PUB over HTTP": same(http_request("POST", "/pub?topic=T", b"x")),
    "no certificate": same(negotiate(tls_v1=True), 1, tls(), ended),
    "no certificate, TLS 1.2": same(negotiate(tls_v1=True), 1, tls("", TLS_1_2)),
    "any certificate": same(negotiate(tls_v1=True), 1, tls("stranger"), 1, pub(b"x") + END),
    "a body that is no JSON": same(b"IDENTIFY\n" + sized(b"{")),
}
"""Scripts for brokers with --tls-required=tcp-https and --tls-client-auth-policy=require."""
