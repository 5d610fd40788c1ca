"""Check that web pages in a real browser can neither change nor read our broker. They can change and read nsqd."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from interop.browser import attacker, visit
from interop.peers import Broker, nsqd, qcli_serve

pytestmark = pytest.mark.interop

Run = Callable[..., AbstractContextManager[Broker]]


def topics(broker: Broker) -> set[str]:
    """Return the names of the broker's topics."""
    stats = json.loads(broker.http("GET", "/stats", format="json"))
    return {topic["topic_name"] for topic in stats["topics"]}


def foreign_page(broker: Broker, profile: Path, host: str) -> dict[str, str]:
    """Attack the broker from a page of another origin, with `fetch` and with a form."""
    base = f"http://{broker.http_address}"
    script = f"""
      await attempt("delete", "{base}/topic/delete?topic=a", {{method: "POST", mode: "no-cors"}});
      await attempt("publish", "{base}/pub?topic=new", {{method: "POST", mode: "no-cors", body: "x"}});
      await submit("form", "{base}/topic/delete?topic=b");
      await attempt("read", "{base}/stats?format=json");
    """
    with attacker() as evil:
        return visit(evil, script, profile, host)


def rebound_page(broker: Broker, profile: Path) -> dict[str, str]:
    """Attack the broker from a page whose own host name was rebound to the broker's address."""
    script = """
      await attempt("read", "/stats?format=json");
      await attempt("delete", "/topic/delete?topic=a", {method: "POST"});
      const headers = {"Accept-Language": "", "User-Agent": "kube-probe/1.29", "Accept": ""};
      const hidden = {headers, referrerPolicy: "no-referrer", credentials: "omit", mode: "same-origin"};
      await attempt("read-hidden", "/stats?format=json", hidden);
      await attempt("ping-hidden", "/ping", hidden);
      await attempt("delete-hidden", "/topic/delete?topic=a", {...hidden, method: "POST"});
    """
    with attacker(broker.http_address) as evil:
        return visit(evil, script, profile)


@pytest.mark.parametrize("host", ["evil.test", "127.0.0.1"], ids=["other-site", "same-site"])
def test_foreign_page_cannot_change_our_broker(tmp_path: Path, host: str) -> None:
    with qcli_serve(tmp_path / "d") as broker:
        broker.create("a")
        broker.create("b")
        seen = foreign_page(broker, tmp_path / "profile", host)
        assert topics(broker) == {"a", "b"}
    assert (seen["delete"], seen["publish"], seen["form"]) == ("sent", "sent", "sent")
    assert "TypeError" in seen["read"]  # no CORS: the browser hides the response from the page


def test_foreign_page_can_change_nsqd(tmp_path: Path) -> None:
    with nsqd(tmp_path / "d") as broker:
        broker.create("a")
        broker.create("b")
        foreign_page(broker, tmp_path / "profile", "evil.test")
        assert topics(broker) == {"new"}


def test_page_with_rebound_name_can_neither_read_nor_change_our_broker(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "d") as broker:
        broker.create("a")
        seen = rebound_page(broker, tmp_path / "profile")
        assert topics(broker) == {"a"}
    assert [text[:3] for text in seen.values()] == ["403"] * 5, seen
    assert "HOST_NOT_ALLOWED" in seen["read"]


def test_page_with_rebound_name_can_read_and_change_nsqd(tmp_path: Path) -> None:
    with nsqd(tmp_path / "d") as broker:
        broker.create("a")
        seen = rebound_page(broker, tmp_path / "profile")
        assert topics(broker) == set()
    assert '"topic_name":"a"' in seen["read"]


def test_page_with_an_allowed_host_name_can_change_our_broker(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "d", "--http-allowed-host=evil.test") as broker:
        broker.create("a")
        assert rebound_page(broker, tmp_path / "profile")["delete"].startswith("200")
        assert topics(broker) == set()


def test_page_with_rebound_name_and_token_can_change_our_broker(tmp_path: Path) -> None:
    """A browser never adds a bearer token itself, so a request with a valid token is intentional."""
    from hashlib import sha256

    auth = tmp_path / "auth.toml"
    digest = sha256(b"ops").hexdigest()
    auth.write_text(
        f'[[token]]\nname = "ops"\nhash = "sha256:{digest}"\ngrants = [{{ roles = ["read", "manage"] }}]\n'
    )
    with qcli_serve(tmp_path / "d", f"--auth-file={auth}") as broker:
        script = """
          const headers = {Authorization: "Bearer ops"};
          await attempt("create", "/topic/create?topic=t", {method: "POST", headers});
          await attempt("without", "/topic/create?topic=t", {method: "POST"});
        """
        with attacker(broker.http_address) as page:
            seen = visit(page, script, tmp_path / "profile")
    assert seen["create"].startswith("200")
    assert seen["without"].startswith("403")
