"""The simulated CUDA kernels as a backend."""

import ctypes
from ctypes import POINTER, c_bool, c_double, c_int, c_int64, c_uint8, c_uint64, c_void_p
from dataclasses import replace

import torch
from cuda_build import built_library
from fused import ADAM, PLAIN_ADAM, PLAIN_SGD, add_averages, add_masters, exact_params, make_rows
from tolerance import assert_all_bit_equal

from stepclock_ext import ops
from stepclock_ext.backends.contract import AccumulateSlots, Companions
from stepclock_ext.backends.device_table import DeviceTable
from stepclock_ext.backends.layout import is_dense, real_dtype

MOMENTS = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
COLUMNS = ("params", "sums", *MOMENTS, "buffers", "masters", "averages")
DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def on(backend, layout):
    """The same layout on a backend that has no name."""
    return replace(layout, backend=backend, verified={}, cache={})


class TableView(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("chunks", "num_elements", "addresses")] + [
        ("num_rows", c_int64)
    ]


class Section(ctypes.Structure):
    _fields_ = [("first_chunk", c_int64), ("num_chunks", c_int64)] + [
        (name, c_uint8) for name in ("param", "accumulator", "state")
    ]


class Target(ctypes.Structure):
    _fields_ = [
        ("table", TableView),
        ("sections", POINTER(Section)),
        ("num_sections", c_int),
        ("stream", c_void_p),
    ]


class ClipRule(ctypes.Structure):
    _fields_ = [("divisor", c_double), ("max_norm", c_double), ("slots_are_maxima", c_bool)]


