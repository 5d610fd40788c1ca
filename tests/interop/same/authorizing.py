"""Scripts for AUTH. Each broker has an auth server whose response depends on the last word of the secret."""

import json
from collections import Counter
from collections.abc import Callable
from struct import pack
from typing import Any

from broker.auth_server import answer, authorization
from interop.same.lines import COMMANDS
from interop.same.stage import (
    END,
    Script,
    batch,
    differs,
    identify,
    negotiate,
    post,
    pub,
    same,
    sized,
    tls,
    wait,
)
from trio_nsq.http.messages import Request, Response

SUB = b"SUB T c\n"
MPUB = b"MPUB T\n" + batch(b"x")
DPUB = b"DPUB T 0\n" + sized(b"x")
EVERYTHING = authorization()
NOTHING = answer()


def auth(secret: bytes) -> bytes:
    return b"AUTH\n" + sized(secret)


def plain(text: str, status: int = 200, content_type: str = "application/json") -> Response:
    return Response(status, text.encode(), content_type)


def changed(**fields: Any) -> Response:
    """Return a response that permits everything, with these fields changed; None removes a field."""
    whole = {"ttl": 3600, "identity": "me", "identity_url": "http://me", "authorizations": [EVERYTHING]}
    return Response.json({name: value for name, value in (whole | fields).items() if value is not None})


def allows(
    topic: str = ".*", channels: Any = (".*",), permissions: Any = ("subscribe", "publish")
) -> Response:
    return changed(authorizations=[{"topic": topic, "channels": channels, "permissions": permissions}])


ANSWERS: dict[str, Response | list[Response]] = {
    # last word of the secret: the response, or a sequence of responses
    "everything": answer(EVERYTHING, identity="me", identity_url="http://me"),
    "twice": answer(EVERYTHING, EVERYTHING),
    "publish": answer(authorization(".*", ".*", "publish")),
    "subscribe": answer(authorization(".*", ".*", "subscribe")),
    "channel": answer(authorization(".*", "c")),
    "channels": allows(channels=["x", "c", ".*y"]),
    "elsewhere": answer(authorization("elsewhere", ".*")),
    "both": answer(authorization("elsewhere", ".*"), authorization(".*", "d", "subscribe")),
    "anchored": answer(authorization("^topic[0-9]+$", "^c$")),
    "part": answer(authorization("opi", ".*")),
    "channel-part": answer(authorization(".*", "elf")),
    "flags": answer(authorization("(?i)TOPIC.*", ".*")),
    "class": answer(authorization(r"[[:alpha:]]+\d+", ".*")),
    "nothing": NOTHING,
    "null": plain('{"ttl":3600,"authorizations":null}'),
    "no-list": plain('{"ttl":3600}'),
    "no-permissions": allows(permissions=[]),
    "null-permissions": allows(permissions=None),
    "no-channels": allows(channels=[]),
    "null-channels": allows(channels=None),
    "ttl-0": changed(ttl=0),
    "ttl-negative": changed(ttl=-1),
    "ttl-missing": changed(ttl=None),
    "ttl-text": changed(ttl="3600"),
    "ttl-fraction": changed(ttl=0.5),
    "permission": allows(permissions=["subscribe", "root"]),
    "manager": allows(permissions=["subscribe", "manage"]),
    "topic-pattern": allows(topic="["),
    "channel-pattern": allows(channels=["c", "("]),
    "lookahead": allows(topic="(?=t).*"),
    "backreference": allows(topic=r"(t)\1*.*"),
    "no-json": plain("{"),
    "empty": plain(""),
    "list": plain("[]"),
    "null-answer": plain("null"),
    "keys": plain(
        '{"TTL":3600,"Identity":"me","AUTHORIZATIONS":[{"Topic":".*","CHANNELS":[".*"],"permissions":["publish"]}]}'
    ),
    "unknown": changed(other={"deep": [1.5, None]}),
    "identity": changed(identity='<a&"b\\\u2028\u00e9\U0001f600>', identity_url="\t"),
    "identity-number": changed(identity=5),
    "text": plain(json.dumps({"ttl": 3600, "authorizations": [EVERYTHING]}), content_type="text/plain"),
    "201": plain(json.dumps({"ttl": 3600, "authorizations": [EVERYTHING]}), 201),
    "403": plain('{"message":"NO"}', 403),
    "500": plain("oops", 500),
    "long": changed(other="x" * 1_100_000),
    "redirect": Response(302, headers={"Location": "/auth?secret=everything"}),
    "then-nothing": [changed(ttl=1), changed(authorizations=[])],
    "then-elsewhere": [changed(ttl=1), answer(authorization("elsewhere", ".*"))],
    "then-500": [changed(ttl=1), plain("oops", 500)],
    "then-everything": [changed(ttl=1), changed(ttl=3600), plain("oops", 500)],
}


