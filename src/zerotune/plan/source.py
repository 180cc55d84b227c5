"""What plans are read from: JSON and YAML text, files, and what names them in a configuration."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from zerotune._util.text import format_size, parse_size
from zerotune.decisions import Log
from zerotune.errors import InvalidValueError, PlanFileError, PlanSyntaxError, shorten

# -- How much is read.


_LARGEST = ContextVar("largest plan file", default=16 * 1024**2)
_YAML_SHARE = 128
"""YAML takes as many times longer to read than JSON, so a file of it may be as much smaller."""
_BYTES_OF_A_VALUE = 20
"""A file may hold a value for as many bytes that it may have: each takes more when it is read."""
_TEXTS = re.compile(r'"[^"]*"?')


@contextmanager
def reading_at_most(size: int | str, *, key: str = "size") -> Iterator[None]:
    """Read plan files of up to ``size`` inside; 16 MiB without it.

    Args:
        size: Bytes, or an amount such as ``"64MiB"``; YAML may have a 128th of it, and JSON a
            value for each 20 of them.
        key: Name of the setting, for the message.

    Raises:
        InvalidValueError: ``size`` is no amount.
    """
    token = _LARGEST.set(parse_size(size, key=key))
    try:
        yield
    finally:
        _LARGEST.reset(token)


def refuse_long_yaml(text: str, *, key: str) -> None:
    """Raise ``InvalidValueError`` for what no reader would take as a part of a YAML."""
    most = _LARGEST.get() // _YAML_SHARE
    if len(text) > most:
        raise InvalidValueError(
            f"is longer than {format_size(most)}, more than is read again from a YAML",
            key=key,
            fix="write DeepSpeed's format, or leave something out",
        )


def _refuse_too_many(text: str, source: str) -> None:
    """Refuse JSON of more values than a configuration has, before they take memory."""
    most = _LARGEST.get() // _BYTES_OF_A_VALUE
    if text.count(",") >= most and _TEXTS.sub("", _without_escapes(text)).count(",") >= most:
        raise PlanFileError(
            f"holds more than {most:,} values, too many for a configuration",
            key="file",
            value=source,
            fix=_READ_MORE,
        )


def _without_escapes(text: str) -> str:
    """The text with blanks for what is escaped: only then each quote begins or ends a text.

    ``re`` would remember every escape of a long text until it has seen its end.
    """
    return text.replace("\\\\", "  ").replace('\\"', "  ")


_READ_MORE = (
    "give the file of a configuration, or allow for more: --max-size SIZE on the command line,"
    " zerotune.plan.source.reading_at_most(…) in Python"
)


def _refuse_too_large(size: int, largest: int, source: str, key: str) -> None:
    if size > largest:
        raise PlanFileError(
            f"is larger than {format_size(largest)}, too large for a configuration",
            key=key,
            value=source,
            fix=_READ_MORE,
        )


# -- JSON, read so that it is known where things are.
#
# ``json`` reads what is in order, which is fast. It reports neither duplicated keys with their
# position nor what people usually mean by a mistake: where it stops, a parser of our own looks
# again. Comments and trailing commas, which DeepSpeed itself accepts in files, are read and
# reported; everything else that is not JSON is an error with line, column and a hint.

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z_][\w.]*")
_HEX = re.compile(r"u([0-9a-fA-F]{4})")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_PLAIN_TEXT = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\r\n]*")
_LITERALS = {"true": True, "false": False, "null": None}
_PYTHON = {
    "True": "true",
    "False": "false",
    "None": "null",
    "TRUE": "true",
    "FALSE": "false",
    "NULL": "null",
}
_ESCAPES = {
    '"': '"',
    "\\": "\\",
    "/": "/",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
}
_CURLY = "\u201c\u201d\u201e\u2018\u2019"
_TEMPLATES = ("{{", "{%")
_UNFILLED = "has a template that was not filled in"
_DOUBLE = "use double quotes"
_DEEPEST = 100
_LONGEST_NUMBER = 400
_MOST_LIBERTIES = 20
"""As many comments and commas are named one by one."""
_LOOKED_AT_AGAIN = 1024**2
"""Letters of a text in which the parser that names mistakes is still quick."""
_SHOWN_OF_A_WORD = 80
_STRING = r'"[^"]*"?'
_COMMENT = r"(?://[^\n]*|#[^\n]*|/\*.*?\*/)"
_TEXT_OR_COMMENTS = re.compile(rf"{_STRING}|(?:{_COMMENT}[ \t\r\n]*){{1,1000}}", re.DOTALL)
_ONE_COMMENT = re.compile(_COMMENT, re.DOTALL)
_TEXT_OR_LAST_COMMA = re.compile(rf"{_STRING}|,(?=[ \t\r\n]*[}}\]])", re.DOTALL)
_LONE_SURROGATE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)


def parse_json(text: str, *, source: str) -> tuple[Any, list[str]]:
    """Parse JSON text.

    Args:
        text: The text; a leading byte-order mark is skipped.
        source: Name used in errors.

    Returns:
        The value, and one sentence for each liberty that was tolerated.

    Raises:
        PlanSyntaxError: Not JSON, comments and trailing commas excepted.
    """
    text = text.removeprefix("\ufeff")
    _refuse_too_large(len(text), _LARGEST.get(), source, "file")
    _refuse_half_letters(text, source)
    _refuse_too_many(text, source)
    try:
        return _strictly(text), []
    except (ValueError, RecursionError):
        plain, liberties = _without_liberties(text)
    try:
        return _strictly(plain), liberties
    except (ValueError, RecursionError) as error:
        if len(text) > _LOOKED_AT_AGAIN:
            raise _briefly(error, text, source) from None
    return _Parser(text, source).parse(), liberties


def _refuse_half_letters(text: str, source: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line, column = _position(text, error.start)
        raise PlanSyntaxError(
            _HALF_LETTER, source=source, line=line, column=column, fix=_WHOLE_LETTER
        ) from None


_HALF_LETTER = "has one half of a surrogate pair, which is no character"
_WHOLE_LETTER = "write the character itself"


def _strictly(text: str) -> Any:
    """What ``json`` makes of it, without what ``json`` lets pass; ``ValueError`` otherwise."""
    if "\\u" in text and _LONE_SURROGATE.search(text):
        raise ValueError(_HALF_LETTER)
    value = _DECODER.decode(text)
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return value
    raise ValueError("is nested too deeply")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("has a key twice in one object")
    return found


def _whole_number(literal: str) -> int:
    if len(literal) > _LONGEST_NUMBER:
        raise ValueError("has a number that is too long")
    return int(literal)


def _real_number(literal: str) -> float:
    value = float(literal)
    if len(literal) > _LONGEST_NUMBER or math.isinf(value):
        raise ValueError("has a number that is too long or too large")
    return value


def _no_constant(word: str) -> Any:
    raise ValueError(f"has {word}, which JSON does not know")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique,
    parse_int=_whole_number,
    parse_float=_real_number,
    parse_constant=_no_constant,
)


def _without_liberties(text: str) -> tuple[str, list[str]]:
    """The text with blanks where its comments and trailing commas are, and where those are."""
    found: list[tuple[str, int]] = []
    parts, done = [], 0
    for match in _TEXT_OR_COMMENTS.finditer(_without_escapes(text)):
        if match[0][0] == '"':
            continue
        parts += [text[done : match.start()], " " * len(match[0])]
        done = match.end()
        if len(found) <= _MOST_LIBERTIES:
            inside = _ONE_COMMENT.finditer(text, match.start(), match.end())
            found += [("a comment", each.start()) for each in inside]
    plain = "".join((*parts, text[done:]))
    parts, done, commas = [], 0, []
    for match in _TEXT_OR_LAST_COMMA.finditer(_without_escapes(plain)):
        if match[0] == "," and _follows_a_value(plain, match.start()):
            parts += [plain[done : match.start()], " "]
            done = match.end()
            commas.append(("a trailing comma", match.start()))
    plain = "".join((*parts, plain[done:]))
    found = sorted((*found, *commas), key=lambda each: each[1])
    sentences = []
    for what, at in found[:_MOST_LIBERTIES]:
        line, column = _position(text, at)
        sentences.append(f"{what} at line {line}, column {column}")
    return plain, [*sentences, "and more of them"] if len(found) > _MOST_LIBERTIES else sentences


def _follows_a_value(text: str, at: int) -> bool:
    at -= 1
    while at >= 0 and text[at] in " \t\r\n":
        at -= 1
    return at >= 0 and text[at] not in "[{,:"


def _briefly(error: Exception, text: str, source: str) -> PlanSyntaxError:
    """The error for a text too long to be looked at again: what ``json`` says of it."""
    at = error.pos if isinstance(error, json.JSONDecodeError) else 0
    said = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
    said = f"is not JSON: {error.msg}" if isinstance(error, json.JSONDecodeError) else said
    line, column = _position(text, at)
    return PlanSyntaxError(
        said, source=source, line=line, column=column, fix="correct it there, or write less"
    )


def _position(text: str, at: int) -> tuple[int, int]:
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)


class _Parser:
    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._at = 0
        self._depth = 0

    def parse(self) -> Any:
        self._skip()
        if self._at == len(self._text):
            raise self._error("is empty", "write at least {}")
        value = self._value()
        self._skip()
        if self._at < len(self._text):
            raise self._error(
                "has something after its end", "keep one object; check the closing braces"
            )
        return value

    def _value(self) -> Any:
        self._skip()
        char = self._peek()
        if char == "{":
            return self._nested(self._object)
        if char == "[":
            return self._nested(self._array)
        if char == '"':
            return self._string()
        if char in ("-", "+", ".") or char.isdigit():
            return self._number()
        return self._literal()

    def _nested(self, read: Any) -> Any:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error("is nested too deeply", f"nest at most {_DEEPEST} levels")
        value = read()
        self._depth -= 1
        return value

    def _object(self) -> dict[str, Any]:
        opened = self._at
        self._at += 1
        result: dict[str, Any] = {}
        while True:
            self._skip()
            if self._peek() == "}":
                self._at += 1
                return result
            key_at = self._at
            key = self._key(opened)
            if key in result:
                self._at = key_at
                raise self._error(
                    f"has the key {shorten(key)} twice in one object", "keep one of the two"
                )
            self._skip()
            if self._peek() != ":":
                raise self._error("wants a colon after a key", 'write "key": value')
            self._at += 1
            result[key] = self._value()
            self._separator("}", opened)

    def _key(self, opened: int) -> str:
        char = self._peek()
        if char == '"':
            return self._string()
        if char == "":
            self._at = opened
            raise self._error("has an object that is never closed", "add the missing }")
        self._refuse_lookalikes("key")
        if _WORD.match(self._text, self._at):
            raise self._error(
                "has a key without quotes",
                "put the key in double quotes",
            )
        raise self._error("wants a key in double quotes here", 'write "key": value')

    def _array(self) -> list[Any]:
        opened = self._at
        self._at += 1
        result: list[Any] = []
        while True:
            self._skip()
            if self._peek() == "]":
                self._at += 1
                return result
            result.append(self._value())
            self._separator("]", opened)

    def _separator(self, close: str, opened: int) -> None:
        """Pass the comma between members; leave the closing bracket to the caller."""
        self._skip()
        char = self._peek()
        if char == close:
            return
        if char == "":
            self._at = opened
            raise self._error("has a bracket that is never closed", f"add the missing {close}")
        if char != ",":
            raise self._error("wants a comma between two entries", "add the missing comma")
        self._at += 1

    def _string(self) -> str:
        start = self._at
        self._at += 1
        parts: list[str] = []
        while True:
            char = self._peek()
            if char == '"':
                self._at += 1
                return "".join(parts)
            if char in ("", "\n"):
                self._at = start
                raise self._error("has text that is never closed", 'add the missing "')
            if char < " ":
                raise self._error(f"has the control character {char!r} in text", "escape it")
            if char == "\\":
                self._at += 1
                parts.append(self._escape())
                continue
            plain = _PLAIN_TEXT.match(self._text, self._at)
            parts.append(plain.group() if plain else char)
            self._at += len(parts[-1])

    def _escape(self) -> str:
        char = self._peek()
        if char in _ESCAPES and char:
            self._at += 1
            return _ESCAPES[char]
        if char == "u":
            return self._unicode()
        raise self._error("has an unknown escape", "double the backslash: \\\\")

    def _unicode(self) -> str:
        match = _HEX.match(self._text, self._at)
        if match is None:
            raise self._error("has an unknown escape", "write \\u and four hexadecimal digits")
        self._at = match.end()
        low = _LOW_SURROGATE.match(self._text, self._at)
        code = int(match[1], 16)
        if 0xD800 <= code < 0xDC00 and low is not None:
            self._at = low.end()
            return chr(0x10000 + ((code - 0xD800) << 10) + (int(low[1], 16) - 0xDC00))
        if 0xD800 <= code < 0xE000:
            raise self._error(_HALF_LETTER, _WHOLE_LETTER)
        return chr(code)

    def _number(self) -> int | float:
        match = _NUMBER.match(self._text, self._at)
        following = "" if match is None else self._text[match.end() : match.end() + 1]
        if self._text.startswith("...", self._at):
            raise self._error(_UNFILLED, "write the value itself")
        if self._text.startswith("-Infinity", self._at):
            raise self._error("has -Infinity, which JSON does not know", "write a finite number")
        if match is None or following.isalnum() or following in ("_", "."):
            raise self._error("has a malformed number", "write digits, such as 500000000 or 5e8")
        literal = match.group()
        if len(literal) > _LONGEST_NUMBER:
            raise self._error("has a number that is too long", "write fewer digits")
        value = float(literal) if set(literal) & set(".eE") else int(literal)
        if isinstance(value, float) and math.isinf(value):
            raise self._error("has a number that is too large", "write a smaller one")
        self._at = match.end()
        return value

    def _literal(self) -> Any:
        match = _WORD.match(self._text, self._at)
        word = match.group() if match else ""
        if word in _LITERALS:
            self._at += len(word)
            return _LITERALS[word]
        if word in _PYTHON:
            raise self._error(f"has the Python word {word}", f"write {_PYTHON[word]}")
        if word in ("NaN", "Infinity", "inf", "nan"):
            raise self._error(f"has {word}, which JSON does not know", "write a finite number")
        if word and self._depth == 0 and self._text[self._at + len(word) :].lstrip()[:1] == ":":
            raise self._error("is not JSON; it looks like YAML", "give it the suffix .yaml")
        if word.startswith("YOUR_") or word in ("TODO", "FIXME"):
            raise self._error(_UNFILLED, "write the value itself")
        if word:
            word = word[:_SHOWN_OF_A_WORD]
            raise self._error(f"has the word {word} without quotes", f'write "{word}"')
        char = self._peek()
        self._refuse_lookalikes("value")
        if char == "":
            raise self._error("ends where a value is missing", "add the value and close the braces")
        raise self._error(f"has an unexpected {char!r}", "write a value")

    def _refuse_lookalikes(self, what: str) -> None:
        """Name what people write, or leave behind, where a key or value belongs."""
        here = self._text[self._at : self._at + 2]
        if here[:1] == "'":
            raise self._error(f"has a {what} in single quotes", _DOUBLE)
        if here[:1] and here[0] in _CURLY:
            raise self._error(f"has a {what} in typographic quotes", _DOUBLE)
        template = here[:1] in ("$", "<", "%", "@", "\u2026") or here in _TEMPLATES
        if template or (here[:1] == "{" and what == "key"):
            raise self._error(_UNFILLED, f"write the {what} itself")
        if here[:1] == ",":
            raise self._error("has a comma too many", "remove it")
        if here[:1] == "(":
            raise self._error("has a Python tuple", "write a list in square brackets")

    def _skip(self) -> None:
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._text.startswith("//", self._at) or self._peek() == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif self._text.startswith("/*", self._at):
                end = self._text.find("*/", self._at + 2)
                if end < 0:
                    raise self._error("has a comment that is never closed", "add the missing */")
                self._at = end + 2
            else:
                return

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _error(self, reason: str, fix: str) -> PlanSyntaxError:
        line, column = _position(self._text, self._at)
        return PlanSyntaxError(reason, source=self._source, line=line, column=column, fix=fix)


# -- YAML, read as strictly.


def parse_yaml(text: str, *, source: str) -> Any:
    """Parse YAML text, refusing duplicated keys, which PyYAML overwrites in silence.

    Raises:
        PlanSyntaxError: Not YAML.
    """
    import yaml

    _refuse_too_large(len(text), _LARGEST.get() // _YAML_SHARE, source, "file")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _refuse_growth(node, source)
        _refuse_duplicates(node, source)
        return None if node is None else loader.construct_document(node)
    except PlanSyntaxError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise PlanSyntaxError(
            f"is not YAML: {error.problem or error.context}",
            source=source,
            line=mark.line + 1 if mark else 1,
            column=mark.column + 1 if mark else 1,
            fix="check indentation, colons and quotes at this place",
        ) from None
    # PyYAML leaves some of these to whoever writes `!!int x` or `!!bool 2`.
    except (
        yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError,
        RecursionError,
    ) as error:  # fmt: skip
        said = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise PlanSyntaxError(
            f"is not YAML: {said}", source=source, line=1, column=1, fix="save it as plain YAML"
        ) from None


_MOST_REPEATED = 10_000
"""Values that aliases may add to those that are written."""


def _refuse_growth(root: Any, source: str) -> None:
    """Refuse what takes little to write and much to hold: aliases of aliases, long numbers."""
    sizes: dict[int, int | None] = {}

    def size_of(node: Any, depth: int) -> int:
        if id(node) not in sizes:
            if depth > _DEEPEST:
                raise _at_node(
                    node, source, "is nested too deeply", f"nest at most {_DEEPEST} levels"
                )
            sizes[id(node)] = None
            sizes[id(node)] = 1 + sum(size_of(inner, depth + 1) for inner in _inside(node, source))
        size = sizes[id(node)]
        if size is None:
            raise _at_node(node, source, "has an anchor that contains itself", "write it out")
        if size > len(sizes) + _MOST_REPEATED:
            why = "is too large: it repeats too much through its aliases"
            raise _at_node(node, source, why, "write it out")
        return size

    if root is not None:
        size_of(root, 0)


def _inside(node: Any, source: str) -> list[Any]:
    if node.id == "scalar":
        numeric = node.tag.endswith((":int", ":float"))
        if numeric and len(node.value) > _LONGEST_NUMBER:
            raise _at_node(node, source, "has a number that is too long", "write fewer digits")
        return []
    if node.id == "mapping":
        return [inner for pair in node.value for inner in pair]
    return list(node.value)


def _at_node(node: Any, source: str, reason: str, fix: str) -> PlanSyntaxError:
    mark = node.start_mark
    return PlanSyntaxError(
        reason, source=source, line=mark.line + 1, column=mark.column + 1, fix=fix
    )


def _refuse_duplicates(root: Any, source: str) -> None:
    pending, visited = [root], set()
    while pending:
        node = pending.pop()
        if node is None or id(node) in visited or isinstance(node.value, str):
            continue
        visited.add(id(node))
        if node.id == "sequence":
            pending.extend(node.value)
            continue
        seen: set[str] = set()
        for key, value in node.value:
            name = key.value if isinstance(key.value, str) else ""
            if name and name in seen:
                raise _at_node(
                    key,
                    source,
                    f"has the key {shorten(name)} twice in one block",
                    "keep one of the two",
                )
            seen.add(name)
            pending.extend((key, value))


# -- Files, and what names them inside a configuration.


YAML_SUFFIXES = (".yaml", ".yml")


def parse_file(text: str, path: Path) -> tuple[Any, list[str]]:
    """Parse the text of a file by its suffix, as ``parse_json`` does.

    Raises:
        PlanSyntaxError: It is not what its suffix says.
    """
    suffix = path.suffix.lower()
    if suffix in YAML_SUFFIXES:
        return parse_yaml(text, source=str(path)), []
    if suffix == ".toml":
        raise PlanSyntaxError(
            "is TOML, which holds the settings of a trainer and no DeepSpeed configuration",
            source=str(path),
            line=1,
            column=1,
            fix="give the JSON or YAML that it or its command line names",
        )
    if suffix == ".hjson":
        raise PlanSyntaxError(
            "is HJSON, which is not read",
            source=str(path),
            line=1,
            column=1,
            fix="convert it to JSON: python -m hjson.tool -j FILE",
        )
    return parse_json(text, source=str(path))


WRAPPERS = ("deepspeed_config", "deepspeed_config_file", "deepspeed")
TRAINER_KEYS = {
    "mixed_precision": "mixed_precision",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping",
    "gradient_clipping": "gradient_clipping",
    "offload_param_path": "offload_param_path",
    "offload_optimizer_path": "offload_optimizer_path",
}
"""Key of a trainer's own file to the launch setting it is."""
MICRO_KEYS = ("train_batch_size", "per_device_train_batch_size")
"""Keys of a trainer's own file for the samples of one pass on one rank."""
INIT_FLAG = "zero3_init_flag"
"""The launch setting that SimpleTuner's page writes among DeepSpeed's own keys."""


