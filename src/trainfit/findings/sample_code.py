"""What a training script's own code does where samples are made (`__getitem__`, `collate_fn`): what
to do instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from trainfit.findings.own_code import Habit

_READS_TABLE: Final = Habit(
    "reads a whole table for each sample",
    "read it once, in __init__, and keep it as an array or a tensor, or store it so that one row "
    "can be read (np.load(…, mmap_mode='r'), HDF5)",
)
#: A file that is gone through up to the line of a sample.
_OVER_FILE: Final = re.compile(r"^(?:\w+\.)?open\([^()]*\)$")
_SCANS: Final = Habit(
    "goes through a file for each sample",
    "note where each line begins once, in __init__ (offsets.append(f.tell())), and f.seek() there; "
    "or keep the lines in memory, or store them as rows of an array (np.load(…, mmap_mode='r'))",
)
#: What a loop goes over that reads a file's lines or rows one by one.
_OVER_ROWS: Final = re.compile(
    r"^csv\.\w+\(|^open\(|\.open\(|readlines\(|splitlines\(|\.iter(?:rows|tuples)\("
)
#: What a loop goes over that makes tokens of text.
_OVER_TOKENS: Final = re.compile(r"\.(?:findall|finditer)\(|\btokeni[sz]e\w*\(|\.split\(\)")
_TOKENS: Final = Habit(
    "makes tokens of text for each sample",
    "do it once before the training (datasets.map(…, batched=True)), with a fast tokenizer",
)
_OF_SAMPLES: Final[tuple[tuple[re.Pattern[str], Habit], ...]] = (
    (
        re.compile(
            r"(?:^|\.)(?:from_(?:file|pretrained|str)|load_model|load_from_checkpoint)$"
            r"|^(?:spacy|torch\.hub|whisper|joblib)\.load$"
        ),
        Habit(
            "loads a model or a tokenizer for each sample",
            "load it once: in __init__, or at the first sample of each worker (if self.tokenizer "
            "is None: self.tokenizer = …)",
        ),
    ),
    (
        re.compile(
            r"h5py\.File|h5py\._hl\.files|make_fid|[Zz]ip[Ff]ile|_RealGetContents|EndRecData|tarfile"
            r"|TarFile|lmdb\.open|sqlite3\.connect|netCDF4|open_dataset|open_group|zarr\.open"
            r"|(?:env|file|f|db|con\w*|h5\w*)\.close$"
        ),
        Habit(
            "opens the file for each sample",
            "open it once in each worker and keep it: at the first sample (if self.file is None: "
            "self.file = …), or in worker_init_fn",
        ),
    ),
    (
        # What is left of HDF5 and of Zarr is reading.
        re.compile(r"^h5py\.|\bh5\b|zarr\.(?:core|codec|storage|abc)|numcodecs"),
        Habit(
            "reads from a chunked file for each sample",
            "of a compressed data set each read unpacks whole chunks: store it with chunks of one "
            "sample (chunks=(1, …)), or without compression, or read the rows of a batch at once "
            "(__getitems__, in order)",
        ),
    ),
    (
        re.compile(r"(?:^|\.)(?:fsync|fdatasync)$"),
        Habit(
            "waits until a disk has written, for each sample",
            "do without fsync(): the system writes by itself; log every 1000 samples, or keep "
            "counts and write them once an epoch",
        ),
    ),
    (
        re.compile(r"^builtins\.print$|^print$|^logging\.|\blogg(?:er|ing)\b|\.flush$|warnings\."),
        Habit(
            "logs for each sample",
            "log in the training loop, every 50 steps, not where samples are made",
        ),
    ),
    (
        re.compile(r"^subprocess\.|(?:^|\.)(?:os\.system|popen|check_output)$|_fork_exec"),
        Habit(
            "starts a program for each sample",
            "do it once, before the training, and store what comes of it; or call a library that "
            "does the same in the process",
        ),
    ),
    (
        re.compile(
            r"csv\.|read_(?:csv|json|parquet|excel|table|pickle)|readlines|loadtxt|genfromtxt"
            r"|codecs\.decode|splitlines"
        ),
        _READS_TABLE,
    ),
    (
        re.compile(r"^pandas\.|groupby|sort_values|\.i?loc\b|\.query$|\.iterrows$"),
        Habit(
            "searches a pandas table for each sample",
            "look the rows up once, in __init__ (groups = df.groupby(…).indices), and keep the "
            "columns as arrays or tensors (df[…].to_numpy()), which __getitem__ indexes",
        ),
    ),
    (
        re.compile(r"(?:^|\.)(?:execute|executemany|fetchone|fetchall|fetchmany|read_sql\w*)$"),
        Habit(
            "asks a database for each sample",
            "an index on the column that is searched (CREATE INDEX … ON table (column)): without "
            "one each search reads the whole table; or fetch the rows of a batch at once "
            "(__getitems__)",
        ),
    ),
    (
        re.compile(r"(?:^|\.)(?:np|numpy|torch)\.(?:load|fromfile)$|_npyio_impl|lib\.format\."),
        Habit(
            "reads a whole file for each sample",
            "read it once, in __init__, or np.load(…, mmap_mode='r') there, which reads only what "
            "is indexed; a file for each sample is right only where it holds that sample alone",
        ),
    ),
    (
        re.compile(r"multiprocessing\.(?:managers|connection)|_callmethod"),
        Habit(
            "gets samples from another process",
            "what a Manager holds is sent, pickled, for each access, by one process for all "
            "workers: keep it as tensors (share_memory_()) or arrays in the data set",
        ),
    ),
    (
        re.compile(r"^concurrent\.futures|\w*Pool\w*$|[Pp]ool\.\w+$|Executor|waiter\.acquire"),
        Habit(
            "hands a sample's parts to threads or processes",
            "make a sample in one thread: the workers are the processes; a pool, where one is "
            "needed, once in each worker and not for each sample",
        ),
    ),
    (
        re.compile(
            r"hashlib|\.(?:md5|sha\d+|hexdigest)$|zlib|gzip|bz2|lzma|zstd|lz4|decompress"
            r"|^_?compression\."
        ),
        Habit(
            "unpacks or checks a file for each sample",
            "do it once, before the training, and store what comes of it",
        ),
    ),
    (
        re.compile(
            r"json\.loads?|scan_once|raw_decode|yaml|ElementTree|literal_eval|pickle\.loads?"
        ),
        Habit(
            "parses text or pickles for each sample",
            "parse once and store tensors or arrays (np.save, which maps them), or only the fields "
            "that are used",
        ),
    ),
    (
        re.compile(
            r"tokeniz|encode_plus|encode_batch|_batch_encode|^re\.|(?:^|\.)findall$|finditer"
            # How scripts call tokenizers: Hugging Face's, tiktoken's, SentencePiece's.
            r"|\bregex\b|(?:^|\.)(?:tok|enc|bpe|sp|spm)\.encode\w*$",
            re.IGNORECASE,
        ),
        _TOKENS,
    ),
    (
        # Of a picture that is in memory, to cut out a part costs next to nothing.
        re.compile(r"(?:^|\.)(?:[Cc]rop|RandomCrop|resized_crop)$"),
        Habit(
            "decodes a whole picture for a crop of it",
            "cut large pictures into pieces once, before the training, or store them so that a "
            "part can be read (np.load(…, mmap_mode='r'), tiled TIFF, Zarr); or take several crops "
            "of each picture that is decoded",
        ),
    ),
    (
        re.compile(
            r"Image\.|\bPIL\b|ImageFile|JpegImagePlugin|imread|imdecode|decode_(?:jpeg|image|png)"
            r"|default_loader|pil_loader|\.convert$|\.decode$|decoder\.|resize|thumbnail"
        ),
        Habit(
            "decodes or resizes images",
            "store them at the size that is used (once, before the training); of JPEG, "
            "Image.draft('RGB', size) before convert() decodes at a half to an eighth of the size",
        ),
    ),
    (
        re.compile(
            r"librosa|soundfile|torchaudio|audioread|pydub|resampl|[ms]el_?spec|mfcc|\bstft$"
        ),
        Habit(
            "decodes or transforms sound",
            "store it decoded, at the rate that is used, or store the spectrograms (once, before "
            "the training); compute them for a whole batch, on the device",
        ),
    ),
    (
        re.compile(r"VideoCapture|VideoReader|^av\.|decord|torchcodec|read_video|imageio"),
        Habit(
            "decodes video",
            "store the frames or short clips that are used (once, before the training); open a "
            "video once in each worker, and seek to a keyframe instead of reading up to a frame",
        ),
    ),
    (
        re.compile(r"(?:^|\.)(?:listdir|scandir|walk|i?glob\w*|rglob)$|^glob\.|^fnmatch\."),
        Habit(
            "lists a folder for each sample",
            "list it once, in __init__, and keep the names",
        ),
    ),
    (
        re.compile(r"deepcopy|^copy\._"),
        Habit(
            "copies in depth for each sample",
            "copy only what is changed (tensor.clone(), dict(record), list(boxes)), or make new "
            "values and leave the stored ones as they are; keep samples as arrays or tensors",
        ),
    ),
    (
        re.compile(r"set_num_threads|gc\.collect|(?:^|\.)compile$"),
        Habit("prepares for each sample", "do it once, in __init__ or worker_init_fn"),
    ),
    (
        re.compile(
            r"(?:^|\.)(?:shuffle|permutation|permuted|randperm|sort|sorted|argsort|\w*multinomial"
            r"|_?choices?)$"
        ),
        Habit(
            "orders, or draws from, a whole list for each sample",
            "draw only as many as the sample needs (random.sample(items, 8), torch.randint), or "
            "order all once, in __init__",
        ),
    ),
)


#: What a sample waits in while it is made; where it is a retry, nobody sees the error.
_SLEEPS: Final = re.compile(r"(?:^|\.)(?:time|asyncio)\.sleep$")
_SLEEPING: Final = Habit(
    "sleeps",
    "remove the sleep; where it comes before another try, log the error that is caught there and "
    "fix why the first try fails",
)
#: Of whole arrays: in a loop over elements the loop is what costs.
_DRAWS: Final = re.compile(
    r"random\.\w*(?:normal|uniform|gauss\w*|poisson|rand|randn|random|standard_\w+)$"
    r"|(?:^|\.)torch\.(?:randn?|normal|bernoulli|poisson)(?:_like)?$"
)
_DRAWN: Final = Habit(
    "draws random numbers for each sample",
    "crop or resize first; draw in float32 (rng.standard_normal(shape, dtype=np.float32), "
    "torch.randn), or for the whole batch at once, on the device",
)
#: … and where only that is known: what follows needs a part of them.
_CONVERTS: Final = re.compile(
    r"(?:^|\.)(?:astype|img_as_float\w*|convert_image_dtype|to_tensor|ToTensor|float|double)$"
)
_CONVERTED: Final = Habit(
    "converts whole arrays to float for each sample",
    "crop or resize first, as uint8 (a quarter of the bytes), and convert what is left of it; or "
    "convert and scale (/ 255) the whole batch in one operator, on the device",
)


def habit_of_samples(names: Sequence[str], over: str = "") -> Habit | None:
    """The habit that most of a batch's time goes to; ``None``: it is not known by its name."""
    for pattern, habit in _OF_SAMPLES:
        if any(pattern.search(name) for name in names):
            return habit
    if any(map(_SLEEPS.search, names)):
        return _SLEEPING
    if _OVER_FILE.search(over):
        return _SCANS
    if _OVER_ROWS.search(over):
        return _READS_TABLE
    if _OVER_TOKENS.search(over):
        return _TOKENS
    if over:
        once = "do it once, in __init__, and index that; or " if over.startswith("self.") else ""
        return Habit(
            f"goes over `{over}` in Python",
            f"{once}use operators on whole tensors or arrays (torch.tensor(list) at once, "
            "pad_sequence, np.stack) instead of a loop over elements",
        )
    if any(map(_CONVERTS.search, names)):
        return _CONVERTED
    return _DRAWN if any(map(_DRAWS.search, names)) else None
