"""The audit logs of members: who changed the leadership, and which member is meant."""

from pathlib import Path

from broker.audit_lines import line, lines_of
from cluster.running import running_members
from console.access_support import auth_file


async def test_promote_switch_and_remove_are_recorded_with_the_member_and_the_name(tmp_path: Path) -> None:
    path, file = tmp_path / "audit", auth_file(tmp_path)
    async with running_members(tmp_path, "static:") as members:
        one = await members.start("one", auth_file=file.path, audit_log=str(path))
        one.client.headers["Authorization"] = "Bearer admin-secret"
        for client, status in (("reader", 403), ("admin", 200), ("admin", 409)):
            headers = {"Authorization": f"Bearer {client}-secret"}
            assert (await one.client.post("/cluster/promote", headers=headers)).status_code == status
            if status == 200:
                await one.leads()
        itself = (await one.about())["id"]
        for target, status in (
            ("switch?to=x", 409),
            ("remove?member=x", 409),
            (f"remove?member={itself}", 409),
        ):
            assert (await one.client.post(f"/cluster/{target}")).status_code == status
    promote = {"action": "POST /cluster/promote"}
    refused = {"status": 409, "error": "REFUSED"}
    assert lines_of(path) == [
        line("refused", "reader", **promote, status=403, error="FORBIDDEN"),
        line("action", "admin", **promote, status=200),
        line("action", "admin", **promote, **refused),
        line("action", "admin", action="POST /cluster/switch", to="x", **refused),
        line("action", "admin", action="POST /cluster/remove", member="x", **refused),
        line("action", "admin", action="POST /cluster/remove", member=itself, **refused),
    ]
