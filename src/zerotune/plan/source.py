"""Read JSON and YAML text and files, and find the file that a configuration names."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import attrs

from zerotune._util.text import format_size
from zerotune.decisions import Log
from zerotune.errors import InvalidValueError, PlanFileError, PlanSyntaxError, shorten

# -- Size limits.


_LARGEST_FILE = 16 * 1024**2
_YAML_SHARE = 128
"""Factor by which YAML parses slower than JSON, and by which a YAML file must be smaller."""
_BYTES_OF_A_VALUE = 20
"""A JSON file may contain one value per this many bytes of the maximum file size, because parsed
values use more memory than their text."""
_QUOTED = re.compile(r'"[^"]*"?')


def refuse_long_yaml(text: str, *, key: str) -> None:
    """Raise ``InvalidValueError`` if ``text`` is too long for a value in a YAML file."""
    most = _LARGEST_FILE // _YAML_SHARE
    if len(text) > most:
        raise InvalidValueError(
            f"is longer than {format_size(most)}, the maximum for a value in a YAML file",
            key=key,
            fix="use DeepSpeed's JSON format, or shorten the configuration",
        )


def _without_escapes(text: str) -> str:
    """Replace escapes with blanks, so that each quote begins or ends a string.

    A pattern that matches escapes would make ``re`` remember each of them until the string ends.
    """
    return text.replace("\\\\", "  ").replace('\\"', "  ")


_SHORTER = "pass a configuration file"


def _refuse_too_large(size: int, largest: int, source: str, key: str) -> None:
    if size > largest:
        raise PlanFileError(
            f"is larger than {format_size(largest)}, the limit for a configuration",
            key=key,
            value=source,
            fix=_SHORTER,
        )


# -- JSON with the positions of its parts.
#
# ``json`` parses it. Comments and trailing commas, which DeepSpeed itself accepts in files, are
# blanked out and reported. Everything else that is not JSON is an error with line and column.

_MOST_LEVELS = 100
_LONGEST_NUMBER = 400
_MOST_LIBERTIES = 20
"""Maximum number of comments and commas that a warning lists."""
_STRING = r'"[^"]*"?'
_COMMENT = r"(?://[^\n]*|#[^\n]*|/\*.*?\*/)"
_TEXT_OR_COMMENTS = re.compile(rf"{_STRING}|(?:{_COMMENT}[ \t\r\n]*){{1,1000}}", re.DOTALL)
_ONE_COMMENT = re.compile(_COMMENT, re.DOTALL)
_TEXT_OR_LAST_COMMA = re.compile(rf"{_STRING}|,(?=[ \t\r\n]*[}}\]])", re.DOTALL)
_TOKENS = re.compile(rf"{_STRING}(?P<colon>[ \t\r\n]*:)?|[\[{{}}\]]|[-+.\w]+")
_LONE_SURROGATE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)


def parse_json(text: str, *, source: str) -> tuple[Any, list[str]]:
    """Parse JSON text.

    Args:
        text: The text; a leading byte-order mark is skipped.
        source: Name of the text in errors.

    Returns:
        The value, and one sentence for each tolerated deviation from JSON.
    """
    return _Json(text.removeprefix("\ufeff"), source).parsed()


@attrs.frozen
class _Json:
    """JSON text of a file, with methods to parse it and to locate errors."""

    text: str
    source: str

    def parsed(self) -> tuple[Any, list[str]]:
        _refuse_too_large(len(self.text), _LARGEST_FILE, self.source, "file")
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise self.error(error.start, *_HALF_LETTER) from None
        self._refuse_too_many()
        try:
            return self._strictly(), []
        except (ValueError, RecursionError):
            blanked, liberties = self._without_liberties()
        plain = _Json(blanked, self.source)
        try:
            return plain._strictly(), liberties
        except json.JSONDecodeError as error:
            raise self.error(error.pos, f"is not JSON: {error.msg}", _LOOK_HERE) from None
        except (ValueError, RecursionError):
            raise self.error(*plain._refused_place()) from None

    def _refuse_too_many(self) -> None:
        """Reject JSON with too many values before it is parsed."""
        most = _LARGEST_FILE // _BYTES_OF_A_VALUE
        if (
            self.text.count(",") >= most
            and _QUOTED.sub("", _without_escapes(self.text)).count(",") >= most
        ):
            raise PlanFileError(
                f"contains more than {most:,} values, the limit for a configuration",
                key="file",
                value=self.source,
                fix=_SHORTER,
            )

    def _strictly(self) -> Any:
        """Parse strictly; raise ``ValueError`` also for invalid JSON that ``json`` accepts."""
        if "\\u" in self.text and _LONE_SURROGATE.search(self.text.replace("\\\\", "  ")):
            raise ValueError(*_HALF_LETTER)
        value = _DECODER.decode(self.text)
        level = [value] if isinstance(value, dict | list) else []
        for _ in range(_MOST_LEVELS):
            level = [
                inner
                for outer in level
                for inner in (outer.values() if type(outer) is dict else outer)
                if type(inner) is dict or type(inner) is list
            ]
            if not level:
                return value
        raise ValueError("is nested too deeply")

    def _without_liberties(self) -> tuple[str, list[str]]:
        """Return the text with blanks for comments and trailing commas, and their positions."""
        found: list[tuple[str, int]] = []
        parts, done = [], 0
        for match in _TEXT_OR_COMMENTS.finditer(_without_escapes(self.text)):
            if match[0][0] == '"':
                continue
            parts += [self.text[done : match.start()], " " * len(match[0])]
            done = match.end()
            if len(found) <= _MOST_LIBERTIES:
                inside = _ONE_COMMENT.finditer(self.text, match.start(), match.end())
                found += [("a comment", each.start()) for each in inside]
        plain = "".join((*parts, self.text[done:]))
        parts, done, commas = [], 0, []
        for match in _TEXT_OR_LAST_COMMA.finditer(_without_escapes(plain)):
            before = match.start() - 1
            while before >= 0 and plain[before] in " \t\r\n":
                before -= 1
            if match[0] == "," and before >= 0 and plain[before] not in "[{,:":
                parts += [plain[done : match.start()], " "]
                done = match.end()
                commas.append(("a trailing comma", match.start()))
        plain = "".join((*parts, plain[done:]))
        found = sorted((*found, *commas), key=lambda each: each[1])
        sentences = []
        for what, at in found[:_MOST_LIBERTIES]:
            line, column = self._line_and_column(at)
            sentences.append(f"{what} at line {line}, column {column}")
        if len(found) > _MOST_LIBERTIES:
            sentences.append("and more of them")
        return plain, sentences

    def _refused_place(self) -> tuple[int, str, str]:
        """Return position, description and fix of invalid JSON that ``json`` accepts."""
        half = _LONE_SURROGATE.search(self.text.replace("\\\\", "  "))
        if half is not None:
            return half.start(), *_HALF_LETTER
        keys: list[set[str]] = []
        for match in _TOKENS.finditer(_without_escapes(self.text)):
            at, token = match.start(), self.text[match.start() : match.end()]
            if token in ("{", "["):
                keys.append(set())
                if len(keys) > _MOST_LEVELS:
                    return at, *_TOO_DEEP
            elif token in ("}", "]"):
                keys.pop()
            elif match["colon"]:
                key = json.loads(token.rstrip(": \t\r\n"))
                if key in keys[-1]:
                    reason = f"contains the key {shorten(key)} twice in one object"
                    return at, reason, _KEEP_ONE
                keys[-1].add(key)
            elif token[0] != '"':
                try:
                    _DECODER.decode(token)
                except ValueError as error:
                    reason, fix = error.args
                    return at, reason, fix
        return 0, *_TOO_DEEP

    def key_lines(self) -> Iterator[tuple[str, int]]:
        """Yield path and line of each key that is not inside a list."""
        plain, _ = self._without_liberties()
        # Prefix of the paths inside each open bracket; ``None`` in a list.
        open_ones: list[str | None] = []
        below: str | None = ""
        line, counted = 1, 0
        for match in _TOKENS.finditer(_without_escapes(plain)):
            written = plain[match.start() : match.end()]
            if written in ("{", "["):
                open_ones.append(below if written == "{" else None)
                below = None
            elif written in ("}", "]"):
                open_ones.pop()
            elif match["colon"] and open_ones[-1] is not None:
                path = open_ones[-1] + json.loads(written.rstrip(": \t\r\n"))
                line += self.text.count("\n", counted, match.start())
                counted = match.start()
                yield path, line
                below = f"{path}."

    def error(self, at: int, reason: str, fix: str) -> PlanSyntaxError:
        line, column = self._line_and_column(at)
        return PlanSyntaxError(reason, source=self.source, line=line, column=column, fix=fix)

    def _line_and_column(self, at: int) -> tuple[int, int]:
        return self.text.count("\n", 0, at) + 1, at - self.text.rfind("\n", 0, at)


_LONG_NUMBER = ("contains a number that is too long", "write fewer digits")
_TOO_DEEP = ("is nested too deeply", f"nest at most {_MOST_LEVELS} levels")
_LOOK_HERE = "check quotes, commas and brackets at this place"
_KEEP_ONE = "keep one of the two"
_HALF_LETTER = (
    "contains an unpaired surrogate (\\ud800-\\udfff), which is not valid Unicode",
    "write the character",
)


def key_lines(text: str, path: Path) -> dict[str, int]:
    """Return the line number (starting at 1) of each key in a file, by the key's path.

    Args:
        text: Content of the file.
        path: The file; its suffix decides the format.
    """
    if path.suffix.lower() in YAML_SUFFIXES:
        import yaml

        return dict(_yaml_key_lines(yaml.SafeLoader(text).get_single_node(), ""))
    return dict(_Json(text.removeprefix("\ufeff"), str(path)).key_lines())


def _yaml_key_lines(node: Any, above: str) -> Iterator[tuple[str, int]]:
    if getattr(node, "id", "") != "mapping":
        return
    for key, value in node.value:
        if key.id == "scalar":
            path = f"{above}{key.value}"
            yield path, key.start_mark.line + 1
            yield from _yaml_key_lines(value, f"{path}.")


def _no_constant(word: str) -> Any:
    raise ValueError(f"contains {word}, which is not valid JSON", "write a finite number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("contains a key twice in one object")
    return entries


def _json_number(kind: Callable[[str], Any], literal: str) -> Any:
    if len(literal) > _LONGEST_NUMBER:
        raise ValueError(*_LONG_NUMBER)
    value = kind(literal)
    if value in (math.inf, -math.inf):
        raise ValueError("contains a number that is too large", "write a smaller one")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique,
    parse_int=partial(_json_number, int),
    parse_float=partial(_json_number, float),
    parse_constant=_no_constant,
)


# -- YAML, parsed as strictly as JSON.


def parse_yaml(text: str, *, source: str) -> Any:
    """Parse YAML text; raise an error for duplicate keys, which PyYAML silently overwrites."""
    import yaml

    _refuse_too_large(len(text), _LARGEST_FILE // _YAML_SHARE, source, "file")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _check_nodes(node, source)
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
    # PyYAML raises some of these for tags such as `!!int x` or `!!bool 2`.
    except (
        yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError,
        RecursionError,
    ) as error:  # fmt: skip
        said = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise PlanSyntaxError(
            f"is not YAML: {said}",
            source=source,
            line=1,
            column=1,
            fix="save the file as plain YAML",
        ) from None


_MOST_REPEATED = 10_000
"""Maximum number of values that aliases may add."""


def _check_nodes(root: Any, source: str) -> None:
    """Reject duplicate keys, repeated aliases, and numbers that need much memory."""
    sizes: dict[int, int | None] = {}

    def refused(node: Any, reason: str, fix: str) -> PlanSyntaxError:
        mark = node.start_mark
        return PlanSyntaxError(
            reason, source=source, line=mark.line + 1, column=mark.column + 1, fix=fix
        )

    def inside(node: Any) -> list[Any]:
        if node.id == "scalar":
            if node.tag.endswith((":int", ":float")) and len(node.value) > _LONGEST_NUMBER:
                raise refused(node, *_LONG_NUMBER)
            return []
        if node.id == "sequence":
            return list(node.value)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.id == "scalar" and key.value and key.value in seen:
                reason = f"contains the key {shorten(key.value)} twice in one block"
                raise refused(key, reason, _KEEP_ONE)
            seen.add(key.value if key.id == "scalar" else "")
        return [inner for pair in node.value for inner in pair]

    def size_of(node: Any, depth: int) -> int:
        if id(node) not in sizes:
            if depth > _MOST_LEVELS:
                raise refused(node, *_TOO_DEEP)
            sizes[id(node)] = None
            sizes[id(node)] = 1 + sum(size_of(inner, depth + 1) for inner in inside(node))
        size = sizes[id(node)]
        if size is None:
            raise refused(node, "contains an anchor that refers to itself", "write it out")
        if size > len(sizes) + _MOST_REPEATED:
            why = "is too large: its aliases expand to too many values"
            raise refused(node, why, "write it out")
        return size

    if root is not None:
        size_of(root, 0)


# -- Files, and settings in a configuration that name them.


YAML_SUFFIXES = (".yaml", ".yml")


def parse_file(text: str, path: Path) -> tuple[Any, list[str]]:
    """Parse the text of a file according to its suffix; return the same as ``parse_json``."""
    suffix = path.suffix.lower()
    if suffix in YAML_SUFFIXES:
        return parse_yaml(text, source=str(path)), []
    other = {
        ".toml": (
            "is TOML, a format for trainers' settings but not for DeepSpeed configurations",
            "pass the JSON or YAML file that is named in it or on the trainer's command line",
        ),
        ".hjson": (
            "is HJSON, which is not supported",
            "convert it to JSON: python -m hjson.tool -j FILE",
        ),
    }.get(suffix)
    if other is not None:
        raise _Json(text, str(path)).error(0, *other)
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
"""Keys of a trainer's file, and the launch setting that each key sets."""
MICRO_KEYS = ("train_batch_size", "per_device_train_batch_size", "micro_batch_size")
"""Keys of a trainer's file that set the number of samples per forward pass and rank."""
INIT_FLAG = "zero3_init_flag"
"""Launch setting that SimpleTuner's documentation puts among DeepSpeed's keys."""


