"""Types of columns, and the documents that describe them.

`column_types` has the types and their text. `avro`, `json_schema` and `arrow_json` convert a schema document of their
kind to fields with types, and `documents` finds out which kind a document is. `contracts` says what an export does
with values that the columns do not have, and `promotions` to which types a column can change.
"""
