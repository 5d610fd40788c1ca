"""Tests for `qcli cluster`, and for clusters in `nodes` and `stat`, with members that answer as the test says."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from cli.completing import ask
from cli.screens import ScreenReader
from cli.scripted_member import (
    ALONE,
    IDS,
    STATS,
    ScriptedMember,
    about_itself,
    cluster,
    member,
    scripted_member,
)
from cli.support import Cli, CliHere, Result, Run
from interop.peers import Broker

DEAD = "127.0.0.1:1"


@pytest.fixture
def start() -> Iterator[Callable[[], ScriptedMember]]:
    """Starts members."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(scripted_member())


@pytest.fixture
def one(start: Callable[[], ScriptedMember]) -> ScriptedMember:
    return start()


@pytest.fixture
def qcli(one: ScriptedMember, run_here: Run) -> Cli:
    """Runs commands with the address of the member."""
    return CliHere(DEAD, one.address, run=run_here)


def rows(result: Result) -> list[list[str]]:
    """The cells of the table of members, where a cell has at most one blank between words."""
    table = result.out.decode().partition("\n\n")[2]
    return [[cell for cell in line.split("  ") if cell] for line in table.splitlines()]


# ---------------------------------------------------------------------- status


def test_status_of_a_cluster_that_is_well(qcli: Cli) -> None:
    result = qcli("cluster", "status")
    assert (result.code, result.err) == (0, "")
    head = result.out.decode().partition("\n\n")[0].splitlines()
    assert [line.split(maxsplit=1)[0] for line in head] == [
        *("cluster", "leader", "epoch", "coordinator", "in", "publishes")
    ]
    assert head[0].split() == ["cluster", "prod"]
    assert head[1].split(maxsplit=1)[1] == f"{IDS[0]} (10.0.0.0:4151)"
    assert "3 of 3 members" in head[4]
    headings, *found = rows(result)
    assert [each.strip() for each in headings][:3] == ["member", "address", "state"]
    assert [[cell.strip() for cell in row][:4] for row in found] == [
        [IDS[0], "10.0.0.0:4151", "leading", "yes"],
        [IDS[1], "10.0.0.1:4151", "in sync", "yes"],
        [IDS[2], "10.0.0.2:4151", "in sync", "yes"],
    ]


@pytest.mark.parametrize(
    ("answer", "problem", "shown"),
    [
        (
            cluster(
                member(0, "leading"),
                member(1, "catching up", lag_operations=12_345, lag_bytes=3 << 30, lag_s=61.5),
            ),
            f"the member {IDS[1]} (10.0.0.1:4151) is catching up, and lacks 12,345 operations",
            "catching up",
        ),
        (
            cluster(member(0, "leading"), member(2, "disconnected", since=0)),
            f"the member {IDS[2]} (10.0.0.2:4151) is disconnected",
            "disconnected",
        ),
        # It is still recorded as in sync, and OKs wait for it.
        (
            cluster(member(0, "leading"), member(2, "disconnected", in_sync=True)),
            f"the member {IDS[2]} (10.0.0.2:4151) is disconnected",
            "disconnected",
        ),
        (
            cluster(member(0, "leading"), member(1, "in sync", in_sync=False)),
            f"the member {IDS[1]} (10.0.0.1:4151) is not recorded as in sync at the coordinator yet, so it cannot be "
            "elected",
            " no ",
        ),
        (
            cluster(coordinator_error="connection refused"),
            "the coordinator does not answer: connection refused",
            "etcd://10.0.0.20:2379 does not answer: connection refused",
        ),
        (
            cluster(min_in_sync=2, refuses_because="1 of 2 members is in sync"),
            "publishes are refused: 1 of 2 members is in sync",
            "3 of 3 members, at least 2 for publishes",
        ),
    ],
)
def test_status_is_a_failure_if_something_is_wrong(
    qcli: Cli, one: ScriptedMember, answer: dict[str, Any], problem: str, shown: str
) -> None:
    one.say("GET /cluster", answer)
    result = qcli("cluster", "status")
    assert (result.code, result.err) == (1, "")
    assert shown in result.out.decode()
    (record,) = qcli("cluster", "status", "--format", "json").records
    assert record["problems"] == [problem]
    # `nodes --check` checks the same.
    checked = qcli("nodes", "--check", "--format", "json")
    assert checked.code == 1
    assert [(each["check"], each["about"], each["problem"]) for each in checked.records] == [
        ("cluster", "prod", problem)
    ]


