"""Plans: a run and what it is, for tables, figures and pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ...common.checks import check_count, check_flag, check_number, is_number
from ...common.errors import BsamError, BsamValueError
from ..common.names import find_name, is_own
from ..common.printing import count_text
from ..config import BASE, RADIUS_SCHEDULE, Check, Run, default_settings, known_method, preset_values
from ..models.weights import PRETRAINED
from ..tasks import task_class, task_of
from ..training.run_dir import RunDir, RunState, run_dir_name
from ..training.trainer import CURVATURE_SAMPLES
from .variants import all_arguments, passes_of, usual_arguments, variant_of, variants

TUNING_SEED = 10_000  # added to the seed, so that tuning runs share no random numbers with final runs
# settings that do not make another experiment: those of the row, of the seed, of speed and of measurements
NOT_COMPARED = frozenset(
    ("method", "arguments", "seed", "compile", "capture", "skip_corrupt", "probe", "curvature", "surface")
) | {*RADIUS_SCHEDULE, "sharpness_rho"}
# settings that come first in titles, before those of the task
FIRST_IN_TITLES = ("freeze_backbone", "head_lr", "layer_decay", "image_size", "augment", "limit_test")
# settings that the title words specially
TITLED = frozenset(("task", "model", "data", "weights", "limit_train", "eval_split", "epochs", "init"))
# entries of a description: numbers, which may be unknown (None), and checks of those that are no text
NUMBERS = ("radius", "passes", "published")
GIVEN = ("chosen", "published", "published_table")  # entries that only whoever plans a run gives
TEXTS = ("experiment", "row", "section", "column", "chosen", "published_table")  # of a plan
CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("place", "order"), partial(check_count, low=0)),
    **dict.fromkeys(NUMBERS, check_number),
    **dict.fromkeys(("tuned", "trial", "shared"), check_flag),
}


def check_text(name: str, value: object) -> None:
    """Raise unless the value is a string."""
    if not isinstance(value, str):
        raise BsamValueError(f"{name} must be text, got {value!r}")


def check_entry(name: str, value: object) -> None:
    """Raise if the value cannot be an entry of a description."""
    if value is not None or name not in NUMBERS:
        CHECKS.get(name, check_text)(name, value)


@dataclass(frozen=True)
class Plan:
    """A run to train, and where its results are shown.

    Args:
        run: the run.
        experiment: the title of the runs that it is compared with; None derives it from the settings.
        row: its row in the table; None names the method and its arguments.
        section: the part of the table; None is the network.
        column: its column in the table; None is the data set.
        order: the position of the row; None is that of the method among :func:`variants`.
        candidates: settings to choose from before it is trained, as fields of ``Run`` by name.
        published: its published number; None takes the one of ``published_table``, if there is one.
        published_table: a table of ``published.json``.
        chosen: how its settings were chosen, in words; None says whether the radii are the defaults.
        settings_chosen: the settings that tuning chose.
        tuned: whether tuning chose settings of this run.
        trial: whether it is a tuning run.
        until: the epoch that a tuning run stops after; None trains all epochs.

    Example:
        >>> Plan(Run("sam", {"rho": 0.2}), column="test").about["row"]
        'SAM, rho 0.2'
    """

    run: Run
    experiment: str | None = None
    row: str | None = None
    section: str | None = None
    column: str | None = None
    order: int | None = None
    candidates: Sequence[Mapping[str, Any]] = ()
    published: float | None = None
    published_table: str | None = None
    chosen: str | None = None
    settings_chosen: Mapping[str, Any] | None = None
    tuned: bool = False
    trial: bool = False
    until: int | None = None

    def __post_init__(self) -> None:
        for name, value in self._given().items():
            check_entry(name, value)

    @cached_property
    def name(self) -> str:
        """The name of the run directory."""
        return run_dir_name(self.run)

    @cached_property
    def about(self) -> Mapping[str, Any]:
        """What ``run.json`` in the run directory says: see :func:`describe`."""
        network, data = task_of(self.run).titles(self.run)
        given = {"section": network, "column": data, **self._given()}
        if "order" in given:
            given["place"] = given.pop("order")  # its name in the file
        return describe(self.run, **given)

    def _given(self) -> dict[str, Any]:
        """Return the entries of the description that do not follow from the run."""
        given = {name: getattr(self, name) for name in (*TEXTS, "order", "published", "tuned", "trial")}
        return {name: value for name, value in given.items() if value is not None}


def with_seed(plans: Sequence[Plan], seed: int, **more: Any) -> list[Plan]:
    """Return the plans with another seed and other settings; runs that start from another of them still do."""
    new = [
        plan if plan.run.seed == seed and not more else replace(plan, run=plan.run.changed(seed=seed, **more))
        for plan in plans
    ]
    if all(plan.run.init is None for plan in new):
        return new
    names = {old.name: plan.name for old, plan in zip(plans, new, strict=True)}
    return [
        replace(plan, run=replace(plan.run, init=names[plan.run.init])) if plan.run.init in names else plan
        for plan in new
    ]


def describe(run: Run, **known: Any) -> dict[str, Any]:
    """Say what a run is: its experiment, its row, its radius, ...

    Args:
        run: the run.
        known: entries that differ from what follows from the settings, such as ``row``, and those that do not follow:
            how the settings were ``chosen``, a ``published`` number, and a ``published_table`` of the paper.

    Example:
        >>> about = describe(
        ...     Run("sam", {"rho": 0.2}, model="resnet18", data="cifar10", batch=256)
        ... )
        >>> about["experiment"], about["row"], about["radius"]
        ('ResNet-18, CIFAR-10, 200 epochs, batch 256', 'SAM, rho 0.2', 0.2)
    """
    variant = variant_of(run)
    tuned = bool(known.get("tuned", False))
    is_unknown = is_own(run.method) and known_method(run.method) is None  # a stored run of somebody's class
    arguments = all_arguments(run.method, run.arguments)
    # their sum is the total radius: to first order, SAM and BSAM correct the gradient in proportion to it
    names = ("rho_max", "rho_min") if "rho_max" in arguments else ("rho",)
    radii: list[Any] = [arguments.get(name) for name in names]
    order = list(variants())
    about: dict[str, Any] = {
        "experiment": experiment_title(run),
        "row": variant.title if tuned else row_title(run),
        "place": order.index(variant.name) if variant.name in order else 0,
        "section": "",
        "column": "",
        "variant": variant.name,
        "radius": float(sum(radii)) if all(map(is_number, radii)) else None,
        "passes": None if is_unknown else passes_of(run),
        "tuned": tuned,
        "trial": False,
        "shared": False,
    }
    if unknown := known.keys() - about.keys() - {*GIVEN}:
        raise BsamValueError(f"a run is described by {', '.join((*about, *GIVEN))}; got {min(unknown)!r}")
    for name, value in known.items():
        check_entry(name, value)
    return {**about, **known}


def experiment_title(run: Run) -> str:
    """Return a title that is equal for runs that can be compared: network, data, and settings that are not defaults."""
    task = task_of(run)
    parts = [*task.titles(run), task.data_words(run), task.network_words(run)]
    if run.weights is not None:
        file = Path(run.weights)
        parts.append("pretrained" if run.weights == PRETRAINED or file.stem == run.model else f"pretrained {file.name}")
    if run.init is not None:
        parts.append("from a trained network")
    if run.limit_train is not None:
        parts.append(f"{run.limit_train:,} training samples")
    if run.eval_split != "test":
        parts.append(f"scored on {run.eval_split}")
    settings = run.settings()
    given = {name: value for name, value in settings.items() if name != "base"}  # the rates of AdamW are shown
    usual = {**default_settings(type(run.task)), **preset_values(type(run.task), given)}
    of_task = [item.name for item in fields(run.task)]
    left_out = NOT_COMPARED | TITLED | {*task.worded}
    further = [
        setting_text(settings[name], name)
        for name in dict.fromkeys((*FIRST_IN_TITLES, *of_task, *settings))
        if settings[name] != usual[name] and name not in left_out
    ]
    return ", ".join([part for part in (*parts, count_text(run.epochs, "epoch"), *further) if part])


def row_title(run: Run) -> str:
    """Return the title of a run's variant, with the arguments that differ from those that recipes use.

    Example:
        >>> row_title(Run("bsam", {"rho_min": 0.2})), row_title(Run("bsam", {"passes": 2}))
        ('BSAM (Algorithm 1), rho_min 0.2', 'BSAM (2 passes)')
    """
    variant = variant_of(run)
    if run.method == BASE:
        return variant.title
    usual = usual_arguments(run, variant)
    values = all_arguments(run.method, run.arguments)
    different = [setting_text(value, name) for name, value in values.items() if value != usual.get(name)]
    different += [setting_text(value, name) for name in RADIUS_SCHEDULE if (value := getattr(run, name))]
    return ", ".join([variant.title, *different])


def setting_text(value: Any, name: str = "") -> str:
    """Return a setting in words; a mapping has several.

    Example:
        >>> (
        ...     setting_text(5e-4, "weight_decay"),
        ...     setting_text(True, "nesterov"),
        ...     setting_text({"rho_max": 0.1, "k": 2}),
        ... )
        ('weight decay 0.0005', 'nesterov', 'rho_max 0.1, k 2')
    """
    words = name if name.startswith("rho") else name.replace("_", " ")
    if name == "precision":
        return str(value)
    if name == "limit_test":
        return f"{value:,} test samples"
    if isinstance(value, bool):
        return words if value else f"no {words}"
    if isinstance(value, Mapping):
        return ", ".join(setting_text(entry, key) for key, entry in value.items())
    return f"{words} {value:g}" if isinstance(value, float) else f"{words} {value}"


def state_of(run: Run, out: Path, until: int | None = None) -> RunState:
    """Return the state of a run that is trained up to an epoch, read from its directory below ``out``.

    A directory that cannot be read is a state, too: it must not stop the other runs.
    """
    path = out / run_dir_name(run)
    try:
        return RunDir(path).state(run, until)
    except BsamError as error:
        return RunState(run, path, until=until, unreadable=str(error))
    except OSError as error:
        return RunState(run, path, until=until, unreadable=f"{path} cannot be read ({error.strerror})")


def measured_on(settings: Mapping[str, Any], samples: int | None = None) -> str:
    """Return which loss of a run is measured, and on which samples: the label of a number such as λmax.

    Args:
        settings: the run's.
        samples: the number of training samples; None for measurements at the end of training, which use fewer than
            :data:`CURVATURE_SAMPLES` only if there are fewer.

    Example:
        >>> measured_on({"task": "classification"}), measured_on({"task": "pose"}, 1000)
        ('cross-entropy, at most 256 training samples', 'SimCC loss, 1,000 training samples')
    """
    try:
        title = task_class(settings.get("task", Run.task.name)).loss_title
    except BsamValueError:  # a task of the user of which only this entry is known
        title = "loss"
    count = f"at most {CURVATURE_SAMPLES}" if samples is None else f"{samples:,}"
    return f"{title}, {count} training samples"


def select(
    plans: Sequence[Plan], methods: Sequence[str] = (), models: Sequence[str] = (), data: Sequence[str] = ()
) -> list[Plan]:
    """Return the runs with these methods (as in the tables), networks and data sets; an empty selection takes all.

    The runs that they start from come first.
    """
    names_of: dict[str, tuple[Sequence[str], Callable[[Plan], str]]] = {
        "method": (methods, lambda plan: variant_of(plan.run).name),
        "model": (models, lambda plan: plan.run.model),
        "data set": (data, lambda plan: plan.run.data),
    }
    chosen = list(plans)
    for kind, (given, name_of) in names_of.items():
        known = dict.fromkeys(map(name_of, plans))
        selected = [find_name(f"{kind} of the recipe", name, known) for name in given] or known
        chosen = [plan for plan in chosen if name_of(plan) in selected]
    if not chosen:
        raise BsamValueError(
            "no run of the recipe has the chosen methods, models and data sets together: leave out --only, --models or "
            "--data"
        )
    initial = {plan.run.init for plan in chosen} - {plan.name for plan in chosen}
    return [*(plan for plan in plans if plan.name in initial), *chosen]
