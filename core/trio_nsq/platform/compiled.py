"""The compiled form of the hot path: what its modules need for it, and whether it is used. See `hatch_build.py`."""

import sysconfig
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:
    _Class = TypeVar("_Class", bound=type)

    def mypyc_attr(**_attributes: object) -> Callable[[_Class], _Class]:
        """Tell mypyc about a class; Python ignores it."""
        return lambda cls: cls


_LIBRARY = "trio_nsq.hot_path__mypyc"
"""The code of all compiled modules. It has a name `init_trio_nsq___event_loop___reactor` for each."""


def form() -> str:
    """Return the form of the hot path: `compiled`, `not compiled` or, if files are missing, `partly compiled`."""
    if find_spec(_LIBRARY) is None:
        return "not compiled"
    names = [name for name in dir(import_module(_LIBRARY)) if name.startswith("init_")]
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    folder = Path(__file__).parents[2]
    files = [folder.joinpath(*name.removeprefix("init_").split("___")).with_suffix(suffix) for name in names]
    return "compiled" if all(file.exists() for file in files) else "partly compiled"
