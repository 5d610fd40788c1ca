"""Coordinators decide which member of a cluster leads: etcd, an object store, or a person.

`state` is the value that they keep, with the rules of its changes. `interface` says what a coordinator does, and has
what all of them share; `etcd`, `bucket` and `static` are the engines; `opening` finds the one of a URL.
docs/decisions/0031-coordinators.md has the reasons.
"""