def wrapper_of(config: Mapping[Any, Any]) -> str | None:
    """The key under which a trainer's file holds its DeepSpeed configuration, as written."""
    return next((key for key in config if undashed(key) in WRAPPERS), None)


def is_off(written: Any) -> bool:
    """Whether a trainer's file switches DeepSpeed off by this value of its wrapper."""
    return written is None or (
        isinstance(written, str) and written.strip().lower() in ("", "none", "null")
    )


def undashed(key: Any) -> str:
    """A key of a trainer's file without leading dashes; ``""`` for what is no text."""
    return key.lstrip("-") if isinstance(key, str) else ""


def read_text(path: Path, *, key: str | None = None, tried: Collection[Path] = ()) -> str:
    """The text of a plan file.

    Args:
        path: The file.
        key: The setting that names it, if one does.
        tried: Other places that were looked at, for the message.

    Raises:
        PlanFileError: The file is missing, a folder, unreadable, too large or not UTF-8.
    """
    name = key or "file"
    try:
        largest = _LARGEST.get()
        with path.open("rb") as file:
            content = file.read(largest + 1)
        _refuse_too_large(len(content), largest, str(path), name)
        text = content.decode("utf-8-sig")
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except PlanFileError:
        raise
    except FileNotFoundError:
        places = f" (looked at {', '.join(str(place) for place in tried)})" if tried else ""
        raise PlanFileError(
            f"there is no such file{places}",
            key=name,
            value=str(path),
            fix="check the path; a relative one is taken from the working directory",
        ) from None
    except IsADirectoryError:
        raise PlanFileError(
            "is a folder", key=name, value=str(path), fix="give the path of a file"
        ) from None
    except UnicodeDecodeError:
        raise PlanFileError(
            "is not UTF-8 text", key=name, value=str(path), fix="save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        raise PlanFileError(
            f"cannot be read: {error}", key=name, value=str(path), fix="check path and permissions"
        ) from None


