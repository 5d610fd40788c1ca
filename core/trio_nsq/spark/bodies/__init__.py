"""Bodies that need a schema: Avro and Protobuf, plain or with the framing of a schema registry.

`framing` reads the bytes before a framed body, `registry` asks the registry for schemas, `avro` and `protobuf` decode
bodies, and `schema` has the schema whose fields become columns.
"""
