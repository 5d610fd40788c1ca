"""Consumers are disconnected on the page of their channel."""

from console.acting import Site
from fleet.support import subscribed, wait_until


def test_all_consumers_of_a_channel_are_disconnected(site: Site) -> None:
    for broker in site.fleet.brokers:
        broker.create("leaves", "c")
    one = site.fleet.ours[0]
    with subscribed(one, "leaves", "c"):
        wait_until(lambda: "/topics/leaves/c/disconnect" in site.get("/topics/leaves/c").html, "it is shown")
        page = site.get("/topics/leaves/c/disconnect")
        addresses = ",".join(each.http_address for each in site.fleet.ours)
        assert page.command == f"qcli channel disconnect leaves/c --all --nsqd-http-address {addresses}"
        done = site.send(page)
        assert "All consumers of channel leaves/c disconnected" in done.text
        assert f"{one.http_address} : 1 consumer disconnected" in done.text
        wait_until(lambda: one.channel_stats("leaves", "c")["client_count"] == 0, "it is disconnected")


def test_one_consumer_is_disconnected(site: Site) -> None:
    one, two = site.fleet.ours
    for broker in (one, two):
        broker.create("one-leaves", "c")
    with subscribed(one, "one-leaves", "c") as address, subscribed(one, "one-leaves", "c"):
        wait_until(lambda: address in site.get("/topics/one-leaves/c").text, "it is shown")
        path = f"/topics/one-leaves/c/disconnect?client={address}&broker={one.http_address}"
        page = site.get(path)
        assert page.command == (
            f"qcli channel disconnect one-leaves/c --client {address} --nsqd-http-address {one.http_address}"
        )
        assert f"The consumer {address} of channel one-leaves/c disconnected" in site.send(page).text
        wait_until(lambda: one.channel_stats("one-leaves", "c")["client_count"] == 1, "it is disconnected")
        assert "Failed: the consumer" in site.send(page).text
        elsewhere = site.get(f"/topics/one-leaves/c/disconnect?client={address}&broker=127.0.0.1:1")
        assert elsewhere.status == 404
