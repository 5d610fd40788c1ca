"""Formats of message bodies: compression, Avro, Protobuf, MessagePack, and the framing of a schema registry.

`framing` reads the bytes before a framed body, `registry` asks the registry for schemas, `avro` and `descriptors` have
the schemas of Avro and Protobuf.
"""
