"""Reads a YAML file strictly: ignores nothing in it, and reports errors with their line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.configs.strict import check_depth, read_text
from mindspeed_mm_dit.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML that refuses duplicate keys, and ``<<``, with which a short file can expand to a very large mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            text = key.value if isinstance(key.value, str) else short_repr(key.value)
            if text in seen or key.tag == "tag:yaml.org,2002:merge":
                reason = "occurs twice" if text in seen else "is not supported"
                raise yaml.constructor.ConstructorError(None, None, f"key {short_repr(text)} {reason}", key.start_mark)
            seen.add(text)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path, flag: str) -> Any:
    """Return the content of a YAML file, or None if it is empty; ``flag`` is the option that named it.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
    """
    text, what = read_text(path, flag), f"{flag} = {path}"
    try:
        content = yaml.load(text, _Loader)
        check_depth(what, content)
        return content
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        raise ConfigError(what, f"is not YAML: {error}") from None
    except RecursionError:
        raise ConfigError(what, "is nested too deeply to be a config file") from None
    except Exception as error:  # (PyYAML lets through whatever an invalid date or number raises)
        raise ConfigError(what, f"holds a value that cannot be read: {error}") from None
