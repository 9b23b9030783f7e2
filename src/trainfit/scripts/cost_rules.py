"""Table of what library functions do for a sample, and the classification of stacks by it."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal

from trainfit.torch_private import needed

#: "wait": for another thread or process, so nothing is said of what is done there.
Kind = Literal["read", "decode", "transform", "collate", "wait"]


@dataclass(frozen=True)
class CostRule:
    """A rule for the functions of a module (and of those below it) that match one of ``names``.

    ``kind`` ``None`` sends the question on to the caller. A ``general`` rule, of libraries that
    serve everything, stands only where no caller is recognised.
    """

    module: str
    kind: Kind | None
    names: tuple[str, ...] = ("*",)
    general: bool = False


def _rules(
    kind: Kind | None, modules: str, names: str = "*", general: bool = False
) -> tuple[CostRule, ...]:
    return tuple(CostRule(word, kind, tuple(names.split()), general) for word in modules.split())


#: The first rule that matches decides; a module's exceptions stand before its rule.
RULES: Final[tuple[CostRule, ...]] = (
    # PyTorch's own collation; the loader's ``collate_fn`` is recognized by the fetcher's call of
    # it.
    *_rules("collate", needed.COLLATION),
    # The data set's tensors are in memory: indexing them is all the reading that there is.
    *_rules("read", "torch.utils.data.dataset", "TensorDataset.*"),
    # Subset, ConcatDataset and the fetcher pass the question on to other data sets.
    *_rules(None, "torch.utils.data"),
    # Unpickling tensors from a file: reading and little else.
    *_rules("read", "torch.serialization torch.storage", general=True),
    # Pillow: what is opened is not decoded before the first use, whoever that is (`load`).
    *_rules("transform", "PIL.ImageFile", "_save _encode_tile"),  # JPEG compression as noise
    *_rules("decode", "PIL.ImageFile"),
    *_rules("transform", "PIL", "*save"),
    # Its formats, which parse headers: PIL.JpegImagePlugin, PIL.PngImagePlugin.
    *_rules("decode", "PIL.*ImagePlugin PIL.TiffTags PIL.ExifTags PIL.GimpPaletteFile"),
    # `convert` changes palette or CMYK to RGB, for users a part of decoding. `Image.im` is
    # where a lazily read image is first asked for.
    *_rules("decode", "PIL.Image", "open open.* preinit init Image.load Image.convert Image.draft"),
    *_rules("decode", "PIL._imaging", "*decode* *decoder* ImagingDecoder.*"),
    *_rules("transform", "PIL"),
    # torchvision: files and codecs, and the rest of it transforms; its data sets only call.
    *_rules("read", "torchvision.io", "read_file"),
    *_rules("decode", "torchvision.io torchvision.extension"),
    *_rules("read", f"torch.ops.image {needed.OPERATORS}", "*read_file*"),
    *_rules("decode", f"torch.ops.image {needed.OPERATORS}", "*decode*"),
    *_rules(None, "torchvision.datasets"),
    *_rules("transform", "torchvision"),
    # OpenCV is C: named by the call. `imread` reads and decodes in one.
    *_rules("decode", "cv2", "imread* imdecode* imcount VideoCapture VideoCapture.*"),
    *_rules("wait", "cv2", "waitKey*"),
    *_rules("transform", "cv2"),
    # PyAV (Cython): packets are read, frames decoded; iterating the container does both.
    *_rules("read", "av", "open *.seek *.demux *.close"),
    *_rules("transform", "av.filter av.audio.resampler av.video.reformatter"),
    *_rules("transform", "av", "*.reformat *.resample *.encode"),
    *_rules("decode", "av"),
    *_rules("read", "_cython*", "InputContainer.demux"),
    *_rules("decode", "_cython*", "InputContainer.decode *.decode"),
    # Video and audio decoders that read their file as they go.
    *_rules("decode", "decord torchcodec torch.ops.torchcodec_ns imageio imageio_ffmpeg"),
    *_rules("decode", "soundfile _soundfile audioread audio2numpy nvidia.dali eva_decord"),
    *_rules("decode", "torchaudio", "load info"),
    *_rules("decode", "torchaudio.io torchaudio.backend torchaudio._backend"),
    *_rules("transform", "torchaudio"),
    *_rules("decode", "librosa", "load stream"),
    *_rules("transform", "librosa"),
    # Other image decoders; scientific and medical images likewise.
    *_rules("decode", "skimage.io simplejpeg turbojpeg pyvips pillow_heif jpeg4py tifffile"),
    *_rules("decode", "pydicom nibabel imagecodecs SimpleITK.extra openslide"),
    # Augmentation and signal processing.
    *_rules(
        "transform", "albumentations albucore kornia imgaug torchio monai.transforms timm.data"
    ),
    *_rules("transform", "skimage scipy.ndimage scipy.signal scipy.fft audiomentations augly"),
    *_rules("transform", "transformers tokenizers sentencepiece tiktoken spacy nltk ftfy"),
    # Arrays in files. HDF5 undoes compression inside of the same call: it cannot be distinguished.
    *_rules("read", "h5py netCDF4 lmdb rocksdict leveldb rasterio tables safetensors tensorstore"),
    *_rules("decode", "numcodecs blosc blosc2 zarr.codecs"),
    *_rules("read", "zarr"),
    # Arrow: files are read; what else it is asked for turns its columns into other objects.
    *_rules("read", "pyarrow.parquet pyarrow.fs pyarrow._fs pyarrow._parquet pyarrow.dataset"),
    *_rules("read", "pyarrow._dataset pyarrow.feather pyarrow.ipc pyarrow._ipc"),
    *_rules("read", "pyarrow", "*read* memory_map OSFile* MemoryMappedFile* open_*"),
    *_rules("decode", "pyarrow"),
    *_rules("decode", "polars pandas.io"),  # parsing, mostly
    *_rules("transform", "pandas", general=True),
    # Hugging Face `datasets`: rows of Arrow tables made to Python objects.
    *_rules("decode", "datasets.formatting datasets.features"),
    *_rules("read", "datasets.table datasets.arrow_reader datasets.iterable_dataset", general=True),
    *_rules(None, "datasets"),
    # WebDataset: shards are read as tar files; its own loop only calls.
    *_rules("read", "webdataset.tariterators webdataset.gopen webdataset.cache"),
    *_rules("decode", "webdataset.autodecode"),
    *_rules(None, "webdataset"),
    # NumPy: files, and arithmetic that may be anything's.
    *_rules("read", "numpy.memmap numpy.core.memmap numpy._core.memmap"),
    *_rules("read", "numpy", "memmap memmap.* load fromfile loadtxt genfromtxt"),
    *_rules(
        "read", "numpy.lib.npyio numpy.lib._npyio_impl numpy.lib.format numpy.lib._format_impl"
    ),
    *_rules("read", "torch", "from_file load"),
    *_rules("wait", "torch.multiprocessing"),
    *_rules("transform", "numpy torch numba jax cupy", general=True),
    # Compression and texts.
    *_rules("decode", "zlib gzip bz2 _bz2 lzma _lzma _compression compression zstandard zstd"),
    *_rules("decode", "lz4 snappy brotli cramjam json _json orjson ujson simdjson msgpack cbor2"),
    *_rules("decode", "pickle _pickle cloudpickle marshal csv _csv yaml _yaml xml lxml pyexpat"),
    *_rules("decode", "base64 binascii struct _struct google.protobuf tensorflow.io"),
    # Waiting for other threads and processes; `select` and `asyncio` also for a network, but
    # what comes from there is not known.
    *_rules("wait", "threading _thread queue _queue concurrent.futures asyncio _asyncio"),
    *_rules("wait", "select selectors subprocess multiprocessing _multiprocessing joblib ray"),
    *_rules("wait", "_posixsubprocess multiprocess"),
    *_rules("wait", "time", "sleep"),
    *_rules("wait", "posix os", "wait* *waitpid*"),
    # Archives, file systems of other machines, the network.
    *_rules("read", "tarfile zipfile fsspec s3fs gcsfs adlfs s3torchconnector boto3 botocore"),
    *_rules("read", "aiobotocore aiohttp google.cloud smart_open huggingface_hub streaming"),
    *_rules("read", "requests urllib urllib3 http httpx httpcore socket _socket ssl _ssl"),
    # A file in memory is read by whoever decodes it.
    *_rules(None, "_io io", "BytesIO* StringIO* *.seek *.tell *.close"),
    *_rules("read", "_io io mmap _pyio codecs"),
    # Of `os` only what asks the file system: joining paths is Python.
    *_rules("read", "posix os nt", "open read pread preadv readv lseek *stat stat listdir scandir"),
    *_rules("read", "posix os nt", "walk fwalk access close readlink sendfile *.__next__"),
    *_rules(
        "read", "posixpath genericpath ntpath", "exists isfile isdir getsize get?time realpath"
    ),
    *_rules("read", "pathlib", "Path.*"),
    *_rules("read", "glob shutil linecache"),
)

#: In the names of the user's own functions, where no library is recognised: what they are for.
#: Only words that leave no doubt ("load" may be to read or to decode).
_WORDS: Final[tuple[tuple[str, Kind], ...]] = (
    (r"collate", "collate"),
    (r"decode|decompress|imread", "decode"),
    (r"transform|augment|preprocess|pre_process|normali[sz]e|resize|crop|flip|jitter", "transform"),
    (r"tokeni[sz]e|mixup|cutmix|pad_sequence|blur|rotate|standardi[sz]e", "transform"),
    (r"read_bytes|read_file|download", "read"),
)


@dataclass(frozen=True)
class StackFrame:
    """A frame of a stack, or a C function that one calls, as far as rules look at it.

    ``called`` is how the source writes what the frame calls ("self.transform"); ``mapped``
    whether the call copies from a mapped file.
    """

    module: str
    name: str
    called: str = ""
    mapped: bool = False


@dataclass(frozen=True)
class Classification:
    """What a look at a stack says: the kind (``None``: unknown) and the function behind that."""

    kind: Kind | None
    what: str


def judge(stack: Sequence[StackFrame], collating: bool = False) -> Classification:
    """What the innermost recognised function of a stack does.

    Args:
        stack: the innermost place first, as far as the DataLoader's fetcher.
        collating: whether the fetcher is in the loader's ``collate_fn``. Then all is collation
            but reading and decoding, which some functions for it do, and waiting.
    """
    classification = _recognised(stack)
    if collating and (classification is None or classification.kind in ("transform", "collate")):
        return Classification("collate", classification.what if classification else _whose(stack))
    return classification or Classification(None, _whose(stack))


def _recognised(stack: Sequence[StackFrame]) -> Classification | None:
    general: Classification | None = None
    for index, place in enumerate(stack):
        if place.mapped:  # its pages come from the file while they are copied
            return Classification("read", f"{shown(place.module, place.name)} of a mapped file")
        rule = rule_of(place.module, place.name)
        if rule is None or rule.kind is None:
            continue
        judged = Classification(rule.kind, shown(place.module, place.name))
        if rule.kind == "wait":
            return Classification("wait", _waiting(stack, index))
        if not rule.general:
            return judged
        general = general or judged
    return _by_words(stack, general) or general


def _by_words(stack: Sequence[StackFrame], general: Classification | None) -> Classification | None:
    """What the names of functions say, where they are no library's; the innermost that says it."""
    for place in stack:
        # A frame's name says what it does; what it calls is said last by the callee's frame.
        for text in (place.name, place.called):
            kind = _kind_of_words(text)
            if kind is None or rule_of(place.module, place.name) is not None:
                continue
            if general is not None and general.kind == kind:
                return general
            return Classification(kind, place.called if text is place.called else _own(place))
    return None


