"""Scripts for HTTP: every endpoint with valid and invalid arguments, and malformed HTTP."""

import http.client
import json
import re
import socket
import ssl
from struct import pack

from interop.same.stage import (
    PATIENCE_S,
    Script,
    Stage,
    Step,
    batch,
    client,
    deflate_on,
    differs,
    figures,
    identify,
    negotiate,
    post,
    pub,
    reply,
    same,
    settles,
    snappy_on,
    stats,
    tls,
)

HEADERS = ("Allow", "Location", "Content-Type", "X-Nsq-Content-Type")
TLS_1_2 = ssl.TLSVersion.TLSv1_2
ABOUT = {"client_id": "it", "hostname": "here", "user_agent": "test/1"}


# ------------------------------------------------------------------------------------------------ steps


def normal(content: bytes) -> str:
    """Return the content with versions, times, ports and process figures replaced, which differ between brokers."""
    content = re.sub(rb'("version":")[0-9][^"]*', rb"\1", content)
    content = re.sub(rb'("(?:start_time|connect_ts|tcp_port|http_port)":)-?[0-9]+', rb"\1N", content)
    content = re.sub(rb'"instance":"[0-9a-f]{16}",?', b"", content)  # the row info-instance
    content = re.sub(rb'("(?:remote_address|broadcast_address)":"127\.0\.0\.1:?)[0-9]*', rb"\1", content)
    content = re.sub(rb'("https_port": ?)[0-9]+', rb"\1N", content)
    content = re.sub(rb'("count":)[0-9]+(,"percentiles")', rb"\1N\2", content)
    content = re.sub(rb'("(?:heap|gc|next_gc)_[a-z0-9_]+":)[0-9]+', rb"\1N", content)
    content = re.sub(rb'("quantile":[0-9.]+,"value":)[0-9.e+]+', rb"\1N", content)
    content = re.sub(rb',"oldest_message_age_ms":(?:[0-9]+|null)', b"", content)  # only ours: row stats-age
    return content.decode("utf-8", "backslashreplace")


def normal_text(content: bytes) -> str:
    """Return the text of /stats with versions, times, ports and process figures replaced."""
    text = content.decode()
    text = re.sub(r"^nsqd v.*", "nsqd", text)
    text = re.sub(r"(start_time|uptime|connected:) \S+", r"\1", text)
    text = re.sub(r":[0-9]{5} ", r":PORT ", text)
    text = re.sub(r"\t[0-9]+$", "\tN", text, flags=re.MULTILINE)
    return re.sub(r"[0-9.]+(ns|us|ms|s)\b", "N", text)


def ask(method: str, target: str, body: bytes | int = b"", **headers: str) -> Step:
    """Send one request; record status, body and the compared headers.

    If the body is a number, the request has this Content-Length but no body.
    """

    def step(stage: Stage) -> None:
        connection = http.client.HTTPConnection(stage.broker.http_address, timeout=PATIENCE_S)
        try:
            connection.putrequest(method, stage.named(target.encode()).decode())
            connection.putheader("Content-Length", str(body if isinstance(body, int) else len(body)))
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders(b"" if isinstance(body, int) else body)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        noted = {name: answer.getheader(name) for name in HEADERS if answer.getheader(name)}
        text = normal_text(content) if content.startswith(b"nsqd v") else normal(content)
        stage.http_answers.append(f"{answer.status} {text} {noted}")

    return step


def raw_http(data: bytes, *, to_https: bool = False) -> Step:
    """Send bytes to the HTTP port and half-close; record status and body of every response, and the end."""

    def step(stage: Stage) -> None:
        address = stage.broker.https_address if to_https else stage.broker.http_address
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            try:
                connection.sendall(stage.named(data))
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the broker has closed the connection already
            answers = _read_to_end(connection)
        answers = answers.removeprefix(
            b"HTTP/1.1 100 Continue\r\n\r\n"
        )  # optional if the broker already has the body
        while answers:
            head, _, rest = answers.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *([0-9]+)", head)
            cut = int(length[1]) if length else len(rest)
            stage.http_answers.append(
                f"{head.partition(b' ')[2].partition(b' ')[0].decode()} {normal(rest[:cut])}"
            )
            answers = rest[cut:]
        stage.http_answers.append("(end)")

    return step