def wrapper_of(config: Mapping[Any, Any]) -> str | None:
    """Return the key of ``config`` that contains or names a DeepSpeed configuration.

    The result is ``None`` if ``config`` itself is the DeepSpeed configuration.
    """
    return next((key for key in config if undashed(key) in WRAPPERS), None)


def is_off(written: Any) -> bool:
    """Whether this value of ``deepspeed_config`` disables DeepSpeed."""
    return written is None or (
        isinstance(written, str) and written.strip().lower() in ("", "none", "null")
    )


def undashed(key: Any) -> str:
    """Return a key of a trainer's file without leading dashes; ``""`` if the key is not text."""
    return key.lstrip("-") if isinstance(key, str) else ""


def read_text(path: Path, *, key: str | None = None, tried: Collection[Path] = ()) -> str:
    """Read the text of a plan file.

    Args:
        path: The file.
        key: Setting that names the file; ``None`` if no setting does.
        tried: All paths that were tried, for messages.
    """
    name = key or "file"
    try:
        largest = _LARGEST_FILE
        if path.is_fifo():
            raise PlanFileError(
                "is a pipe, and reading it may wait for ever",
                key=name,
                value=str(path),
                fix="save the configuration in a file",
            )
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
            fix="check the path; relative paths start at the working directory",
        ) from None
    except IsADirectoryError:
        raise PlanFileError(
            "is a folder", key=name, value=str(path), fix="pass the path of a file"
        ) from None
    except UnicodeDecodeError:
        raise PlanFileError(
            "is not UTF-8 text", key=name, value=str(path), fix="save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        raise PlanFileError(
            f"cannot be read: {error}", key=name, value=str(path), fix="check path and permissions"
        ) from None