def answering() -> Callable[[Request], Response]:
    """Return the handler of one auth server."""
    asked: Counter[str] = Counter()

    def respond(request: Request) -> Response:
        secret = request.query["secret"]
        answers = ANSWERS.get(secret.rpartition(" ")[2], NOTHING)
        if isinstance(answers, Response):
            return answers
        asked[secret] += 1
        return answers[min(asked[secret], len(answers)) - 1]

    return respond


OPEN = auth(b"the secret is everything")

BEFORE = {name: command for name, command in COMMANDS.items() if name != "AUTH"}

REFUSED = [
    "channel",
    "elsewhere",
    "both",
    "subscribe",
    "publish",
    "no-permissions",
    "null-permissions",
    "no-channels",
    "null-channels",
]
WORDS = [
    word
    for word in ANSWERS
    if not word.startswith("then-")
    and word not in ("part", "channel-part", "flags", "class", "anchored", "long", "redirect", "manager")
]

SCRIPTS: dict[str, Script] = (
    {f"{name} before AUTH": same(command + END) for name, command in BEFORE.items()}
    | {f"{name} after AUTH": same(OPEN + command + END) for name, command in BEFORE.items()}
    | {f"the answer {word!r}": same(auth(b"the secret is " + word.encode()) + END) for word in WORDS}
    | {
        f"{verb} with {word!r}": same(auth(b"the secret is " + word.encode()) + command + END)
        for word in (*REFUSED, "channels", "anchored", "flags", "class")
        for verb, command in (("SUB", SUB), ("PUB", pub(b"x")), ("MPUB", MPUB), ("DPUB", DPUB))
    }
    | {
        "IDENTIFY says so": same(negotiate() + OPEN + END),
        "IDENTIFY after AUTH": same(OPEN + identify() + pub(b"x") + END),
        "AUTH twice": same(OPEN + OPEN),
        "AUTH twice, the second too big": differs(
            "handshake-bytes",
            OPEN + b"AUTH\n" + pack(">i", 5242881),
            here=[
                '{"identity":"me","identity_url":"http://me","permission_count":1}',
                "error E_BAD_BODY AUTH body too big 5242881 > 65536",
            ],
        ),
        "AUTH after SUB": same(OPEN + SUB + OPEN),
        "AUTH with a parameter": same(b"AUTH everything\n" + sized(b"x")),
        "AUTH empty": same(auth(b"")),
        "AUTH too big": differs(
            "handshake-bytes",
            b"AUTH\n" + pack(">i", 5242881),
            here=["error E_BAD_BODY AUTH body too big 5242881 > 65536"],
        ),
        "a secret of any text": same(auth("%41+&=#?/ é\n\t\U0001f600\"'~ everything".encode()) + END),
        "a secret that is no text": same(auth(b"the secret is \xff\xfe\0 everything") + END),
        "a secret of 10 KB": same(auth(b"the secret is " + b"s" * 10_000 + b" everything") + END),
        "an answer of more than 1 MiB": differs(
            "auth-answer", auth(b"the secret is long") + END, here=["error E_AUTH_FAILED AUTH failed"]
        ),
        "an answer from elsewhere": differs(
            "auth-redirect", auth(b"the secret is redirect") + END, here=["error E_AUTH_FAILED AUTH failed"]
        ),
        "HTTP publishes without": differs(
            "auth-http",
            post("/pub?topic=T", b"x"),
            post("/mpub?topic=T", b"x"),
            here=['HTTP 401 {"message":"AUTH_REQUIRED"}'] * 2,
        ),
        # -- order of checks
        "PUB to a bad name before AUTH": same(b"PUB |\n"),
        "PUB of nothing before AUTH": same(b"PUB T\n" + sized(b"")),
        "DPUB at a bad time before AUTH": same(b"DPUB T x\n"),
        "DPUB of nothing before AUTH": same(b"DPUB T 0\n" + sized(b"")),
        "MPUB of nothing before AUTH": same(b"MPUB T\n" + batch()),
        "MPUB of nothing without the permission": differs(
            "mpub-auth",
            auth(b"the secret is subscribe") + b"MPUB T\n" + batch(),
            here=[
                '{"identity":"","identity_url":"","permission_count":1}',
                "error E_BAD_BODY MPUB invalid message count 0",
            ],
        ),
        "SUB without channel before AUTH": same(b"SUB T\n"),
        "SUB to a bad name before AUTH": same(b"SUB T |\n"),
        "SUB without heartbeats before AUTH": same(identify(heartbeat_interval=-1) + SUB),
        # -- patterns that match a part of a name
        "a pattern for a part of a topic": differs(
            "auth-patterns",
            auth(b"the secret is part") + pub(b"x") + END,
            here=[
                '{"identity":"","identity_url":"","permission_count":1}',
                'error E_UNAUTHORIZED AUTH failed for PUB on "T" ""',
            ],
        ),
        "an answer with a permission for HTTP": differs(
            "auth-permissions",
            auth(b"the secret is manager") + SUB + END,
            here=[
                '{"identity":"me","identity_url":"http://me","permission_count":1}',
                "OK",
                "error E_INVALID invalid command NOPE",
            ],
        ),
        "a pattern for a part of a channel": differs(
            "auth-patterns",
            auth(b"the secret is channel-part") + b"SUB T selfish\n" + END,
            here=[
                '{"identity":"","identity_url":"","permission_count":1}',
                'error E_UNAUTHORIZED AUTH failed for SUB on "T" "selfish"',
            ],
        ),
        # -- after the ttl expires
        "asked again: no more": same(
            auth(b"number 1 then-nothing") + pub(b"x"), 2, wait(1.1), pub(b"x") + END
        ),
        "asked again: not this": same(auth(b"number 3 then-elsewhere") + pub(b"x"), 2, wait(1.1), MPUB + END),
        "asked again: an error": same(auth(b"number 4 then-500") + pub(b"x"), 2, wait(1.1), DPUB + END),
        "asked again: still": same(
            auth(b"number 5 then-everything") + pub(b"x"), 2, wait(1.1), pub(b"x") + SUB + pub(b"x") + END
        ),
        "a subscription goes on": same(
            auth(b"number 2 then-nothing") + b"DPUB T 1600\n" + sized(b"x") + SUB + b"RDY 1\n",
            3,
            wait(1.1),
            1,
            b"FIN {0}\nNOP\n" + END,
        ),
    }
)

OVER_TLS: dict[str, Script] = {
    "AUTH over TLS": same(negotiate(tls_v1=True), 1, tls("client"), 1, OPEN + pub(b"x") + END),
    "AUTH over TLS with no certificate of ours": same(
        negotiate(tls_v1=True), 1, tls("stranger"), 1, OPEN + END
    ),
    "AUTH before TLS": same(OPEN),
}
"""Scripts for brokers with --tls-client-auth-policy=require."""
