"""Tests for IDENTIFY: parsed as by Go, negotiated as by nsqd. The expectations are answers of nsqd 1.3.0."""

from dataclasses import fields, replace

import pytest

from trio_nsq.protocol import CommandError, Limits
from trio_nsq.protocol.identify import (
    IdentifyRequest,
    IdentifySettings,
    Upgrades,
    choose_upgrades,
    identify_reply,
    negotiate,
    parse_identify,
)

NOT_JSON = "E_BAD_BODY IDENTIFY failed to decode JSON body"


def test_every_field() -> None:
    body = (
        b'{"client_id":"c","hostname":"h","user_agent":"u","feature_negotiation":true,"heartbeat_interval":1000,'
        b'"output_buffer_size":64,"output_buffer_timeout":25,"tls_v1":true,"snappy":true,"deflate":true,'
        b'"deflate_level":3,"sample_rate":99,"msg_timeout":1000,"survive_refusals":true,"private_channel":true,'
        b'"producer":"p","producer_instance":"i",'
        b'"message_headers":true,"uncounted_requeues":true,"topology_region":"r","topology_zone":"z","short_id":"c","long_id":7,"other":[{}]}'
    )
    expected = IdentifyRequest(
        *("c", "h", "u", True, 1000, 64, 25, True, True, True),
        deflate_level=3,
        sample_rate=99,
        msg_timeout=1000,
        survive_refusals=True,
        private_channel=True,
        producer="p",
        producer_instance="i",
        message_headers=True,
        uncounted_requeues=True,
        topology_region="r",
        topology_zone="z",
    )
    assert parse_identify(body) == expected
    assert all(getattr(expected, field.name) != field.default for field in fields(IdentifyRequest))


ACCEPTED: list[tuple[bytes, IdentifyRequest]] = [
    (b"{}", IdentifyRequest()),
    (b" \t\r\n{ } \n", IdentifyRequest()),
    (b"null", IdentifyRequest()),
    (b" null ", IdentifyRequest()),
    # keys
    (b'{"HEARTBEAT_interval":5}', IdentifyRequest(heartbeat_interval=5)),
    (b'{"heartbeat_interval":1,"Heartbeat_Interval":2}', IdentifyRequest(heartbeat_interval=2)),
    (b'{"Heartbeat_Interval":2,"heartbeat_interval":1}', IdentifyRequest(heartbeat_interval=1)),
    (b'{"heartbeat_interval":1,"heartbeat_interval":2}', IdentifyRequest(heartbeat_interval=2)),
    (b'{"heartbeat_interval":5,"heartbeat_interval":null}', IdentifyRequest(heartbeat_interval=5)),
    (b'{"m\xc5\xbfg_timeout":5}', IdentifyRequest(msg_timeout=5)),  # the long s
    (b'{"mSG_timeout":5}', IdentifyRequest(msg_timeout=5)),
    (b'{"":1}', IdentifyRequest()),
    (b'{"\\u0063lient_id":"x"}', IdentifyRequest(client_id="x")),
    # unknown keys with any values
    (b'{"x":1.5,"y":[1,{"msg_timeout":"?"}],"z":{"client_id":1}}', IdentifyRequest()),
    (b'{"x":' + b"9" * 5000 + b"}", IdentifyRequest()),
    (b'{"x":1e999}', IdentifyRequest()),
    (b'{"\xff":1}', IdentifyRequest()),
    # values
    (b'{"heartbeat_interval":null,"client_id":null,"tls_v1":null}', IdentifyRequest()),
    (b'{"heartbeat_interval":-0}', IdentifyRequest()),
    (b'{"heartbeat_interval":9223372036854775807}', IdentifyRequest(heartbeat_interval=2**63 - 1)),
    (b'{"heartbeat_interval":-9223372036854775808}', IdentifyRequest(heartbeat_interval=-(2**63))),
    (b'{"sample_rate":2147483647}', IdentifyRequest(sample_rate=2**31 - 1)),
    (b'{"sample_rate":-2147483648}', IdentifyRequest(sample_rate=-(2**31))),
    (b'{"tls_v1":false}', IdentifyRequest()),
    (b'{"client_id":"\\u0041\\/\\n"}', IdentifyRequest(client_id="A/\n")),
    (b'{"client_id":"\xc3\xa9"}', IdentifyRequest(client_id="é")),
    (b'{"client_id":"a\xffb"}', IdentifyRequest(client_id="a\ufffdb")),
    (b'{"client_id":"\\ud83d\\ude00"}', IdentifyRequest(client_id="😀")),
    (b'{"client_id":"a\\ud800b\\udfff"}', IdentifyRequest(client_id="a\ufffdb\ufffd")),
]  # fmt: skip