def _read_to_end(connection: socket.socket) -> bytes:
    found = b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found


def producers(stage: Stage) -> None:
    """Record the message counts of each producer, by topic."""
    _, content = stage.request("GET", "/stats?format=json&include_mem=false")
    for producer in json.loads(content)["producers"]:
        counts = sorted((each["topic"], each["count"]) for each in producer["pub_counts"])
        stage.http_answers.append(f"{producer['client_id']}: {counts}")


def waiting(stage: Stage) -> None:
    """Record how many messages wait for the topic's first channel."""
    topic = stats(stage)
    assert topic is not None
    stage.http_answers.append(f"depth {topic['depth']}, deferred {topic.get('deferred_count')}")


def suites(stage: Stage) -> None:
    """Record TLS version and cipher suite of the channel's clients."""
    topic = stats(stage)
    assert topic is not None
    for consumer in topic["channels"][0]["clients"]:
        stage.http_answers.append(f"{consumer['tls_version']}, {consumer['tls_cipher_suite']}")


def made(stage: Stage) -> None:
    """Create the topic with a channel c."""
    stage.request("POST", "/topic/create?topic=T")
    stage.request("POST", "/channel/create?topic=T&channel=c")


# ------------------------------------------------------------------------------------------------ requests

CONFIG = [
    "nsqlookupd_tcp_addresses",
    "log_level",
    "auth_http_addresses",
    "http_client_connect_timeout",
    "http_client_request_timeout",
    "broadcast_address",
    "broadcast_tcp_port",
    "broadcast_http_port",
    "mem_queue_size",
    "max_bytes_per_file",
    "sync_every",
    "sync_timeout",
    "msg_timeout",
    "max_msg_timeout",
    "max_msg_size",
    "max_body_size",
    "max_req_timeout",
    "max_heartbeat_interval",
    "max_rdy_count",
    "max_output_buffer_size",
    "max_output_buffer_timeout",
    "min_output_buffer_timeout",
    "output_buffer_timeout",
    "max_channel_consumers",
    "statsd_address",
    "statsd_interval",
    "statsd_mem_stats",
    "statsd_udp_packet_size",
    "statsd_exclude_ephemeral",
    "e",
    "e_processing_latency_window_time",
    "e",
    "e_processing_latency_percentiles",
    "tls_cert",
    "tls_key",
    "tls_client_auth_policy",
    "tls_root_ca_file",
    "tls_required",
    "deflate",
    "max_deflate_level",
    "snappy",
    "config",
    "version",
    "verbose",
    "worker_id",
    "unknown",
    "lookupd_tcp_address",
    "node_id",
    "node-id",
    "log-level",
    "LOG_LEVEL",
    "%6cog_level",
]
"""All options, and unknown names."""

