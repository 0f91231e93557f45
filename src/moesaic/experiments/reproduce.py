"""Makes the paper's tables and figures one after the other, and goes on where it stopped.

DIR holds a page, a JSON file and a plot for each, and README.md, which lists them. The
JSON file comes last: a table is done when that is there, made with the same settings.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moesaic._version import __version__
from moesaic.calibration.text import read_documents
from moesaic.errors import MoesaicError, is_of_disk, reason_of
from moesaic.evaluate.task_data import check_files
from moesaic.evaluate.tasks import TASKS, load_questions
from moesaic.experiments.contents import (
    ALL,
    EXPERIMENTS,
    Experiment,
    chosen,
)
from moesaic.experiments.digests import WEIGHTS, digest_of
from moesaic.experiments.figure import draw
from moesaic.experiments.page import markdown
from moesaic.experiments.questions import MADE_UP, write_questions
from moesaic.experiments.scales import (
    Scale,
    check_length,
    scale_of,
    with_prompts_within,
)
from moesaic.experiments.study import Study
from moesaic.experiments.table import Table
from moesaic.experiments.texts import (
    SMOKE_TEXTS,
    USUAL,
    check_sources,
    named_sources,
    prepare_texts,
    smoke_text,
)
from moesaic.families.load import choose_device, context_of, load_config
from moesaic.output.atomic import check_parent, write_file
from moesaic.progress import duration

SMOKE = "smoke"
_MARK = "reproduce.json"  # what the folder was made with
_VERSIONS = ("torch", "transformers", "moesaic")


@dataclass
class Done:
    """How many tables, how long it took, and the reasons of those that failed.

    `in_part`: of those that were made without rows which may come another time.
    """

    made: int = 0
    kept: int = 0
    seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    in_part: dict[str, str] = field(default_factory=dict)


def reproduce(
    model: str,
    output: str | Path,
    *,
    tables: str = ALL,
    scale: str = SMOKE,
    texts: Mapping[str, str] | None = None,
    task_data: Path | None = None,
    allow_code_execution: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    progress: Callable[[str], Any] = lambda line: None,
) -> Done:
    """Writes the paper's tables and figures, made on `model`, into the folder `output`.

    `tables` names some with commas. `texts` are SOURCEs by domain (wiki, c4, code, maths,
    science) in place of the scale's own, `task_data` a folder of questions. A table that
    is whole and was made with the same settings stays. One that fails stops no other.
    Raises MoesaicError for bad input, before anything is written.

    Models that several tables share stay in `output`/models: some 60 of the model's size.
    """
    experiments = chosen(tables)
    usual_size = scale_of(scale)
    folder = Path(output).absolute()
    is_smoke = scale == SMOKE
    sources = named_sources(texts or {}, is_smoke)
    config = load_config(model, trust_remote_code, dtype)
    context = context_of(config)
    check_length(usual_size, model, context)
    size = with_prompts_within(usual_size, context)
    settings = {
        "model": model,
        "scale": size.to_dict(),
        "texts": sources,
        "device": choose_device(device).type,
        "dtype": dtype,
        "version": __version__,
    }
    mark = settings | {
        "contents": _contents(texts or {}),
        "weights": digest_of(model, WEIGHTS),
    }
    _check_folder(folder, mark)
    if not is_smoke:
        check_sources(sources, experiments)
    _check_questions(experiments, size, task_data, allow_code_execution)

    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / _MARK, mark)
    questions = task_data
    if is_smoke and task_data is None:
        text = smoke_text("code")
        questions = write_questions(text, folder / "questions")
    study = Study(
        model=model,
        scale=size,
        folder=folder,
        texts=prepare_texts(sources, folder / "texts", is_smoke),
        task_data=questions,
        questions=None if questions is None else digest_of(questions),
        allow_code_execution=allow_code_execution,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        tell=progress,
    )
    asked = {
        "task_data": None if task_data is None else str(task_data),
        "questions": study.questions,
        "allow_code_execution": allow_code_execution,
    }
    return _make_all(experiments, study, {**settings, **asked}, progress)


def _contents(texts: Mapping[str, str]) -> dict[str, str]:
    """A digest of what each text holds: a file that has changed is another text.

    Raises MoesaicError for one that cannot be read.
    """
    digests = {}
    for domain, source in texts.items():
        text = "\n\n".join(read_documents(source))
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
        digests[domain] = digest.hexdigest()[:8]
    return digests


def _check_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raises MoesaicError where the folder is another's, or of another reproduction."""
    check_parent(folder)
    if folder.exists() and not folder.is_dir():
        raise MoesaicError(f"output {folder} is a file; choose another")
    if not folder.exists() or not any(folder.iterdir()):
        return
    try:
        earlier = json.loads((folder / _MARK).read_text("utf-8"))
        differing = [
            key for key in settings if earlier.get(key) != settings[key]
        ]
    except (OSError, ValueError, AttributeError) as error:
        raise MoesaicError(
            f"output {folder} is in the way: it is not empty, and no reproduction; "
            "choose another"
        ) from error
    if differing:
        key = differing[0]
        before = _short(earlier.get(key))
        raise MoesaicError(
            f"output {folder} was made with {key} = {before}, this run has "
            f"{_short(settings[key])}; choose another"
        )


