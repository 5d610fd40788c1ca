"""Parse the tables of docs/reference/differences.md, and list the rows that no script can show."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "differences.md"

NOT_BY_SCRIPT = {
    # key of the row: the reason why no script shows it, or the tests that show it
    "tls-suites": "tests/broker/test_tls_scan.py",
    "ok-means": "tests/faults",
    "killed": "bench/kills.py",
    "damage": "tests/faults/test_damage.py",
    "unavailable": "tests/broker/test_unavailable.py",
    "full-disk": "tests/faults/test_full_disk.py",
    "loopback": "tests/cli/test_serve_options.py",
    "data-folder": "tests/broker/test_startup.py",
    "nsqd-folder": "tests/interop/test_nsqd_import.py",
    "channels": "it is about files, not about answers",
    "order": "nsqd's order is random then",
    "clock": "tests/faults/test_clock.py",
    "timers": "it is about how late nsqd happens to be",
    "message-ids": "nsqd's ids meet by chance only",
    "error-arrives": "whether nsqd's reset overtakes its frame is chance",
    "not-owned": "tests/broker/test_channel_in_flight.py",
    "unread-answers": "tests/broker/test_server_tcp.py",
    "no-magic": "it takes a minute: tests/broker/test_server_timers.py",
    "stats-memory": "tests/broker/test_stats.py",
    "metrics": "tests/broker/test_metrics.py",
    "e2e-sketch": "tests/broker/test_quantiles.py",
    "statsd-percentiles": "tests/broker/test_statsd.py",
    "statsd-again": "tests/broker/test_statsd.py",
    "statsd-interval": "tests/broker/test_statsd.py",
    "http-503": "tests/broker/test_disk_errors.py",
    "http-deadlines": "tests/http/test_deadlines.py",
    "config-secret": "tests/broker/test_http_config.py",
    "max-connections": "tests/broker/test_limits.py",
    "max-topics": "tests/broker/test_limits.py",
    "body-room": "tests/broker/test_bodies.py",
    "unix-stale": "tests/broker/test_listening.py",
    "unix-path": "tests/broker/test_listening.py",
    "stats-age": "tests/broker/test_stats_age.py",
    "draining": "tests/broker/test_drain.py",
    "move": "tests/faults/test_moves.py",
    "http-log": "tests/broker/test_http_log.py",
    "option-values": "tests/cli/test_serve_options.py",
    "option-policy": "tests/cli/test_serve_options.py",
    "option-exit": "tests/cli/test_serve_options.py",
    "option-words": "tests/cli/test_serve_options.py",
    "option-switches": "tests/cli/test_serve_config.py",
    "option-keys": "tests/cli/test_serve_config.py",
    "option-idle": "tests/cli/test_serve_options.py",
    "auth-body": "tests/access/test_http_guard.py",
    "auth-time": "tests/access/test_http_guard.py",
    "auth-delay": "tests/access/test_http_guard.py",
    "auth-log": "tests/broker/test_authorization.py",
    "auth-secret": "most auth servers refuse nsqd's question: tests/broker/test_authorization.py",
    "auth-tls": "tests/broker/test_authorization.py",
    "auth-address": "tests/broker/test_authorization.py",
    "lookup-publish": "tests/lookup/test_broker_discovery.py",
    "lookup-start": "tests/lookup/test_registration.py",
    "lookup-names": "tests/lookup/test_broker_discovery.py",
    "lookup-news": "tests/lookup/test_registration.py",
    "lookup-again": "tests/lookup/test_registration.py",
    "lookup-refused": "tests/lookup/test_registration.py",
    "lookup-bounds": "tests/lookup/test_registration.py",
    "lookup-address": "tests/lookup/test_broker_discovery.py",
    "lookup-loopback": "tests/lookup/test_broker_discovery.py",
    "lookupd-restart": "tests/lookup/test_lookupd_files.py",
    "lookup-tls": "tests/lookup/test_secure_registration.py",
    "lookupd-tls": "tests/lookup/test_lookupd_tls.py",
    "lookupd-auth": "tests/lookup/test_lookupd_access.py",
    "lookupd-pages": "tests/lookup/test_lookupd_access.py",
    "lookupd-connections": "tests/lookup/test_lookupd_tls.py",
    "lookupd-silence": "tests/lookup/test_lookupd.py",
    "lookupd-log": "tests/lookup/test_lookupd.py",
    "reload": "tests/cli/test_reload.py",
    "log-prefix": "tests/cli/test_serve_options.py",
    "connector-exit": "tests/interop/test_same_requests.py",
    "connector-usage": "tests/interop/test_same_requests.py",
    "to-file-layout": "tests/interop/test_same_files.py",
    "to-file-strftime": "tests/interop/test_same_files.py",
    "to-file-rev": "tests/interop/test_same_files.py",
    "to-file-kill": "tests/interop/test_same_files.py",
    "to-file-part": "tests/interop/test_same_files.py",
    "to-file-moved": "tests/interop/test_same_files.py",
    "to-file-work-sighup": "tests/interop/test_same_files.py",
    "to-file-defaults": "tests/cli/test_to_file.py",
    "to-file-deferred": "tests/cli/test_to_file.py",
    "to-http-agent": "tests/interop/test_same_requests.py",
    "to-http-get": "tests/interop/test_same_requests.py",
    "to-http-redirect": "tests/interop/test_same_requests.py",
    "to-http-final": "tests/interop/test_same_requests.py",
    "to-http-lost": "tests/interop/test_same_requests.py",
    "to-http-waits": "tests/interop/test_same_requests.py",
    "to-http-percent": "tests/connectors/test_http_templates.py",
    "to-http-mode": "tests/cli/test_to_http.py",
    "to-http-turn": "tests/connectors/test_to_http.py",
    "to-nsq-defaults": "tests/cli/test_to_nsq.py",
    "to-nsq-integers": "tests/interop/test_same_mirror.py",
    "to-nsq-text": "tests/interop/test_same_mirror.py",
    "to-nsq-order": "tests/interop/test_same_mirror.py",
    "to-nsq-numbers": "tests/interop/test_same_mirror.py",
    "to-nsq-exact": "tests/interop/test_same_mirror.py",
    "to-nsq-words": "tests/interop/test_same_mirror.py",
    "to-nsq-not-json": "tests/interop/test_same_mirror.py",
    "to-nsq-value": "tests/interop/test_same_mirror.py",
}


def rows() -> dict[str, str]:
    """Return the rows of all sections by their keys.

    Raises:
        ValueError: a row has no key, or the key of another row.
    """
    found: dict[str, str] = {}
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("|") and not re.match(r"\| key |\|---", line):
            key = re.match(r"\| `([a-z0-9-]+)` \|", line)
            if key is None or key[1] in found:
                raise ValueError(f"every row begins with a key of its own in backquotes: {line}")
            found[key[1]] = line
    return found
