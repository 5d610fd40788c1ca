"""A console that masks fields of bodies, for those who may see them and those who may not."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from access.support import ALL_ROLES, AuthFile, everything
from console.access_support import guarded_broker, running_console

SECRET = "4111-9999-tops3cret"
BODY = json.dumps({"card": SECRET, "level": "error", "user": {"email": SECRET}}).encode()
BODIES = """
[[topic]]
name = "clicks"
mask = ["card", "user.email"]
"""


@asynccontextmanager
async def masked_site(folder: Path, bodies: list[bytes]) -> AsyncIterator[tuple[Any, Any]]:
    """Run a console that masks fields of the topic `clicks`, with these messages in it."""
    file = AuthFile(folder / "auth.toml")
    file.add_token("console", everything("read"))
    file.add_token("admin", everything(*ALL_ROLES))
    file.add_token("reader", everything(*(role for role in ALL_ROLES if role != "unmask")))
    file.write()
    (folder / "bodies.toml").write_text(BODIES)
    async with guarded_broker(folder, auth_file=file.path) as broker:
        root = f"http://{broker.http_address}"
        async with httpx.AsyncClient(
            base_url=root, headers={"Authorization": "Bearer admin-secret"}, timeout=30
        ) as api:
            for path in (
                "/channel/create?topic=clicks&channel=c",
                "/topic/create?topic=dead",
                "/channel/create?topic=dead&channel=dead-letters",
            ):
                assert (await api.post(path)).status_code == 200
            for body in bodies:
                assert (await api.post("/pub?topic=clicks", content=body)).status_code == 200
            assert (await api.post("/pub?topic=clicks&defer=3600000", content=bodies[0])).status_code == 200
            assert (await api.post("/pub?topic=dead", content=bodies[0])).status_code == 200
        async with running_console(folder, broker, bodies_file=folder / "bodies.toml") as site:
            yield site, broker


def leaks(text: str) -> bool:
    """Whether the secret is in a text, also in hexadecimal digits or base64."""
    plain = text.replace(" ", "").replace("\n", "")
    return "tops3cret" in text or b"tops3cret".hex() in plain or "dG9wczNjcmV0" in plain
