"""kombu's messages as bodies of NSQ messages: JSON."""

import base64
import json
import math
import time
from datetime import datetime
from typing import Any

Raw = dict[str, Any]
"""What `kombu.transport.virtual.Message` takes."""


def encode(message: Raw) -> bytes:
    """Return the body for a message of kombu."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(body: bytes) -> Raw:
    """Return the message of a body. One that kombu has not published becomes a message with these bytes."""
    try:
        message = json.loads(body)
        objects = message["headers"], message["properties"], message["properties"]["delivery_info"]
        if all(isinstance(each, dict) for each in objects) and isinstance(message["body"], str):
            found: Raw = message
            return found
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return {
        "body": base64.b64encode(body).decode(),
        "content-type": "application/data",
        "content-encoding": "binary",
        "headers": {},
        "properties": {"body_encoding": "base64", "delivery_info": {"exchange": "", "routing_key": ""}},
    }


def wait_s(message: Raw) -> float:
    """Return the time until the ETA of a Celery task; 0 without one.

    An ETA without a time zone counts as none: Celery's worker knows the zone, and waits.
    """
    eta = (message.get("headers") or {}).get("eta")
    if not isinstance(eta, str):
        return 0.0
    try:
        due = datetime.fromisoformat(eta)
        if due.tzinfo is None:
            return 0.0
        left_s = due.timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
    return left_s if math.isfinite(left_s) and left_s > 0 else 0.0
