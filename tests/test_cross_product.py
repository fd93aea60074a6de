"""Every source, autoencoder, text encoder, predictor, objective and optimizer with every other one that it fits.

Whether parts fit is asked of all of them: model.json of each autoencoder, predictor and objective, and data.json of
each source with each of these. What fits is trained and sampled, so that every pair of parts meets: more than two at a
time have nothing more to say to each other, for each sees of the others what the next one hands it.
"""

import dataclasses
import importlib
import itertools
import random
from collections import namedtuple
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from mindspeed_mm_dit.configs.condition import TextCondition
from mindspeed_mm_dit.configs.data import SOURCE_CONFIGS, DataConfig
from mindspeed_mm_dit.configs.model import AE_CONFIGS, DIFFUSION_CONFIGS, PREDICTOR_CONFIGS, TEXT_ENCODER_CONFIGS
from mindspeed_mm_dit.configs.run import MultiModalArguments
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.data.conditions import CONDITIONS
from mindspeed_mm_dit.data.sources import SOURCES
from mindspeed_mm_dit.errors import ConfigError, PlatformError, UserError
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.registry import AUTOENCODERS, TEXT_ENCODERS, check_encoders, check_framework
from mindspeed_mm_dit.objectives.registry import OBJECTIVES, objective_of, training_draw
from mindspeed_mm_dit.optimizers.registry import OPTIMIZERS
from mindspeed_mm_dit.training.data_set import DataSet
from tests import parts
from tests.conftest import FRAMEWORK, run_config
from tests.external import plugin
from tests.external.source import write_turned

TABLES = (AUTOENCODERS, CONDITIONS, OBJECTIVES, OPTIMIZERS, PREDICTOR_CONFIGS, SOURCES, TEXT_ENCODERS)
FLAGS = {"seed": 0, "weight_decay": 0.0, "ema_decay": 0.5, "micro_batch_size": 3, "clip_grad": 0.0}
BATCH, SIDE = 3, 4
NO_TEXTS = FRAMEWORK == "mindspore"  # whose text encoders stand beside PyTorch; small caches of states are of videos
CLOSE = {"rtol": 2e-5, "atol": 2e-6}  # float32 sums of some tens of terms, whose order a batch may change