class Named(NamedTuple):
    """Configuration that a setting contains or names."""

    value: Any
    sentences: list[str]
    """Descriptions of tolerated deviations from JSON."""
    source: str
    """Name of the configuration in messages."""
    folder: Path | None
    """Folder of the file; ``None`` if the setting contains the configuration."""


def read_named(written: str, folder: Path | None, *, key: str) -> Named:
    """Read a configuration that is given as JSON text, the path of a file, or base64-encoded JSON.

    accelerate and transformers accept these three forms (``HfDeepSpeedConfig``).
    """
    places = [Path(written)] if folder is None else [folder / written, Path(written)]
    path = next(filter(_is_file, places), None)
    text = _text_inside(written)
    if text is not None and (path is None or text is written):
        return Named(*parse_json(text, source=key), source=f"the text of {key}", folder=None)
    tried = list(dict.fromkeys(places))
    path = path or places[-1]
    value, sentences = parse_file(read_text(path, key=key, tried=tried), path)
    return Named(value, sentences, source=str(path), folder=path.parent)


def _is_file(place: Path) -> bool:
    try:
        return place.is_file()
    except (OSError, ValueError):  # a name too long, or with a null character
        return False


def tolerated(sentences: Collection[str], source: str, log: Log) -> None:
    """Record one warning in ``log`` that lists all tolerated deviations from JSON.

    Args:
        sentences: One sentence for each deviation, from ``parse_any``.
        source: Name of the file.
        log: Log that receives the warning; nothing is recorded if ``sentences`` is empty.
    """
    if sentences:
        log.warn(
            key=source,
            reason=f"contains {', '.join(sentences)}, which strict JSON and accelerate reject",
            fix="remove it" if len(sentences) == 1 else "remove them",
        )


