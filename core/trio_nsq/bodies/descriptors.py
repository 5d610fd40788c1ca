"""Descriptors of Protobuf messages: from the file that `protoc --descriptor_set_out` writes, and from a registry.

A registry has the source of a schema, `.proto`, or its descriptors, if a producer has registered these. The source is
compiled with the package grpcio-tools, if it is installed. Confluent's registry can also return the descriptors.
"""

import base64
import binascii
import errno
import importlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError

from .errors import BodyError, BodySchemaError, RegistryError
from .registry import RegisteredSchema, SchemaRegistry

_COMPILE_TIMEOUT_S = 60.0
_WELL_KNOWN = re.compile(r"google/(?:protobuf|type)/[a-z_]+\.proto")
"""The files that come with Python's protobuf and googleapis-common-protos. Others are not imported by their name."""
_NO_NAMES = (NotADirectoryError, IsADirectoryError, FileExistsError)
"""What the names `a` and `a/b` cause, which cannot both be files."""
_POOL_REFUSES = (TypeError, ValueError, KeyError)


def parse_set(data: bytes) -> FileDescriptorSet:
    """Parse a file of `protoc --descriptor_set_out`. Raises BodySchemaError."""
    try:
        found = FileDescriptorSet.FromString(data)
    except DecodeError as exc:
        raise BodySchemaError("it is not a file of protoc --include_imports --descriptor_set_out") from exc
    if not found.file:
        raise BodySchemaError("it is empty: use a file of protoc --include_imports --descriptor_set_out")
    return found


def message_of(files: Iterable[FileDescriptorProto], name: str) -> Descriptor:
    """Return the descriptor of a message.

    Args:
        name: Its full name, or the part after the package; empty: the only message of the files that is in no other
            message, apart from those of `google.protobuf`.

    Raises:
        BodySchemaError: There is no such message, or several, or the files are not valid or lack one.
    """
    there = {file.name: file for file in files}
    pool = _pool(there)
    found: dict[str, Descriptor] = {}
    for file in there:
        if not _WELL_KNOWN.fullmatch(file):
            _collect(pool.FindFileByName(file).message_types_by_name, found)
    wanted = [
        each
        for each in found.values()
        if (name in (each.full_name, _local_name(each)) if name else each.containing_type is None)
    ]
    if len(wanted) == 1:
        return wanted[0]
    names = ", ".join(sorted(each.full_name for each in (wanted or found.values()))[:20])
    if not wanted:
        raise BodySchemaError(f"it has no message {name}; it has {names}")
    raise BodySchemaError(f"it has several messages, of which one must be chosen: {names}")


def _local_name(message: Descriptor) -> str:
    package = message.file.package
    return message.full_name.removeprefix(f"{package}.") if package else message.full_name


def _collect(messages: Mapping[str, Descriptor], found: dict[str, Descriptor]) -> None:
    for each in messages.values():
        if not each.GetOptions().map_entry:
            found[each.full_name] = each
            _collect(each.nested_types_by_name, found)


def _pool(files: Mapping[str, FileDescriptorProto]) -> DescriptorPool:
    """Return a pool with these files, and with those of Protobuf itself that they import. Raises BodySchemaError."""
    pool = DescriptorPool()
    added: set[str] = set()

    def add(name: str, importer: str) -> None:
        if name in added:
            return
        added.add(name)
        file = files.get(name) or _well_known(name)
        if file is None:
            raise BodySchemaError(
                f"{importer} imports {name}, which is missing: use protoc --include_imports"
            )
        for each in file.dependency:
            add(each, name)
        pool.Add(file)

    try:
        for name in files:
            add(name, "")
    except BodySchemaError:
        raise
    except (*_POOL_REFUSES, RecursionError) as exc:
        raise BodySchemaError(f"its descriptors are not valid: {exc}") from exc
    return pool


def _well_known(name: str) -> FileDescriptorProto | None:
    if not _WELL_KNOWN.fullmatch(name):
        return None
    try:
        module = importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
    except ImportError:
        return None
    return FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)


