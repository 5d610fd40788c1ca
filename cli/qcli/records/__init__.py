"""The records that commands print with `--format json`: their JSON Schemas are made from these types.

`framework/json_schema.py` makes the schemas; fields are described in the docstrings, below `Attributes`. A time in
Unix nanoseconds, `..._ns`, has an RFC 3339 time beside it, which is not declared here: `with_times` in
`framework/output.py` adds it. The modules import little, because every command imports those of its own records.
"""
