"""trio-nsq."""