def test_lag_of_a_member_that_catches_up(qcli: Cli, one: ScriptedMember) -> None:
    lags = {"lag_operations": 12_345, "lag_bytes": 3 << 30, "lag_s": 61.5}
    one.say(
        "GET /cluster",
        cluster(member(0, "leading"), member(1, "catching up", **lags), member(2, "disconnected")),
    )
    _, _, catching_up, gone = rows(qcli("cluster", "status"))
    assert [each.strip() for each in catching_up[4:7]] == ["12k", "3.0G", "1m01s"]
    assert [each.strip() for each in gone[:4]] == [IDS[2], "10.0.0.2:4151", "disconnected", "no"]
    assert len(gone) == 5  # without numbers that nobody knows


def test_status_as_json_is_the_answer_of_the_leader(qcli: Cli, one: ScriptedMember) -> None:
    (record,) = qcli("cluster", "status", "--format", "json").records
    more: dict[str, Any] = {"reason": None, "problems": [], "diverged": {}, "answered_by": one.address}
    assert record == cluster() | more


@pytest.mark.parametrize("status", [None, 503])
def test_status_without_a_leader_is_what_the_member_says(
    qcli: Cli, one: ScriptedMember, status: int | None
) -> None:
    if status is None:
        one.say("GET /cluster/member", ALONE)
        reason = "no member was elected yet"
    else:
        one.say(
            "GET /cluster/member", about_itself(is_following=False, reason="leader X: connection refused")
        )
        one.refuse("GET /cluster", status, "NO_LEADER: try again")
        reason = "leader X: connection refused"
    result = qcli("cluster", "status")
    assert result.code == 3
    shown = dict(line.split(maxsplit=1) for line in result.out.decode().splitlines())
    leader = "none" if status is None else f"{IDS[0]}, which does not answer"
    assert (shown["cluster"], shown["leader"], shown["reason"]) == ("prod", leader, reason)
    text = f"The leader of the cluster prod, {IDS[0]}, does not serve its member at {one.address}"
    if status is None:
        text = f"The cluster prod has no leader, as its member at {one.address} says"
    assert result.err == f"Error: {text}: {reason}.\n"
    (record,) = qcli("cluster", "status", "--format", "json").records
    assert (record["leader"], record["reason"], record["members"][0]["id"]) == (None, reason, IDS[1])
    if status is None:
        assert "GET /cluster" not in one.seen, "it would be waited for"


def test_status_without_a_leader_and_an_engine_names_the_command(qcli: Cli, one: ScriptedMember) -> None:
    one.say("GET /cluster/member", ALONE | {"coordinator": "static:10.0.0.0:4151"})
    assert qcli("cluster", "status").err.endswith("If the leader is lost, see 'qcli cluster promote'.\n")


def test_status_with_several_addresses_needs_one_that_answers(
    run_here: Run, one: ScriptedMember, start: Callable[[], ScriptedMember]
) -> None:
    without_leader = start()
    without_leader.say("GET /cluster/member", ALONE)
    for order in ((DEAD, without_leader.address, one.address), (one.address, without_leader.address, DEAD)):
        result = run_here(Cli(DEAD, ",".join(order)), "cluster", "status")
        assert result.code == 0
        assert result.out.decode().count("cluster") == 1
        assert result.err == f"Warning: No broker answers at {DEAD}: connection refused.\n"


def test_status_of_several_clusters(
    run_here: Run, one: ScriptedMember, start: Callable[[], ScriptedMember]
) -> None:
    other = start()
    other.say("GET /cluster/member", about_itself(cluster="a"))
    other.say("GET /cluster", cluster(cluster="a", coordinator_error="down"))
    both = Cli(DEAD, f"{one.address},{other.address}")
    result = run_here(both, "cluster", "status", "--format", "json")
    assert [each["cluster"] for each in result.records] == ["a", "prod"]
    assert result.code == 1
    refused = run_here(both, "cluster", "switch", "--yes")
    assert refused.err == ("Error: The addresses are of several clusters: a and prod. Name members of one.\n")
    assert not one.changes + other.changes


