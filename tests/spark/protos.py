"""The Protobuf messages of the tests, compiled by protoc."""

import importlib.resources
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

FOLDER = Path(__file__).parent / "protobuf"
SOURCE = (FOLDER / "order.proto").read_text()
_TIMEOUT_S = 60


def compiled(folder: Path, output: Path, *files: str, imports: bool = True) -> Path:
    """Compile files of a folder to descriptors, as a user does; return `output`."""
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", f"-I{well_known}"]
    flags = [*(["--include_imports"] if imports else []), f"--descriptor_set_out={output}"]
    subprocess.run([*command, *flags, *files], check=True, timeout=_TIMEOUT_S)
    return output


@cache
def order_pool(descriptors: Path) -> DescriptorPool:
    """Return a pool with the messages of a file of descriptors."""
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(descriptors.read_bytes()).file:
        pool.Add(file)
    return pool


def message_class(descriptors: Path, name: str) -> Any:
    """Return the class of a message, as generated code has it."""
    return GetMessageClass(order_pool(descriptors).FindMessageTypeByName(name))
