"""Blocking clients of a broker's HTTP interface, with the standard library only: Spark's workers have nothing else."""
