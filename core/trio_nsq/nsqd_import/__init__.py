"""Taking over the data folder of an nsqd 1.3.0: its topics and channels, and every message in its queues.

`NsqdFolder` is the folder, `import_topics` does the work. What is kept: ids, publish times, attempts, bodies, pause
flags, and which channel has what. Nothing in nsqd's folder is changed.
"""

from .errors import ImportRefused
from .importer import ChannelReport, IfExists, Outcome, TopicReport, import_topics, queue_bytes
from .nsqd_folder import NsqdFolder

__all__ = [
    "ChannelReport",
    "IfExists",
    "ImportRefused",
    "NsqdFolder",
    "Outcome",
    "TopicReport",
    "import_topics",
    "queue_bytes",
]