def test_broker_that_is_no_member(run_here: Run, broker: Broker, one: ScriptedMember) -> None:
    one.refuse(
        "GET /cluster/member", 404, "NO_CLUSTER: this broker is not a member of a cluster; see --cluster"
    )
    for command in (
        ["status"],
        ["switch", "--yes"],
        ["promote", "--yes"],
        ["remove", "x", "--yes"],
        ["wait"],
    ):
        result = run_here(Cli(DEAD, one.address), "cluster", *command)
        assert (result.code, result.out) == (1, b""), command
        assert f"The broker at {one.address} is not a member of a cluster" in result.err
    one.refuse("GET /cluster/member", 404, "NOT_FOUND")
    result = run_here(Cli(DEAD, one.address), "cluster", "status")
    assert "cannot be a member of a cluster: it is an nsqd, or an older 'qcli serve'" in result.err


def test_secret_without_the_role(qcli: Cli, one: ScriptedMember) -> None:
    one.refuse("GET /cluster", 403, "FORBIDDEN: this needs the role read on all topics")
    result = qcli("cluster", "status")
    assert (result.code, result.out) == (1, b"")
    assert "your secret does not have the role read on all topics" in result.err


# ---------------------------------------------------------------------- switch


def switched(one: ScriptedMember, leader: int = 1, **values: Any) -> None:
    """Let another member lead after the second request: the first one is made before the switch."""
    one.say("POST /cluster/switch", {"to": IDS[1]})
    one.say(
        "GET /cluster",
        cluster(),
        cluster(),
        cluster(member(0), member(1, "leading"), leader=IDS[leader], epoch=8, **values),
    )


@pytest.mark.parametrize(
    "to", [None, IDS[1], "9b1c", "10.0.0.1:4151", "http://10.0.0.1:4151", "10.0.0.1:4150"]
)
def test_switch(qcli: Cli, one: ScriptedMember, to: str | None) -> None:
    switched(one)
    result = qcli("cluster", "switch", *([] if to is None else [to]), "--yes")
    assert (result.code, result.out) == (0, b"")
    assert result.err.startswith(f"{IDS[1]} (10.0.0.1:4151) leads the cluster prod, epoch 8, after ")
    assert one.changes == ["/cluster/switch" if to is None else f"/cluster/switch?to={IDS[1]}"]


def test_switch_waits_while_there_is_no_leader(qcli: Cli, one: ScriptedMember) -> None:
    switched(one)
    one.say("GET /cluster/member", about_itself(), ALONE, ALONE, about_itself())
    assert qcli("cluster", "switch", "--yes").code == 0
    assert one.seen.count("GET /cluster/member") > 4


def test_switch_after_which_another_member_leads(qcli: Cli, one: ScriptedMember) -> None:
    switched(one, leader=0)
    result = qcli("cluster", "switch", "--yes")
    assert result.code == 1
    assert f"{IDS[0]} (10.0.0.0:4151) leads the cluster prod, not {IDS[1]}" in result.err


def test_switch_after_which_no_other_member_leads(qcli: Cli, one: ScriptedMember) -> None:
    one.say("POST /cluster/switch", {"to": IDS[1]})
    result = qcli("cluster", "switch", "--yes", "--timeout", "1ms")
    assert result.code == 3
    assert result.err == (
        "Error: The switch was requested, and no other member leads yet. "
        f"{IDS[0]} (10.0.0.0:4151) still leads.\n"
    )


def test_switch_that_the_leader_refuses(qcli: Cli, one: ScriptedMember) -> None:
    one.refuse("POST /cluster/switch", 409, "REFUSED: no other member is connected and in sync")
    result = qcli("cluster", "switch", "--yes")
    assert (result.code, result.err) == (
        1,
        "Error: Nothing was changed: no other member is connected and in sync.\n",
    )


@pytest.mark.parametrize(
    ("to", "error"),
    [
        ("9b", f"Error: 9b may be {IDS[1]} or {IDS[2]}: write more of the id.\n"),
        ("none", "Error: The cluster prod has no member none. Its members: "),
    ],
)
def test_members_that_cannot_be_meant(qcli: Cli, one: ScriptedMember, to: str, error: str) -> None:
    for command in ("switch", "remove"):
        result = qcli("cluster", command, to, "--yes")
        assert (result.code, one.changes) == (1, [])
        assert result.err.startswith(error)


