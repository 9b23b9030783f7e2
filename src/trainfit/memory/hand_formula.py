"""The arithmetic that people do by hand, next to the simulated peak, with what makes the
difference.

The formula is that of the notes on ACT, VGG16 and the T4: 4 bytes for each parameter and its
gradient and 4 for each of the optimizer's states (16 bytes with Adam, 12 with momentum, 8 with
SGD); each layer's result in the type that is computed in; the input; 10 to 30% for the rest. The
numbers of the results are the recording's (:mod:`trainfit.memory.forward_pass`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from trainfit.memory.explanation import ExplainError, RecordingSource, device_of
from trainfit.memory.forward_pass import ATTENTION, Operators, forward_pass
from trainfit.memory.peak import divided, moment
from trainfit.memory.replay import Replay, Stream, live_at
from trainfit.results.memory import DifferenceCause, HandReport, HandRow, ModelPart
from trainfit.results.runs.recording import (
    FREE,
    KINDS,
    MALLOC,
    PHASES,
    Parameter,
    Recording,
    step_around,
    step_ends,
)

# ---
# A hand formula's parameter memory: 4 bytes each for the weight, its gradient and each state.


#: Bytes of a number in the formula's parameters, gradients and states.
BYTES: Final = 4
#: Numbers that an optimizer keeps of each parameter, by its class.
_STATES: Final = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax"), 2),
    **dict.fromkeys(("RMSprop", "Adagrad"), 1),
}
#: SGD has a momentum if its states have at least this share of one.
_MOMENTUM: Final = 0.5


def numbers(parameters: Iterable[Parameter]) -> int:
    """How many numbers they have together."""
    return sum(int(np.prod(parameter.shape, dtype=np.int64)) for parameter in parameters)


def narrower(parameters: Iterable[Parameter]) -> int:
    """Bytes that they have more (negative: less) than 4 a number."""
    total = 0
    for parameter in parameters:
        itemsize = {"float16": 2, "bfloat16": 2, "float64": 8}.get(parameter.dtype, 4)
        itemsize = 1 if "8" in parameter.dtype else itemsize
        total += (itemsize - BYTES) * numbers([parameter])
    return total


def state_bytes(recording: Recording, parameters: Sequence[Parameter]) -> int | None:
    """Bytes of the recorded optimizer's states for a parameter, by the formula; ``None`` where it
    has none. The recording must have an optimizer step."""
    name = str(recording.header.get("optimizer") or "")
    if name == "SGD":
        one = BYTES * numbers(parameter for parameter in parameters if parameter.trained)
        return BYTES if _kept_states(recording) >= _MOMENTUM * one else 0
    states = _STATES.get(name)
    return None if states is None else BYTES * states


def _kept_states(recording: Recording) -> int:
    """Bytes of the optimizer's states after the last step."""
    end = int(step_ends(recording.events)[-1])
    live = live_at(Stream.of(recording), end)
    states = live[recording.alloc_kind[live] == KINDS.index("optimizer_state")]
    return int(recording.alloc_bytes[states].sum())


WEIGHTS: Final = "weights"
GRADIENTS: Final = "gradients"
STATES: Final = "optimizer's states"
INPUT: Final = "input"
NOT_COUNTED: Final = "kept tensors that the formula lacks"
REST: Final = "temporaries, workspaces"
BUFFERS: Final = "buffers of the model"
#: Rows that are no activations, and no layer's results.
_NO_ACTIVATIONS: Final = (WEIGHTS, GRADIENTS, STATES, INPUT, REST, BUFFERS)
_NO_RESULTS: Final = (*_NO_ACTIVATIONS, NOT_COUNTED)
#: Kinds of allocations whose row does not hang on the operator.
_ROW_OF_KIND: Final = {
    "parameter": WEIGHTS,
    "buffer": BUFFERS,
    "gradient": GRADIENTS,
    "optimizer_state": STATES,
    "input": INPUT,
    "temporary": REST,
    "workspace": REST,
    "activation": NOT_COUNTED,
    "kv_cache": NOT_COUNTED,
    "data": NOT_COUNTED,
    "bucket": NOT_COUNTED,
}
#: The notes' "10%-30% extra buffer".
_BUFFER: Final = (0.1, 0.3)
#: Operators that are named for what the formula does not count.
_NAMED: Final = 3
_BACKWARD = PHASES.index("backward")


