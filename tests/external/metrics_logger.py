"""A metrics logger as another package brings it: every value of a run as a line of a CSV file."""

from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm_dit.training.loggers.registry import MetricsLoggerSpec, flag


@dataclass(frozen=True)
class CsvConfig:
    """Where the lines go."""

    folder: str | None = flag("DIR", "keep every value of the run in DIR/values.csv")


class Csv:
    def __init__(self, config, opening):
        Path(opening.folder).mkdir(parents=True, exist_ok=True)
        self._file = (Path(opening.folder) / "values.csv").open("a", encoding="utf-8")

    def add(self, iteration, values):
        self._file.writelines(f"{iteration},{name},{value}\n" for name, value in values.items())

    def add_picture(self, iteration, name, pixels):
        """Leave pictures out."""

    def close(self):
        self._file.close()


CSV = MetricsLoggerSpec("csv", CsvConfig, Csv, lambda config, extra_images: Path(config.folder))