def test_member_that_leads_already(qcli: Cli, one: ScriptedMember) -> None:
    result = qcli("cluster", "switch", IDS[0])
    assert (result.code, one.changes) == (0, [])
    assert result.err == f"{IDS[0]} (10.0.0.0:4151) leads the cluster prod already.\n"


def test_switch_without_a_leader(qcli: Cli, one: ScriptedMember) -> None:
    one.say("GET /cluster/member", ALONE)
    result = qcli("cluster", "switch", "--yes")
    assert (result.code, one.changes) == (3, [])
    assert "has no leader" in result.err


# ---------------------------------------------------------------------- confirmation


@pytest.mark.parametrize("command", [["switch"], ["remove", IDS[2]], ["promote"]])
def test_without_a_terminal_the_answer_must_be_given(
    qcli: Cli, one: ScriptedMember, command: list[str]
) -> None:
    result = qcli("cluster", *command)
    assert (result.code, one.changes) == (2, [])
    assert result.err.endswith("and standard input is not a terminal: confirm with --yes.\n")


@pytest.mark.parametrize("command", [["switch"], ["remove", IDS[2]]])
@pytest.mark.parametrize("answer", [b"n\n", b"\x04"])
def test_answer_is_no(qcli: Cli, one: ScriptedMember, command: list[str], answer: bytes) -> None:
    with qcli.on_terminal("cluster", *command, columns=200) as terminal:
        terminal.expect(b"[y/N]: ")
        terminal.type(answer)
        assert terminal.end() == 1
        assert b"Nothing was done." in terminal.shown
    assert one.changes == []


def test_promotion_needs_the_name_of_the_cluster(qcli: Cli, one: ScriptedMember) -> None:
    one.say("GET /cluster/member", ALONE)
    for answer in (b"y\n", b"\n", b"Prod\n", b"\x04"):
        with qcli.on_terminal("cluster", "promote", columns=300) as terminal:
            terminal.expect(b"Type the name of the cluster, prod, to promote it: ")
            terminal.type(answer)
            assert terminal.end() == 1
            assert b"Messages that only the lost leader had are lost." in terminal.shown
            assert b"it must not run" in terminal.shown
            assert b"Nothing was done." in terminal.shown
    assert one.changes == []


# ---------------------------------------------------------------------- promote


def leads_at_the_end(one: ScriptedMember, *before: dict[str, Any]) -> None:
    itself = about_itself(role="leader", epoch=8, leader=IDS[1], is_following=False)
    one.say("GET /cluster/member", *(before or (ALONE, ALONE)), itself)
    one.say("GET /cluster", cluster(member(0, "disconnected"), member(1, "leading"), leader=IDS[1], epoch=8))
    one.say("POST /cluster/promote", None)


def test_promotion_on_a_terminal(qcli: Cli, one: ScriptedMember) -> None:
    leads_at_the_end(one)
    with qcli.on_terminal("cluster", "promote", columns=300) as terminal:
        terminal.expect(b"to promote it: ")
        terminal.type(b"prod\n")
        assert terminal.end() == 0
        assert f"{IDS[1]} (10.0.0.1:4151) leads the cluster prod, epoch 8, after ".encode() in terminal.shown
    assert one.changes == ["/cluster/promote"]


def test_promotion_needs_no_leader(qcli: Cli, one: ScriptedMember) -> None:
    """Requests that a member passes on to the leader would wait for one."""
    leads_at_the_end(one)
    assert qcli("cluster", "promote", "--yes").code == 0
    assert one.changes == ["/cluster/promote"]
    assert not any("/info" in each for each in one.seen)


def test_promotion_waits_until_the_member_leads(qcli: Cli, one: ScriptedMember) -> None:
    leads_at_the_end(one, ALONE, about_itself())
    one.answers["GET /cluster"].insert(0, (200, cluster()))
    result = qcli("cluster", "promote", "--yes")
    assert result.err.startswith(f"{IDS[1]} (10.0.0.1:4151) leads the cluster prod, epoch 8, after ")


