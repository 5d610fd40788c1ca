"""An archive of a broker's data folder, on another disk or in a bucket, a second behind it.

docs/reference/archive.md describes its objects.
"""

from typing import Final

OWNER_FILE: Final = "archive.json"
"""The file of a data folder with the id that it shares with its archive: see `owner`."""
