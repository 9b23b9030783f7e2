"""What a worker's process cannot be given: open files and connections, and scripts without a guard.

A forked worker has the same file description as the main process: whoever reads moves the
position for all. A spawned one would need it as a pickle, which these objects refuse, and runs the
script's top-level code again.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from trainfit.findings.source_code import file_syntax, names_in

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


# ---
# Top-level code of a script that spawned workers would run again, as its source tells.


def unguarded_line(path: Path) -> int | None:
    """The first line at a script's top level that iterates or calls, without a guard."""
    tree = file_syntax(str(path.absolute()))
    return None if tree is None else _working_line(tree.body)


def _working_line(body: Sequence[ast.stmt]) -> int | None:
    for node in body:
        if isinstance(node, ast.For | ast.While):
            return node.lineno
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            # "main()", "train(args)"; modules' functions ("torch.manual_seed(0)") only set up.
            if isinstance(function, ast.Name) and function.id != "print":
                return node.lineno
        if isinstance(node, ast.With | ast.Try | ast.If) and not is_main_guard(node):
            line = _working_line(node.body)
            if line is not None:
                return line
    return None


def is_main_guard(node: ast.stmt) -> bool:
    """Is it `if __name__ == "__main__":`, or another question of the name?"""
    test = node.test if isinstance(node, ast.If) else None
    return test is not None and "__name__" in names_in(test)