@pytest.mark.parametrize("command", ["promote", "switch"])
def test_member_is_asked_again_while_it_changes_its_role(
    qcli: Cli, one: ScriptedMember, command: str
) -> None:
    if command == "promote":
        leads_at_the_end(one)
    else:
        switched(one)
        one.say("GET /cluster/member", about_itself(), about_itself())
    busy = {"message": "NO_LEADER: the cluster has no leader that accepts clients now; try again"}
    one.answers["GET /cluster/member"][1:1] = [(503, busy), (503, busy)]
    result = qcli("cluster", command, "--yes")
    assert (result.code, len(one.changes)) == (0, 1)
    assert one.seen.count("GET /cluster/member") >= 4


def test_promotion_says_whether_the_member_was_in_sync(qcli: Cli, one: ScriptedMember) -> None:
    for in_sync, text in ((True, "was in sync."), (False, "was not in sync, and may lack messages.")):
        one.say("GET /cluster/member", ALONE | {"in_sync": in_sync})
        result = qcli("cluster", "promote")
        assert f"The member {IDS[1]} (10.0.0.1:4151) of the cluster prod {text}" in result.err


def test_promotion_of_the_leader(qcli: Cli, one: ScriptedMember) -> None:
    one.say("GET /cluster/member", about_itself(role="leader", leader=IDS[1]))
    result = qcli("cluster", "promote")
    assert (result.code, one.changes) == (0, [])
    assert result.err == f"{IDS[1]} (10.0.0.1:4151) leads the cluster prod already.\n"


def test_promotion_that_the_member_refuses(qcli: Cli, one: ScriptedMember) -> None:
    one.refuse(
        "POST /cluster/promote", 409, "REFUSED: this member follows a leader, which runs: stop that one first"
    )
    result = qcli("cluster", "promote", "--yes")
    assert result.code == 1
    assert "Nothing was changed: this member follows a leader, which runs: stop that one first." in result.err


def test_promotion_takes_exactly_one_address(run_here: Run, one: ScriptedMember) -> None:
    result = run_here(Cli(DEAD, f"{one.address},{DEAD}"), "cluster", "promote", "--yes")
    assert (result.code, one.seen) == (2, [])
    assert "this command takes one broker" in result.err


# ---------------------------------------------------------------------- remove, wait


def test_remove(qcli: Cli, one: ScriptedMember) -> None:
    one.say("GET /cluster", cluster(member(0, "leading"), member(2, "disconnected")))
    one.say("POST /cluster/remove", None)
    result = qcli("cluster", "remove", "10.0.0.2:4151", "--yes")
    assert (result.code, one.changes) == (0, [f"/cluster/remove?member={IDS[2]}"])
    assert result.err == f"{IDS[2]} (10.0.0.2:4151) removed from the cluster prod.\n"


def test_replaced_members_are_named_with_the_command_that_forgets_them(
    qcli: Cli, one: ScriptedMember
) -> None:
    """A member with an empty data folder is a new one, also at the address of the one before."""
    there = {"addresses": member(0)["addresses"]}
    gone = [member(1, "disconnected", **there), member(2, "disconnected", **there)]
    one.say("GET /cluster", cluster(member(0, "leading"), *gone))
    result = qcli("cluster", "status", "--format", "json")
    assert result.records[0]["problems"] == [
        f"the member {gone_id} (10.0.0.0:4151) is disconnected; {IDS[0]} has its address now: if the data "
        f"folder of {gone_id} is gone, forget it with 'qcli cluster remove {gone_id}'"
        for gone_id in IDS[1:3]
    ]
    command = f"qcli cluster remove {IDS[1]} {IDS[2]}"
    assert command in qcli("cluster", "status").out.decode()
    late = qcli("cluster", "wait", "--timeout", "1ms")
    assert late.err.endswith(f". Forget members that are gone with '{command}'.\n")
    one.say("POST /cluster/remove", None)
    result = qcli(*command.split()[1:], "--yes")
    assert (result.code, one.changes) == (0, [f"/cluster/remove?member={gone_id}" for gone_id in IDS[1:3]])
    assert result.err.count(" removed from the cluster prod.\n") == 2


def test_remove_asks_once(qcli: Cli, one: ScriptedMember) -> None:
    one.say(
        "GET /cluster", cluster(member(0, "leading"), member(1, "disconnected"), member(2, "disconnected"))
    )
    one.say("POST /cluster/remove", None)
    with qcli.on_terminal("cluster", "remove", IDS[1], IDS[2], columns=200) as terminal:
        terminal.expect(
            f"Remove {IDS[1]} (10.0.0.1:4151), which is disconnected, and {IDS[2]} (10.0.0.2:4151), which is "
            "disconnected, from the cluster prod? [y/N]: ".encode()
        )
        terminal.type(b"y\n")
        assert terminal.end() == 0
    assert len(one.changes) == 2


