"""Read a YAML file as a user wrote it: nothing in it is passed over, and what cannot be read is said with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mindspeed_mm_dit.configs.limits import shown
from mindspeed_mm_dit.configs.strict import read_text
from mindspeed_mm_dit.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML, refusing a key that stands twice, and ``<<``, which can make a short file a very large mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            text = key.value if isinstance(key.value, str) else shown(key.value)
            if text in seen or key.tag == "tag:yaml.org,2002:merge":
                reason = "stands twice" if text in seen else "is not understood here"
                raise yaml.constructor.ConstructorError(None, None, f"key {shown(text)} {reason}", key.start_mark)
            seen.add(text)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path, flag: str) -> Any:
    """Return the content of a YAML file, None of an empty one; ``flag`` is the option that named it.

    Raises:
        ConfigError: it cannot be read, or is not YAML.
    """
    text, what = read_text(path, flag), f"{flag} = {path}"
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(what, f"is not YAML: {error}") from None
    except RecursionError:
        raise ConfigError(what, "is nested too deeply to be a config file") from None
    except Exception as error:  # (PyYAML passes on whatever a date or number that is none raises)
        raise ConfigError(what, f"holds a value that cannot be read: {error}") from None