@pytest.mark.parametrize(("body", "request_"), ACCEPTED)
def test_valid_requests(body: bytes, request_: IdentifyRequest) -> None:
    assert parse_identify(body) == request_


REFUSED = [
    b"",
    b"{",
    b"x",
    b"{} x",
    b"{}\0",
    b"\x0c{}",
    b"[]",
    b'""',
    b"1",
    b"true",
    b"{'client_id':'x'}",
    b'{"client_id":"x",}',
    b'{"heartbeat_interval":1000.0}',
    b'{"heartbeat_interval":1000.5}',
    b'{"heartbeat_interval":1e3}',
    b'{"heartbeat_interval":01}',
    b'{"heartbeat_interval":+1}',
    b'{"heartbeat_interval":true}',
    b'{"heartbeat_interval":"1000"}',
    b'{"heartbeat_interval":[]}',
    b'{"heartbeat_interval":9223372036854775808}',
    b'{"heartbeat_interval":-9223372036854775809}',
    b'{"heartbeat_interval":' + b"9" * 5000 + b"}",
    b'{"heartbeat_interval":"x","heartbeat_interval":1000}',  # each field with a wrong type
    b'{"HEARTBEAT_INTERVAL":"x","heartbeat_interval":1000}',
    b'{"sample_rate":2147483648}',
    b'{"sample_rate":-2147483649}',
    b'{"tls_v1":1}',
    b'{"tls_v1":"true"}',
    b'{"snappy":0}',
    b'{"client_id":1}',
    b'{"client_id":' + b"9" * 30 + b"}",
    b'{"client_id":true}',
    b'{"client_id":{"a":1}}',
    b'{"client_id":["a"]}',
    b'{"client_id":"\x01"}',
    b'{"client_id":"a\nb"}',
    b'{"x":NaN}',
    b'{"x":Infinity}',
    b'{"x":-Infinity}',
    b'{"heartbeat_interval":NaN}',
    b"\xef\xbb\xbf{}",
    "{}".encode("utf-16"),
    "{}".encode("utf-16-le"),
    "{}".encode("utf-32"),
    b"\xff{}",
    b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    b"[" * 1_000_000,
    b'{"tls_v1":1,"heartbeat_interval":5}',  # the type is checked before the range
]


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: repr(body[:60]))
def test_invalid_requests(body: bytes) -> None:
    with pytest.raises(CommandError) as caught:
        parse_identify(body)
    assert str(caught.value) == NOT_JSON
    assert caught.value.fatal


# ---------------------------------------------------------------------- negotiation

DEFAULTS = IdentifySettings(30_000, 16_384, 250, 0, 60_000)


def negotiated(request: IdentifyRequest, limits: Limits) -> IdentifySettings:
    """Return the settings after the first request of a connection."""
    return negotiate(request, limits, IdentifySettings.default(limits))


