"""Compiles the hot path with mypyc when the project is installed from its sources.

All modules of `MODULES` become one group, so that they call each other directly. Without a C compiler, without Python's
header files and on other interpreters the same sources run as they are, and are slower; then mypy is not downloaded
either. `TRIO_NSQ_COMPILE=1` makes it an error that something cannot be compiled, `TRIO_NSQ_COMPILE=0` leaves it out.

In a checkout: `python hatch_build.py compile` compiles what has changed, and `python hatch_build.py pure` removes what
is compiled.

`TRIO_NSQ_REPOSITORY` is the address of the repository, such as https://github.com/OWNER/trio-nsq, for a source
distribution that is published: PyPI shows README.md, where relative links lead nowhere, and the links of the project.
Wheels take both from the source distribution that they are built from.
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SOURCES = Path("core")
MODULES = (
    "trio_nsq.event_loop.monotonic_clock",
    "trio_nsq.event_loop.reactor",
    "trio_nsq.event_loop.pacing",
    "trio_nsq.protocol.bulk",
    "trio_nsq.protocol.command_reader",
    "trio_nsq.protocol.commands",
    "trio_nsq.protocol.frames",
    "trio_nsq.protocol.large_bodies",
    "trio_nsq.protocol.limits",
    "trio_nsq.protocol.messages",
    "trio_nsq.protocol.names",
    "trio_nsq.protocol.states",
    "trio_nsq.broker.delivery",
    "trio_nsq.broker.clock",
    "trio_nsq.broker.ingest.local_sync",
    "trio_nsq.broker.ingest.publication",
    "trio_nsq.broker.ingest.write_ahead",
    "trio_nsq.broker.ingest.write_path",
    "trio_nsq.broker.scheduler",
    "trio_nsq.broker.ingest.scheduled_syncs",
    "trio_nsq.broker.ingest.sync_stage",
    "trio_nsq.broker.session.description",
    "trio_nsq.broker.session.finish_rate",
    "trio_nsq.broker.session.session",
    "trio_nsq.broker.session.transport",
    "trio_nsq.broker.state.batch",
    "trio_nsq.broker.state.broker",
    "trio_nsq.broker.state.cache",
    "trio_nsq.broker.state.channel",
    "trio_nsq.broker.state.channel_messages",
    "trio_nsq.broker.state.consumer",
    "trio_nsq.broker.state.cursor",
    "trio_nsq.broker.state.deadline_heap",
    "trio_nsq.broker.state.deferred",
    "trio_nsq.broker.state.dispatcher",
    "trio_nsq.broker.state.in_flight",
    "trio_nsq.broker.state.in_flight_batch",
    "trio_nsq.broker.state.key_order",
    "trio_nsq.broker.state.keyed_send",
    "trio_nsq.broker.state.message_keys",
    "trio_nsq.broker.state.message_store",
    "trio_nsq.broker.state.rate_limit",
    "trio_nsq.broker.state.read_ahead",
    "trio_nsq.broker.state.timeouts",
    "trio_nsq.broker.state.topic",
    "trio_nsq.broker.state.topic_limits",
    "trio_nsq.broker.state.topic_view",
    "trio_nsq.broker.state.undistributed",
    "trio_nsq.broker.state.version",
    "trio_nsq.broker.state.waiting_messages",
    "trio_nsq.broker.state.withdrawn",
    "trio_nsq.broker.monitoring.clients",
    "trio_nsq.broker.monitoring.forms",
    "trio_nsq.broker.monitoring.histogram",
    "trio_nsq.broker.monitoring.lines",
    "trio_nsq.broker.monitoring.oldest",
    "trio_nsq.broker.monitoring.queues",
    "trio_nsq.broker.storage.disk_reserve",
    "trio_nsq.log.interface",
    "trio_nsq.log.records",
    "trio_nsq.log.disk.log",
    "trio_nsq.log.files.open_files",
    "trio_nsq.log.files.write_all",
    "trio_nsq.log.segment.index",
    "trio_nsq.log.segment.writer",
    "trio_nsq.log.write_ahead.file",
    "trio_nsq.replication.barrier",
    "trio_nsq.replication.follower",
    "trio_nsq.replication.frame_socket",
    "trio_nsq.replication.journal",
    "trio_nsq.replication.link",
    "trio_nsq.replication.live_link",
    "trio_nsq.replication.names",
    "trio_nsq.replication.operations",
    "trio_nsq.replication.replica",
    "trio_nsq.replication.stream",
)
"""The modules that are worth compiling. Decision 0028 says why others are left out."""
GROUP = "trio_nsq.hot_path"
"""Names the library with the code of all modules; the extension of each module only loads it."""
NEEDED = ["mypy[mypyc]>=2.4", "setuptools>=70"]
"""What compiles, besides the project's dependencies: their types decide what is compiled to direct operations."""
_BUILD = Path(".compiled") / str(sys.implementation.cache_tag)
"""In a checkout: what mypy and the compiler keep for the next time. Object files of another Python cannot be used."""
_SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))  # says which interpreter an extension is for
_MARKED = "trio_nsq.protocol.bulk"
_DIGEST = 'COMPILED_FROM = ""\n'  # in the source of `_MARKED`; filled in for what is compiled


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]  # for wheels, whatever their configuration
    """Makes C extensions of `MODULES`, beside their sources in an editable installation, else for the wheel."""

    PLUGIN_NAME = "custom"
    _folder: TemporaryDirectory[str]

    def dependencies(self) -> list[str]:
        """What has to be installed for the build."""
        return [] if _wanted() == "0" or _missing() else [*NEEDED, *self.metadata.core.dependencies]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds a wheel."""
        sources = Path(self.root) / SOURCES
        if _wanted() not in ("", "0", "1"):
            self.app.abort(f"TRIO_NSQ_COMPILE is 0 or 1, not {_wanted()}")
        if version == "editable" and (_wanted() == "0" or not _is_current(sources)):
            # Whatever comes now: old ones would be imported in place of a source that they are not of.
            _install(sources, [])
        if _wanted() == "0":
            return
        # Where `finalize` is not reached, the end of the process removes it.
        self._folder = TemporaryDirectory(prefix="trio-nsq-build-")
        try:
            if missing := _missing():
                raise RuntimeError(missing)
            if version != "editable":
                extensions = _compile(sources, Path(self._folder.name))
            elif not _is_current(sources):
                _install(sources, _compile(sources, Path(self.root) / _BUILD))
        except (Exception, SystemExit) as exc:  # mypyc and setuptools have many ways to fail
            reason = shorten(str(exc), 300, placeholder=" ...") or type(exc).__name__
            if _wanted():
                self.app.abort(f"TRIO_NSQ_COMPILE is set, and trio-nsq cannot be compiled: {reason}")
            self.app.display_warning(f"trio-nsq is not compiled, which makes it slower: {reason}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if version != "editable":
            build_data["force_include"] |= {str(built): str(name) for built, name in extensions}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling when the wheel is made."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


class DescriptionHook(MetadataHookInterface):
    """Fills in the description of the project, and its links if the address of the repository is known."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling. A source distribution has these fields already."""
        if "readme" in metadata:
            return
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if repository := os.environ.get("TRIO_NSQ_REPOSITORY", "").rstrip("/"):
            tag = f"v{metadata['version']}"
            text = with_absolute_links(text, repository, tag)
            metadata["urls"] = {
                "Repository": repository,
                "Documentation": f"{repository}/blob/{tag}/docs/index.md",
                "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """Return a Markdown text whose links and pictures are those of a tag in the repository, not of a folder."""

    def absolute(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)", absolute, text)


def digest(sources: Path) -> str:
    """Return the SHA-256 of all that is compiled, in hexadecimal."""
    whole = hashlib.sha256()
    for module in MODULES:
        code = (sources / _source(module)).read_bytes()
        whole.update(b"%s %d\n%s" % (module.encode(), len(code), code))
    return whole.hexdigest()


def extension_files() -> set[str]:
    """Return the files that compiling makes for this interpreter, below the folder of the sources."""
    return {_source(module).with_suffix(_SUFFIX).as_posix() for module in (*MODULES, f"{GROUP}__mypyc")}


def stale(sources: Path) -> str:
    """Return what is wrong with the compiled modules of a checkout; empty: nothing, or there are none."""
    if not _installed(sources) or _is_current(sources):
        return ""
    return (
        f"the compiled modules in {sources} are not of the sources beside them, which would not be used: "
        "run `make compile`, or `make pure` to go without"
    )


def _is_current(sources: Path) -> bool:
    """Whether all modules of a checkout are compiled, from the sources that are there."""
    found = {path.relative_to(sources).as_posix() for path in _installed(sources)}
    try:
        return found == extension_files() and _digest_of(sources) == digest(sources)
    except RuntimeError:
        return False


def _digest_of(folder: Path) -> str:
    """Return what the compiled modules in a folder were compiled from. Raises RuntimeError: they cannot be imported."""
    program = f"import sys; sys.path.insert(0, sys.argv[1]); import {_MARKED} as it; print(it.COMPILED_FROM)"
    # Without site-packages: mypy and what comes with it will not be there where it runs.
    command = [sys.executable, "-I", "-S", "-c", program, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"what was compiled cannot be imported: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()


def _source(module: str) -> Path:
    return Path(*module.split(".")).with_suffix(".py")


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
    """Make the extensions, and see that they can be imported.

    Args:
        folder: Gets what is made; what an earlier call has left there is used.

    Returns:
        Where each file is, and its place below the folder of the sources.
    """
    from mypyc.build import mypycify
    from setuptools import Distribution

    code, expected = folder / "sources", digest(sources)
    _copy_sources(sources, code, expected)
    c_files, lib, objects = folder / "c", folder / "lib", folder / "objects"
    with chdir(code):  # what mypy and setuptools write beside lands there, too
        extensions = mypycify(
            [
                "--config-file=",
                "--strict-bytes",
                "--follow-imports=silent",  # `make types` checks all of them, with the project's settings
                "--ignore-missing-imports",
                f"--cache-dir={folder / 'mypy'}",
                *[str(_source(module)) for module in MODULES],
            ],
            target_dir=str(c_files),
            debug_level="0",
            multi_file=True,
            group_name=GROUP,
        )
        for extension in extensions:
            # The files of the modules look for the group's header here.
            extension.include_dirs.append(str(c_files / _source(GROUP).parent))
            extension.extra_compile_args += [
                "-Wno-error",  # what another compiler warns of does no harm
                "-fvisibility=hidden",  # calls between modules need no indirection: nothing else may replace them
            ]
        command = _build_ext()(Distribution({"name": "trio-nsq", "ext_modules": extensions}))
        command.build_lib, command.build_temp = str(lib), str(objects)
        command.ensure_finalized()
        command.run()
    if _digest_of(lib) != expected:
        raise RuntimeError("what was compiled is not what was to be compiled")
    return [(lib / name, Path(name)) for name in sorted(extension_files())]


def _copy_sources(sources: Path, to: Path, expected: str) -> None:
    """Copy the package's sources, with the digest filled in. Unchanged files keep their time, for mypy's cache."""
    for path in sources.glob("trio_nsq/**/*.py"):
        copy, text = to / path.relative_to(sources), path.read_bytes()
        if path == sources / _source(_MARKED):
            if text.count(_DIGEST.encode()) != 1:
                raise RuntimeError(f"{path} has to have one line {_DIGEST.strip()}")
            text = text.replace(_DIGEST.encode(), f'COMPILED_FROM = "{expected}"\n'.encode())
        if not copy.exists() or copy.read_bytes() != text:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(text)
    for copy in to.glob("trio_nsq/**/*.py"):
        if not (sources / copy.relative_to(to)).exists():
            copy.unlink()


def _build_ext() -> Any:
    """Return setuptools' command, compiling several files at a time and only those that changed."""
    from setuptools.command.build_ext import build_ext

    class BuildExt(build_ext):
        def build_extensions(self) -> None:
            compile_one = self.compiler._compile

            def compile_all(sources: Sequence[str], output_dir: str, **how: Any) -> list[str]:
                _, objects, after, options, build = self.compiler._setup_compile(
                    output_dir,
                    how.get("macros"),
                    how.get("include_dirs"),
                    sources,
                    how.get("depends"),
                    how.get("extra_postargs"),
                )
                before = self.compiler._get_cc_args(options, how.get("debug"), None)
                headers = [Path(path) for path in how.get("depends") or () if path.endswith(".h")]
                headers_ns = max([path.stat().st_mtime_ns for path in headers], default=0)

                def compile_if_changed(made: str) -> None:
                    source, suffix = build[made]
                    changed_ns = max(headers_ns, Path(source).stat().st_mtime_ns)
                    if not Path(made).exists() or Path(made).stat().st_mtime_ns <= changed_ns:
                        compile_one(made, source, suffix, before, after, options)

                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    list(pool.map(compile_if_changed, objects))
                return objects

            self.compiler.compile = compile_all
            super().build_extensions()

    return BuildExt


def _installed(sources: Path) -> list[Path]:
    """Return the extensions of this interpreter in a checkout."""
    return sorted((sources / "trio_nsq").rglob(f"*{_SUFFIX}"))


def _install(sources: Path, extensions: list[tuple[Path, Path]]) -> None:
    """Put these in the place of those that are there, of this interpreter; a process that runs keeps its own."""
    folder = os.open(sources, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # the files belong together; let go when it is closed
        for old in _installed(sources):
            old.unlink()
        for built, name in extensions:
            temporary = sources / name.with_name(f".{name.name}")
            temporary.write_bytes(built.read_bytes())
            temporary.replace(sources / name)  # never seen half written
    finally:
        os.close(folder)


def main(arguments: Sequence[str]) -> None:
    """`compile` or `pure`: see above. Raises SystemExit with a message if that is not possible."""
    root = Path(__file__).parent
    if list(arguments) == ["pure"]:
        _install(root / SOURCES, [])
    elif list(arguments) == ["compile"]:
        if missing := _missing():
            sys.exit(f"trio-nsq cannot be compiled: {missing}")
        if not _is_current(root / SOURCES):
            _install(root / SOURCES, _compile(root / SOURCES, root / _BUILD))
    else:
        sys.exit("usage: python hatch_build.py compile|pure")


if __name__ == "__main__":
    main(sys.argv[1:])
