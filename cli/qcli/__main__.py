"""`python -m qcli`."""

from . import main

main()
