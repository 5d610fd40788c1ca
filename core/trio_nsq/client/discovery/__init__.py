"""Discovery of brokers: repeated queries to discovery services, and their options."""