def test_remove_while_the_coordinator_does_not_answer(qcli: Cli, one: ScriptedMember) -> None:
    one.refuse("POST /cluster/remove", 503, "COORDINATOR: no endpoint answers")
    result = qcli("cluster", "remove", IDS[2], "--yes")
    assert (result.code, result.err) == (
        1,
        "Error: The coordinator of the cluster does not answer: no endpoint answers.\n",
    )


SOON = cluster(member(0, "leading"), member(1, "catching up"), member(2, "disconnected"))


def test_wait(qcli: Cli, one: ScriptedMember) -> None:
    one.say("GET /cluster/member", ALONE, about_itself())
    one.say(
        "GET /cluster", SOON, cluster(member(0, "leading"), member(1), member(2, "disconnected")), cluster()
    )
    result = qcli("cluster", "wait")
    assert (result.code, result.out) == (0, b"")
    assert result.err.startswith("3 of 3 members of the cluster prod are in sync, after ")


@pytest.mark.parametrize(("count", "code"), [("1", 0), ("2", 1), ("3", 1), ("4", 1)])
def test_wait_for_some_members(qcli: Cli, one: ScriptedMember, count: str, code: int) -> None:
    one.say("GET /cluster", SOON)
    assert qcli("cluster", "wait", "--members", count, "--timeout", "1ms").code == code


def test_wait_that_is_over(qcli: Cli, one: ScriptedMember, nowhere: Cli) -> None:
    one.say("GET /cluster", SOON)
    result = qcli("cluster", "wait", "--timeout", "1ms")
    assert (result.code, result.err) == (
        1,
        "Error: --timeout is over. 1 of 3 members of the cluster prod are in sync. Not in sync: "
        f"{IDS[1]} (10.0.0.1:4151) and {IDS[2]} (10.0.0.2:4151).\n",
    )
    one.say("GET /cluster/member", ALONE)
    assert qcli("cluster", "wait", "--timeout", "1ms").code == 3
    result = nowhere("cluster", "wait", "--timeout", "1ms")
    assert result.code == 3
    assert result.err.startswith(
        "Error: --timeout is over. No broker answers at 127.0.0.1:1: connection refused"
    )


# ---------------------------------------------------------------------- elsewhere


def test_members_are_completed(one: ScriptedMember) -> None:
    one.say("GET /cluster", cluster(member(0, "leading"), member(1), member(2, "disconnected")))
    qcli = Cli(DEAD, one.address)
    assert ask(qcli, "qcli cluster switch ") == [["plain", IDS[1], "10.0.0.1:4151"]]
    assert ask(qcli, "qcli cluster switch x") == []
    assert ask(qcli, "qcli cluster remove 9b") == [["plain", IDS[2], "10.0.0.2:4151"]]


@pytest.mark.parametrize(
    "itself", [ALONE, about_itself(is_following=False, reason="leader X: connection refused")]
)
def test_other_commands_say_why_a_member_does_not_answer(
    qcli: Cli, one: ScriptedMember, monkeypatch: pytest.MonkeyPatch, itself: dict[str, Any]
) -> None:
    monkeypatch.setattr("qcli.broker.admin_client.REQUEST_TIMEOUT_S", 0.1)
    monkeypatch.setattr("qcli.broker.admin_client.PROMPT_S", 60.0)
    one.keep_silent("GET /stats")
    one.say("GET /cluster/member", itself)
    text = f"The cluster prod has no leader, as its member at {one.address} says: {itself['reason']}."
    result = qcli("stat", "--once")
    assert (result.code, result.err) == (3, f"Error: {text} See 'qcli cluster status'.\n")
    checked = qcli("nodes", "--check")
    assert (checked.code, checked.out.decode().splitlines()[1]) == (3, f"reachable: {text}")
    # One that follows waits for something else.
    one.say("GET /cluster/member", about_itself())
    assert "connected, but no answer" in qcli("stat", "--once").err


