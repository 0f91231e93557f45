"""Table 8: whether neuron-level sparsity (WINA) saves on top of experts."""

from __future__ import annotations

from moesaic.experiments.study import LAYOUT, SPARSITY, Study
from moesaic.experiments.table import Column, Row, Table, Value
from moesaic.experiments.work import decoding_speeds, macs_of

COLUMNS = (
    Column("flops", "FLOPs (G)", 2),
    Column("macs", "MACs (G)", 2),
    Column("saved", "MACs saved (%)", 1),
    Column("wiki", "perplexity, wiki", 3),
    Column("speed", "tokens/s", 1, timed=True),
)

# Llama-2 7B.
PAPER: dict[str, dict[str, Value]] = {
    "dense": {"flops": 1690, "macs": 845.71, "speed": 45.88},
    "wina": {"flops": 1310, "macs": 691.19, "saved": 18.3, "speed": 51.76},
    "cmoe": {"flops": 1410, "macs": 707.36, "saved": 16.3, "speed": 52.67},
    "cmoe + wina": {
        "flops": 1230,
        "macs": 625.53,
        "saved": 26.0,
        "speed": 55.97,
    },
}


def run(study: Study) -> Table:
    experts = study.converted("cmoe", LAYOUT)
    models = {
        "dense": study.model,
        "wina": study.converted("wina", sparsity=SPARSITY),
        "cmoe": experts,
        "cmoe + wina": study.converted(
            "wina", sparsity=SPARSITY, model=experts
        ),
    }
    dense = macs_of(study, study.model)
    rows = []
    for name, model in models.items():
        macs = macs_of(study, model)
        values: dict[str, Value] = {
            "flops": 2 * macs,
            "macs": macs,
            "saved": 100 * (1 - macs / dense),
            "wiki": study.perplexity(model, "wiki"),
        }
        if name == "dense":
            values["speed"] = decoding_speeds(study, experts)[1]
        else:
            values["speed"] = decoding_speeds(study, model)[0]
        rows.append(
            Row(name, values, PAPER[name], is_reference=name == "dense")
        )
    notes = [
        "training-free; WINA skips inputs of attention and of what is shared, and leaves "
        "routed experts whole (docs/deviations.md)",
        "tokens/s: on a CPU with AVX2 or AVX-512 a kernel of ours skips the inputs that WINA does "
        "not read; elsewhere all are read, and choosing them comes on top",
    ]
    return Table(COLUMNS, rows, notes)
