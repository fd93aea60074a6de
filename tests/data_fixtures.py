"""Rows and samples as a run opens them, in a line."""

from mindspeed_mm_dit.data.cache import Cache
from mindspeed_mm_dit.data.order import split
from mindspeed_mm_dit.data.sources import SourceRequest, source_of
from mindspeed_mm_dit.models.data import open_data
from mindspeed_mm_dit.objectives.registry import training_draw


def open_rows(param, num_classes=None, **wanted):
    """Return the rows of a section dataset_param, of their files or of the cache that it names."""
    if param.cache is not None:
        return source_of(param).as_listed(param, Cache(param.cache, param.cache_key).rows(param.data_folder))
    return source_of(param).open(param, SourceRequest(param.items, num_classes, **wanted))


def split_rows(rows, valid_fraction, seed):
    return tuple(rows.subset(part) for part in split(len(rows), valid_fraction, seed))


def open_samples(model, data, seed=0, rows=None):
    """Return the samples of a run on all rows, or on ``rows``, as the model's objective draws them."""
    opened = open_data(model, data.dataset_param)
    draw = training_draw(model.diffusion)
    return opened.samples(rows or opened.rows, seed, data.dataloader_param.shuffle, draw)