def test_defaults() -> None:
    assert IdentifySettings.default(Limits()) == DEFAULTS
    assert negotiated(IdentifyRequest(), Limits()) == DEFAULTS


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ({"heartbeat_interval": 1000}, {"heartbeat_interval_ms": 1000}),
        ({"heartbeat_interval": 60_000}, {"heartbeat_interval_ms": 60_000}),
        ({"heartbeat_interval": -1}, {"heartbeat_interval_ms": 0}),
        ({"output_buffer_size": 64}, {"output_buffer_size": 64}),
        ({"output_buffer_size": 65_536}, {"output_buffer_size": 65_536}),
        ({"output_buffer_size": -1}, {"output_buffer_size": 1, "output_buffer_timeout_ms": 0}),
        (
            {"output_buffer_size": -1, "output_buffer_timeout": 100},
            {"output_buffer_size": 1, "output_buffer_timeout_ms": 0},
        ),
        ({"output_buffer_timeout": 25}, {"output_buffer_timeout_ms": 25}),
        ({"output_buffer_timeout": 30_000}, {"output_buffer_timeout_ms": 30_000}),
        ({"output_buffer_timeout": -1}, {"output_buffer_timeout_ms": 0}),
        ({"msg_timeout": 1000}, {"msg_timeout_ms": 1000}),
        ({"msg_timeout": 900_000}, {"msg_timeout_ms": 900_000}),
        ({"deflate_level": 99, "tls_v1": True, "snappy": True, "deflate": True}, {}),
    ],
)
def test_negotiated_values(asked: dict[str, int], got: dict[str, int]) -> None:
    assert negotiated(IdentifyRequest(**asked), Limits()) == replace(DEFAULTS, **got)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0, 1, 99])
def test_sample_rates_in_range_are_accepted(rate: int) -> None:
    negotiated(IdentifyRequest(sample_rate=rate), Limits())


@pytest.mark.parametrize(
    ("field", "name", "values"),
    [
        ("heartbeat_interval", "heartbeat interval", [-2, 1, 999, 60_001, 2**62]),
        ("output_buffer_timeout", "output buffer timeout", [-2, 1, 24, 30_001]),
        ("output_buffer_size", "output buffer size", [-2, 1, 63, 65_537]),
        ("sample_rate", "sample rate", [-1, 100, 2**31 - 1]),
        ("msg_timeout", "msg timeout", [-1, 1, 999, 900_001]),
    ],
)
def test_out_of_range(field: str, name: str, values: list[int]) -> None:
    for value in values:
        with pytest.raises(CommandError) as caught:
            negotiated(IdentifyRequest(**{field: value}), Limits())  # type: ignore[arg-type]
        assert str(caught.value) == f"E_BAD_BODY IDENTIFY {name} ({value}) is invalid"
        assert caught.value.fatal


def test_first_error_in_the_order_of_nsqd_is_reported() -> None:
    wrong = {
        "heartbeat_interval": 5,
        "output_buffer_timeout": 1,
        "output_buffer_size": 1,
        "sample_rate": 100,
        "msg_timeout": 1,
    }
    for field, value in list(wrong.items()):
        with pytest.raises(CommandError) as caught:
            negotiated(IdentifyRequest(**wrong), Limits())  # type: ignore[arg-type]
        assert str(caught.value) == f"E_BAD_BODY IDENTIFY {field.replace('_', ' ')} ({value}) is invalid"
        del wrong[field]


def test_ranges_are_those_of_the_limits() -> None:
    limits = Limits(
        max_heartbeat_interval_ms=2000,
        heartbeat_interval_ms=1500,
        max_output_buffer_size=128,
        output_buffer_size=100,
        min_output_buffer_timeout_ms=5,
        max_output_buffer_timeout_ms=10,
        output_buffer_timeout_ms=7,
        msg_timeout_ms=1100,
        max_msg_timeout_ms=1200,
    )
    assert IdentifySettings.default(limits) == IdentifySettings(1500, 100, 7, 0, 1100)
    most = IdentifyRequest(
        heartbeat_interval=2000, output_buffer_size=128, output_buffer_timeout=10, msg_timeout=1200
    )
    assert negotiated(most, limits) == IdentifySettings(2000, 128, 10, 0, 1200)
    assert negotiated(IdentifyRequest(output_buffer_timeout=5), limits).output_buffer_timeout_ms == 5
    for field in ("heartbeat_interval", "output_buffer_size", "output_buffer_timeout", "msg_timeout"):
        with pytest.raises(CommandError, match="is invalid"):
            negotiated(replace(most, **{field: getattr(most, field) + 1}), limits)


def test_later_request_keeps_missing_fields() -> None:
    first = IdentifyRequest(
        heartbeat_interval=-1,
        output_buffer_size=64,
        output_buffer_timeout=25,
        msg_timeout=5000,
        sample_rate=7,
    )
    before = negotiated(first, Limits())
    assert negotiate(IdentifyRequest(), Limits(), before) == replace(before, sample_rate=0)
    later = negotiate(IdentifyRequest(heartbeat_interval=1000, msg_timeout=6000), Limits(), before)
    assert later == IdentifySettings(1000, 64, 25, 0, 6000)


