"""Objects that hold an open file or a connection, which a process must not share with another.

A forked worker has the same file description as the main process: whoever reads moves the
position for all. A spawned one would need it as a pickle, which these objects refuse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

#: By top-level module, the names of types.
_TYPES: Final[Mapping[str, str]] = {
    "h5py": r"File|Group|Dataset",
    "tables": r"File|Group|Table|\w*Array",
    "netCDF4": r"Dataset|Variable|Group",
    "lmdb": r"Environment|Transaction|Cursor",
    "zipfile": r"ZipFile|ZipExtFile",
    "tarfile": r"TarFile|ExFileObject",
    "_io": r"BufferedReader|BufferedRandom|TextIOWrapper|FileIO",
    "gzip": r"GzipFile",
    "bz2": r"BZ2File",
    "lzma": r"LZMAFile",
    "sqlite3": r"Connection|Cursor",
    "psycopg2": r"connection|cursor",
    "psycopg": r"Connection|Cursor",
    "pymysql": r"Connection|Cursor",
    "redis": r"Redis|StrictRedis",
    "pymongo": r"MongoClient|Database|Collection",
    "botocore": r"\w+",
    "boto3": r"\w+",
    "grpc": r"\w*Channel",
    "google": r"\w*(?:Client|Bucket|Channel)",
    "av": r"\w*Container|\w*Stream",
    "decord": r"VideoReader|AudioReader|AVReader",
    "torchcodec": r"\w*Decoder",
    "cv2": r"VideoCapture",
    "rasterio": r"DatasetReader",
    "openslide": r"OpenSlide",
    "soundfile": r"SoundFile",
    "pyarrow": r"NativeFile|OSFile|ParquetFile|RandomAccessFile",
    "socket": r"socket",
    "ssl": r"SSLSocket|SSLContext",
}
#: Extension types that do not say which module they are of.
_WITHOUT_MODULE: Final = {"Environment": "lmdb", "Transaction": "lmdb", "SSLContext": "ssl"}

#: What pickle names: "cannot pickle 'sqlite3.Connection' object", "Can't pickle <class
#: 'botocore.client.S3'>", "h5py objects cannot be pickled" (`h5py/_hl/base.py`).
_QUOTED: Final = re.compile(r"'((?:\w+\.)*)(\w+)'")
_IN_WORDS: Final = re.compile(r"^(?:\w+: )?(h5py) objects cannot be pickled")


def library_of(module: str, name: str) -> str:
    """The library that a type is of, if its objects are such handles; else empty."""
    top = module.split(".")[0]
    if top == "builtins":
        return _WITHOUT_MODULE.get(name, "")
    pattern = _TYPES.get(top)
    return top if pattern is not None and re.fullmatch(pattern, name) else ""


def named_in(said: str) -> str:
    """The type of the handle that an exception of pickle names ("lmdb.Environment"); else empty."""
    if words := _IN_WORDS.search(said):
        return words[1]
    for module, name in _QUOTED.findall(said):
        if library := library_of(module or "builtins", name):
            return f"{library}.{name}"
    return ""
