"""Import the data folder of an nsqd 1.3.0: its topics, channels and queued messages.

`NsqdFolder` is the folder; `import_topics` imports it. The import preserves ids, timestamps, attempts, bodies, pause
flags and the messages of each channel. It does not change nsqd's folder.
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