REQUESTS: list[tuple[str, str, bytes | int]] = [
    # (method, path and query, body); a number is a Content-Length without a body
    ("GET", "/ping", b""),
    ("HEAD", "/ping", b""),
    ("POST", "/ping", b""),
    ("GET", "/ping?x=1", b""),
    ("GET", "/info", b""),
    ("POST", "/info", b""),
    ("GET", "/info?x=%20", b""),
    ("GET", "/", b""),
    ("GET", "/nowhere", b""),
    ("GET", "/ping/pong", b""),
    ("GET", "/pin%67", b""),
    ("POST", "/nowhere?topic=T", b""),
    ("GET", "/pub?topic=T", b""),
    ("PUT", "/pub?topic=T", b"x"),
    ("DELETE", "/topic/delete?topic=T", b""),
    ("PATCH", "/topic/delete?topic=T", b""),
    ("POST", "/stats", b""),
    # -- /stats
    ("GET", "/stats?topic=unknown", b""),
    ("GET", "/stats?topic=T&include_mem=false", b""),
    ("GET", "/stats?topic=T&channel=c&include_mem=0", b""),
    ("GET", "/stats?topic=T&channel=unknown&include_mem=false", b""),
    ("GET", "/stats?topic=T&include_clients=false&include_mem=false", b""),
    ("GET", "/stats?format=text&topic=T&include_mem=false", b""),
    ("GET", "/stats?format=JSON&topic=T&include_mem=false", b""),
    ("GET", "/stats?format=&topic=T&include_mem=false", b""),
    ("GET", "/stats?format=json&topic=unknown&include_mem=false", b""),
    ("GET", "/stats?format=json&topic=T&channel=unknown&include_mem=false", b""),
    ("GET", "/stats?format=json&topic=T&include_clients=false&include_mem=false", b""),
    ("GET", "/stats?format=json&topic=T&include_clients=F&include_mem=false", b""),
    ("GET", "/stats?format=json&topic=T&include_clients=0&include_mem=0", b""),
    ("GET", "/stats?format=json&topic=T&include_clients=no&include_mem=FALSE", b""),
    ("GET", "/stats?format=json&topic=T&include_clients=&include_mem=f", b""),
    ("GET", "/stats?format=json&topic=T&channel=c&include_mem=false", b""),
    ("GET", "/stats?format=json&topic=T&topic=unknown&include_mem=false", b""),
    ("GET", "/stats?topic=%zz", b""),
    ("GET", "/stats?format=json;topic=a", b""),
    # -- /pub
    ("POST", "/pub?topic=T", b"x"),
    ("POST", "/pub?topic=T.new", b"x"),
    ("POST", "/pub?topic=T", b""),
    ("POST", "/pub", b""),
    ("POST", "/pub", b"x"),
    ("POST", "/pub?topic=", b"x"),
    ("POST", "/pub?topic", b"x"),
    ("POST", "/pub?Topic=T", b"x"),
    ("POST", "/pub?topic=a|b", b"x"),
    ("POST", "/pub?topic=a%0a", b"x"),
    ("POST", "/pub?topic=a+b", b"x"),
    ("POST", "/pub?topic=%54.decoded", b"x"),
    ("POST", "/pub?topic=T&topic=a|b", b"x"),
    ("POST", "/pub?topic=" + "t" * 64, b"x"),
    ("POST", "/pub?topic=" + "t" * 65, b"x"),
    ("POST", "/pub?topic=T%23ephemeral", b"x"),
    ("POST", "/pub?topic=T&topic=%zz", b"x"),
    ("POST", "/pub?topic=T&", b"x"),
    ("POST", "/pub?&&topic=T", b"x"),
    ("POST", "/pub?topic=T", bytes(1048576)),
    ("POST", "/pub?topic=T", 1048577),
    ("POST", "/pub?topic=T", 10**15),
    ("POST", "/pub", 1048577),
    ("POST", "/pub?topic=T&defer=0", b"x"),
    ("POST", "/pub?topic=T&defer=3600000", b"x"),
    ("POST", "/pub?topic=T&defer=3600001", b"x"),
    ("POST", "/pub?topic=T&defer=-1", b"x"),
    ("POST", "/pub?topic=T&defer=-0", b"x"),
    ("POST", "/pub?topic=T&defer=%2B5", b"x"),
    ("POST", "/pub?topic=T&defer=+5", b"x"),
    ("POST", "/pub?topic=T&defer=", b"x"),
    ("POST", "/pub?topic=T&defer", b"x"),
    ("POST", "/pub?topic=T&defer=soon", b"x"),
    ("POST", "/pub?topic=T&defer=1.5", b"x"),
    ("POST", "/pub?topic=T&defer=0x10", b"x"),
    ("POST", "/pub?topic=T&defer=1_0", b"x"),
    ("POST", "/pub?topic=T&defer=5&defer=soon", b"x"),
    ("POST", "/pub?topic=T&defer=" + "9" * 5000, b"x"),
    ("POST", "/pub?topic=T&defer=" + "0" * 5000 + "1", b"x"),
    ("POST", "/pub?topic=a|b&defer=soon", b"x"),
    ("POST", "/pub?defer=soon", b"x"),
    # -- /mpub
    ("POST", "/mpub?topic=T", b"a\nb\n"),
    ("POST", "/mpub?topic=T", b"a\r\nb"),
    ("POST", "/mpub?topic=T", b""),
    ("POST", "/mpub?topic=T", b"\n\n"),
    ("POST", "/mpub", b"a"),
    ("POST", "/mpub", b""),
    ("GET", "/mpub?topic=T", b""),
    ("POST", "/mpub?topic=a|b", b"a"),
    ("POST", "/mpub?topic=T&defer=1000", b"a"),
    ("POST", "/mpub?topic=T", bytes(1048577)),
    ("POST", "/mpub?topic=T", (b"x" * 1048575 + b"\n") * 5),
    ("POST", "/mpub?topic=T", 5242881),
    ("POST", "/mpub?topic=T&binary=true", batch(b"a", b"b")[4:]),
    ("POST", "/mpub?topic=T&binary=1", batch(b"a")[4:]),
    ("POST", "/mpub?topic=T&binary=", batch(b"a")[4:]),
    ("POST", "/mpub?topic=T&binary", batch(b"a")[4:]),
    ("POST", "/mpub?topic=T&binary=yes", b"text"),
    ("POST", "/mpub?topic=T&binary=false", b"text"),
    ("POST", "/mpub?topic=T&binary=0", b"text"),
    ("POST", "/mpub?topic=T&binary=f", b"text"),
    ("POST", "/mpub?topic=T&binary=F", b"text"),
    ("POST", "/mpub?topic=T&binary=FALSE", b"text"),
    ("POST", "/mpub?topic=T&binary=False", b"text"),
    ("POST", "/mpub?topic=T&binary=true", b""),
    ("POST", "/mpub?topic=T&binary=true", b"\0\0"),
    ("POST", "/mpub?topic=T&binary=true", pack(">i", 0)),
    ("POST", "/mpub?topic=T&binary=true", pack(">i", -1)),
    ("POST", "/mpub?topic=T&binary=true", pack(">i", 1048576)),
    ("POST", "/mpub?topic=T&binary=true", pack(">ii", 1, 0)),
    ("POST", "/mpub?topic=T&binary=true", pack(">ii", 1, -1)),
    ("POST", "/mpub?topic=T&binary=true", pack(">ii", 1, 1048577)),
    ("POST", "/mpub?topic=T&binary=true", pack(">ii", 1, 5) + b"half"),
    ("POST", "/mpub?topic=T&binary=true", pack(">ii", 2, 1) + b"a"),
    ("POST", "/mpub?topic=T&binary=true", pack(">ii", 2, 1) + b"a\0\0"),
    # -- topics
    ("POST", "/topic/create?topic=T", b""),
    ("POST", "/topic/create?topic=T.new", b"with a body"),
    ("POST", "/topic/create", b""),
    ("POST", "/topic/create?topic=", b""),
    ("POST", "/topic/create?topic=a|b", b""),
    ("GET", "/topic/create?topic=T", b""),
    ("POST", "/topic/pause?topic=T", b""),
    ("POST", "/topic/pause?topic=a|b", b""),
    ("POST", "/topic/pause?topic=unknown", b""),
    ("POST", "/topic/pause", b""),
    ("POST", "/topic/unpause?topic=T", b""),
    ("POST", "/topic/unpause?topic=unknown", b""),
    ("POST", "/topic/unpause", b""),
    ("POST", "/topic/empty?topic=T", b""),
    ("POST", "/topic/empty?topic=unknown", b""),
    ("POST", "/topic/empty?topic=a|b", b""),
    ("POST", "/topic/empty", b""),
    ("POST", "/topic/delete?topic=T", b""),
    ("POST", "/topic/delete?topic=unknown", b""),
    ("POST", "/topic/delete?topic=a|b", b""),
    ("POST", "/topic/delete", b""),
    ("POST", "/topic/nothing?topic=T", b""),
    # -- channels
    *(
        ("POST", f"/channel/{action}{query}", b"")
        for action in ("create", "delete", "empty", "pause", "unpause")
        for query in (
            "?topic=T&channel=c",
            "?topic=T&channel=unknown",
            "?topic=T&channel=a|b",
            "?topic=T&channel=",
            "?topic=T",
            "?channel=c",
            "?topic=a|b&channel=c",
            "?topic=a|b",
            "?topic=unknown&channel=c",
            "?topic=unknown&channel=a|b",
        )
    ),
    ("POST", "/channel/create?topic=T&channel=" + "c" * 64, b""),
    ("POST", "/channel/create?topic=T&channel=" + "c" * 65, b""),
    ("POST", "/channel/create?topic=T&channel=c%23ephemeral", b""),
    ("GET", "/channel/create?topic=T&channel=c", b""),
    ("POST", "/channel/nothing?topic=T&channel=c", b""),
    # -- /config
    *(("GET", f"/config/{option}", b"") for option in CONFIG),
    ("GET", "/config", b""),
    ("GET", "/config/", b""),
    ("GET", "/config/log_level/x", b""),
    ("POST", "/config/log_level", b"info"),
    ("DELETE", "/config/log_level", b""),
    ("PUT", "/config/log_level", b"debug"),
    ("PUT", "/config/log_level", b"WARN"),
    ("PUT", "/config/log_level", b"Error"),
    ("PUT", "/config/log_level", b"fatal"),
    ("PUT", "/config/log_level", b"info"),
    ("PUT", "/config/log_level", b""),
    ("PUT", "/config/log_level", b"info\n"),
    ("PUT", "/config/log_level", b" info"),
    ("PUT", "/config/log_level", b'"info"'),
    ("PUT", "/config/log_level", b"warning"),
    ("PUT", "/config/log_level", b"2"),
    ("PUT", "/config/log_level", b"\xff"),
    ("PUT", "/config/log_level", b"x" * 1048576),
    ("PUT", "/config/log_level", b"x" * 1048577),
    ("PUT", "/config/nsqlookupd_tcp_addresses", b"[]"),
    ("PUT", "/config/nsqlookupd_tcp_addresses", b"["),
    ("PUT", "/config/nsqlookupd_tcp_addresses", b"{}"),
    ("PUT", "/config/nsqlookupd_tcp_addresses", b'"127.0.0.1:1"'),
    ("PUT", "/config/nsqlookupd_tcp_addresses", b"[1]"),
    ("PUT", "/config/nsqlookupd_tcp_addresses", b" [ ] "),
    ("PUT", "/config/nsqlookupd_tcp_addresses", b""),
    ("PUT", "/config/max_rdy_count", b"5"),
    ("PUT", "/config/max_rdy_count", b""),
    ("PUT", "/config/unknown", b"5"),
]