def self_contained(message: Descriptor) -> FileDescriptorSet:
    """Return the file of a message, and all files that it imports."""
    found: dict[str, FileDescriptorProto] = {}

    def add(file: FileDescriptor) -> None:
        if file.name not in found:
            for each in file.dependencies:
                add(each)
            found[file.name] = FileDescriptorProto.FromString(file.serialized_pb)

    add(message.file)
    return FileDescriptorSet(file=found.values())


# ---------------------------------------------------------------------- schemas of a registry


def file_of_schema(registry: SchemaRegistry, found: RegisteredSchema) -> FileDescriptor:
    """Return the file of a schema of a registry.

    Each is made once: to compile one takes about half a second.

    Raises:
        BodySchemaError: The schema is not valid, or no Protobuf schema.
        RegistryError: The registry has only the source, and grpcio-tools is not installed, or cannot be asked.
    """
    if found.id not in registry.files:
        try:
            registry.files[found.id] = _file_of_schema(registry, found)
        except BodySchemaError as error:
            registry.files[found.id] = error
    file: FileDescriptor | BodySchemaError = registry.files[found.id]
    if isinstance(file, BodySchemaError):
        raise file.with_traceback(None)
    return file


def _file_of_schema(registry: SchemaRegistry, found: RegisteredSchema) -> FileDescriptor:
    if found.kind != "PROTOBUF":
        raise BodySchemaError(f"the schema {found.id} of the registry is {found.kind}, not PROTOBUF")
    name = f"schema-{found.id}.proto"
    files = _decoded(name, found)
    if files is None:
        has_compiler = importlib.util.find_spec("grpc_tools") is not None
        files = _compiled(name, found) if has_compiler else None
        files = files or _decoded(name, registry.schema(found.id, serialized=True))
        if files is None and not has_compiler:
            raise RegistryError(
                f"the schema registry {registry.access.shown} has the schema {found.id} as source only, which needs a "
                "compiler: pip install grpcio-tools"
            )
        if files is None:
            raise BodySchemaError(f"the schema {found.id} of the registry cannot be compiled")
    return _pool(files).FindFileByName(name)


def message_at(file: FileDescriptor, indexes: Sequence[int]) -> Descriptor:
    """Return the message with these indexes, see `framing`. Raises BodyError: there is none."""
    messages: Sequence[Descriptor] = list(file.message_types_by_name.values())
    message: Descriptor | None = None
    for index in indexes:
        if not 0 <= index < len(messages):
            raise BodyError("the schema has no message with the message indexes of the body")
        message = messages[index]
        messages = list(message.nested_types)
    assert message is not None  # there is one index at least
    return message


def _decoded(name: str, found: RegisteredSchema) -> dict[str, FileDescriptorProto] | None:
    """Return the files of a schema that are descriptors in base64; None: they are source."""
    files = {}
    for each, text in {**found.references, name: found.text}.items():
        try:
            file = FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError, DecodeError):
            return None
        file.name = each
        files[each] = file
    return files


def _compiled(name: str, found: RegisteredSchema) -> dict[str, FileDescriptorProto] | None:
    """Compile the source of a schema. Return its files; None: it is not valid, or imports what the registry lacks."""
    with tempfile.TemporaryDirectory(prefix="trio-nsq-proto-") as folder:
        for each, text in {**found.references, name: found.text}.items():
            if PurePosixPath(each).is_absolute() or ".." in PurePosixPath(each).parts:
                return None  # outside of the folder
            path = Path(folder, each)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            except (*_NO_NAMES, ValueError):  # also of text that is not Unicode
                return None
            except OSError as exc:
                if exc.errno != errno.ENAMETOOLONG:
                    raise
                return None
        output = Path(folder, "output.desc")
        flags = ["--include_imports", f"--descriptor_set_out={output}", f"-I{folder}"]
        command = [sys.executable, "-m", "grpc_tools.protoc", *flags, name]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        if done.returncode:
            return None
        return {file.name: file for file in FileDescriptorSet.FromString(output.read_bytes()).file}