class Adam(ctypes.Structure):
    _fields_ = [(name, c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")] + [
        (name, c_bool) for name in ("decoupled", "amsgrad")
    ]


class Sgd(ctypes.Structure):
    _fields_ = [(name, c_double) for name in ("lr", "momentum", "dampening", "weight_decay")] + [
        (name, c_bool) for name in ("nesterov", "first")
    ]


class Along(ctypes.Structure):
    _fields_ = [
        *((name, c_bool) for name in ("has_masters", "has_averages", "stochastic", "gated")),
        ("average_weight", c_double),
        ("rounding_key", c_uint64),
    ]


class Counts(ctypes.Structure):
    _fields_ = [
        (name, c_int64)
        for name in ("load_bytes", "store_bytes", "wide_accesses", "narrow_accesses")
    ]


class SimulatorError(RuntimeError):
    """A launch failed, as it would have on a device."""


class SimulatedBackend:
    """The contract on the simulated kernels.

    Args:
        path: of the library; that of the kernels as they are unless given.

    Attributes:
        scratch: of `coefficient_`; zero between the ops.
        alter: a function of chunks, sizes and addresses before the kernels of an op see them.
    """

    name = "simulated"
    device = torch.device("cpu")
    settles_late = False
    watches_addresses = False

    def __init__(self, path=None):
        self._library = ctypes.CDLL(str(path or built_library()))
        self._library.simulated_error.restype = ctypes.c_char_p
        self._library.simulated_scratch_bytes.restype = c_int64
        self.scratch = torch.zeros(self._library.simulated_scratch_bytes(), dtype=torch.uint8)
        self.alter = leave

    def set_order(self, *, blocks=0, threads=0):
        """The order in which blocks and threads run: 0 forward, 1 backward, others shuffled."""
        self._library.simulated_set_order(c_uint64(blocks), c_uint64(threads))

    def take_counts(self):
        """The accesses to elements since the last time."""
        counts = Counts()
        self._library.simulated_take_counts(ctypes.byref(counts))
        return counts

    def supports(self, tensor):
        known = real_dtype(tensor.dtype) in DTYPE_CODES and not tensor.is_conj()
        return tensor.device.type == "cpu" and known and is_dense(tensor)

    def release(self, layout, columns):
        pass

    def gather_params(self, params, layout):
        return False

    def gather_gradients(self, params, layout):
        return None

    def sum_squares_(self, slots, tensors, layout):
        self._call("sum_squares", address(slots), self._target(layout, ACCUMULATOR=tensors))

    def max_abs_(self, slots, tensors, layout):
        self._call("max_abs", address(slots), self._target(layout, ACCUMULATOR=tensors))

    def accumulate_(self, accumulators, slots: AccumulateSlots, grads, layout, *, store):
        target = self._target(layout, ACCUMULATOR=accumulators, GRAD=grads)
        into = [address(s) for s in (slots.sums, slots.grad_sums, slots.prior_sums)]
        self._call("accumulate", (c_void_p * 3)(*(a.value for a in into)), c_bool(store), target)

    def coefficient_(self, stats, slots, *, divisor, max_norm, maxima):
        rule = ClipRule(divisor, max_norm, maxima)
        arguments = (address(stats), address(self.scratch), address(slots), c_int64(slots.numel()))
        self._call("coefficient", *arguments, ctypes.byref(rule))

    def scale_(self, tensors, stats, layout):
        self._call("scale", address(stats), self._target(layout, ACCUMULATOR=tensors))

    def adam_(self, params, states, sums, stats, layout, scalars, companions):
        moments = dict(EXP_AVG=states.exp_avgs, EXP_AVG_SQ=states.exp_avg_sqs, STEP=states.steps)
        if states.max_exp_avg_sqs is not None:
            moments["MAX_EXP_AVG_SQ"] = states.max_exp_avg_sqs
        columns = dict(PARAM=params, ACCUMULATOR=sums, **moments, **bound(companions))
        target = self._target(layout, **columns)
        biases = address(self._table(layout).biases)
        given = (address(stats), fields(Adam, scalars), along(companions))
        self._call("adam", biases, *given, c_bool(scalars.maximize), target)

    def sgd_(self, params, buffers, sums, stats, layout, scalars, companions):
        columns = dict(PARAM=params, ACCUMULATOR=sums, **bound(companions))
        if buffers is not None:
            columns["BUFFER"] = buffers
        target = self._target(layout, **columns)
        given = (address(stats), fields(Sgd, scalars), along(companions))
        self._call("sgd", *given, c_bool(scalars.maximize), target)

    def move_average_(self, params, stats, layout, companions):
        target = self._target(layout, PARAM=params, **bound(companions))
        self._call("move_average", address(stats), along(companions), target)

    def _table(self, layout):
        kind = tuple(layout.state_dtypes)
        known = layout.cache.get(self.name)
        if known is None or known[0] != kind:
            known = layout.cache[self.name] = (kind, DeviceTable(layout, torch.device("cpu")))
        return known[1]

    def _target(self, layout, **columns):
        table = self._table(layout)
        for column, tensors in columns.items():
            table.bind(column, tensors)
        table.send()
        self._allow([t for column, tensors in columns.items() if column != "STEP" for t in tensors])
        read = [t.clone() for t in (table.chunks, table.num_elements, table.addresses)]
        self.alter(*read)
        view = TableView(*(t.data_ptr() for t in read), len(layout.num_elements))
        sections = [
            Section(s.first_chunk, s.num_chunks, *(DTYPE_CODES[d] for d in dtypes_of(s)))
            for s in table.sections
        ]
        target = Target(view, (Section * len(sections))(*sections), len(sections), None)
        target.read = read  # as long as the target
        return ctypes.byref(target)

    def _allow(self, tensors):
        """Nothing but the memory of `tensors` may be touched."""
        ends = [[t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()] for t in tensors]
        merged = []
        for begin, end in sorted(pair for pair in ends if pair[0] < pair[1]):
            if merged and begin < merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([begin, end])
        flat = [value for pair in merged for value in pair]
        self._library.simulated_allow((c_uint64 * len(flat))(*flat), c_int64(len(merged)))

    def _call(self, op, *arguments):
        error = getattr(self._library, f"simulated_{op}")(*arguments)
        if error:
            raise SimulatorError(f"{op}: {self._library.simulated_error().decode()}")


def leave(chunks, num_elements, addresses):
    """Changes nothing."""


def dtypes_of(section):
    """In the order of the structure."""
    return section.param, section.accumulator, section.state


def address(tensor):
    """Where `tensor` lies; null for None."""
    return c_void_p(None if tensor is None else tensor.data_ptr())


def fields(kind, values):
    """The structure `kind` of the fields of a value that has the same."""
    return ctypes.byref(kind(*(getattr(values, name) for name, _ in kind._fields_)))


def bound(companions: Companions):
    """The columns that move along."""
    columns = dict(MASTER=companions.masters, AVERAGE=companions.averages)
    return {name: tensors for name, tensors in columns.items() if tensors is not None}


def along(companions: Companions):
    """The rest of `companions` as the kernels take it."""
    return ctypes.byref(
        Along(
            companions.masters is not None,
            companions.averages is not None,
            companions.rounding_key is not None,
            companions.is_gated,
            companions.average_weight,
            companions.rounding_key or 0,
        )
    )


def rows_on(backend, sizes, kind, *, masters=False, averages=False, misaligned=None, **options):
    """Rows of these dtypes on `backend`: a name, or the simulated one.

    The tensors of `misaligned`, one of `COLUMNS`, begin one element into their memory.
    """
    name = backend if isinstance(backend, str) else "reference"
    rows = make_rows(name, sizes, kind[0], sums=kind[1], state=kind[2], **options)
    if not isinstance(backend, str):
        rows.layout = on(backend, rows.layout)
    if masters:
        add_masters(rows, exact_params(rows.params))
    if averages:
        add_averages(rows)
    if misaligned is not None:
        columns = {**vars(rows), **dict(zip(MOMENTS, rows.moments, strict=True))}
        columns[misaligned][:] = [torch.cat([t[:1], t])[1:] for t in columns[misaligned]]
    return rows


def assert_same(backend, sizes, kind, update, *, other="cpu", companions=None, **options):
    """`update` of rows leaves the same bits on both backends; the simulated rows."""
    rows = [rows_on(b, sizes, kind, **options) for b in (backend, other)]
    for each in rows:
        update(each, **(companions or {}))
    assert_all_bit_equal(rows[0].written(), rows[1].written())
    return rows[0]


def gated_update(rows, update, norm, *, is_gated=True):
    """One plain update, or the move of the averages, under this norm."""
    stats = torch.tensor([norm, 0.5, 1.0], dtype=torch.float64)
    along = ops.Companions(rows.masters, rows.averages, 0.5, None, is_gated)
    if update == "adam":
        states = ops.AdamStates(rows.steps, *rows.moments[:2], None)
        scalars = ops.AdamScalars(**ADAM, **PLAIN_ADAM)
        ops.adam_(rows.params, states, rows.sums, stats, rows.layout, scalars, along)
    elif update == "sgd":
        scalars = ops.SgdScalars(first=False, **PLAIN_SGD)
        ops.sgd_(rows.params, None, rows.sums, stats, rows.layout, scalars, along)
    else:
        ops.move_average_(rows.params, stats, rows.layout, along)
