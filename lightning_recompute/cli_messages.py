"""jsonargparse's nested type errors as one message: which option, what was found, what is due, what to do.

A text of another form than expected is passed on as it is.
"""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from omegaconf import OmegaConf

from lightning_recompute.policy import nearest

# Every subtype of a union reports; these say only that the value is none of that subtype.
_NOT_TELLING = ("Expected a", "Not a valid subclass of", "Could not interpret as")
_CLASS_KEYS = {"class_path", "init_args", "dict_kwargs"}


def explain(message: str, options: Iterable[str] = ()) -> str:
    """A message of jsonargparse in short.

    Args:
        message: What `ArgumentParser.error` got, or the text of an error at instantiation.
        options: The options there are, to name the nearest one where an option is unknown.

    Returns:
        `trainer.strategy.init_args.granularity: found 'ful'; 'full', 'selective' or null is due; did you mean 'full'?`
    """
    return _explain(message.strip(), "", tuple(options))


def _explain(text: str, key: str, options: Sequence[str]) -> str:
    first, _, rest = text.partition("\n")
    rest = textwrap.dedent(rest)
    if match := re.fullmatch(r'Parser key "([^"]+)":\s*(.*)', first):
        inner = f"{match[2]}\n{rest}".strip() if match[2] else rest
        return _explain(inner, _join(key, match[1]), options)
    if match := re.fullmatch(r"Problem with given class_path '([^']+)':", first):
        return _in_class(rest, key, match[1])
    if first.startswith("Does not validate against any of the Union subtypes") and (told := _union(rest, key)):
        return told
    if match := re.fullmatch(r"Expected a <class '(\w+)'>\. Got value: (.*)", text, re.DOTALL):
        return f"{key}: {_refused(match[2], _alternatives(match[1]))}"
    unknown = r"(?:Subcommand '\w+' does not accept option|unrecognized arguments:) '?([^']+?)'?"
    if match := re.fullmatch(unknown, first):
        return _unknown_option(match[1], options)
    if match := re.fullmatch(r"the following arguments are required: (?:\w+\.)?(\w+)", first):
        return f"there is no {match[1]}; give one in the config or by --{match[1]} CLASS"
    return f"{key}: {text}" if key else text


def _join(key: str, inner: str) -> str:
    return f"{key}.{inner}" if key else inner


def _in_class(text: str, key: str, class_path: str) -> str:
    if match := re.fullmatch(r"Option '([^']+)' is not accepted", text.strip()):
        names = _argument_names(class_path)
        hint = nearest(match[1], names) if names else ""
        known = f" It takes: {', '.join(names)}" if names and not hint.startswith("known") else ""
        return f"{key}: {class_path.rpartition('.')[2]} has no argument {match[1]!r}; {hint}{known}"
    if text.startswith("Parser key"):
        return _explain(text, f"{key}.init_args", ())
    if match := re.fullmatch(r"module '([^']+)' has no attribute '([^']+)'", text.strip()):
        classes = [name for name, _ in inspect.getmembers(pydoc.locate(match[1]), inspect.isclass)]
        hint = nearest(match[2], classes)
        return f"{key}: {match[1]} has no class {match[2]!r}{'' if hint.startswith('known') else '; ' + hint}"
    return f"{key}: class_path {class_path!r}: {text.strip()}"


def _argument_names(class_path: str) -> list[str]:
    found = pydoc.locate(class_path)
    if not inspect.isclass(found):
        return []
    parameters = inspect.signature(found).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _union(text: str, key: str) -> str | None:
    match = re.fullmatch(
        r"Subtypes: (?P<due>.*?)\nErrors:\n(?P<errors>.*)\nGiven value type: [^\n]*\nGiven value: (?P<found>.*)",
        text.strip(),
        re.DOTALL,
    )
    if match is None:
        return None
    found, due = match["found"].strip(), match["due"]
    if shape := _wrong_shape(found, due):
        return f"{key}: {shape}"
    errors = re.split(r"^- ", textwrap.dedent(match["errors"]), flags=re.MULTILINE)
    # continuation lines of a bullet are indented by its dash
    told = [re.sub(r"^  ", "", error, flags=re.MULTILINE).strip() for error in errors if error.strip()]
    telling = [error for error in told if not error.startswith(_NOT_TELLING)]
    if telling:
        made = re.match(r"Namespace\(class_path='([^']+)'", found)
        if made and not telling[0].startswith(("Problem with", "Parser key")):
            return f"{_join(key, made[1].rpartition('.')[2])}: {telling[0]}"
        return _explain(telling[0], key, ())
    return f"{key}: {_refused(found, _alternatives(due))}"