@functools.lru_cache(1 << 12)
def rule_of(module: str, name: str) -> CostRule | None:
    """The rule for a function, or ``None``: it is nobody's that the table knows."""
    for rule in RULES:
        if _below(module, rule.module) and any(fnmatchcase(name, each) for each in rule.names):
            return rule
    return None


def _below(module: str, above: str) -> bool:
    if "*" in above:
        return fnmatchcase(module, above)
    return module == above or module.startswith(above + ".")


@functools.lru_cache(1 << 12)
def _kind_of_words(text: str) -> Kind | None:
    last = re.split(r"\.<locals>\.", text)[-1].lower()
    for words, kind in _WORDS:
        if re.search(words, last):
            return kind
    return None


def _whose(stack: Sequence[StackFrame]) -> str:
    """The name of the function that was not recognised: the innermost that is the user's."""
    for place in stack:
        if (
            place.module
            and rule_of(place.module, place.name) is None
            and place.module != "builtins"
        ):
            return _own(place)
    return shown(stack[0].module, stack[0].name) if stack else ""


def _waiting(stack: Sequence[StackFrame], index: int) -> str:
    """The wait, and who waits: the function outside of the libraries that only wait."""
    wait = stack[index]
    outermost = wait
    for place in stack[index:]:
        rule = rule_of(place.module, place.name)
        if rule is None or rule.kind != "wait":
            return f"{_own(place)} waits ({shown(outermost.module, outermost.name)})"
        outermost = place
    return f"{shown(outermost.module, outermost.name)} waits"


def _own(place: StackFrame) -> str:
    return place.name if place.module == "__main__" else shown(place.module, place.name)


@functools.lru_cache(1 << 12)
def shown(module: str, name: str) -> str:
    """A function's name as its users know it: "torch.stack", "PIL.Image.Image.resize"."""
    name = name.replace("<locals>.", "")
    for private, public in needed.SHOWN_AS:
        if (module, name.split(".", 1)[0]) == private and "." in name:
            return f"{public}.{name.split('.', 1)[1]}"
    if module.startswith("_cython"):  # generators of PyAV
        module = "av"
    module = _MODULES.get(module, module)
    return f"{module}.{name}" if module and module != "builtins" else name


_MODULES: Final = {"_io": "io", "posix": "os", "_thread": "threading", "_queue": "queue"} | {
    "numpy._core.memmap": "numpy",
    "numpy.core.memmap": "numpy",
    "numpy.random._generator": "numpy.random",
}