# ---------------------------------------------------------------------- the reply


def reply(request: IdentifyRequest, limits: Limits, version: str, *, tls: bool, auth: bool) -> bytes:
    upgrades = choose_upgrades(request, limits, tls=tls)
    return identify_reply(request, negotiated(request, limits), upgrades, limits, version, auth_required=auth)


def test_reply_equals_that_of_nsqd() -> None:
    request = IdentifyRequest(feature_negotiation=True, deflate_level=3)
    assert reply(request, Limits(), "1.3.0", tls=False, auth=False) == (
        b'{"max_rdy_count":2500,"version":"1.3.0","max_msg_timeout":900000,"msg_timeout":60000,"tls_v1":false,'
        b'"deflate":false,"deflate_level":6,"max_deflate_level":6,"snappy":false,"sample_rate":0,'
        b'"auth_required":false,"output_buffer_size":16384,"output_buffer_timeout":250}'
    )


def test_reply_has_the_negotiated_values() -> None:
    request = IdentifyRequest(
        msg_timeout=1234,
        output_buffer_size=100,
        output_buffer_timeout=99,
        tls_v1=True,
        snappy=True,
        sample_rate=7,
    )
    limits = Limits(max_rdy_count=7, max_msg_timeout_ms=5000, max_deflate_level=4)
    assert reply(request, limits, "9", tls=True, auth=True) == (
        b'{"max_rdy_count":7,"version":"9","max_msg_timeout":5000,"msg_timeout":1234,"tls_v1":true,'
        b'"deflate":false,"deflate_level":4,"max_deflate_level":4,"snappy":true,"sample_rate":7,'
        b'"auth_required":true,"output_buffer_size":100,"output_buffer_timeout":99}'
    )


def test_extensions_are_announced_to_clients_that_requested_them() -> None:
    settings = negotiated(IdentifyRequest(), Limits())
    asked = IdentifyRequest(survive_refusals=True)
    told = identify_reply(asked, settings, Upgrades(), Limits(), "1", auth_required=False)
    assert told.endswith(b',"survive_refusals":true}')
    asked = IdentifyRequest(private_channel=True)
    told = identify_reply(asked, settings, Upgrades(), Limits(), "1", auth_required=False)
    assert told.endswith(b'":250,"private_channel":true}')


# ---------------------------------------------------------------------- upgrades


def test_requested_upgrades_are_granted() -> None:
    request = IdentifyRequest(tls_v1=True, deflate=True, deflate_level=3)
    assert choose_upgrades(request, Limits(), tls=True) == Upgrades(True, False, True, 3)
    assert choose_upgrades(IdentifyRequest(), Limits(), tls=True) == Upgrades(False, False, False, 6)


def test_disabled_upgrades_are_not_granted() -> None:
    limits = Limits(deflate=False, snappy=False)
    request = IdentifyRequest(tls_v1=True, snappy=True, deflate=True, deflate_level=9)
    assert choose_upgrades(request, limits, tls=False) == Upgrades(False, False, False, 6)


def test_two_compressions_are_refused_unless_one_is_disabled() -> None:
    request = IdentifyRequest(snappy=True, deflate=True)
    with pytest.raises(
        CommandError, match=r"^E_IDENTIFY_FAILED cannot enable both deflate and snappy compression$"
    ):
        choose_upgrades(request, Limits(), tls=False)
    assert choose_upgrades(request, Limits(deflate=False), tls=False).snappy


@pytest.mark.parametrize(
    ("asked", "most", "given"), [(0, 6, 6), (-1, 6, 6), (1, 6, 1), (9, 6, 6), (9, 9, 9), (0, 3, 3)]
)
def test_deflate_level_is_limited_to_the_maximum(asked: int, most: int, given: int) -> None:
    request = IdentifyRequest(deflate=True, deflate_level=asked)
    assert choose_upgrades(request, Limits(max_deflate_level=most), tls=False).deflate_level == given