@pytest.fixture(scope="module")
def place(tmp_path_factory, framework):
    """A folder with small data and encoders; the parts of another package stand beside ours."""
    before = [dict(table) for table in TABLES]
    plugin.register_rotary()
    folder = tmp_path_factory.mktemp("parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder
    for table, content in zip(TABLES, before):
        table.clear()
        table.update(content)


@pytest.fixture(scope="module")
def sources(place):
    """A section dataset_param of every kind that can be read here, by name."""
    (place / "outside").mkdir()
    section = write_turned(place / "outside", 6, SIDE)
    found = [*parts.sources(place), from_mapping(SOURCE_CONFIGS["turned"], section, "data.json")]
    return {f"{param.dataset_type} {param.where}": param for param in found}


@pytest.fixture(scope="module")
def whole_product(request):
    """Whether all forms of all parts meet; in `make test` each encoder meets one other, and forms are the plainest."""
    return request.config.getoption("--extended") or request.config.getoption("--campaign")


def plainest(predictors):
    """Return the first predictor of each kind for each set of conditions."""
    first: dict[Any, Any] = {}
    for name, predictor in predictors.items():
        conditions = tuple(type(condition) for condition in predictor.conditions)
        first.setdefault((predictor.model_id, conditions), (name, predictor))
    return dict(first.values())


def diagonal(first, second):
    """Return pairs in which each of both occurs."""
    longest = max(len(first), len(second))
    return itertools.islice(zip(itertools.cycle(first), itertools.cycle(second)), longest)


@pytest.fixture(scope="module")
def models(place, whole_product):
    """Every model that model.json lets pass, with the names of its parts."""
    found: dict[Any, Any] = {}
    autoencoders, texts = parts.autoencoders(place), parts.text_encoders(place)
    meetings = itertools.product(autoencoders, texts) if whole_product else diagonal(autoencoders, texts)
    for ae, text in meetings:
        predictors = called(parts.predictors(ae.latent_channels))
        predictors = predictors if whole_product else plainest(predictors)
        for (name, predictor), objective in itertools.product(predictors.items(), some_objectives()):
            for model in parts.fitted(ae, as_wide(predictor, text), objective, text):
                encoder = text.model_id if model.text_encoders else "none"
                found.setdefault((ae.model_id, encoder, name, parts.name_of(objective)), model)
    return found


def called(predictors):
    """Return each by a name that tells it from the first of its kind, whatever the channels of its latents."""
    first: dict[str, Any] = {}
    found = {}
    for predictor in predictors:
        plain = dataclasses.asdict(first.setdefault(predictor.model_id, predictor))
        own = {name: value for name, value in dataclasses.asdict(predictor).items() if value != plain[name]}
        if "out_channels" in own:
            own["out_channels"] = f"{predictor.out_channels // predictor.in_channels}C"
        found[" ".join([predictor.model_id, *(f"{name}={value}" for name, value in own.items())])] = predictor
    return found


def some_objectives():
    """One of each objective for each width of output and time of data: no other part hears of its other words."""
    told = {(c.model_id, getattr(c, "data_time", None), takes(c, 3), takes(c, 6)): c for c in parts.objectives()}
    return list(told.values())


def takes(objective, out_channels):
    with suppress(ConfigError):
        objective.check_output(3, out_channels)
        return True
    return False


def as_wide(predictor, text):
    """Return ``predictor`` for states and vectors of the width that ``text`` gives."""
    for condition in predictor.conditions:
        if isinstance(condition, TextCondition):
            found = condition.widths_of((text,) * (1 + max(part.encoder for part in condition.parts)))
            predictor = dataclasses.replace(predictor, **{key: width for key, (width, _) in found.items() if width})
    return predictor


class Combination(namedtuple("Names", "source ae text predictor objective optimizer")):
    """Names of parts that fit."""

    @property
    def parts(self):
        """Each kind of part."""
        return set(enumerate(name.split()[0].split("-")[0] for name in self))

    @property
    def pairs(self):
        """Each pair of parts in all their forms."""
        return set(itertools.combinations(enumerate(self), 2))


Fit = namedtuple("Fit", "model data encodes")
"""Parts that fit."""


@pytest.fixture(scope="module")
def fitting(models, sources, place, whole_product):
    """Every combination that fits; every other one was refused with a UserError."""
    opened: dict[Any, Any] = {}
    found = {}
    for names, model in models.items():
        for source, param in sources.items():
            key = (source, *names[:3])
            if key not in opened:
                opened[key] = opens(model, parts.of_size(param, model.sample_size))
            if opened[key] is not None:
                fit = Fit(model, opened[key], encodes=True)
                found |= {Combination(source, *names, optimizer): fit for optimizer in OPTIMIZERS}
    return found | of_caches(place, whole_product)


def of_caches(place, whole_product):
    """The same of caches, whose latents and states have sizes of their own, for whatever takes these."""
    found = {}
    for there, param in parts.caches(place):
        size, kept = there.latent_shape[1:], there.predictor.conditions.items
        others = [other for other in parts.predictors(there.ae.latent_channels)
                  if other.conditions.items == kept and not has_one_class(other)]  # fmt: skip
        predictors = called([there.predictor, *filter(None, (parts.resized(other, size) for other in others))])
        predictors = predictors if whole_product else plainest(predictors)
        text = there.text_encoder
        for (name, predictor), objective in itertools.product(predictors.items(), some_objectives()):
            for model in parts.fitted(there.ae, as_wide(predictor, text), objective, text):
                names = f"cache {param.cache}", there.ae.model_id, "kept", name, parts.name_of(objective)
                fit = Fit(model, data_set(model, param), encodes=False)
                found |= {Combination(*names, optimizer): fit for optimizer in OPTIMIZERS}
    return found


def data_set(model, param):
    return DataSet(MultiModalArguments(model, DataConfig(param), None, {}), 0)


def has_one_class(predictor):
    return getattr(predictor.conditions.label, "num_classes", None) == 1


def opens(model, param):
    """Return the data set, or None where it is refused: exactly where sizes, items or encoders differ."""
    conditions = model.predictor.conditions
    fits = set(conditions.items) <= set(param.items) and len(param.sample_size) == len(model.sample_size)
    texts = [condition for condition in conditions if isinstance(condition, TextCondition)]
    pooled = [width for text in texts for width, _ in text.widths_of(model.text_encoders).values()]  # if asked for
    fits = fits and all(pooled) and (not has_one_class(model.predictor) or getattr(param, "single_class", False))
    fits = fits and (param.dataset_type != "turned" or param.sample_size == (SIDE, SIDE))
    try:
        check_encoders(model)
        data = data_set(model, param)
    except UserError as error:
        not_here = FRAMEWORK == "mindspore" and isinstance(error, PlatformError)  # a package that stands beside PyTorch
        assert not_here or not fits, error
        return None
    assert fits, (param, model)
    return data


def covering(combinations, items):
    """Return some of them that have all ``items`` (parts or pairs) which any of them has."""
    missing, chosen = set().union(*(getattr(c, items) for c in combinations)), []
    shuffled = random.Random(0).sample(combinations, len(combinations))
    for least in (8, 5, 3, 2, 1):
        for combination in shuffled:
            if len(getattr(combination, items) & missing) >= least:
                chosen.append(combination)
                missing -= getattr(combination, items)
    return chosen


def test_every_part_fits_another(fitting, sources, whole_product):
    assert {c.optimizer for c in fitting} == set(OPTIMIZERS)
    tried = [fit.model for fit in fitting.values()]
    captioned = {p.model_id for p in parts.predictors() if "caption" in p.conditions.items and len(p.latent_shape) == 3}
    assert {model.predictor.model_id for model in tried} >= set(PREDICTOR_CONFIGS) - (captioned if NO_TEXTS else set())
    of_two_times = set() if whole_product else {"mean_flow"}  # (whose network is not the plainest DiT)
    assert {model.diffusion.model_id for model in tried} >= set(DIFFUSION_CONFIGS) - of_two_times
    runs_here = {name for name, kind in AE_CONFIGS.items() if FRAMEWORK in kind.frameworks}
    assert {model.ae.model_id for model in tried} >= runs_here
    if FRAMEWORK == "pytorch":  # where what reads all sources, and captions, is installed
        kinds = {sources[c.source].dataset_type for c in fitting if c.source in sources}
        assert kinds == set(SOURCES) - {"mixed"}  # (made of the others: tests/data/test_mixed.py)
        conditions = {type(condition).__name__ for model in tried for condition in model.predictor.conditions}
        elsewhere = {"PooledText", "Vector", "ImageTokens"}  # (no image encoder)
        assert conditions >= {name.rpartition(".")[2] for name in CONDITIONS} - elsewhere
        texts = {kind for kind in TEXT_ENCODER_CONFIGS.values() if FRAMEWORK in kind.frameworks}
        assert {type(text) for model in tried for text in model.text_encoders} == texts


@pytest.mark.parametrize("items", ["parts", pytest.param("pairs", marks=[pytest.mark.extended, pytest.mark.pytorch])])
def test_all_that_fits_is_trained_and_sampled(framework, fitting, monkeypatch, items):
    engines = importlib.import_module(f"mindspeed_mm_dit.training.{FRAMEWORK}.engine")
    monkeypatch.setattr(engines.runtime, "num_microbatches", lambda: 1)
    chosen, failures = covering(list(fitting), items), []
    for combination in chosen:
        try:
            try_out(framework, engines, fitting[combination], combination.optimizer)
        except PlatformError as error:  # an objective whose loss MindSpore does not compile says so
            assert FRAMEWORK == "mindspore", error
        except Exception as error:
            failures.append(f"{combination}: {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} of {len(chosen)}:\n" + "\n".join(failures[:5])


def try_out(framework, engines, fit, optimizer):
    """Each sample's loss is its own; two steps move every parameter; a guided sample of each of two values."""
    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.models.composite import DiTModel
    from mindspeed_mm_dit.models.registry import load_encoders

    config, data = fit.model, fit.data
    model = DiTModel(config, *load_encoders(config, fit.encodes))
    draw = np.random.default_rng(1)
    shapes = parameters_of(config).shapes()
    start = {name: (0.3 * draw.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    engine = engines.Engine(model, run_config(**FLAGS, optimizer=optimizer), None, weights=start)
    samples = data.samples(training_draw(config.diffusion))
    batch = samples.batch(np.arange(BATCH))
    runtime.to_runtime_device(model)

    def forward_step(batches, model):
        return model(**runtime.to_device(next(batches))), lambda losses: (losses.mean(), {"loss": losses.mean()})

    rows = [{name: array[row : row + 1] for name, array in batch.items()} for row in range(BATCH)]
    together, *alone = (framework.ops.numpy(engine.eval_step(forward_step, iter([given]))) for given in (batch, *rows))
    np.testing.assert_allclose(together, np.concatenate(alone), **CLOSE)
    assert np.ptp(together) > 0 or config.diffusion.model_id == "mean_flow"  # (its losses are weighted to about 1)
    for lr in (1e-2, 2e-2):  # (of a sign alone two equal steps may undo each other)
        result = engine.train_step(forward_step, iter([batch]), lr)
    assert np.isfinite(framework.ops.numpy(result.loss))
    trained = parameters_of(config).shapes(trained_only=True)
    moved = {name: p for name, p in model.predictor.named_parameters() if name in trained}
    still = [name for name, p in moved.items() if (framework.ops.numpy(p) == start[name]).all()]
    assert not still, f"never moved: {still}"
    if fit.encodes:
        samples_of(config, model, data)


def samples_of(config, model, data):
    from mindspeed_mm_dit.sampling.conditions import SampleConditions
    from mindspeed_mm_dit.sampling.generate import generate, with_defaults
    from mindspeed_mm_dit.sampling.request import SampleRequest

    asked = SampleConditions({item: values[:2] for item, values in data.examples().items()})
    guidance = 1.5 if config.predictor.conditions.has_unconditional else 1.0
    request = SampleRequest(sampler=objective_of(config.diffusion).quick_sampler, steps=2, guidance=guidance)
    samples = generate(model, config, asked, with_defaults(request, config))
    assert samples.shape[:-1] == (len(asked), *config.sample_size)


@pytest.mark.parametrize(
    "kind", dict.fromkeys([*AE_CONFIGS.values(), *TEXT_ENCODER_CONFIGS.values()]), ids=lambda kind: kind.__name__
)
def test_an_encoder_of_another_framework_is_refused_by_name(framework, kind):
    if FRAMEWORK in kind.frameworks:
        pytest.skip("runs here")
    with pytest.raises(PlatformError, match=f"PyTorch.* {FRAMEWORK}"):
        check_framework(kind("nowhere"))
