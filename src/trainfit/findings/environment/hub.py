"""What a hub or a server does not give: models, tokenizers, data sets, metrics, files."""

from __future__ import annotations

import re
from typing import Final

from trainfit.findings.facts import FailureContext
from trainfit.findings.tracebacks import ParsedException
from trainfit.findings.training_errors import KnownError, first_met
from trainfit.results.findings import Finding, failure_finding

_KNOWN: Final = (
    # datasets/load.py, of a data set by its name on the hub
    KnownError(
        "hub_unreachable",
        re.compile(
            r"Couldn't reach '[^']+' on the Hub|Couldn't find any data file at hf://datasets"
        ),
        "Data set{} is not on this machine, and its hub cannot be reached",
        "hf download NAME --repo-type dataset --local-dir FOLDER where there is a network, and "
        "that folder's path instead of the name; or a copy of its cache (HF_HOME)",
    ),
    # transformers/utils/hub.py, huggingface_hub/errors.py
    KnownError(
        "hub_unreachable",
        re.compile(r"couldn't connect to '[^']*' to load|cannot find the requested files in the"),
        "Model, tokenizer or data set{} is not on this machine, and its hub cannot be reached",
        "hf download NAME --local-dir FOLDER where there is a network, and that folder's path "
        "instead of the name; or a copy of its cache (HF_HOME)",
    ),
    # diffusers/configuration_utils.py, also where it has no network
    KnownError(
        "hub_unreachable",
        re.compile(r"does not appear to have a file named \S+\.(?:json|safetensors|bin)"),
        "The hub gave no such file{}: it cannot be reached (a simulated run has no network), or "
        "the name is another",
        "hf download NAME before, which fills its cache (HF_HOME), or --local-dir FOLDER and that "
        "folder's path instead of the name",
    ),
    # evaluate/loading.py, which looks for a metric in this folder and at its hub
    KnownError(
        "hub_unreachable",
        re.compile(r"Module '[^']+' doesn't exist on the Hugging Face Hub either"),
        "evaluate.load() downloads a metric's code, and its hub cannot be reached (a simulated "
        "run has no network)",
        "run that line once where there is a network, which fills its cache (HF_HOME); or a metric "
        "of torchmetrics or scikit-learn, which are installed with their code",
    ),
    KnownError(
        "hub_refused",
        re.compile(r"gated repo|is a gated dataset|is not a valid model identifier listed on"),
        "The hub does not give{}: it is gated, private, or has another name",
        "accept its terms on its page, then `hf auth login` (or HF_TOKEN); check the name",
    ),
    # urllib/request.py, urllib3 (requests), aiohttp, socket.getaddrinfo (httpx): no address, or no
    # way to it
    KnownError(
        "server_unreachable",
        re.compile(
            r"(?:urlopen error|HTTPS?Connection)[\s\S]*?(?:Name or service not known"
            r"|[Nn]ame resolution|No address associated with hostname|Network is unreachable"
            r"|Connection timed out|Connection refused)"
            r"|\[Errno -\d+\] (?:Name or service not known|Temporary failure in name resolution"
            r"|No address associated with hostname)|Cannot connect to host \S+"
        ),
        "A server that the script asks cannot be reached from this machine",
        "what it downloads: run that part once where there is a network, and copy the files to "
        "where the script looks for them; what it logs to: its offline mode",
    ),
)
#: Their kinds.
KINDS: Final = tuple(dict.fromkeys(error.kind for error in _KNOWN))
#: What stands in an instruction for a name that is not known.
_NAME: Final = "NAME"
#: Where a message has a repository's name: of a page, or said as such.
_TOLD: Final = re.compile(
    r"huggingface\.co/(?:api/)?(?:models/|datasets/)?(?P<page>[\w.-]+/[\w.-]+)"
    r"|(?:reach|[Dd]ataset|hf://datasets/) ?'?(?P<said>[\w.-]+/[\w.-]+)"
    r"|(?<![\w./-])(?P<bare>[\w.-]+(?:/[\w.-]+)?)'? (?:is not a (?:local folder|valid model id)"
    r"|does not appear to have a file)"
)
#: What a line of the user's loads: by a name in quotes, or by one that a variable has.
_LOADED: Final = re.compile(
    r"(?:from_pretrained|load_dataset|pipeline|snapshot_download|SentenceTransformer)\(\s*"
    r"(?:[\"'](?P<text>[\w.-]+(?:/[\w.-]+)?)[\"']|(?P<variable>[A-Za-z_]\w*)\s*[,)])"
)


def known(raised: ParsedException, _: FailureContext) -> Finding | None:
    """What is not given, by its name where message or script has it, and what gives it."""
    met = first_met(_KNOWN, raised.message)
    if met is None:
        return None
    found, name = met[0], _name(raised)
    unnamed = " this model" if found.kind == "hub_refused" else ""
    title = found.title.format(f" {name!r}" if name else unnamed)
    return failure_finding(found.kind, title, "", found.fix.replace(_NAME, name or _NAME))


def _name(raised: ParsedException) -> str:
    """The name of the repository that was asked for; empty where it is not known."""
    if match := _TOLD.search(raised.message):
        return next(filter(None, match.groups()), "").rstrip(".")
    loaded = _LOADED.search(raised.code)
    if loaded is None:
        return ""
    if loaded["text"]:
        return str(loaded["text"])
    given = re.compile(rf"\s*{loaded['variable']}\s*=\s*[\"']([\w.-]+(?:/[\w.-]+)?)[\"']")
    return next((it[1] for line in reversed(raised.lines) if (it := given.match(line))), "")
