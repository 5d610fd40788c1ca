"""Importing the data folder of an nsqd 1.3.0: its topics and channels, and every message in its queues.

`NsqdFolder` is the folder, `import_topics` imports it. Ids, timestamps, attempts, bodies, pause flags and the messages
of each channel are kept. nsqd's folder is not changed.
"""

from .importer import ChannelReport, IfExists, Outcome, TopicReport, import_topics, queue_bytes
from .nsqd_folder import NsqdFolder
from .nsqd_metadata import ImportRefused

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