def _short(value: Any) -> Any:
    """A scale by its name."""
    return value.get("name", value) if isinstance(value, dict) else value


def _check_questions(
    experiments: list[Experiment],
    scale: Scale,
    task_data: Path | None,
    allow_code_execution: bool,
) -> None:
    """Raises MoesaicError where a table's questions cannot be had."""
    names = [row.name for row in experiments if row.tasks]
    if not names:
        return
    if find_spec("lm_eval") is None:
        raise MoesaicError(
            f"{', '.join(names)} ask questions: pip install 'lm-eval>=0.4.13', or leave "
            "them out by --tables"
        )
    if task_data is not None:
        tasks = {task for row in experiments for task in row.tasks}
        if not allow_code_execution:
            tasks.discard("humaneval")
        usual = {task: TASKS[task].shots for task in sorted(tasks)}
        check_files(task_data, {**usual, **_of(scale.shots, tasks)})
    elif scale.name != SMOKE:
        with TemporaryDirectory() as scratch:
            load_questions({"piqa": 0}, 1, None, Path(scratch))


def _of(shots: Mapping[str, int], tasks: Collection[str]) -> dict[str, int]:
    return {task: count for task, count in shots.items() if task in tasks}


def _make_all(
    experiments: list[Experiment],
    study: Study,
    settings: dict[str, Any],
    progress: Callable[[str], Any],
) -> Done:
    """The loop over the tables; whatever one raises, the others go on."""
    started = time.perf_counter()
    undone = [row for row in experiments if not _is_whole(study, row, settings)]
    done = Done(kept=len(experiments) - len(undone))
    spent = 0.0
    for number, experiment in enumerate(undone, start=1):
        left = sum(row.cost for row in undone) - spent
        seconds = time.perf_counter() - started
        outlook = f", {duration(seconds / spent * left)} left" if spent else ""
        progress(
            f"{number} of {len(undone)}: {experiment.label}, {experiment.name}{outlook}"
        )
        study.broken.clear()
        try:
            _make(experiment, study, settings)
        except Exception as error:  # of methods, of libraries, of memory
            if is_of_disk(error):
                raise
            done.failed[experiment.name] = reason_of(error)
        else:
            done.made += 1
            if study.broken:
                done.in_part[experiment.name] = study.broken[0]
        spent += experiment.cost
        _write_list(experiments, study, settings, done)
    _write_list(experiments, study, settings, done)
    done.seconds = time.perf_counter() - started
    return done