def by_hand(source: RecordingSource) -> HandReport:
    """The formula next to the peak of a recording.

    Raises :class:`ExplainError` for a recording without an optimizer step, and for one of an
    earlier version that does not name its parameters.
    """
    recording = source.recording
    parameters = recording.parameters()
    if not recording.steps:
        raise ExplainError(
            f"recording {source.file!r} has no complete optimizer step, which the "
            "formula needs; record a training script at a batch size that fits"
        )
    if parameters is None or not len(recording.kernel_op):
        raise ExplainError(
            f"recording {source.file!r} was made by an older trainfit and lacks data; re-record it"
        )
    device = device_of(recording)
    stream = Stream.of(recording)
    limited = device.replay(stream)
    outcome = limited if limited.fits else device.unlimited(stream)
    return _Comparison(source, parameters, stream, outcome).report()


class _Comparison:
    """Rows of the formula, and the causes of each difference."""

    def __init__(
        self,
        source: RecordingSource,
        parameters: Sequence[Parameter],
        stream: Stream,
        outcome: Replay,
    ) -> None:
        self._source = source
        self._recording = recording = source.recording
        self._parameters = parameters
        self._state_bytes = state_bytes(recording, parameters)
        self._outcome = outcome
        self._operators = Operators(recording)
        self._live = live_at(stream, outcome.peak_event)
        self._is_live = np.zeros(len(recording.alloc_bytes), dtype=bool)
        self._is_live[self._live] = True
        self._peak_alloc = int(recording.events[outcome.peak_event] >> 2)
        passed = forward_pass(self._operators, self._peak_alloc)
        if passed is None:
            raise ExplainError(
                f"recording {source.file!r}: no layer's forward pass was recorded; record a "
                "script whose model has layers"
            )
        self._begin, self._end, self._counted = passed.begin, passed.end, passed.counted
        self._counted_operators = {each.operator for each in self._counted}
        self._weights = self._weights_by_module()
        self._output_row = {each.output: each.row for each in self._counted if each.output >= 0}
        self._compute = passed.compute
        self._activation_bytes = 2 if self._compute in ("float16", "bfloat16") else 4
        #: By cause, then by row.
        self._causes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._named: dict[str, int] = defaultdict(int)

    def report(self) -> HandReport:
        recording, outcome, source = self._recording, self._outcome, self._source
        hand: dict[str, int | None] = {**self._states(), **self._activations()}
        hand |= {INPUT: self._input(), NOT_COUNTED: None, BUFFERS: None, REST: None}
        self._explain_live()
        simulated = self._simulated()
        rows = tuple(
            HandRow(name, hand.get(name), simulated.get(name, 0))
            for name in dict.fromkeys((*hand, *simulated))
            if hand.get(name) or simulated.get(name)
        )
        total = sum(row.by_hand_bytes or 0 for row in rows)
        activations = sum(row.by_hand_bytes or 0 for row in rows if row.name not in _NO_RESULTS)
        unexplained = self._unexplained(rows)
        return HandReport(
            file=source.file,
            gpu=recording.header["gpu"],
            torch=recording.header["torch"],
            batch_size=source.batch_size,
            parameters=numbers(self._parameters),
            optimizer=str(recording.header.get("optimizer") or ""),
            state_bytes=self._state_bytes,
            compute=self._compute,
            activation_bytes=self._activation_bytes,
            moment=moment(recording, outcome.peak_event),
            rows=rows,
            causes=self._listed(),
            unexplained_bytes=sum(unexplained.values()),
            unexplained_rows=unexplained,
            by_hand_bytes=total,
            buffer_bytes=(int(_BUFFER[0] * total), int(_BUFFER[1] * total)),
            doubled_bytes=total + activations,
            allocated_bytes=outcome.peak_allocated,
            reserved_bytes=outcome.peak_reserved,
            most_temporaries_bytes=self._most_temporaries(),
            parts=self._parts(),
        )

    # -- parameters ------------------------------------------------------------------------

    def _states(self) -> dict[str, int | None]:
        """Weights, gradients and states by hand; and why the peak has others."""
        total = numbers(self._parameters)
        trained = [parameter for parameter in self._parameters if parameter.trained]
        frozen = BYTES * (total - numbers(trained))
        self._cause("narrow_parameters", WEIGHTS, narrower(self._parameters))
        self._cause("frozen", GRADIENTS, -frozen)
        self._cause("narrow_parameters", GRADIENTS, narrower(trained))
        expected = BYTES * numbers(trained) + narrower(trained)
        self._cause("gradients_missing", GRADIENTS, min(0, self._asked("gradient") - expected))
        states = self._state_bytes
        kept = self._asked("optimizer_state")
        if states is None:
            self._cause("unknown_optimizer", STATES, kept)
            return {WEIGHTS: BYTES * total, GRADIENTS: BYTES * total, STATES: None}
        per_number = states // BYTES
        self._cause("frozen", STATES, -frozen * per_number)
        self._cause("narrow_parameters", STATES, narrower(trained) * per_number)
        if not kept:
            self._cause("states_missing", STATES, -expected * per_number)
        return {
            WEIGHTS: BYTES * total,
            GRADIENTS: BYTES * total,
            STATES: states * total,
        }

    # -- activations -----------------------------------------------------------------------

    def _activations(self) -> dict[str, int | None]:
        """Each row's results by hand; and what became of each of them until the peak."""
        size = self._activation_bytes
        totals: dict[str, int | None] = {}
        for each in self._counted:
            by_hand = each.elements * size
            totals[each.row] = (totals.get(each.row) or 0) + by_hand
            if each.extra:
                totals[ATTENTION] = (totals.get(ATTENTION) or 0) + each.extra * size
                self._cause("fused", ATTENTION, -each.extra * size)
            if each.output < 0:
                self._cause("in_place", each.row, -by_hand)
            elif self._is_live[each.output]:
                kept = int(self._recording.alloc_bytes[each.output])
                self._cause("precision", each.row, kept - by_hand)
            else:
                self._cause(self._why_gone(each.output), each.row, -by_hand)
        return dict(sorted(totals.items(), key=lambda item: -(item[1] or 0)))

    def _why_gone(self, alloc: int) -> str:
        if alloc > self._peak_alloc:
            return "later"
        kept = KINDS[int(self._recording.alloc_kind[alloc])] == "activation"
        return "used" if kept else "not_kept"

    def _explain_live(self) -> None:
        """What is there at the peak and not in the formula, and the allocator's rounding."""
        recording = self._recording
        granted = self._outcome.granted
        for alloc in self._live.tolist():
            nbytes = int(recording.alloc_bytes[alloc])
            row = self._row_of(alloc)
            self._cause("rounding", row, int(granted[alloc]) - nbytes)
            if row == NOT_COUNTED:
                self._cause(self._why_kept(alloc), row, nbytes)
            elif row == REST:
                kind = KINDS[int(recording.alloc_kind[alloc])]
                self._cause("workspaces" if kind == "workspace" else "temporaries", row, nbytes)
            elif row == BUFFERS:
                self._cause("buffers", row, nbytes)

    def _why_kept(self, alloc: int) -> str:
        operator = int(self._recording.alloc_op[alloc])
        if operator < self._begin:
            return "earlier"
        name = self._operators.name(operator)
        if name == "_to_copy":
            return "weight_copies" if self._is_weight_copy(alloc) else "casts"
        if name == "native_dropout":
            return "dropout"
        if operator in self._counted_operators:
            return "statistics"
        self._named[name] += int(self._recording.alloc_bytes[alloc])
        return "uncounted"

    def _is_weight_copy(self, alloc: int) -> bool:
        """Is an allocation of as many half-precision numbers as a parameter of the module has, or
        of a third of them: the stacked projections of attention are cast one by one?"""
        module = int(self._recording.alloc_module[alloc])
        half = int(self._recording.alloc_bytes[alloc]) // 2
        return half in self._weights.get(module, ())

    def _weights_by_module(self) -> dict[int, set[int]]:
        """Numbers of parameters, and of their parts, by the module that owns them."""
        weights: dict[int, set[int]] = defaultdict(set)
        for parameter in self._parameters:
            owner = int(self._recording.alloc_module[parameter.alloc])
            all_of_it = numbers([parameter])
            stacked = len(parameter.shape) == 2 and parameter.shape[0] % 3 == 0
            weights[owner] |= {all_of_it, all_of_it // 3} if stacked else {all_of_it}
        return weights

    # -- input and the rest ----------------------------------------------------------------

    def _input(self) -> int:
        """What was copied to the GPU for the micro-batch; and whether it is there at the peak."""
        recording = self._recording
        of_pass = (recording.alloc_op >= self._begin) & (recording.alloc_op < self._end)
        inputs = np.flatnonzero(self._mask("input") & of_pass)
        nbytes = recording.alloc_bytes
        self._cause("input_freed", INPUT, -int(nbytes[inputs[~self._is_live[inputs]]].sum()))
        live = self._live[recording.alloc_kind[self._live] == KINDS.index("input")]
        others = np.setdiff1d(live, inputs)
        self._cause("other_inputs", INPUT, int(nbytes[others].sum()))
        return int(nbytes[inputs].sum())

    def _most_temporaries(self) -> int:
        """The most bytes of the backward pass's temporaries at once, in the peak's step."""
        recording = self._recording
        operators = np.maximum(recording.alloc_op, 0)
        backward = (recording.alloc_op >= 0) & (recording.op_phase[operators] == _BACKWARD)
        chosen = np.where(self._mask("temporary") & backward, recording.alloc_bytes, 0)
        values, codes = recording.events >> 2, recording.events & 3
        change = np.zeros(len(values), dtype=np.int64)
        change[codes == MALLOC] = chosen[values[codes == MALLOC]]
        change[codes == FREE] = -chosen[values[codes == FREE]]
        begin, stop = step_around(recording.events, self._outcome.peak_event)
        return int(np.cumsum(change)[begin:stop].max(initial=0))

    # -- what is where ---------------------------------------------------------------------

    def _row_of(self, alloc: int) -> str:
        """The row that a live allocation belongs to."""
        row = self._output_row.get(alloc)
        return row or _ROW_OF_KIND[KINDS[int(self._recording.alloc_kind[alloc])]]

    def _simulated(self) -> dict[str, int]:
        totals: dict[str, int] = defaultdict(int)
        for alloc in self._live.tolist():
            totals[self._row_of(alloc)] += int(self._outcome.granted[alloc])
        return totals

    def _parts(self) -> tuple[ModelPart, ...]:
        """Activations by the parts of the model, the largest by hand first."""
        recording, size = self._recording, self._activation_bytes
        hand: dict[str, int] = defaultdict(int)
        for each in self._counted:
            module = int(recording.op_module[each.operator])
            path = recording.strings[module] if module >= 0 else ""
            hand[path] += (each.elements + each.extra) * size
        kept: dict[str, int] = defaultdict(int)
        for alloc in self._live.tolist():
            if self._row_of(alloc) in _NO_ACTIVATIONS:
                continue
            operator = int(recording.alloc_op[alloc])
            module = int(recording.op_module[operator]) if operator >= 0 else -1
            kept[recording.strings[module] if module >= 0 else ""] += int(
                self._outcome.granted[alloc]
            )
        largest = {path: hand.get(path, 0) + kept.get(path, 0) for path in (*hand, *kept)}
        parts: dict[str, list[int]] = {path: [0, 0] for path in divided(largest)}
        for column, totals in enumerate((hand, kept)):
            for path, nbytes in totals.items():
                owner = max((part for part in parts if _is_within(path, part)), key=len)
                parts[owner][column] += nbytes
        model_parts = [ModelPart(path, *sizes) for path, sizes in parts.items()]
        return tuple(sorted(model_parts, key=lambda part: -part.by_hand_bytes))

    # -- small ones ------------------------------------------------------------------------

    def _cause(self, name: str, row: str, nbytes: int) -> None:
        if nbytes:
            self._causes[name][row] += nbytes

    def _listed(self) -> tuple[DifferenceCause, ...]:
        """The causes, the largest first."""
        named = sorted(self._named, key=lambda name: -self._named[name])[:_NAMED]
        causes = [
            DifferenceCause(
                name, sum(rows.values()), dict(rows), tuple(named) * (name == "uncounted")
            )
            for name, rows in self._causes.items()
        ]
        return tuple(sorted(causes, key=lambda cause: -abs(cause.nbytes)))

    def _unexplained(self, rows: Sequence[HandRow]) -> dict[str, int]:
        """The difference that no cause explains, by row."""
        left = {
            row.name: row.difference_bytes
            - sum(of_rows.get(row.name, 0) for of_rows in self._causes.values())
            for row in rows
        }
        return {name: nbytes for name, nbytes in left.items() if nbytes}

    def _mask(self, kind: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        mask: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
            self._recording.alloc_kind == KINDS.index(kind)
        )
        return mask

    def _asked(self, kind: str) -> int:
        """Bytes asked for by the allocations of a kind at the peak."""
        live = self._live[self._recording.alloc_kind[self._live] == KINDS.index(kind)]
        return int(self._recording.alloc_bytes[live].sum())


def _is_within(path: str, part: str) -> bool:
    return path == part or path.startswith(f"{part}.")
