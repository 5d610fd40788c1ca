"""Tests for object stores that fail: requests without an answer, refusals, silence; and for leases and credentials."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark.support import until
from storage.stores import BUCKET, KEY, SECRET, Fault, Judge, Proxy, Store, proxy
from trio_nsq.protocol.errors import NSQError
from trio_nsq.spark.places import keep_secrets, storage_at
from trio_nsq.storage import (
    ChangedMeanwhile,
    LeaseLost,
    LocalStorage,
    StorageError,
    known_access,
    shown_place,
)
from trio_nsq.storage.lease import ObjectLease


class Held(NSQError):
    """Another process has the lease."""


@pytest.fixture
def broken(s3: Store) -> Iterator[Proxy]:
    """A proxy in front of the S3 server, which this process uses."""
    with proxy(s3) as running, s3.behind(running.endpoint).here():
        yield running


@pytest.fixture
def place(s3: Store) -> str:
    return s3.new_place()


def first(count: int, method: str, fault: Fault) -> Judge:
    """Return a judge with a fault for the first requests of a method."""
    left = [fault] * count
    return lambda asked, path: left.pop() if asked == method and left else None


# ---------------------------------------------------------------------- faults


@pytest.mark.parametrize("is_sent", [False, True], ids=["lost request", "lost answer"])
@pytest.mark.parametrize("status", [None, 500, 503], ids=["reset", "500", "503"])
def test_writes_are_repeated_and_recognized(
    broken: Proxy, place: str, is_sent: bool, status: int | None
) -> None:
    """A write that was applied without an answer is not taken for that of another process."""
    storage = storage_at(place)
    fault = Fault(is_sent=is_sent, status=status)
    broken.judge = first(1, "PUT", fault)
    assert storage.put_new("a", b"one")
    broken.judge = first(1, "PUT", fault)
    version = storage.replace("b", b"one", None)
    broken.judge = first(1, "PUT", fault)
    version = storage.replace("b", b"two", version)
    assert storage.read("b") == (b"two", version)
    broken.judge = first(1, "PUT", fault)
    with pytest.raises(ChangedMeanwhile):
        storage.replace("b", b"three", None)
    broken.judge = first(1, "PUT", fault)
    file = storage.create("c")
    file.write(b"x" * 3_000_000)
    assert file.publish()
    broken.judge = first(1, "PUT", fault)
    assert not storage.put_new("a", b"another one")
    assert [found.data for name in "ab" if (found := storage.read(name)) is not None] == [b"one", b"two"]


@pytest.mark.parametrize("status", [409, 412])
def test_a_conflict_with_another_request_is_repeated(broken: Proxy, place: str, status: int) -> None:
    storage = storage_at(place)
    for name, write in (
        ("a", lambda: storage.put("a", b"one")),
        ("b", lambda: storage.put_new("b", b"one")),
        ("c", lambda: storage.replace("c", b"one", None)),
    ):
        broken.judge = first(2, "PUT", Fault(status=status))
        write()
        found = storage.read(name)
        assert found is not None
        assert found.data == b"one"


def test_a_large_object_that_is_there_is_sent_once(broken: Proxy, place: str) -> None:
    """A store may refuse a large object before all of it is sent, and close the connection."""
    storage = storage_at(place)
    assert storage.put_new("a", b"x" * 3_000_000)
    file = storage.create("a")
    file.write(b"x" * 2_000_000)
    broken.requests.clear()
    broken.judge = lambda method, path: Fault() if method == "PUT" else None
    assert not file.publish()
    assert [each.partition(" ")[0] for each in broken.requests].count("PUT") == 1


def test_a_file_of_a_listing_is_opened_without_a_request(broken: Proxy, place: str) -> None:
    storage = storage_at(place)
    storage.put_new("a", b"0123456789")
    found = storage.files()
    assert isinstance(found, list)
    broken.requests.clear()
    with storage.open_file(found[0]) as file:
        assert (file.size(), broken.requests) == (10, [])
        assert file.read(4) == b"0123"
        storage.put("a", b"abcdefghij")
        with pytest.raises(StorageError, match="changed meanwhile"):
            file.read(2)


def test_reads_and_lists_are_repeated(broken: Proxy, place: str) -> None:
    storage = storage_at(place)
    storage.put_new("a/b", b"0123456789")
    for fault in (Fault(), Fault(is_sent=True), Fault(status=503)):
        broken.judge = first(2, "GET", fault)
        found = storage.read("a/b")
        assert found is not None
        broken.judge = first(2, "GET", fault)
        assert storage.names("a") == ["a/b"]
        with storage.open_input("a/b") as file:
            broken.judge = first(2, "GET", fault)
            assert file.read(4) == b"0123"


def test_half_of_a_listing_is_not_taken_for_all_of_it(broken: Proxy, place: str) -> None:
    storage = storage_at(place)
    names = [f"a/{number:04d}" for number in range(20)]
    for name in names:
        storage.put_new(name, b"")
    halves = [Fault(is_sent=True, cuts=True)]
    broken.judge = lambda method, path: halves.pop() if halves and "list-type" in path else None
    with pytest.raises(StorageError, match="cannot be listed"):
        storage.names("a")
    assert not halves
    assert sorted(storage.names("a")) == names


def test_a_silent_store_ends_in_one_sentence(broken: Proxy, place: str) -> None:
    broken.judge = lambda method, path: Fault()
    began_s = time.monotonic()
    with pytest.raises(StorageError) as caught:
        storage_at(place).read("a")
    assert time.monotonic() - began_s < 20
    assert f"the object {place}/a cannot be read: " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_read_notices_that_the_object_was_replaced(s3: Store, place: str) -> None:
    with s3.here():
        storage = storage_at(place)
        storage.put("a", b"0123456789")
        with storage.open_input("a") as file:
            assert file.read(2) == b"01"
            storage.put("a", b"abcdefghij")
            with pytest.raises(StorageError, match="changed meanwhile"):
                file.read(2)


# ---------------------------------------------------------------------- leases

HOLDER = """
import sys
from trio_nsq.storage import StorageError
from trio_nsq.spark.places import storage_at
storage = storage_at(sys.argv[1])
version = storage.replace("book", b"of the first", None)
with storage.hold("lock", StorageError) as lease:
    print("held", flush=True)
    sys.stdin.readline()
    try:
        lease.check()
        storage.replace("book", b"of the first again", version)
        print("written", flush=True)
    except StorageError as exc:
        print(type(exc).__name__, flush=True)
