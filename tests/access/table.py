"""The rules of every endpoint and command, as the documentation has them. Written by hand, not taken from the code."""

from typing import NamedTuple


class Row(NamedTuple):
    """What a request needs.

    Attributes:
        role: The role; `open`: none, also without authentication; `any`: any authenticated client.
        scope: Where: `topic`, `channel`, or `all` topics.
        body: The limit of its body: `64 KiB`, or the option that sets it.
    """

    role: str
    scope: str = "all"
    body: str = "64 KiB"


ENDPOINTS = {
    ("GET", "/ping"): Row("open"),
    ("GET", "/info"): Row("any"),
    ("GET", "/access"): Row("any"),
    ("GET", "/stats"): Row("any"),
    ("GET", "/metrics"): Row("read"),
    ("GET", "/config/{opt}"): Row("admin"),
    ("PUT", "/config/{opt}"): Row("admin", body="--max-msg-size"),
    ("POST", "/pub"): Row("publish", "topic", "--max-msg-size"),
    ("POST", "/mpub"): Row("publish", "topic", "--max-body-size"),
    ("POST", "/hpub"): Row("publish", "topic", "--max-body-size"),
    ("POST", "/channel/pub"): Row("publish", "topic", "--max-msg-size"),
    ("GET", "/topic/producer"): Row("publish", "topic"),
    ("POST", "/topic/producer/forget"): Row("publish", "topic"),
    ("POST", "/topic/create"): Row("manage", "topic"),
    ("POST", "/topic/delete"): Row("manage", "topic"),
    ("POST", "/topic/empty"): Row("manage", "topic"),
    ("POST", "/topic/pause"): Row("manage", "topic"),
    ("POST", "/topic/unpause"): Row("manage", "topic"),
    ("GET", "/topic/settings"): Row("read", "topic"),
    ("PUT", "/topic/settings"): Row("manage", "topic"),
    ("GET", "/topic/move"): Row("manage", "topic"),
    ("POST", "/topic/move/begin"): Row("manage", "topic"),
    ("POST", "/topic/move/next"): Row("manage", "topic"),
    ("POST", "/topic/move/end"): Row("manage", "topic"),
    ("POST", "/topic/move/store"): Row("publish", "topic", "--max-body-size"),
    ("GET", "/topic/read"): Row("read", "topic"),
    ("GET", "/topic/bounds"): Row("read", "topic"),
    ("GET", "/definitions"): Row("any"),
    ("POST", "/channel/disconnect"): Row("manage", "channel"),
    ("POST", "/channel/create"): Row("manage", "channel"),
    ("POST", "/channel/delete"): Row("manage", "channel"),
    ("POST", "/channel/empty"): Row("manage", "channel"),
    ("POST", "/channel/pause"): Row("manage", "channel"),
    ("POST", "/channel/unpause"): Row("manage", "channel"),
    ("GET", "/channel/settings"): Row("read", "channel"),
    ("PUT", "/channel/settings"): Row("manage", "channel"),
    ("GET", "/channel/peek"): Row("read", "channel"),
    ("POST", "/channel/seek"): Row("manage", "channel"),
    ("GET", "/channel/deferred"): Row("read", "channel"),
    ("GET", "/channel/deferred/counts"): Row("read", "channel"),
    ("POST", "/channel/deferred/cancel"): Row("manage", "channel"),
    ("GET", "/dead_letters"): Row("read", "topic"),
    ("GET", "/dead_letters/messages"): Row("read", "topic"),
    ("POST", "/dead_letters/requeue"): Row("manage", "topic"),
    ("POST", "/dead_letters/drop"): Row("manage", "topic"),
    ("GET", "/jobs"): Row("any"),
    ("PUT", "/jobs/{id}"): Row("any", body="4 KiB"),
    ("GET", "/cluster"): Row("read"),
    ("GET", "/cluster/member"): Row("any"),
    ("POST", "/cluster/switch"): Row("admin"),
    ("POST", "/cluster/remove"): Row("admin"),
    ("POST", "/cluster/promote"): Row("admin"),
    ("GET", "/cluster/replicate"): Row("replicate"),
    ("GET", "/cluster/forward"): Row("replicate"),
    ("GET", "/debug"): Row("admin"),
    ("GET", "/debug/tasks"): Row("admin"),
    ("GET", "/debug/profile"): Row("admin"),
    ("GET", "/debug/memory"): Row("admin"),
    ("POST", "/debug/freememory"): Row("admin"),
    ("GET", "/debug/pprof"): Row("admin"),
    ("GET", "/debug/pprof/{profile}"): Row("admin"),
    ("POST", "/debug/pprof/{profile}"): Row("admin"),
    ("PUT", "/debug/setblockrate"): Row("admin"),
}
"""Every endpoint of the broker."""

COMMANDS = {
    "IDENTIFY": Row("open"),
    "AUTH": Row("open"),
    "NOP": Row("open"),
    "PUB": Row("publish", "topic"),
    "MPUB": Row("publish", "topic"),
    "DPUB": Row("publish", "topic"),
    "HPUB": Row("publish", "topic"),
    "PRODUCER": Row("publish", "topic"),
    "SUB": Row("consume", "channel"),
    # Only after SUB.
    "RDY": Row("consume", "channel"),
    "FIN": Row("consume", "channel"),
    "REQ": Row("consume", "channel"),
    "TOUCH": Row("consume", "channel"),
    "CLS": Row("consume", "channel"),
}
"""Every command of the TCP protocol."""