# -- Text that a front end received: its format is not known, and it must not open any file.


def parse_any(text: str, *, source: str) -> tuple[Any, list[str]]:
    """Parse the text of a configuration; the suffix or the text itself decides the format.

    Args:
        text: JSON, or YAML as accelerate writes it.
        source: Name of the file, for its suffix and for errors. Unless the suffix is one of YAML,
            HJSON or TOML, the text is parsed as JSON and, if that fails, as YAML.

    Returns:
        The value, and one sentence for each tolerated deviation from JSON.

    Raises:
        PlanFileError: The text is too large, or its suffix is not supported.
        PlanSyntaxError: The text is neither JSON nor YAML.
    """
    if Path(source).suffix.lower() in (*YAML_SUFFIXES, ".hjson", ".toml"):
        return parse_file(text, Path(source))
    try:
        return parse_json(text, source=source)
    except PlanSyntaxError as error:
        if text.lstrip("\ufeff \t\r\n").startswith(("{", "[", "/")):
            raise
        content = parse_yaml(text, source=source)
        if isinstance(content, Mapping):
            return content, []
        raise error from None


def with_named_files(
    content: Mapping[str, Any], place: Callable[[str, str], object]
) -> dict[str, Any]:
    """Replace the path of every file that a configuration names.

    Args:
        content: A configuration, or a trainer's settings that contain one.
        place: Function that takes a key and the path in its value, and returns the new path. To
            reject the file, the function raises an error.

    Returns:
        A copy of ``content`` with the new paths.
    """
    copy = dict(content)
    for key, value in content.items():
        if undashed(key) not in WRAPPERS:
            continue
        if isinstance(value, Mapping):
            copy[key] = with_named_files(value, place)
        elif isinstance(value, str) and not is_off(value) and _text_inside(value) is None:
            copy[key] = str(place(str(key), value))
    return copy


def _text_inside(written: str) -> str | None:
    """Return the JSON text in a setting, plain or decoded from base64; ``None`` for a path."""
    if written.lstrip().startswith("{"):
        return written
    with suppress(binascii.Error, ValueError):
        decoded = base64.urlsafe_b64decode(written).decode("utf-8")
        if decoded.lstrip().startswith("{"):
            return decoded
    return None