def _refused(found: str, alternatives: Sequence[str]) -> str:
    *others, last = alternatives
    due = f"{', '.join(others)} or {last}" if others else last
    return f"found {_written(found)}; {due} is due{_hint(found, alternatives)}"


def _wrong_shape(found: str, due: str) -> str | None:
    """What is wrong with the form of a value where an object is due; None: not the form."""
    classes = [pydoc.locate(path) for path in re.findall(r"<class '((?:\w+\.)+[A-Z]\w*)'>", due)]
    try:
        value = ast.literal_eval(found)
    except (SyntaxError, ValueError):
        return None
    if not classes or not inspect.isclass(classes[0]) or not isinstance(value, dict | list):
        return None
    for made in value if isinstance(value, list) else [value]:
        if isinstance(made, dict) and "class_path" in made:
            beside = {name: made[name] for name in made if name not in _CLASS_KEYS}
            form = {"class_path": made["class_path"], "init_args": {**beside, **(made.get("init_args") or {})}}
            if beside:
                names = ", ".join(map(repr, beside))
                return f"found {names} beside class_path; arguments go under init_args:\n{_as_yaml(form)}"
            if "." not in str(made["class_path"]):
                hint = nearest(str(made["class_path"]), sorted(_subclass_names(classes[0])))
                hint = "" if hint.startswith("known") else f"; {hint}"
                return f"no {classes[0].__name__} named {made['class_path']!r} is imported{hint}"
    form = {"class_path": f"package.{classes[0].__name__}", "init_args": {"argument": "value"}}
    if isinstance(value, dict) and "class_path" not in value:
        return f"found a mapping without class_path ({', '.join(map(str, value))}); this form is due:\n{_as_yaml(form)}"
    if isinstance(value, list) and "list[" not in due:
        only = value[0] if len(value) == 1 and isinstance(value[0], dict) and "class_path" in value[0] else form
        return f"found a list; one {classes[0].__name__} is due, without the dash:\n{_as_yaml(only)}"
    return None


def _subclass_names(base: type[object]) -> set[str]:
    names: set[str] = set()
    for subclass in base.__subclasses__():
        names |= {subclass.__name__} | _subclass_names(subclass)
    return names


def _as_yaml(value: dict[str, Any]) -> str:
    return textwrap.indent(OmegaConf.to_yaml(OmegaConf.create(value)).rstrip(), "  ")


def _alternatives(types: str) -> list[str]:
    """`[typing.Literal['a', 'b'], <class 'NoneType'>]` as the words `'a'`, `'b'`, `null`."""
    words: list[str] = []
    # at commas outside of brackets
    for part in re.findall(r"(?:\[[^\[\]]*\]|[^,\[\]])+", types.removeprefix("[").removesuffix("]")):
        if literal := re.search(r"Literal\[(.*)\]", part):
            words += literal[1].split(", ")
            continue
        plain = re.sub(r"<class '(.+)'>", r"\1", part.strip())
        plain = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", plain)
        plain = re.sub(r"(?:Sequence|list)\[(\w+)\]", r"a list of \1", plain)
        words.append({"NoneType": "null", "bool": "true or false", "int": "a whole number"}.get(plain, plain))
    return words


def _written(found: str) -> str:
    is_text = not re.fullmatch(r"[\d.+\-e]+|True|False|None|[\[{(].*", found, re.DOTALL)
    return repr(found) if is_text else found


def _hint(found: str, words: Sequence[str]) -> str:
    choices = [word.strip("'") for word in words if word.startswith("'")]
    if choices and not (hint := nearest(found, choices)).startswith("known"):
        return f"; {hint}"
    if any(word.startswith("a list of") for word in words) and _written(found).startswith("'"):
        return f"; write [{found}]"
    return ""


def _unknown_option(option: str, options: Sequence[str]) -> str:
    option = option.lstrip("-").partition("=")[0]
    head, _, rest = option.partition(".")
    # the first part is wrong, or what comes after a right one
    heads = sorted({known.partition(".")[0] for known in options})
    below = [known.partition(".")[2] for known in options if known.startswith(f"{head}.")]
    hint = nearest(rest, below) if head in heads and below else nearest(head, heads)
    # among a hundred options the list would hide the message
    if hint.startswith("known") and len(below) > 20:
        hint = ""
    return f"there is no option {option!r}{'; ' + hint if hint else ''}"
