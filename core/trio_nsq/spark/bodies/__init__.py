"""The columns of Avro and Protobuf bodies: `schema` has the schema whose fields become columns."""
