"""Write `reference/python-api.md` from the client's sources: `python docs/_ext/python_api.py`. A test checks that.

The page has signatures and docstrings as Markdown, so it can be read on a Git host, too. The sources are read, not
imported: compiled modules have no signatures.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/python-api.md"
_CORE = ROOT / "core"
_WIDTH = 100
_SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")
_NAMES = """
trio_nsq
  Publish: Producer PublishAck Receipt PublishState ProducerStats IdempotentProducer PublishOutcome
  Consume: Consumer Message MessageBatch ConsumerStats Finish Retry DeadLetter Answer Handler OnFailure GivenUp
  Read a topic: TopicReader RecordBatch Gap
  Typed topics: Topic Codec JSON Msgspec Pydantic
  Hooks: Hooks PublishCall ProcessCall
  Options: ProducerSettings ConsumerSettings RunOptions DiscoverySettings ConnectionSettings TLSFiles ProducerOptions
    ConsumerOptions DiscoveryOptions ConnectionOptions
  Errors: NSQError PublishFailed ConnectionFailed ConnectionLost AuthRefused BrokerError ProducerClosed ConsumerClosed
    ProducerFenced MessagesLost HeadersRefused AlreadyAnswered DecodeFailed BrokerUnreachable NotABroker RequestRefused
    PublishInDoubt RawStreamError TLSFilesError
  Packed messages and addresses: MessageSet format_address parse_address
trio_nsq.sync
  : Producer Receipt Consumer Message MessageBatch Handler OnFailure GivenUp RunOptions
trio_nsq.otel
  : instrument uninstrument OpenTelemetryHooks
trio_nsq.testing
  : NSQ NSQServer ServerFailed deliver deliver_sync Delivery FakeProducer FakeSyncProducer FakeMessage
trio_nsq.integrations.kombu
  : Transport
trio_nsq.integrations.taskiq
  : NSQBroker