def find_file(written: str, folder: Path | None, *, key: str) -> Path:
    """A file named inside a configuration: beside that configuration, else where we are.

    Raises:
        PlanFileError: Neither place has it; the message lists both.
    """
    places = _places(written, folder)
    for place in places:
        if _is_file(place):
            return place
    read_text(places[-1], key=key, tried=list(dict.fromkeys(places)))
    return places[-1]


class Named(NamedTuple):
    """What a setting that names a configuration leads to."""

    value: Any
    sentences: list[str]
    """Liberties that were tolerated."""
    source: str
    """Name for messages."""
    folder: Path | None
    """Folder of the file; ``None`` when the setting is the configuration itself."""


def read_named(written: str, folder: Path | None, *, key: str) -> Named:
    """The configuration that a setting names: JSON text, the path of a file, or base64 of JSON.

    accelerate and transformers accept all three (``HfDeepSpeedConfig``).

    Raises:
        PlanFileError: It is neither JSON, nor base64 of it, nor a file in any of the places.
        PlanSyntaxError: Not JSON.
    """
    encoded = None if written.lstrip().startswith("{") else _decoded(written, folder)
    text = written if written.lstrip().startswith("{") else encoded
    if text is not None:
        return Named(*parse_json(text, source=key), source=f"the text of {key}", folder=None)
    path = find_file(written, folder, key=key)
    value, sentences = parse_file(read_text(path, key=key), path)
    return Named(value, sentences, source=str(path), folder=path.parent)


def _decoded(written: str, folder: Path | None) -> str | None:
    import base64
    import binascii

    if any(_is_file(place) for place in _places(written, folder)):
        return None
    try:
        text = base64.urlsafe_b64decode(written).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return text if text.lstrip().startswith("{") else None


def _places(written: str, folder: Path | None) -> list[Path]:
    return [Path(written)] if folder is None else [folder / written, Path(written)]


def _is_file(place: Path) -> bool:
    try:
        return place.is_file()
    except (OSError, ValueError):  # a name too long, or with a null character
        return False


def tolerated(sentences: Collection[str], source: str, log: Log) -> None:
    """Record one warning for everything a file has that JSON does not allow."""
    if sentences:
        log.decide(
            key=source,
            before="; ".join(sentences),
            after=None,
            reason="strict JSON allows no comments, no trailing commas and nothing of HJSON, and"
            " accelerate refuses them",
            severity="warning",
        )