def _make(
    experiment: Experiment, study: Study, settings: dict[str, Any]
) -> None:
    """One table: its page and its plot, then its numbers."""
    started = time.perf_counter()
    table: Table = import_module(experiment.where).run(study)
    table = _with_stand_ins(table, experiment, study, settings)
    seconds = time.perf_counter() - started
    label = f"{experiment.label}: {experiment.title}"
    paper_model = experiment.paper_model or study.paper_model
    page = markdown(
        experiment, table, study.shown_model, study.scale, paper_model
    )
    image = draw(table, f"{label}\n{study.shown_model}, {study.scale.name}")
    values = {
        "name": experiment.name,
        "label": experiment.label,
        "title": experiment.title,
        "settings": settings,
        **table.numbers(),
        "broken": list(study.broken),
        "times": {"seconds": seconds, "rows": table.times()},
        "versions": {name: version(name) for name in _VERSIONS},
    }
    write_file(study.folder / f"{experiment.name}.md", page)
    write_file(study.folder / f"{experiment.name}.png", image)
    _write(study.folder / f"{experiment.name}.json", values)


def _with_stand_ins(
    table: Table,
    experiment: Experiment,
    study: Study,
    settings: dict[str, Any],
) -> Table:
    """The table, with a note where texts or questions are not the usual ones."""
    notes = list(dict.fromkeys(table.notes))
    if study.scale.name == SMOKE:
        if experiment.tasks and settings["task_data"] is None:
            notes.append(MADE_UP)
        if not settings["texts"]:
            notes.append(SMOKE_TEXTS)
    prompts = study.scale.contexts
    if experiment.is_timed and prompts != scale_of(study.scale.name).contexts:
        longest = max(prompts)
        notes.append(
            f"prompts have at most {longest:,} tokens: the model's context holds no more"
        )
    for domain in experiment.texts:
        source = settings["texts"].get(domain)
        if source != USUAL.get(domain) and source is not None:
            notes.append(f"{domain} is {Path(source).name}")
    return Table(table.columns, table.rows, notes, table.panels)


def _is_whole(
    study: Study, experiment: Experiment, settings: dict[str, Any]
) -> bool:
    """Whether a table is there, made with these settings, as far as it asks for them."""
    path = study.folder / f"{experiment.name}.json"
    unused = set()
    if not experiment.tasks:
        unused |= {"task_data", "questions"}
    if "humaneval" not in experiment.tasks:
        unused.add("allow_code_execution")
    try:
        values = json.loads(path.read_text("utf-8"))
        earlier = values["settings"]
        differing = {key for key in settings if earlier[key] != settings[key]}
        same = differing <= unused and not values.get("broken")
    except (OSError, ValueError, KeyError, TypeError):
        return False
    others = [path.with_suffix(suffix) for suffix in (".md", ".png")]
    return same and all(other.is_file() for other in others)


def _write_list(
    asked_for: list[Experiment],
    study: Study,
    settings: dict[str, Any],
    done: Done,
) -> None:
    """README.md: which tables there are, of this run or another, and why others are not."""
    scale: Scale = study.scale
    lines = [
        f"# {study.shown_model} at {scale.name}: the paper's tables and figures",
        "",
        f"{scale.says} The paper is arXiv 2502.04416.",
        "",
    ]
    for row in EXPERIMENTS.values():
        entry = f"- {row.label}, {row.title}"
        if row.name in done.failed:
            lines.append(f"{entry}: failed, {done.failed[row.name]}")
        elif row.name in done.in_part:
            reason = done.in_part[row.name]
            lines.append(
                f"{entry}: [{row.name}]({row.name}.md), in part: {reason}"
            )
        elif _is_whole(study, row, settings):
            lines.append(f"{entry}: [{row.name}]({row.name}.md)")
        elif row in asked_for:
            lines.append(f"{entry}: not run yet")
    write_file(study.folder / "README.md", "\n".join(lines) + "\n")


def _write(path: Path, values: Mapping[str, Any]) -> None:
    write_file(path, json.dumps(values, indent=1) + "\n")
