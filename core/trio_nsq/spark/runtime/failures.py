"""What Spark reports, as one sentence: what failed, why, and what to do.

Spark's exceptions are pages of Python and Java traces, whose first lines say only that a stage was aborted. The cause
is the exception of the Python worker in the last trace, or one line of the JVM.
"""

import re
from typing import Any

from ...access.secret import redacted
from ...protocol.errors import NSQError
from .java import MIN_VERSION

_MEMORY = "give executors more memory (spark.executor.memory) or fewer cores (spark.executor.cores)"
_CAUSES = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (
            r"ModuleNotFoundError: No module named '(.+?)'",
            "the Python of the workers has no module {}: install it on every node, or set PYSPARK_PYTHON to a Python "
            "that has it",
        ),
        (
            r'Cannot run program "(.+?)"',
            "a worker cannot run its Python, {}: set PYSPARK_PYTHON to a Python that every node has at this path",
        ),
        (
            r"Python in worker has different version: \(?(\d+)(?:\.|, )(\d+)\)? than that in driver: (\d+\.\d+)",
            "the workers run Python {}.{}, and this is Python {}: set PYSPARK_PYTHON to the same version on every node",
        ),
        (
            r"ExecutorLostFailure \(.*?\)(?: Reason: (.*?)\.?(?=\n|$))?",
            f"executors were lost ({{}}), perhaps for lack of memory: {_MEMORY}",
        ),
        (
            r"Python worker exited unexpectedly",
            f"Python workers were killed, perhaps for lack of memory: {_MEMORY}",
        ),
        (r"\bMemoryError\b", f"a Python worker ran out of memory: {_MEMORY}"),
        (r"java\.lang\.OutOfMemoryError: (.*)", f"a JVM of Spark ran out of memory ({{}}): {_MEMORY}"),
        (
            r"All masters are unresponsive",
            "the master does not accept this program: check that the URL is that of a Spark master, and that it runs "
            "the same version of Spark",
        ),
        (
            r"SparkContext (?:has been|was) (?:shutdown|shut down|stopped)|on a stopped SparkContext",
            "the cluster ended this program: its master may have been stopped, or may run another version of Spark",
        ),
        (
            r"UnsupportedClassVersionError|compiled by a more recent version of the Java Runtime",
            f"this Java is too old: set JAVA_HOME to Java {MIN_VERSION} or newer",
        ),
        (
            r"Could not parse Master URL: '(.*?)'",
            "{} is not the URL of a Spark master",
        ),
        (r"Py4JNetworkError|Answer from Java side is empty", "its JVM ended; it may have been killed"),
    )
)
_PYTHON = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(?P<error>[^\s].*)")
_PREFIX = re.compile(
    r"^(?:Exception in thread \S+ |Caused by: |(?:[a-z]\w*\.)+[A-Z][\w$]*: |Job aborted due to stage failure: "
    r"|Task \d+ in stage [\d.]+ failed \d+ times, most recent failure: |Lost task .*?\(TID \d+\) \(.*?\): )+"
)
_IN_LOG = re.compile(
    r"^(?:Exception in thread|Caused by:|Error:|(?:[a-z]\w*\.)+[A-Z]\w*(?:Exception|Error):).*", re.M
)
_ENDED = "[JAVA_GATEWAY_EXITED]"
_ABOUT_SCRIPT = "/spark-class: line "


class SparkFailed(NSQError):
    """Spark is not installed, does not start, or failed; the text has the reason.

    Everything that Spark reported is a note of the exception, for experts.
    """

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        if details:
            self.add_note(redacted(details))


def failure(error: BaseException, what: str = "Spark failed") -> SparkFailed:
    """Return the failure for an exception of pyspark or py4j while Spark runs; `what` says what failed."""
    text = _text_of(error)
    return SparkFailed(f"{what}: {reason(text)}", text)


def start_failure(error: BaseException, log: str, java: str) -> SparkFailed:
    """Return the failure for an exception while Spark starts.

    Args:
        log: What the JVM has printed.
        java: Describes the Java that was used.
    """
    text = _text_of(error)
    details = f"{log}\n{text}"
    if known := _known(details):
        return SparkFailed(f"Spark does not start: {known}", details)
    told = reason(text)
    if getattr(error, "java_exception", None) is None:  # the exception says only that the JVM has ended
        ended = "its program ended and said nothing: try bin/java -version" if _ENDED in told else told
        told = _last_error(log) or ended
    return SparkFailed(f"Spark does not start with {java}: {told}", details)


def reason(text: str) -> str:
    """Return what went wrong, of the text of an exception of Spark."""
    if known := _known(text):
        return known
    if found := list(_PYTHON.finditer(text)):
        return redacted(found[-1]["error"].strip())
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return redacted(_PREFIX.sub("", first) or first) or "it gave no reason"


def _known(text: str) -> str:
    """Return the sentence for a known cause; "" for another."""
    for pattern, sentence in _CAUSES:
        if found := pattern.search(text):
            values = (each or "no reason given" for each in found.groups())
            return redacted(sentence.format(*values))
    return ""


def _text_of(error: BaseException) -> str:
    """Return the whole text of an exception, that of the JVM if there is one."""
    java: Any = getattr(error, "java_exception", None)
    try:
        text = str(error if java is None else java.toString())
    except Exception:  # the JVM, which is asked for the text, has ended
        text = "its JVM ended"
    if java is not None:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _last_error(log: str) -> str:
    """Return the last error of a JVM's output, or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and _ABOUT_SCRIPT not in line]
    errors = [line for line in lines if _IN_LOG.match(line)]
    chosen = (errors or lines or [""])[-1]
    return redacted(_PREFIX.sub("", chosen) or chosen)
