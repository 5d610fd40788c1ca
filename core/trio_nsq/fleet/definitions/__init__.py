"""Topics, channels and their settings as one document, which is exported, kept with other files, and applied.

`document` has the format, `differences` compares brokers, `changes` makes brokers as the document says.
See docs/decisions/0058-definitions.md.
"""
