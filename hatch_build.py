"""Compiles what is worth compiling, with mypyc, when the project is installed from its sources.

Where that is not possible, for want of a C compiler or of Python's header files, the same Python runs as it is, and
is slower; then mypy is not downloaded either. `TRIO_NSQ_COMPILE=1` makes it an error that something cannot be
compiled, `TRIO_NSQ_COMPILE=0` leaves it out.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("core")
MODULE = "trio_nsq.protocol.bulk"
NEEDED = ["mypy[mypyc]>=1.16", "setuptools>=70"]
_SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))  # says which interpreter an extension is for
_DIGEST = 'COMPILED_FROM = ""\n'  # in the module's source; filled in for what is compiled


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]  # for wheels, whatever their configuration
    """Makes a C extension of `MODULE`, beside its source in an editable installation, else for the wheel."""

    PLUGIN_NAME = "custom"
    _folder: TemporaryDirectory[str]

    def dependencies(self) -> list[str]:
        """What has to be installed for the build."""
        return [] if _wanted() == "0" or _missing() else NEEDED

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds a wheel."""
        sources = Path(self.root) / SOURCES
        if version == "editable":
            # Whatever comes now: old ones would be imported in place of a source that they may not be of.
            _install(sources, [])
        if _wanted() not in ("", "0", "1"):
            self.app.abort(f"TRIO_NSQ_COMPILE is 0 or 1, not {_wanted()}")
        if _wanted() == "0":
            return
        # Where `finalize` is not reached, the end of the process removes it.
        self._folder = TemporaryDirectory(prefix="trio-nsq-build-")
        try:
            if missing := _missing():
                raise RuntimeError(missing)
            extensions = _compile(sources, Path(self._folder.name))
        except (Exception, SystemExit) as exc:  # mypyc and setuptools have many ways to fail
            reason = shorten(str(exc), 300, placeholder=" ...") or type(exc).__name__
            if _wanted():
                self.app.abort(f"TRIO_NSQ_COMPILE is set, and trio-nsq cannot be compiled: {reason}")
            self.app.display_warning(f"trio-nsq is not compiled, which makes it slower: {reason}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if version == "editable":
            _install(sources, extensions)
        else:
            build_data["force_include"] |= {str(built): str(name) for built, name in extensions}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling when the wheel is made."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _wanted() -> str:
    return os.environ.get("TRIO_NSQ_COMPILE", "")


def _missing() -> str:
    """Why nothing can be compiled here; empty: as far as one can see, it can."""
    if sys.implementation.name != "cpython":
        return f"mypyc compiles for CPython, and this is {sys.implementation.name}"
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    if not shutil.which(shlex.split(compiler)[0]):
        return f"there is no C compiler {compiler}"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return f"there is no {header}"
    return ""


def _compile(sources: Path, folder: Path) -> list[tuple[Path, Path]]:
    """Make the extension, in files of which the last one is what is imported, and see that it can be.

    Returns:
        Where each file is, and its place below the folder of the sources.
    """
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    source = Path(*MODULE.split(".")).with_suffix(".py")
    code = (sources / source).read_bytes()
    digest = hashlib.sha256(code).hexdigest()
    copy = folder / "sources" / source
    copy.parent.mkdir(parents=True)
    for package in source.parents[:-1]:
        (folder / "sources" / package / "__init__.py").touch()
    text = code.decode()
    if text.count(_DIGEST) != 1:
        raise RuntimeError(f"{source} has to have one line {_DIGEST.strip()}")
    copy.write_text(text.replace(_DIGEST, f'COMPILED_FROM = "{digest}"\n'))
    with chdir(folder / "sources"):  # what mypy and setuptools write beside lands there, too
        extensions = mypycify(
            ["--config-file=", "--strict-bytes", str(source)], target_dir=str(folder), debug_level="0"
        )
        for extension in extensions:
            extension.extra_compile_args.append("-Wno-error")  # what another compiler warns of does no harm
        command = build_ext(Distribution({"name": "trio-nsq", "ext_modules": extensions}))
        command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "temp")
        command.ensure_finalized()
        command.run()
    # Without site-packages: mypy and what comes with it will not be there where it runs.
    check = f"import sys; sys.path.insert(0, sys.argv[1]); import {MODULE} as it; print(it.COMPILED_FROM)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", check, str(folder / "lib")], capture_output=True, text=True
    )
    if done.stdout.strip() != digest:
        raise RuntimeError(f"what was compiled cannot be imported: {done.stderr.strip()[-500:]}")
    # The one with the name of the module needs the other.
    built = sorted((folder / "lib").rglob(f"*{_SUFFIX}"), reverse=True)
    return [(path, path.relative_to(folder / "lib")) for path in built]


def _install(sources: Path, extensions: list[tuple[Path, Path]]) -> None:
    """Put these in the place of those that are there, of this interpreter; a process that runs keeps its own."""
    module = sources.joinpath(*MODULE.split("."))
    folder = os.open(module.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # the files belong together; let go when it is closed
        for old in (module.name, f"{module.name}__mypyc"):
            module.with_name(old + _SUFFIX).unlink(missing_ok=True)
        for built, name in extensions:
            temporary = sources / name.with_name(f".{name.name}")
            temporary.write_bytes(built.read_bytes())
            temporary.replace(sources / name)  # never seen half written
    finally:
        os.close(folder)
