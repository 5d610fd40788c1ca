"""The metrics of an answer of `/metrics`, and those that are documented."""

import re
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}

Described = tuple[str, set[str], str]
"""The type, the labels and the help of a metric."""


def documented(*members: str) -> dict[str, Described]:
    """Return what is documented, by name: metrics of brokers; with arguments, only those of such members of a cluster,
    or of brokers with an archive."""
    rows = re.findall(
        r"^\| `(nsq_\w+)` \| (\w+) \| ([\w, ]*?) ?\| (.*?) \|(?: (\w+) \|)?$", DOCS.read_text(), re.M
    )
    return {
        name: (kind, set(re.findall(r"\w+", labels)), text)
        for name, kind, labels, text, member in rows
        if member in (members or ("",))
    }


def described(answer: str) -> dict[str, Described]:
    """Return what an answer in OpenMetrics has, by name. Others than those of the broker must be documented, too."""
    found = {}
    for family in openmetrics.text_string_to_metric_families(answer):  # type: ignore[no-untyped-call]
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        if family.name.startswith("nsq_"):
            found[family.name + suffix] = family.type, labels, family.documentation
        else:
            assert f"`{family.name}{suffix}`" in DOCS.read_text()
    return found


class Scrape:
    """Samples by name and labels."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = {family.name: family for family in families}
        self.samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples["nsq_" + name, tuple(sorted(labels.items()))]

    def channel(self, name: str) -> float:
        """Return a sample of channel `c` of topic `t`."""
        return self("channel_" + name, topic="t", channel="c")