NSQ_HEADER = "'X-Nsq-Content-Type': 'nsq; version=1.0'"
ERROR_HEADERS = f"{{'Content-Type': 'application/json; charset=utf-8', {NSQ_HEADER}}}"
INVALID = ['400 {"message":"INVALID_REQUEST"}', "(end)"]
CLOSE = b"Host: localhost\r\nConnection: close\r\n\r\n"


def _name(method: str, target: str, body: bytes | int) -> str:
    shown = body if isinstance(body, int) else body[:12]
    return f"{method} {target[:80]}{f' {shown!r}' if body else ''}"


def moved(status: int, location: str) -> list[str]:
    return [f"{status}  {{'Location': '{location}', {NSQ_HEADER}}}"]


SCRIPTS: dict[str, Script] = {_name(*request): same(made, ask(*request)) for request in REQUESTS} | {
    # -- redirects and OPTIONS
    "GET with a slash at the end": differs("http-redirects", ask("GET", "/ping/"), here=moved(301, "/ping")),
    "GET with a slash at the end and a query": differs(
        "http-redirects", ask("GET", "/stats/?format=json"), here=moved(301, "/stats?format=json")
    ),
    "GET in upper case": differs("http-redirects", ask("GET", "/Ping"), here=moved(301, "/ping")),
    "GET with two slashes": differs("http-redirects", ask("GET", "//ping"), here=moved(301, "/ping")),
    "GET /config with a slash at the end": differs(
        "http-redirects", ask("GET", "/config/log_level/"), here=moved(301, "/config/log_level")
    ),
    "POST with a slash at the end": differs(
        "http-redirects", ask("POST", "/pub/?topic=T", b"x"), here=moved(307, "/pub?topic=T")
    ),
    "POST in upper case": differs(
        "http-redirects", ask("POST", "/Topic/Create?topic=T"), here=moved(307, "/topic/create?topic=T")
    ),
    "OPTIONS": differs(
        "http-redirects", ask("OPTIONS", "/ping"), here=[f"200  {{'Allow': 'GET, OPTIONS', {NSQ_HEADER}}}"]
    ),
    # -- /config, /debug
    "PUT of no lookupds": differs(
        "config-lookupd",
        ask("PUT", "/config/nsqlookupd_tcp_addresses", b"null"),
        here=[f"200 [] {ERROR_HEADERS}"],
    ),
    "PUT of a lookupd that is none": differs(
        "config-lookupd",
        *(
            ask("PUT", "/config/nsqlookupd_tcp_addresses", b'["nowhere"]'),
            ask("GET", "/config/nsqlookupd_tcp_addresses"),
        ),
        ask("PUT", "/config/nsqlookupd_tcp_addresses", b"[]"),
        here=[
            f'400 {{"message":"INVALID_VALUE"}} {ERROR_HEADERS}',
            f"200 [] {ERROR_HEADERS}",
            f"200 [] {ERROR_HEADERS}",
        ],
    ),
    "an option that does nothing here": differs(
        "config-idle", ask("GET", "/config/queue_scan_selection_count"), here=[f"200 20 {ERROR_HEADERS}"]
    ),
    "an option of our own": differs(
        "config-own",
        ask("GET", "/config/sync"),
        here=[f"200 always {{'Content-Type': 'text/plain; charset=utf-8', {NSQ_HEADER}}}"],
    ),
    "a profile of Go": differs(
        "debug",
        ask("GET", "/debug/pprof/cmdline"),
        here=[
            '404 {"message":"NOT_FOUND: these are profiles of a Go program; /debug lists what there is here"} '
            "{'Content-Type': 'application/json; charset=utf-8'}"
        ],
    ),
    "/debug from a web page": differs(
        "debug-pages",
        ask("GET", "/debug/pprof/cmdline", Sec_Fetch_Site="cross-site"),
        here=[
            '403 {"message":"NOT_FOR_WEB_PAGES: a web page of another origin made this request"} '
            "{'Content-Type': 'application/json; charset=utf-8', 'X-Nsq-Content-Type': 'nsq; version=1.0'}"
        ],
    ),
    "a change by a web page": differs(
        "web-pages",
        ask("POST", "/topic/create?topic=T", Origin="http://evil.test"),
        here=[
            '403 {"message":"NOT_FOR_WEB_PAGES: a web page of another origin made this request"} '
            "{'Content-Type': 'application/json; charset=utf-8', 'X-Nsq-Content-Type': 'nsq; version=1.0'}"
        ],
    ),
    "a browser's request to another host": differs(
        "host",
        raw_http(
            b"GET /ping HTTP/1.1\r\nHost: evil.test\r\nAccept-Language: en\r\nConnection: close\r\n\r\n"
        ),
        here=[
            '403 {"message":"HOST_NOT_ALLOWED: evil.test is not a name of this server; see --http-allowed-host"}',
            "(end)",
        ],
    ),
    # -- idempotent publishing
    "a batch that is sent twice": differs(
        "publish-once",
        *[ask("POST", "/mpub?topic=T&producer=p&number=1", b"a\nb\n")] * 2,
        figures("message_count", of=""),
        here=[
            *["200 OK {'Content-Type': 'text/plain; charset=utf-8', " + NSQ_HEADER + "}"] * 2,
            "topic has {'message_count': 2}",
        ],
    ),
    # -- limits of our broker
    "a bad query where none is read": differs(
        "http-query", ask("GET", "/ping?%zz"), here=[f'400 {{"message":"INVALID_REQUEST"}} {ERROR_HEADERS}']
    ),
    "a body where none is read": same(made, ask("POST", "/topic/pause?topic=T", bytes(65536))),
    "a long body where none is read": differs(
        "http-body",
        *(made, ask("POST", "/topic/pause?topic=T", bytes(65537))),
        here=[f'413 {{"message":"BODY_TOO_BIG"}} {ERROR_HEADERS}'],
    ),
    "a head of 60 KB": same(ask("GET", "/ping", X="x" * 60_000)),
    "a head of 200 KB": differs(
        "http-head",
        ask("GET", "/ping", X="x" * 200_000),
        here=[f'431 {{"message":"HEADERS_TOO_BIG"}} {ERROR_HEADERS}'],
    ),
    # -- the protocol
    "HTTP/1.0": same(raw_http(b"GET /ping HTTP/1.0\r\n\r\n")),
    "HTTP/1.0 that stays": same(
        raw_http(b"GET /ping HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET /ping HTTP/1.0\r\n\r\n")
    ),
    "two requests at once": same(
        raw_http(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\nGET /nowhere HTTP/1.1\r\n" + CLOSE)
    ),
    "an absolute target": same(raw_http(b"GET http://x/ping HTTP/1.1\r\n" + CLOSE)),
    "a chunked body": same(
        raw_http(
            b"POST /pub?topic=T HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
            + CLOSE
            + b"3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n"
        )
    ),
    "an empty chunked body": same(
        raw_http(b"POST /pub?topic=T HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + CLOSE + b"0\r\n\r\n")
    ),
    "Expect": same(
        raw_http(
            b"POST /pub?topic=T HTTP/1.1\r\nContent-Length: 1\r\nExpect: 100-continue\r\n" + CLOSE + b"x"
        )
    ),
    "an empty line before": differs(
        "http-empty-line", raw_http(b"\r\nGET /ping HTTP/1.1\r\n" + CLOSE), here=["200 OK", "(end)"]
    ),
    "nothing": same(raw_http(b"")),
    "half a head": differs(
        "http-cut", raw_http(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n"), here=["(end)"]
    ),
    "half a body": differs(
        "http-cut",
        raw_http(b"POST /pub?topic=T HTTP/1.1\r\nContent-Length: 5\r\n" + CLOSE + b"ha"),
        here=["(end)"],
    ),
    # -- malformed HTTP
    "NSQ's own protocol": differs("http-malformed", raw_http(b"  V2IDENTIFY\n"), here=INVALID),
    "bare line feeds": differs(
        "http-malformed",
        raw_http(b"GET /ping HTTP/1.1\nHost: localhost\nConnection: close\n\n"),
        here=INVALID,
    ),
    "no Host": differs(
        "http-malformed", raw_http(b"GET /ping HTTP/1.1\r\nConnection: close\r\n\r\n"), here=INVALID
    ),
    "an unknown method": differs(
        "http-malformed", raw_http(b"BREW /ping HTTP/1.1\r\n" + CLOSE), here=INVALID
    ),
    "a method in lower case": differs(
        "http-malformed", raw_http(b"get /ping HTTP/1.1\r\n" + CLOSE), here=INVALID
    ),
    "HTTP/2.0": differs("http-malformed", raw_http(b"GET /ping HTTP/2.0\r\n" + CLOSE), here=INVALID),
    "HTTP/0.9": differs("http-malformed", raw_http(b"GET /ping\r\n\r\n"), here=INVALID),
    "a length that is none": differs(
        "http-malformed",
        raw_http(b"POST /pub?topic=T HTTP/1.1\r\nContent-Length: x\r\n" + CLOSE),
        here=INVALID,
    ),
    "a negative length": differs(
        "http-malformed",
        raw_http(b"POST /pub?topic=T HTTP/1.1\r\nContent-Length: -1\r\n" + CLOSE),
        here=INVALID,
    ),
    "two lengths": differs(
        "http-malformed",
        raw_http(b"POST /pub?topic=T HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n" + CLOSE + b"xy"),
        here=INVALID,
    ),
    "chunked with a length": differs(
        "http-malformed",
        raw_http(
            b"POST /pub?topic=T HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n"
            + CLOSE
            + b"1\r\nx\r\n0\r\n\r\n"
        ),
        here=INVALID,
    ),
    "a chunk that is none": differs(
        "http-malformed",
        raw_http(b"POST /pub?topic=T HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + CLOSE + b"x\r\n"),
        here=INVALID,
    ),
    "a header that is none": differs(
        "http-malformed", raw_http(b"GET /ping HTTP/1.1\r\nnonsense\r\n" + CLOSE), here=INVALID
    ),
    "a space before the colon": differs(
        "http-malformed", raw_http(b"GET /ping HTTP/1.1\r\nX : y\r\n" + CLOSE), here=INVALID
    ),
    "a folded header": differs(
        "http-malformed", raw_http(b"GET /ping HTTP/1.1\r\nX: y\r\n z\r\n" + CLOSE), here=INVALID
    ),
    "a null in a header": differs(
        "http-malformed", raw_http(b"GET /ping HTTP/1.1\r\nX: \0\r\n" + CLOSE), here=INVALID
    ),
}

FLAGS = ["--broadcast-tcp-port=1", "--broadcast-http-port=2", "--queue-scan-selection-count=21"]
STATS_FLAGS = ["--e2e-processing-latency-percentile=0.5,0.99"]

STATS = "/stats?format=json&topic=T&include_mem=false"
TEXT = "/stats?topic=T&include_mem=false"

STATS_SCRIPTS: dict[str, Script] = {
    "an idle channel": same(made, ask("GET", STATS), ask("GET", TEXT)),
    "no channel": same(pub(b"abc"), 1, settles("", depth=1), ask("GET", STATS), ask("GET", TEXT), b"NOPE\n"),
    "a paused topic and channel": same(
        *(made, post("/topic/pause?topic=T"), post("/channel/pause?topic=T&channel=c"), pub(b"abc"), 1),
        *(ask("GET", STATS), ask("GET", TEXT), b"NOPE\n"),
    ),
    "a client without IDENTIFY": same(b"SUB T c\n", 1, ask("GET", STATS), ask("GET", TEXT), b"NOPE\n"),
    "a client with an empty IDENTIFY": same(
        identify() + b"SUB T c\n", 2, ask("GET", STATS), ask("GET", TEXT), b"NOPE\n"
    ),
    "a client at work": same(
        *(identify(**ABOUT) + b"SUB T c\nRDY 3\nMPUB T\n" + batch(*[b"%d" % n for n in range(6)]), 6),
        *(b"FIN {0}\n", 1, b"REQ {1} 3600000\n", 1, pub(b"x"), 1),
        settles(depth=2, in_flight_count=3, deferred_count=1, message_count=7),
        *(ask("GET", STATS), ask("GET", TEXT), b"NOPE\n"),
    ),
    "a client that is closing": same(
        identify(**ABOUT) + b"SUB T c\nCLS\n", 3, ask("GET", STATS), ask("GET", TEXT), b"NOPE\n"
    ),
    "producers and consumers": same(
        *(identify(**ABOUT) + b"SUB T c\n", 2, client("b"), identify(**ABOUT) + pub(b"x", b"y"), 3),
        *(settles(depth=2), ask("GET", STATS), ask("GET", TEXT), b"NOPE\n", client(""), b"NOPE\n"),
    ),
    "deferred messages without a channel": differs(
        "stats-deferred",
        *(pub(b"x") + b"DPUB T 3600000\n" + pack(">i", 1) + b"y", 2, waiting, b"NOPE\n"),
        here=["OK", "OK", "error E_INVALID invalid command NOPE", "depth 1, deferred 1"],
    ),
    "a producer of two topics": differs(
        "stats-pub-counts",
        *(identify(**ABOUT) + pub(b"x", b"y") + pub(b"z", topic=b"T.other"), 4, producers, b"NOPE\n"),
        here=[
            "OK",
            "OK",
            "OK",
            "OK",
            "error E_INVALID invalid command NOPE",
            "it: [('T', 2), ('T.other', 1)]",
        ],
    ),
    "a client with all its options": same(
        negotiate(sample_rate=99, heartbeat_interval=60000, msg_timeout=5000, **ABOUT)
        + b"SUB T c\nRDY 2500\n",
        *(2, settles(client_count=1), ask("GET", STATS), ask("GET", TEXT), b"NOPE\n"),
    ),
    "a client with snappy": same(
        *(
            negotiate(snappy=True, **ABOUT),
            1,
            snappy_on,
            1,
            b"SUB T c\n",
            1,
            ask("GET", STATS),
            ask("GET", TEXT),
            b"NOPE\n",
        ),
    ),
    "a client with TLS 1.2 and deflate": same(
        *(
            negotiate(tls_v1=True, deflate=True, **ABOUT),
            1,
            tls(version=TLS_1_2),
            1,
            deflate_on,
            1,
            b"SUB T c\n",
            1,
        ),
        *(ask("GET", STATS), ask("GET", TEXT), b"NOPE\n"),
    ),
    "a client with TLS": differs(
        "tls-suite",
        *(negotiate(tls_v1=True, **ABOUT), 1, tls(), 1, b"SUB T c\n", 1, suites, b"NOPE\n"),
        here=[
            reply(tls_v1=True),
            "(TLSv1.3)",
            "OK",
            "OK",
            "error E_INVALID invalid command NOPE",
            "TLS1.3, TLS_AES_256_GCM_SHA384",
        ],
    ),
    "plain HTTP to the HTTPS port": differs(
        "https-plain", raw_http(b"GET /ping HTTP/1.1\r\n" + CLOSE, to_https=True), here=["(end)"]
    ),
    "memory": same(made, ask("GET", "/stats?format=json&topic=T"), ask("GET", "/stats?topic=T")),
}
"""Scripts for brokers with a certificate and e2e percentiles."""