"""
"""The modules, and the names of each by heading. A test finds names that are missing."""
_GROUPS = {
    module: {
        heading: names.split()
        for heading, names in re.findall(r"^  (\S[^:]*|): ((?:.|\n    )+)", groups, re.MULTILINE)
    }
    for module, groups in re.findall(r"^(\S+)\n((?:  .+\n)+)", _NAMES, re.MULTILINE)
}

_CREATED_BY_THE_LIBRARY = {"Message", "MessageBatch", "ProcessCall", "PublishCall", "Receipt"}
_CALLED_BY_FRAMEWORKS = {"Transport"}

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def render() -> str:
    """The page."""
    return "\n\n".join(part for part in _page() if part) + "\n"


def _page() -> Iterator[str]:
    yield "# Python API"
    yield "<!-- Written by docs/_ext/python_api.py from the docstrings; do not edit. -->"
    yield (
        "All public classes, with their methods, options and errors. "
        "[asyncio](../how-to/asyncio.md) and [the Python client](../how-to/python-client.md) show how to use them. "
        "Names ending in `_s` are seconds, those ending in `_ms` milliseconds. "
        "`trio_nsq.client` has the names of `trio_nsq`, too."
    )
    yield _contents()
    for module, groups in _GROUPS.items():
        yield f"## {module}"
        tree = _parse(_path(module))
        yield _markdown(ast.get_docstring(tree) or "")
        for heading, names in groups.items():
            if heading:
                yield f"### {heading}"
            for name in names:
                shown = name if module == "trio_nsq" else f"{module.removeprefix('trio_nsq.')}.{name}"
                yield f"{'####' if heading else '###'} {shown}"
                yield from _definition(module, name)


def _contents() -> str:
    rows = ["| | |", "|---|---|"]
    for module, groups in _GROUPS.items():
        for heading, names in groups.items():
            links = []
            for name in names:
                shown = name if module == "trio_nsq" else f"{module.removeprefix('trio_nsq.')}.{name}"
                links.append(f"[{name}](#{shown.lower().replace('.', '')})")
            rows.append(f"| {heading or f'`{module}`'} | {', '.join(links)} |")
    return "\n".join(rows)


def _definition(module: str, name: str) -> Iterator[str]:
    path, node = find(module, name)
    match node:
        case ast.ClassDef():
            yield from _class(path, node)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield _fence(_signature(node))
            yield _markdown(ast.get_docstring(node) or "")
        case _:
            yield _fence(_code(node))
            yield _markdown(_text_after(_parse(path).body, node))


def _class(path: Path, node: ast.ClassDef) -> Iterator[str]:
    lineage = list(_lineage(path, node))
    members: dict[str, list[_Function]] = {}
    for each in lineage:
        own: dict[str, list[_Function]] = {}
        for member in each.body:
            if isinstance(member, _Function):
                own.setdefault(member.name, []).append(member)
        members = members | {name: functions for name, functions in own.items() if name not in members}
    if "__init__" in members and node.name not in _CREATED_BY_THE_LIBRARY:
        yield _fence(_signature(members["__init__"][-1], f"class {node.name}", with_self=False))
    else:
        yield _fence(_head(node))
    yield _markdown(ast.get_docstring(node) or "")
    for name, functions in members.items():
        if not name.startswith("_") and node.name not in _CALLED_BY_FRAMEWORKS:
            overloads = [each for each in functions if "overload" in map(_code, each.decorator_list)]
            yield _fence("\n".join(_member(each, node.name) for each in overloads or functions[:1]))
            documents = [text for each in functions if (text := ast.get_docstring(each))]
            yield _markdown(documents[-1] if documents else "")


def _head(node: ast.ClassDef) -> str:
    bases = ", ".join(_code(base) for base in node.bases)
    head = f"class {node.name}({bases})" if bases else f"class {node.name}"
    fields = [
        f"    {_code(field)}"
        for field in node.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and not field.target.id.startswith("_")
    ]
    return "\n".join([f"{head}:", *fields]) if fields else head


def _member(node: _Function, owner: str) -> str:
    kinds = {_code(each).rpartition(".")[2] for each in node.decorator_list}
    if kinds & {"property", "cached_property"}:
        return f"{owner}.{node.name}: {_code(node.returns) if node.returns else 'Any'}"
    text = _signature(node, f"{owner}.{node.name}", with_self="staticmethod" in kinds)
    return f"async {text}" if isinstance(node, ast.AsyncFunctionDef) else text


def _signature(node: _Function, name: str = "", *, with_self: bool = True) -> str:
    arguments = ast.parse(f"def f({_code(node.args)}): ...").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    if not with_self:
        spec = arguments.args
        del (spec.posonlyargs or spec.args)[0]
    if not name:
        name = f"async {node.name}" if isinstance(node, ast.AsyncFunctionDef) else node.name
    returns = f" -> {_code(node.returns)}" if node.returns and not name.startswith("class ") else ""
    parts = [*_arguments(_code(arguments.args))]
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in parts), f"){returns}"])


def _arguments(text: str) -> Iterator[str]:
    """Yield the arguments of a function; a default behind a type is set off. Brackets may have commas and `=`."""
    argument = ""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            yield argument.strip()
            argument = ""
        elif character == "=" and not depth and ":" in argument:
            argument += " = "
        else:
            argument += character
    if argument:
        yield argument.strip()


def _lineage(path: Path, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """Yield a class and its bases in the project, the class first."""
    yield node
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(name, ast.Name):
            try:
                where, found = _find_in(path, name.id)
            except LookupError:
                continue  # of the standard library, or of a library
            if isinstance(found, ast.ClassDef):
                yield from _lineage(where, found)


def find(module: str, name: str) -> tuple[Path, ast.stmt]:
    """Return the definition of a name that a module defines or imports, and the file that has it.

    Raises:
        LookupError: There is none in the project.
    """
    return _find_in(_path(module), name)


def _find_in(path: Path, name: str) -> tuple[Path, ast.stmt]:
    for node in ast.walk(_parse(path)):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == name:
                return path, node
            case ast.AnnAssign(target=ast.Name(id=target)) if target == name:
                return path, node
            case ast.ImportFrom():
                for alias in node.names:
                    if alias.name == "*":
                        with suppress(LookupError):
                            return _find_in(_imported(path, node), name)
                    elif (alias.asname or alias.name) == name:
                        return _find_in(_imported(path, node), alias.name)
    raise LookupError(f"{name} is not defined in {path}")


def _imported(path: Path, node: ast.ImportFrom) -> Path:
    words = (node.module or "").split(".") if node.module else []
    if node.level == 0:
        if words[0] != "trio_nsq":
            raise LookupError(f"{node.module} is not a part of the project")
        return _path(".".join(words))
    folder = path.parent
    for _ in range(node.level - 1):
        folder = folder.parent
    return _path(".".join([*folder.relative_to(_CORE).parts, *words]))


def _path(module: str) -> Path:
    path = _CORE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _text_after(body: Sequence[ast.stmt], node: ast.stmt) -> str:
    """Return the string that describes an assignment, behind it."""
    for before, after in pairwise(body):
        if (
            before.lineno == node.lineno
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            return inspect.cleandoc(str(after.value.value))
    return ""


def _markdown(document: str) -> str:
    """Turn a docstring in Google's style into Markdown."""
    parts = re.split(rf"^({'|'.join(_SECTIONS)}):\n", document, flags=re.MULTILINE)
    texts = [_paragraphs(parts[0])]
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        items, rest = _items(text)
        named = [_item(item) for item in items] if title not in ("Returns", "Yields") else []
        if named:
            texts.append("\n".join([f"{title}:\n", *named]))
        else:
            texts.append(f"{title}: {' '.join(' '.join(items).split())}")
        texts.append(_paragraphs(rest))
    return "\n\n".join(text for text in texts if text)


def _items(text: str) -> tuple[list[str], str]:
    """Return the items of an indented section, and the text behind it."""
    items: list[str] = []
    lines = text.splitlines()
    index = 0
    while index < len(lines) and (not lines[index] or lines[index].startswith("    ")):
        line = lines[index][4:]
        if line and (not line.startswith("    ") or not items):
            items.append(line)
        elif line:
            items[-1] += f" {line.strip()}"
        index += 1
    return items, "\n".join(lines[index:])


def _item(item: str) -> str:
    name, separator, text = item.partition(": ")
    if not separator:
        return f"- {item}"
    return f"- {', '.join(f'`{each.strip()}`' for each in name.split(','))}: {text}"


def _paragraphs(text: str) -> str:
    """Indented parts are code."""
    parts = re.findall(r"^(?:    .*\n*)+|^(?:(?! {4}|\n).*\n*)+", text, re.MULTILINE)
    parts = [part.strip("\n") for part in parts]
    return "\n\n".join(
        _fence(textwrap.dedent(part).strip("\n")) if part.startswith("    ") else part
        for part in parts
        if part
    )


def _code(node: ast.AST) -> str:
    """Return the source of a node, with double quotes."""
    return re.sub(r"'([^'\"\\\\]*)'", r'"\1"', ast.unparse(node))


def _fence(text: str) -> str:
    return f"```python\n{text}\n```"


if __name__ == "__main__":
    PAGE.write_text(render())
