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
            "use DeepSpeed's JSON format, or shorten the configuration",
            key,
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
            _SHORTER,
            key,
            source,
        )


# -- JSON, with the comments and trailing commas that DeepSpeed itself accepts in files.
#
# ``json`` parses it. What it alone refuses has a line and a column.

_MOST_LEVELS = 100
_LONGEST_NUMBER = 400
_STRING = r'"[^"]*"?'
_LIBERTIES = {
    "comments": re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL),
    "trailing commas": re.compile(
        rf"{_STRING}|(?<=[^ \t\r\n\[{{,:])[ \t\r\n]*,(?=[ \t\r\n]*[}}\]])", re.DOTALL
    ),
}
_LONE_SURROGATE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]|[\ud800-\udfff]"
)
_LONG_NUMBER = ("contains a number that is too long", "write fewer digits")
_TOO_DEEP = ("is nested too deeply", f"nest at most {_MOST_LEVELS} levels")
_KEEP_ONE = "keep one of the two"


def parse_json(text: str, *, source: str) -> tuple[Any, list[str]]:
    """Parse JSON text.

    Args:
        text: The text; a leading byte-order mark is skipped.
        source: Name of the text in errors.

    Returns:
        The value, and the kinds of tolerated deviations from JSON.
    """
    text = text.removeprefix("\ufeff")
    _refuse_too_large(len(text), _LARGEST_FILE, source, "file")
    most = _LARGEST_FILE // _BYTES_OF_A_VALUE
    if text.count(",") >= most and _QUOTED.sub("", _without_escapes(text)).count(",") >= most:
        reason = f"contains more than {most:,} values, the limit for a configuration"
        raise PlanFileError(reason, _SHORTER, "file", source)
    try:
        return _strictly(text), []
    except (ValueError, RecursionError):
        plain, liberties = _without_liberties(text)
    at, reason, fix = 0, *_TOO_DEEP
    try:
        return _strictly(plain), liberties
    except json.JSONDecodeError as error:
        at, reason = error.pos, f"is not JSON: {error.msg}"
        fix = "check quotes, commas and brackets at this place"
    except ValueError as error:
        reason, fix = error.args
    except RecursionError:
        pass
    raise _misplaced(text, source, at, reason, fix)


def _misplaced(text: str, source: str, at: int, reason: str, fix: str) -> PlanSyntaxError:
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    return PlanSyntaxError(reason, source=source, line=line, column=column, fix=fix)


def _strictly(text: str) -> Any:
    """Parse strictly; raise ``ValueError`` also for invalid JSON that ``json`` accepts."""
    if _LONE_SURROGATE.search(text.replace("\\\\", "  ")):
        reason = "contains an unpaired surrogate (\\ud800-\\udfff), which is not valid Unicode"
        raise ValueError(reason, "write the character")
    value = _DECODER.decode(text)
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MOST_LEVELS):
        inside = (each.values() if type(each) is dict else each for each in level)
        level = [one for many in inside for one in many if type(one) is dict or type(one) is list]
    if level:
        raise ValueError(*_TOO_DEEP)
    return value


def _without_liberties(text: str) -> tuple[str, list[str]]:
    """Return the text with blanks for comments and trailing commas, and which of them it has."""
    found = []
    for name, pattern in _LIBERTIES.items():
        parts, done = [], 0
        for match in pattern.finditer(_without_escapes(text)):
            if match[0][0] != '"':
                parts += [text[done : match.start()], " " * len(match[0])]
                done = match.end()
        text = "".join((*parts, text[done:]))
        found += [name] if parts else []
    return text, found


def key_lines(text: str, path: Path) -> dict[str, int]:
    """Return the line number (starting at 1) of each key in a file, by the key's path.

    Keys inside lists have no path. The result is empty for a file that YAML cannot read.

    Args:
        text: Content of the file.
        path: The file; its suffix decides the format.
    """
    import yaml

    if len(text) > _LARGEST_FILE // _YAML_SHARE:
        return {}
    if path.suffix.lower() not in YAML_SUFFIXES:
        # JSON without comments is YAML, if no tab indents it. Ends of lines in comments count.
        written = text.removeprefix("\ufeff")
        plain = _without_liberties(written)[0].replace("\t", " ")
        ends = (one == "\n" for one in written)
        text = "".join("\n" if end else one for one, end in zip(plain, ends, strict=True))
    try:
        return dict(_key_lines(yaml.SafeLoader(text).get_single_node(), ""))
    except yaml.YAMLError:  # for example, a key that is longer than YAML's keys
        return {}


def _key_lines(node: Any, above: str) -> Iterator[tuple[str, int]]:
    if getattr(node, "id", "") != "mapping":
        return
    for key, value in node.value:
        if key.id == "scalar":
            path = f"{above}{key.value}"
            yield path, key.start_mark.line + 1
            yield from _key_lines(value, f"{path}.")


def _no_constant(word: str) -> Any:
    raise ValueError(f"contains {word}, which is not valid JSON", "write a finite number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"contains the key {shorten(twice)} twice in one object", _KEEP_ONE)
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
    if path.suffix.lower() in YAML_SUFFIXES:
        return parse_yaml(text, source=str(path)), []
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
    fix = "check path and permissions"
    try:
        if path.is_fifo():
            raise OSError("it is a pipe, which may wait for ever")
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        _refuse_too_large(len(content), _LARGEST_FILE, str(path), name)
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except PlanFileError:
        raise
    except FileNotFoundError:
        places = f" (looked at {', '.join(map(str, tried))})" if tried else ""
        reason = f"there is no such file{places}"
        fix = "check the path; relative paths start at the working directory"
    except IsADirectoryError:
        reason, fix = "is a folder", "pass the path of a file"
    except UnicodeDecodeError:
        reason, fix = "is not UTF-8 text", "save it as UTF-8"
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {error}"
    raise PlanFileError(reason, fix, name, str(path))


class Named(NamedTuple):
    """Configuration that a setting contains or names."""

    value: Any
    sentences: list[str]
    """Kinds of tolerated deviations from JSON."""
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
        sentences: Kinds of deviations, from ``parse_any``.
        source: Name of the file.
        log: Log that receives the warning; nothing is recorded if ``sentences`` is empty.
    """
    if sentences:
        log.warn(
            key=source,
            reason=f"contains {' and '.join(sentences)}, which strict JSON and accelerate reject",
            fix="remove them",
        )


# -- Text that a front end received: its format is not known, and it must not open any file.


def parse_any(text: str, *, source: str) -> tuple[Any, list[str]]:
    """Parse the text of a configuration; the suffix or the text itself decides the format.

    Args:
        text: JSON, or YAML as accelerate writes it.
        source: Name of the file, for its suffix and for errors. Unless the suffix is one of YAML,
            the text is parsed as JSON and, if that fails, as YAML.

    Returns:
        The value, and the kinds of tolerated deviations from JSON.

    Raises:
        PlanFileError: The text is too large.
        PlanSyntaxError: The text is neither JSON nor YAML.
    """
    if Path(source).suffix.lower() in YAML_SUFFIXES:
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