"""


@pytest.fixture
def holder(s3: Store, place: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Another process that holds a lease; it writes when it gets a line."""
    command = [sys.executable, "-c", HOLDER, place]
    env = os.environ | s3.env
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


def test_a_lease_has_one_holder(s3: Store, place: str, holder: "subprocess.Popen[bytes]") -> None:
    with s3.here():
        with pytest.raises(Held, match=f"process {holder.pid} on "), storage_at(place).hold("lock", Held):
            pass
        assert holder.communicate(b"\n")[0] == b"written\n"
        began_s = time.monotonic()
        with storage_at(place).hold("lock", Held) as lease:
            lease.check()
        assert time.monotonic() - began_s < 5  # it was released


def test_the_lease_of_a_killed_process_is_free(
    s3: Store, place: str, holder: "subprocess.Popen[bytes]"
) -> None:
    holder.kill()
    holder.wait()
    began_s = time.monotonic()
    with s3.here(), storage_at(place).hold("lock", Held) as lease:
        lease.check()
        assert time.monotonic() - began_s < 5


TAKER = """
import sys
from trio_nsq.storage import StorageError
from trio_nsq.spark.places import storage_at
try:
    with storage_at(sys.argv[1]).hold("lock", StorageError):
        print("taken")
except StorageError as exc:
    print(exc)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a /proc without /proc/sys")
def test_a_process_that_sees_little_of_the_machine_takes_no_lease(
    s3: Store, place: str, holder: "subprocess.Popen[bytes]"
) -> None:
    """As with ProcSubset=pid of systemd: what is not in /proc does not show that the holder has ended."""
    mounted = 'mount -t proc -o subset=pid proc /proc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mounted, "sh", sys.executable, "-c", TAKER, place]
    ran = subprocess.run(command, env=os.environ | s3.env, capture_output=True, check=True)
    assert ran.stdout.decode().startswith(f"process {holder.pid} on ")
    assert holder.communicate(b"\n")[0] == b"written\n"


def test_when_a_holder_has_ended(tmp_path: Path, s3: Store, place: str) -> None:
    with s3.here():
        storage = storage_at(place)
        with storage.hold("lock", Held):
            found = storage.read("lock")
    assert found is not None
    mine = json.loads(found.data) | {"token": "of another process"}
    local = LocalStorage(tmp_path)

    def is_free(**changes: object) -> bool:
        local.put("lock", json.dumps(mine | changes).encode())
        return ObjectLease(local, "lock").find_holder() is None

    with subprocess.Popen(["true"]) as ended:
        ended.wait()
        assert is_free(pid=ended.pid)
        assert not is_free(pid=ended.pid, machine="of another start")
    assert not is_free()
    assert is_free(started="another time")  # the number of a process that has ended is used again
    unknown: object
    for unknown in (None, "x", -(10**30), 10**30, [], 0):
        assert not is_free(pid=unknown)
    assert not is_free(machine=None)
    assert not is_free(machine=None, pid=ended.pid)


def test_a_process_that_slept_has_lost_its_lease(
    s3: Store, place: str, holder: "subprocess.Popen[bytes]"
) -> None:
    holder.send_signal(signal.SIGSTOP)
    with s3.here():
        storage = storage_at(place)
        with storage.hold("lock", Held) as lease:
            holder.send_signal(signal.SIGCONT)
            assert holder.communicate(b"\n")[0] == b"LeaseLost\n"
            lease.check()
        found = storage.read("book")
        assert found is not None
        assert found.data == b"of the first"


def test_a_lease_that_was_taken_over_is_lost(s3: Store, place: str) -> None:
    with s3.here():
        storage = storage_at(place)
        with storage.hold("lock", Held) as lease:
            storage.put("lock", json.dumps({"holder": "another one", "token": "x"}).encode())
            until(lambda: _is_lost(lease))


def test_a_lease_that_was_removed_is_not_called_taken_over(s3: Store, place: str) -> None:
    with s3.here():
        storage = storage_at(place)
        lease = ObjectLease(storage, "lock")
        assert lease.find_holder() is None
        assert lease.take()
        storage.remove(["lock"])
        with pytest.raises(LeaseLost, match=r"/lock, the lease of this process, was removed"):
            lease.renew()


def test_a_renewal_whose_answer_was_lost_keeps_the_lease(s3: Store, place: str) -> None:
    def about() -> dict[str, object]:
        found = storage.read("lock")
        assert found is not None
        return dict(json.loads(found.data))

    with s3.here():
        storage = storage_at(place)
        with storage.hold("lock", Held) as lease:
            storage.put("lock", json.dumps(about() | {"count": -1}).encode())
            until(lambda: about()["count"] != -1)
            lease.check()


def _is_lost(lease: object) -> bool:
    try:
        lease.check()  # type: ignore[attr-defined]
    except LeaseLost:
        return True
    return False


@pytest.mark.parametrize("header", ["if-none-match", "if-match"])
def test_a_store_that_ignores_conditions_is_refused(moto_s3: Store, header: str) -> None:
    with proxy(moto_s3) as server, moto_s3.behind(server.endpoint).here():
        server.ignored = frozenset({header})
        storage = storage_at(moto_s3.new_place())
        with pytest.raises(StorageError, match=f"(?i)ignores {header}"), storage.hold("lock", Held):
            pass


# ---------------------------------------------------------------------- credentials


def reaches(place: str) -> bool:
    """Whether a place can be used with what this process knows."""
    return storage_at(place).put_new("reached", b"")


def without(store: Store, *names: str) -> dict[str, str]:
    return {name: value for name, value in store.env.items() if name not in names}


KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def test_secrets_of_a_uri_stay_in_the_process(s3: Store) -> None:
    bare = Store(s3.place, without(s3, *KEYS), s3.endpoint)
    for user in (f"{KEY}:{SECRET}", f"{KEY}:{SECRET.replace('/', '%2F').replace('+', '%2B')}"):
        with bare.here():
            place = bare.new_place()
            with_secret = place.replace("s3://", f"s3a://{user}@")
            assert shown_place(with_secret) == place.replace("s3://", "s3a://")
            kept = keep_secrets(with_secret)
            assert kept == place.replace("s3://", "s3a://")
            assert reaches(kept)
            assert reaches(bare.new_place())
            assert storage_at(with_secret).shown == kept
            access = known_access()
            assert SECRET not in repr(access) + repr(access.buckets)
            sent = pickle.dumps(access)
        with bare.here():
            pickle.loads(sent).keep()
            assert reaches(bare.new_place())


def test_options_of_a_uri(s3: Store) -> None:
    address = s3.endpoint.removeprefix("http://")
    place = f"{s3.new_place()}?region=us-east-1&endpoint_override={address}&scheme=http"
    with Store(s3.place, without(s3, "AWS_ENDPOINT_URL", "AWS_REGION"), "").here():
        assert reaches(keep_secrets(place))
    place += f"&access_key={KEY}&secret_key={SECRET.replace('+', '%2B')}"
    with Store(s3.place, {}, "").here():
        kept = keep_secrets(place)
        assert (SECRET in kept, KEY in kept) == (False, False)
        assert reaches(kept.replace("?", "/again?"))


def test_profiles(s3: Store, tmp_path: Path) -> None:
    program = tmp_path / "keys.py"
    keys = {"Version": 1, "AccessKeyId": KEY, "SecretAccessKey": SECRET, "Expiration": "2126-01-01T00:00:00Z"}
    program.write_text(f"print({json.dumps(json.dumps(keys))})")
    odd = tmp_path / "odd.py"
    odd.write_text(f"print({json.dumps(json.dumps(keys | {'Expiration': 'tomorrow'}))})")
    (tmp_path / "config").write_text(
        f"[default]\nregion = us-east-1\nendpoint_url = {s3.endpoint}\n"
        f"[profile process]\ncredential_process = {sys.executable} {program}\nendpoint_url = {s3.endpoint}\n"
        "[profile failing]\ncredential_process = /nowhere/program\n"
        f"[profile odd]\ncredential_process = {sys.executable} {odd}\n"
    )
    (tmp_path / "credentials").write_text(
        f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    )
    env = {
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
    }
    for profile in ({}, {"AWS_PROFILE": "default"}, {"AWS_PROFILE": "process"}):
        with Store(s3.place, env | profile, "").here():
            assert reaches(s3.new_place())
    for name, text in (
        ("failing", "credential_process"),
        ("odd", "credential_process"),
        ("missing", "does not exist"),
    ):
        with (
            Store(s3.place, env | {"AWS_PROFILE": name}, "").here(),
            pytest.raises(StorageError, match=f"profile {name} of AWS.*|.*{text}"),
        ):
            storage_at(s3.place)


def test_settings_of_spark(s3: Store, tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        f"# for S3\nspark.hadoop.fs.s3a.access.key {KEY}\nspark.hadoop.fs.s3a.bucket.{BUCKET}.secret.key={SECRET}\n"
        f"spark.hadoop.fs.s3a.secret.key  another\nspark.hadoop.fs.s3a.endpoint\t{s3.endpoint}\n"
    )
    with Store(s3.place, {"SPARK_CONF_DIR": str(tmp_path)}, "").here():
        assert reaches(s3.new_place())


@pytest.mark.parametrize(
    ("uri", "env", "text"),
    [
        (f"s3://{KEY}:wrong@{BUCKET}/x", {}, "SignatureDoesNotMatch"),
        (f"s3://wrong:{SECRET}@{BUCKET}/x", {}, "access key"),
        ("s3://missing/x", {}, "the bucket missing does not exist"),
        (f"s3://{BUCKET}/x", {"AWS_REGION": "eu-west-1"}, "set AWS_REGION"),
        (f"s3://{BUCKET}/x", {"AWS_ENDPOINT_URL": "nonsense"}, "must begin with http"),
        (f"s3://{BUCKET}/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "127.0.0.1:1 refuses connections"),
        ("s3:///x", {}, "has no bucket"),
        ("s3://", {}, "has no bucket"),
        ("az://container/x", {}, "AZURE_STORAGE_ACCOUNT_NAME"),
        ("gs://bucket/x", {"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere"}, "/nowhere"),
    ],
)
def test_wrong_settings_are_named(s3: Store, uri: str, env: dict[str, str], text: str) -> None:
    with s3.here(**env), pytest.raises(StorageError) as caught:
        reaches(uri)
    message = str(caught.value)
    assert text in message
    assert ("\n" in message, SECRET in message, "wrong@" in message) == (False, False, False)


@pytest.mark.parametrize("url", ["s3:bucket/x", "S3:/bucket/x", "gs:"])
def test_a_url_without_slashes_is_no_local_folder(url: str) -> None:
    with pytest.raises(StorageError, match=f"the URL {url} lacks two slashes"):
        keep_secrets(url)


@pytest.mark.parametrize(
    "url", ["s3://bucket/what?x/y", "s3://bucket/what?region=a&hidden=b", "gs://bucket/x?y"]
)
def test_unknown_options_of_urls_are_refused(url: str) -> None:
    """`what?x/y` would be the folder `what`, in which other exports may write. Options may be secret."""
    with Store("", {}, "").here(), pytest.raises(StorageError, match="unknown option after its") as caught:
        keep_secrets(url)
    assert ("hidden" in str(caught.value), "x/y" in str(caught.value)) == (False, False)


def test_signatures_in_urls_are_not_in_causes() -> None:
    """`--verbose` shows the causes of an error."""
    env = {
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_SAS_TOKEN": "sv=2023-11-03&sig=hidden%2Bsignature",
        "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1",
    }
    with Store("az://container", env, "").here(), pytest.raises(StorageError) as caught:
        storage_at("az://container/x").read("a")
    shown = "".join(traceback.format_exception(caught.value))
    assert ("the store refuses connections" in shown, "hidden" in shown) == (True, False)


def test_signals_end_a_call(s3: Store, place: str) -> None:
    """A store that does not answer does not keep a handler from running."""
    waiting, released = threading.Event(), threading.Event()

    def hang(method: str, path: str) -> Fault:
        waiting.set()
        return Fault(then=released.wait)

    def interrupt() -> None:
        waiting.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with proxy(s3) as server, s3.behind(server.endpoint).here():
        server.judge = hang
        threading.Thread(target=interrupt, daemon=True).start()
        began_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            storage_at(place).read("a")
        assert time.monotonic() - began_s < 5
        released.set()