def test_nodes_has_a_row_for_each_member(qcli: Cli, one: ScriptedMember) -> None:
    one.say("GET /cluster", cluster(member(0, "leading"), member(1, "catching up"), member(2)))
    found = [
        (each["kind"], each["address"], each["status"], each["cluster"], each["epoch"], each["role"])
        for each in qcli("nodes", "--format", "json").records
    ]
    assert found == [
        ("broker", one.address, "ok", "prod", 7, "leader"),
        ("member", "10.0.0.1:4151", "catching up", "prod", 7, "follower"),
        ("member", "10.0.0.2:4151", "in sync", "prod", 7, "follower"),
    ]
    lines = qcli("nodes").out.decode().splitlines()
    assert lines[0].split()[:4] == ["broker", "status", "role", "cluster"]
    assert lines[2].split() == ["10.0.0.1:4151", "catching", "up", "follower", "prod"]


def test_status_shows_what_the_members_that_are_asked_say(
    qcli: Cli, one: ScriptedMember, start: Callable[[], ScriptedMember]
) -> None:
    two = start()
    kept = [{"name": "diverged-3", "files": 2, "bytes": 9000}]
    one.say("GET /cluster", cluster(member(0, "leading"), member(1), member(2, "disconnected")))
    one.say("GET /cluster/member", about_itself(1, diverged=kept))
    full = "leader X: No space left on device"
    two.say("GET /cluster/member", about_itself(2, is_following=False, reason=full, diverged=[]))
    two.refuse("GET /cluster", 503, "NO_LEADER: the cluster has no leader")
    addresses = f"{one.address},{two.address}"
    result = qcli("cluster", "status", "--nsqd-http-address", addresses)
    head = result.out.decode().partition("\n\n")[0].splitlines()
    assert [line.split() for line in head[-2:]] == [
        [IDS[2], *full.split()],
        ["diverged", "diverged-3", "(8.7K)", "at", IDS[1]],
    ]
    result = qcli("cluster", "status", "--nsqd-http-address", addresses, "--format", "json")
    assert (result.code, result.records[0]["diverged"]) == (1, {IDS[1]: kept})


def test_status_of_a_leader_that_refuses_its_follower(qcli: Cli, one: ScriptedMember) -> None:
    reason = f"leader {IDS[0]} at http://10.0.0.0:4151: 403 FORBIDDEN"
    one.say("GET /cluster/member", about_itself(is_following=False, reason=reason))
    one.refuse("GET /cluster", 503, "NO_LEADER: the cluster has no leader")
    result = qcli("cluster", "status")
    text = f"The leader of the cluster prod, {IDS[0]}, does not serve its member at {one.address}: {reason}."
    assert (result.code, text in result.err) == (3, True)


def test_stat_names_the_cluster_of_a_broker(qcli: Cli, one: ScriptedMember) -> None:
    shown = qcli("stat", "--once").out.decode().splitlines()[-1]
    assert shown == f"{one.address}: cluster prod, leader, epoch 7, 2 of 3 in sync"


def test_nodes_shows_the_leader_at_its_address_if_a_follower_is_asked(qcli: Cli, one: ScriptedMember) -> None:
    here = member(1, addresses=[f"http://{one.address}"])
    one.say("GET /cluster", cluster(member(0, "leading"), here))
    found = [(each["address"], each["role"]) for each in qcli("nodes", "--format", "json").records]
    assert found == [("10.0.0.0:4151", "leader"), (one.address, "follower")]


def test_nodes_and_checks_of_a_broker_that_is_no_member(qcli: Cli, one: ScriptedMember) -> None:
    one.say("GET /stats", {name: value for name, value in STATS.items() if name != "cluster"})
    heading = qcli("nodes").out.decode().splitlines()[0]
    assert "role" not in heading
    assert "cluster" not in heading
    assert qcli("nodes", "--check").code == 0
    assert not any("/cluster" in each for each in one.seen)


def test_live_screen_names_the_cluster(one: ScriptedMember) -> None:
    with Cli(DEAD, one.address).on_terminal("stat", rows=24, columns=120) as terminal:
        screen = ScreenReader(terminal, 24, 120)
        lines = screen.wait(lambda lines: "topic/channel" in "".join(lines))
        assert lines[0].startswith(f"{one.address} (cluster prod, leader, epoch 7, 2 of 3 in sync)  ")
        terminal.type(b"q")
        terminal.end()
