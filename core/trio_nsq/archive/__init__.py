"""An archive of a broker's data folder, on another disk or in a bucket, a second behind it.

docs/reference/archive.md describes its objects.
"""
