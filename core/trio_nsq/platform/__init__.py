"""What differs between machines and installations: the C library, the interpreter, optional libraries."""
