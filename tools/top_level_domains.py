"""Write the list of top-level domains from the development dependency `publicsuffixlist`: part of `make generate`.

`make pins` renews that package, so the list is never older than the other pins; `tests/building` compares them.
"""

import re
import sys
from pathlib import Path
from textwrap import wrap

import publicsuffixlist

TARGET = Path(__file__).parents[1] / "core" / "trio_nsq" / "http" / "top_level_domains.py"
_GENERIC = re.compile(r"[a-z]{3,63}", re.ASCII)
_END = "===END ICANN DOMAINS==="

_TEMPLATE = '''\
"""The generic top-level domains of the public DNS. `tools/top_level_domains.py` writes this file: `make generate`.

Those of countries have two letters, and those in other scripts begin with `xn--`, so they need no list.
"""

GENERIC = frozenset(
    """
{names}
    """.split()  # noqa: SIM905  a list would have a line for each name
)
'''


def generated() -> str:
    """Return the contents of the file."""
    text = Path(publicsuffixlist.__file__).with_name("public_suffix_list.dat").read_text("utf-8")
    lines = (line.strip() for line in text.partition(_END)[0].splitlines())
    labels = {line.rpartition(".")[2] for line in lines if line and not line.startswith("//")}
    names = sorted(label for label in labels if _GENERIC.fullmatch(label))
    return _TEMPLATE.format(
        names="\n".join(
            wrap(
                " ".join(names),
                106,
                break_on_hyphens=False,
                initial_indent=" " * 4,
                subsequent_indent=" " * 4,
            )
        )
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(
            generated() != TARGET.read_text("utf-8") and "The list of top-level domains is old: make generate"
        )
    TARGET.write_text(generated(), "utf-8")
