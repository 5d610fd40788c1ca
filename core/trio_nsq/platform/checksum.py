"""CRC-32 at zlib-ng's speed where it is installed, otherwise zlib's, which is slower and gives the same values.

The package requires zlib-ng, but Spark's workers get these modules in a zip file, without what the package requires.
"""

try:
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32
