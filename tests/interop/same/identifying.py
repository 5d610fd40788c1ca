"""Scripts for IDENTIFY, and for AUTH without an auth server."""

from interop.same.stage import (
    END,
    Script,
    differs,
    identify,
    identify_raw,
    negotiate,
    pub,
    reply,
    same,
    sized,
)

SUB = b"SUB T c\n"

BIGGEST_BODY = 65536

SCRIPTS: dict[str, Script] = {
    # -- replies
    "no negotiation": same(identify() + END),
    "the reply": same(negotiate() + END),
    "all that others send": same(
        negotiate(
            client_id="it",
            hostname="here",
            user_agent="test/1",
            short_id="a",
            long_id=["b"],
            tls_v1=False,
            deflate=False,
            deflate_level=6,
            snappy=False,
            heartbeat_interval=30000,
            sample_rate=0,
            output_buffer_size=16384,
            output_buffer_timeout=250,
            msg_timeout=0,
        )
        + END
    ),
    "all at their lower ends": same(
        negotiate(
            heartbeat_interval=1000,
            output_buffer_size=64,
            output_buffer_timeout=25,
            sample_rate=0,
            msg_timeout=1000,
            deflate_level=1,
        )
        + END
    ),
    "all at their upper ends": same(
        negotiate(
            heartbeat_interval=60000,
            output_buffer_size=65536,
            output_buffer_timeout=30000,
            sample_rate=99,
            msg_timeout=900000,
            deflate_level=9,
        )
        + END
    ),
    "all off": same(negotiate(heartbeat_interval=-1, output_buffer_timeout=-1, deflate_level=-1) + END),
    "unbuffered": same(negotiate(output_buffer_size=-1) + END),
    "unbuffered, and a timeout": same(negotiate(output_buffer_size=-1, output_buffer_timeout=1000) + END),
    "sample rate": same(negotiate(sample_rate=42) + END),
    "TLS where there is none": same(negotiate(tls_v1=True) + END),
    "compression without negotiation": same(identify(snappy=True) + pub(b"x") + END),
    "two compressions without negotiation": same(identify(snappy=True, deflate=True) + END),
    "two compressions": same(negotiate(snappy=True, deflate=True)),
    # -- repeated IDENTIFY
    "twice": same(negotiate() + negotiate(msg_timeout=5000) + END),
    "twice, the second without negotiation": same(negotiate(msg_timeout=5000) + identify() + END),
    "twice, the second says nothing of what the first said": same(
        negotiate(msg_timeout=5000, output_buffer_size=64, output_buffer_timeout=25, sample_rate=7)
        + negotiate()
        + END
    ),
    "after PUB": same(pub(b"x") + identify() + END),
    # -- JSON
    "null": same(identify_raw(b"null") + END),
    "null for a value": same(identify_raw(b'{"msg_timeout":null,"feature_negotiation":true}') + END),
    "keys in any case": same(identify(Feature_Negotiation=True, MSG_TIMEOUT=2000) + END),
    "a key with a long s": same(
        identify_raw('{"feature_negotiation":true,"m\u017fg_timeout":2000}'.encode()) + END
    ),
    "a key with a Kelvin sign": same(
        identify_raw('{"feature_negotiation":true,"\u212aey":2000}'.encode()) + END
    ),
    "a key twice": same(
        identify_raw(b'{"msg_timeout":2000,"feature_negotiation":true,"msg_timeout":3000}') + END
    ),
    "a key twice, the first of the wrong type": same(
        identify_raw(b'{"msg_timeout":"2000","feature_negotiation":true,"msg_timeout":3000}')
    ),
    "a key with escapes": same(identify_raw(rb'{"msg\u005ftimeout":2000,"feature_negotiation":true}') + END),
    "blanks around it": same(identify_raw(b' \t\r\n{"feature_negotiation" : true } \n') + END),
    "something after it": same(identify_raw(b"{} {}")),
    "a byte order mark": same(identify_raw(b"\xef\xbb\xbf{}")),
    "UTF-16": same(identify_raw("{}".encode("utf-16-le"))),
    "not UTF-8": same(identify_raw(b'{"client_id":"\xff","feature_negotiation":true}') + END),
    "half a surrogate": same(identify_raw(rb'{"client_id":"\ud800","feature_negotiation":true}') + END),
    "a control character": same(identify_raw(b'{"client_id":"\n"}')),
    "single quotes": same(identify_raw(b"{'msg_timeout':2000}")),
    "a comma too many": same(identify_raw(b'{"msg_timeout":2000,}')),
    "NaN": same(identify_raw(b'{"x":NaN}')),
    "a number with a leading zero": same(identify_raw(b'{"msg_timeout":02000}')),
    "minus zero": same(identify_raw(b'{"msg_timeout":-0,"feature_negotiation":true}') + END),
    "unknown keys": same(identify(short_id="a", long_id=["b"], feature_negotiation=True) + END),
    "a key of ours alone": differs(
        "survive-refusals",
        negotiate(survive_refusals=True) + END,
        here=[reply(survive_refusals=True), "error E_INVALID invalid command NOPE"],
    ),
    "another key of ours": differs(
        "private-channel",
        negotiate(private_channel=True) + END,
        here=[reply(private_channel=True), "error E_INVALID invalid command NOPE"],
    ),
    "a producer with a name": differs(
        "named-producer",
        negotiate(producer="p", producer_instance="i") + END,
        here=[reply(producer="p"), "error E_INVALID invalid command NOPE"],
    ),
    "a third key of ours": differs(
        "message-headers",
        negotiate(message_headers=True) + END,
        here=[reply(message_headers=True), "error E_INVALID invalid command NOPE"],
    ),
    "a place": differs(
        "topology",
        negotiate(topology_region="r", topology_zone="z") + END,
        here=[reply(topology_region="", topology_zone=""), "error E_INVALID invalid command NOPE"],
    ),
    "a fourth key of ours": differs(
        "uncounted-requeues",
        negotiate(uncounted_requeues=True) + END,
        here=[reply(uncounted_requeues=True), "error E_INVALID invalid command NOPE"],
    ),
    "an unknown key with a large number": same(identify_raw(b'{"x":1e999,"feature_negotiation":true}') + END),
    "an unknown key with depth": same(
        identify_raw(b'{"x":' + b"[" * 500 + b"]" * 500 + b',"feature_negotiation":true}') + END
    ),
    "an unknown key with more depth": differs(
        "json-depth",
        identify_raw(b'{"x":' + b"[" * 9998 + b"]" * 9998 + b',"feature_negotiation":true}') + END,
        here=["error E_BAD_BODY IDENTIFY failed to decode JSON body"],
    ),
    "an unknown key with too much depth": same(
        identify_raw(b'{"x":' + b"[" * 10001 + b"]" * 10001 + b',"feature_negotiation":true}') + END
    ),
    "a string for a number": same(identify(msg_timeout="1000")),
    "a string for a bool": same(identify(feature_negotiation="true")),
    "a number for a bool": same(identify(feature_negotiation=1)),
    "a bool for a number": same(identify(msg_timeout=True)),
    "a number for a string": same(identify(client_id=1)),
    "a list for a number": same(identify(msg_timeout=[1000])),
    "a fraction": same(identify(msg_timeout=5000.5)),
    "a whole fraction": same(identify_raw(b'{"msg_timeout":5000.0}')),
    "an exponent": same(identify_raw(b'{"msg_timeout":5e3}')),
    "a number beyond 64 bits": same(identify(msg_timeout=2**63)),
    "a number at the end of 64 bits": same(identify(msg_timeout=2**63 - 1)),
    "a sample rate beyond 32 bits": same(identify(sample_rate=2**31)),
    "array": same(identify_raw(b"[]")),
    "string": same(identify_raw(b'"{}"')),
    "true": same(identify_raw(b"true")),
    "no JSON": same(identify_raw(b"{")),
    # -- sizes
    "empty": same(identify_raw(b"")),
    "negative size": same(b"IDENTIFY\n\xff\xff\xff\xff"),
    "most negative size": same(b"IDENTIFY\n\x80\0\0\0"),
    "biggest": same(identify_raw(b"{}".ljust(BIGGEST_BODY)) + END),
    "larger than here": differs(
        "handshake-bytes",
        identify_raw(b"{}".ljust(BIGGEST_BODY + 1)) + END,
        here=["error E_BAD_BODY IDENTIFY body too big 65537 > 65536"],
    ),
    # -- out of range
    "heartbeat too short": same(identify(heartbeat_interval=999)),
    "heartbeat too long": same(identify(heartbeat_interval=60001)),
    "heartbeat -2": same(identify(heartbeat_interval=-2)),
    "buffer too small": same(identify(output_buffer_size=63)),
    "buffer too large": same(identify(output_buffer_size=65537)),
    "buffer -2": same(identify(output_buffer_size=-2)),
    "buffer timeout too short": same(identify(output_buffer_timeout=24)),
    "buffer timeout too long": same(identify(output_buffer_timeout=30001)),
    "buffer timeout -2": same(identify(output_buffer_timeout=-2)),
    "sample rate too high": same(identify(sample_rate=100)),
    "negative sample rate": same(identify(sample_rate=-1)),
    "msg timeout too short": same(identify(msg_timeout=999)),
    "msg timeout too long": same(identify(msg_timeout=900001)),
    "msg timeout off": same(identify(msg_timeout=-1)),
    "first of several errors": same(identify(msg_timeout=1, heartbeat_interval=1, sample_rate=-1)),
    "second of several errors": same(identify(output_buffer_size=1, output_buffer_timeout=1)),
    "an error beside two compressions": same(negotiate(msg_timeout=1, snappy=True, deflate=True)),
    # -- heartbeats off
    "heartbeats off, then SUB": same(identify(heartbeat_interval=-1) + b"SUB T\n"),
    "heartbeats off, then PUB": same(identify(heartbeat_interval=-1) + pub(b"x") + END),
    "heartbeats off, then on, then SUB": same(
        identify(heartbeat_interval=-1) + identify(heartbeat_interval=5000) + SUB + END
    ),
    "heartbeats off, then default, then SUB": same(identify(heartbeat_interval=-1) + identify() + SUB),
    "heartbeats on, then off, then SUB": same(identify() + identify(heartbeat_interval=-1) + SUB),
    # -- AUTH
    "AUTH with a parameter": same(b"AUTH x\n"),
    "AUTH with an empty parameter": same(b"AUTH \n"),
    "AUTH empty": same(b"AUTH\n" + sized(b"")),
    "AUTH negative size": same(b"AUTH\n\xff\xff\xff\xff"),
    "AUTH larger than here": differs(
        "handshake-bytes",
        b"AUTH\n" + sized(bytes(BIGGEST_BODY + 1)) + END,
        here=["error E_BAD_BODY AUTH body too big 65537 > 65536"],
    ),
    "AUTH biggest": same(b"AUTH\n" + sized(bytes(BIGGEST_BODY))),
}
